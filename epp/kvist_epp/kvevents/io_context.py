"""Resources that all feeds share: ZMQ sockets on the event loop, turns to work, and a limit on replays.

This is the only module that imports ZMQ. Raw sockets on the loop's readers are used instead of
``zmq.asyncio``, which costs 50 us a message. Their descriptors are edge triggered: a socket is read until it
is empty, or its job stays with the scheduler.
"""

import asyncio
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import zmq

logger = logging.getLogger(__name__)

_IPV4 = re.compile(r"tcp://\d+\.")
_ZmqSocket = zmq.Socket[bytes]
_EVENTS = int(zmq.EVENTS)
_POLLIN, _DONTWAIT = int(zmq.POLLIN), int(zmq.DONTWAIT)


@dataclass(frozen=True, slots=True)
class SubscriberLimits:
    """Limits of the subscriber; times in seconds."""

    slice_seconds: float = 0.001
    """Work between two turns of the event loop: bounds the time that a pick may have to wait."""
    replay_timeout: float = 2.0
    """Silence after which a replay is requested again; doubled each time."""
    replay_attempts: int = 3
    replays: int = 8
    """Replays at once, over all publishers: each may bring 10,000 batches."""
    settle: float = 1.0
    """Pause after a replay, before another one that covers messages sent before our subscription arrived and
    after the replay."""
    check: float = 30.0
    """Interval of checks of an idle publisher: its last message may be lost, its restart silent."""
    receive_hwm: int = 200_000
    """Messages that ZMQ queues for each publisher; beyond it the engine's own queue fills."""
    orphans: float = 5.0
    """Interval of checks for events that waited too long for their parents."""


class Job(Protocol):
    """Work that is done in slices, when there is some."""

    def work(self, deadline: float) -> bool:
        """Work until done or until ``deadline`` (``perf_counter`` seconds); return whether more is left."""


class CooperativeScheduler:
    """Runs jobs in turn between picks: after ``slice_seconds`` of work the event loop gets its turn.

    Created inside a running event loop.
    """

    def __init__(self, slice_seconds: float = 0.001) -> None:
        self._slice = slice_seconds
        self._loop = asyncio.get_running_loop()
        self._jobs: OrderedDict[Job, None] = OrderedDict()
        """In the order of their turns; a dictionary, since a thousand may wait."""
        self._handle: asyncio.Handle | None = None

    def add(self, job: Job) -> None:
        """Run a job until it has no more work; no effect on a job that is waiting for its turn."""
        self._jobs.setdefault(job)
        if self._handle is None:
            self._handle = self._loop.call_soon(self._run)

    def remove(self, job: Job) -> None:
        """Stop running a job."""
        self._jobs.pop(job, None)

    def close(self) -> None:
        """Stop running any job."""
        self._jobs.clear()
        if self._handle is not None:
            self._handle.cancel()

    def _run(self) -> None:
        deadline = perf_counter() + self._slice
        try:
            while self._jobs:
                job, _ = self._jobs.popitem(last=False)
                if job.work(deadline):
                    self._jobs.setdefault(job)
                if perf_counter() >= deadline:
                    break
        finally:
            self._handle = self._loop.call_soon(self._run) if self._jobs else None


