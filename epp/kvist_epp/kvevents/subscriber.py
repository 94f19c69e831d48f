"""Sockets to the engines' KV events: the only module that knows ZMQ.

Two directions. *Connect* (vLLM binds): one SUB socket for each publisher. *Bind* (``bind=``): one SUB socket
here; publishers connect to it and are told apart by topic (``door``).

Raw ZMQ sockets on the loop's readers instead of ``zmq.asyncio``, which costs 50 us a message. Their
descriptors are edge triggered: a socket is read until it has no more, or its job stays with the pump.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable

import zmq

from kvist_epp.kvevents.background_jobs import Chores
from kvist_epp.kvevents.bound_subscriber import Door
from kvist_epp.kvevents.cooperative_scheduler import Pump
from kvist_epp.kvevents.feed import Feed
from kvist_epp.kvevents.followed import FollowedPublisher, SubscriberLimits
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.publisher_stats import PublisherStats
from kvist_epp.kvevents.replay_semaphore import Slots

__all__ = ["FollowedPublisher", "Subscriber", "SubscriberLimits"]

_log = logging.getLogger(__name__)
_IPV4 = re.compile(r"tcp://\d+\.")
_Socket = zmq.Socket[bytes]


class Subscriber:
    """Follows publishers and feeds an ``Ingestor``; made inside a running event loop."""

    def __init__(
        self,
        ingestor: Ingestor,
        *,
        observe: Callable[[Observation], None] = lambda _: None,
        bind: str | None = None,
        ipv6: bool = True,
        limits: SubscriberLimits | None = None,
    ) -> None:
        limits = limits or SubscriberLimits()
        self._ingestor = ingestor
        self._observe = observe
        self._hub = _Hub(limits, ipv6=ipv6)
        self._chores = Chores(ingestor, self._hub.pump)
        self._feeds: dict[FollowedPublisher, Feed] = {}
        self._by_source: dict[str, Feed] = {}
        self._stats: dict[str, list[PublisherStats]] = {}
        """By endpoint: asked for each one, several times a second."""
        self._door = None if bind is None else Door(self._hub, bind)
        self._waiting = False
        self._orphans = limits.orphans
        self._timer = self._hub.loop.call_later(limits.orphans, self._expire)

    @property
    def bound(self) -> str | None:
        """Where publishers connect, in bind mode."""
        return None if self._door is None else self._door.address

    @property
    def strangers(self) -> int:
        """Messages from publishers that are not followed, in bind mode."""
        return 0 if self._door is None else self._door.strangers

    def follow(self, followed: Iterable[FollowedPublisher]) -> None:
        """The publishers to follow from now on; those not named any more are forgotten."""
        wanted = set(followed)
        for gone in self._feeds.keys() - wanted:
            self._feeds.pop(gone).close()
            self._ingestor.leave(gone.source)
            self._hub.pump.ready(self._chores)
        for new in wanted - self._feeds.keys():
            self._ingestor.join(new.source, new.endpoint)
            self._feeds[new] = self._feed(new)
        self._by_source = {one.source: feed for one, feed in self._feeds.items()}
        self._stats = {}
        for one, feed in self._feeds.items():
            self._stats.setdefault(one.endpoint, []).append(feed.intake.stats)
        if self._door is not None:
            self._door.know(self._feeds)

    def stats(self) -> dict[str, PublisherStats]:
        """Counters by source."""
        return {followed.source: feed.intake.stats for followed, feed in self._feeds.items()}

    def of(self, endpoint: str) -> list[PublisherStats]:
        """Counters of the endpoint's publishers; none when it is not followed."""
        return self._stats.get(endpoint, [])

    def warm(self, endpoint: str) -> bool:
        """Whether the first replay of each of its publishers is over and learned."""
        mine = self.of(endpoint)
        return bool(mine) and all(stats.warm for stats in mine)

    def suspect(self, endpoint: str) -> bool:
        """Whether messages of one of its publishers are missing and not explained yet."""
        return any(stats.suspect for stats in self.of(endpoint))

    @property
    def pump(self) -> Pump:
        """Where work is done in slices between picks."""
        return self._hub.pump

    def wait(self) -> None:
        """Publishers followed from now on wait for ``adopt`` or ``resume`` before their rings are asked."""
        self._waiting = True

    def waiting(self) -> list[str]:
        """The publishers that wait for a peer's snapshot."""
        return [one.source for one, feed in self._feeds.items() if feed.intake.stream.waiting]

    def waits(self, source: str) -> bool:
        """Whether this publisher waits for a peer's snapshot."""
        feed = self.feed(source)
        return feed is not None and feed.intake.stream.waiting

    def resume(self) -> None:
        """Note that no further snapshot comes: publishers that still wait for one use their replay buffer."""
        self._waiting = False
        for feed in self._feeds.values():
            if feed.intake.stream.waiting:
                feed.resume()

    def feed(self, source: str) -> Feed | None:
        """The feed of a publisher."""
        return self._by_source.get(source)

    async def close(self) -> None:
        """Closes all sockets and timers; nothing is left behind."""
        self._timer.cancel()
        self._chores.close()
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()
        if self._door is not None:
            self._door.close()
        self._hub.close()

    def _feed(self, followed: FollowedPublisher) -> Feed:
        feed = Feed(self._hub, followed, self._ingestor, self._observe, self._chores.look)
        if self._waiting:
            feed.intake.stream.wait()
        if self._door is None:
            feed.connect(followed.events)
        else:
            feed.begin()
        return feed

    def _expire(self) -> None:
        self._ingestor.expire()
        self._timer = self._hub.loop.call_later(self._orphans, self._expire)