class ReplaySemaphore:
    """Limits the number of replays at once; first come, first served."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owners: set[Hashable] = set()
        self._waiting: deque[tuple[Hashable, Callable[[], None]]] = deque()

    def acquire(self, owner: Hashable, start: Callable[[], None]) -> None:
        """Call ``start`` once a slot is free; at once if one is, or if ``owner`` has one already."""
        if owner in self._owners or len(self._owners) < self._limit:
            self._owners.add(owner)
            start()
        else:
            self._remove_waiting(owner)
            self._waiting.append((owner, start))

    def release(self, owner: Hashable) -> None:
        """Let the next one start; an ``owner`` that still waits leaves the queue."""
        self._owners.discard(owner)
        self._remove_waiting(owner)
        while self._waiting and len(self._owners) < self._limit:
            self.acquire(*self._waiting.popleft())

    def _remove_waiting(self, owner: Hashable) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] is not owner)


class EventSocket:
    """A ZMQ socket on the loop's readers."""

    def __init__(self, socket: _ZmqSocket, address: str, on_readable: Callable[[], None]) -> None:
        self.receive: Callable[[], list[bytes] | None] = _receiver(socket)
        """Returns one message, as frames; None if there is none."""
        self._socket = socket
        self._address = address
        self._watched: dict[int, _ZmqSocket] = {}
        self._calls: list[asyncio.Handle] = []
        self.watch(socket, on_readable)

    def watch(self, socket: _ZmqSocket, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` whenever ``socket`` (this one or its monitor) has something to read.

        The look at its events also silences the descriptor until the socket has been read empty: else the
        loop would report every socket that waits for its turn, again and again.
        """
        loop = asyncio.get_running_loop()
        descriptor = int(socket.getsockopt(zmq.FD))
        look_up = socket.get

        def look() -> None:
            if not socket.closed and int(look_up(_EVENTS)) & _POLLIN:
                on_readable()

        loop.add_reader(descriptor, look)
        self._watched[descriptor] = socket
        self._calls.append(loop.call_soon(look))  # the descriptor is silent until the first look

    def readable(self) -> bool:
        """Return True if there is something to read."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, frames: list[bytes]) -> None:
        """Queue a message until the connection is up; drop it if that queue is full. Never blocks."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("the replay request to %s was not queued, will retry", self._address)

    def close(self) -> None:
        """Remove the readers and close the descriptors."""
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)
        for call in self._calls:
            call.cancel()
        self.receive = _nothing
        self._socket.disable_monitor()
        for socket in self._watched.values():
            socket.close(0)


class IoContext:
    """Creates sockets, and owns the scheduler and the limit on replays."""

    def __init__(self, limits: SubscriberLimits, *, ipv6: bool) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.scheduler = CooperativeScheduler(limits.slice_seconds)
        self.replay_semaphore = ReplaySemaphore(limits.replays)
        self._ipv6 = ipv6
        self._context: zmq.Context[_ZmqSocket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, int(self._context.get(zmq.SOCKET_LIMIT)))

    def connect_subscriber(
        self, address: str, on_readable: Callable[[], None], on_connected: Callable[[], None]
    ) -> EventSocket:
        """Return a SUB socket connected to a publisher; ``on_connected`` is called at each handshake."""
        zmq_socket = self._new_socket(zmq.SUB)
        socket = EventSocket(zmq_socket, address, on_readable)
        monitor = zmq_socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        read_monitor = _receiver(monitor)
        socket.watch(monitor, lambda: _drain(read_monitor, on_connected))
        self._connect(zmq_socket, address)
        return socket

    def connect_dealer(self, address: str, on_readable: Callable[[], None]) -> EventSocket:
        """Return a DEALER socket connected to a replay socket."""
        zmq_socket = self._new_socket(zmq.DEALER)
        self._connect(zmq_socket, address)
        return EventSocket(zmq_socket, address, on_readable)

    def bind_subscriber(self, address: str, on_readable: Callable[[], None]) -> tuple[EventSocket, str]:
        """Return a SUB socket that publishers connect to, and the address it is bound to."""
        zmq_socket = self._new_socket(zmq.SUB)
        if _IPV4.match(address):
            zmq_socket.setsockopt(zmq.IPV6, 0)  # else it is bound to, and reports, an IPv6 address
        zmq_socket.bind(address)
        bound = str(zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return EventSocket(zmq_socket, address, on_readable), bound

    def close(self) -> None:
        """Stop all jobs, and end ZMQ's threads."""
        self.scheduler.close()
        self._context.destroy(linger=0)

    def _new_socket(self, kind: int) -> _ZmqSocket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, self.limits.receive_hwm if kind == zmq.SUB else 0)
        socket.setsockopt(zmq.IPV6, int(self._ipv6))
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        return socket

    def _connect(self, socket: _ZmqSocket, address: str) -> None:
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            logger.warning("cannot subscribe to KV events at %s; they stay unknown: %s", address, error)


def _drain(receive: Callable[[], object], on_connected: Callable[[], None]) -> None:
    connected = False
    while receive() is not None:
        connected = True
    if connected:
        on_connected()


def _receiver(socket: _ZmqSocket) -> Callable[[], list[bytes] | None]:
    """Return a function that receives one message, as frames; None if there is none.

    Each frame says whether another follows: to ask the socket costs as much as to receive a frame, and so
    does the search for a method of a socket, which looks among its options first. An exception at the end
    costs less than a look before each message.
    """
    receive = socket.recv

    def message() -> list[bytes] | None:
        try:
            frame = receive(_DONTWAIT, False)
            frames = [frame.bytes]
            while frame.more:
                frame = receive(_DONTWAIT, False)
                frames.append(frame.bytes)
        except zmq.Again:
            return None
        return frames

    return message


def _nothing() -> None:
    """Receive nothing: the socket is closed."""