class _Line:
    """A ZMQ socket on the loop's readers."""

    def __init__(self, socket: _Socket, wake: Callable[[], None]) -> None:
        self._socket = socket
        self._watched: dict[int, _Socket] = {}
        self._calls: list[asyncio.Handle] = []
        self.watch(socket, wake)

    def watch(self, socket: _Socket, wake: Callable[[], None]) -> None:
        """``wake`` is called when ``socket`` (this one or its monitor) may have something to read."""
        loop = asyncio.get_running_loop()
        descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, wake)
        self._watched[descriptor] = socket
        self._calls.append(loop.call_soon(wake))  # it is silent until the socket was looked at once

    def receive(self) -> list[bytes] | None:
        """One message; None when there is none."""
        return _receive(self._socket)

    def pending(self) -> bool:
        """Whether there is something to read."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, frames: list[bytes]) -> None:
        """Queued until the connection is up; dropped when that queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            _log.warning("a replay request could not be queued")

    def close(self) -> None:
        """No reader and no descriptor is left."""
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)
        for call in self._calls:
            call.cancel()
        self._socket.disable_monitor()
        for socket in self._watched.values():
            socket.close(0)


class _Hub:
    """The ``ports.Hub`` of real sockets."""

    def __init__(self, limits: SubscriberLimits, *, ipv6: bool) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.pump = Pump(limits.slice_seconds)
        self.slots = Slots(limits.replays)
        self._ipv6 = ipv6
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, int(self._context.get(zmq.SOCKET_LIMIT)))

    def subscribe(self, address: str, wake: Callable[[], None], handshake: Callable[[], None]) -> _Line:
        """A SUB socket that connects, and says whenever a connection came up."""
        socket = self._socket(zmq.SUB)
        line = _Line(socket, wake)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        line.watch(monitor, lambda: _drain(monitor, handshake))
        self._connect(socket, address)
        return line

    def dealer(self, address: str, wake: Callable[[], None]) -> _Line:
        """A DEALER socket for one replay."""
        socket = self._socket(zmq.DEALER)
        self._connect(socket, address)
        return _Line(socket, wake)

    def door(self, address: str, wake: Callable[[], None]) -> tuple[_Line, str]:
        """A SUB socket that is bound, and its address."""
        socket = self._socket(zmq.SUB)
        if _IPV4.match(address):
            socket.setsockopt(zmq.IPV6, 0)  # else it would be bound, and told, as an IPv6 address
        socket.bind(address)
        return _Line(socket, wake), str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def close(self) -> None:
        """No handle and no thread of ZMQ is left."""
        self.pump.close()
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> _Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self.limits.receive_hwm if kind == zmq.SUB else 0)
        socket.setsockopt(zmq.IPV6, int(self._ipv6))
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        return socket

    def _connect(self, socket: _Socket, address: str) -> None:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            _log.warning("cannot connect to the KV events of an engine at %s: %s", address, error)


def _drain(monitor: _Socket, handshake: Callable[[], None]) -> None:
    seen = False
    while _receive(monitor) is not None:
        seen = True
    if seen:
        handshake()


def _receive(socket: _Socket) -> list[bytes] | None:
    if socket.closed:
        return None
    try:
        return socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None
