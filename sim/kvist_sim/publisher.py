"""Publisher of KV events that behaves as vLLM's (``ZmqEventPublisher`` in ``vllm/distributed/kv_events.py``).

A PUB socket sends ``topic, seq (8 bytes, big endian, from 0), payload``; a ROUTER answers ``start seq`` with
every batch of its ring from there on and an end marker. Both run on the engine's loop; no send waits.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace

import zmq

from kvist_epp.engines.vllm.event_encoder import Form, encode
from kvist_epp.engines.vllm.kv_events import Batch

END_SEQ = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Fields of vLLM's ``KVEventsConfig`` that concern the sockets, and differences between versions."""

    endpoint: str = "tcp://*:5557"
    """Address to bind when it has ``*`` or ``::`` or is ``ipc://`` or ``inproc://``; else to connect to."""
    bind: bool | None = None
    """True to bind any address; None: as the address says."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Number of batches in the ring."""
    hwm: int = 100_000
    """Messages queued for a slow subscriber; beyond it they are dropped."""
    topic: str = ""
    form: Form = "map"
    """Events as maps (vLLM from 0.26 on) or as positional arrays."""
    replay_topic: bool = True
    """True if replayed batches carry the topic frame (older releases leave it out)."""
    replay_hwm: int | None = None
    """None: ``2 * (buffer_steps + 1)`` as in 0.33; 1000 before, where long replays lose messages."""


class Publisher:
    """Publisher of one data-parallel rank; made inside a running event loop."""

    def __init__(
        self,
        config: PublisherConfig,
        rank: int = 0,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """``context``: one that is shared; by default the publisher has its own."""
        self._config = config
        self.rank = rank
        self._binds = _binds(config.endpoint) if config.bind is None else config.bind
        self._shared = context is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self.next_seq = 0
        self.replays: list[int] = []
        """First sequence numbers of the replay requests, in order."""
        self.endpoint = ""
        """Address for subscribers (a port 0 is resolved)."""
        self.replay_endpoint: str | None = None
        self._open(rank)

    def publish(self, batch: Batch) -> int:
        """Send a batch and keep it in the ring; return its number."""
        return self.publish_raw(encode(batch, self._config.form))

    def publish_raw(self, payload: bytes, *, sent: bool = True, kept: bool = True) -> int:
        """Send any payload; ``sent=False`` loses it on the way, ``kept=False`` also in the ring."""
        seq = self.next_seq
        self.next_seq += 1
        if sent:
            self.send(seq, payload)
        if kept:
            self._ring.append((seq, payload))
        return seq

    def lose(self, batch: Batch, *, kept: bool = True) -> int:
        """Give a batch a sequence number without sending it to any subscriber."""
        return self.publish_raw(encode(batch, self._config.form), sent=False, kept=kept)

    def send(self, seq: int, payload: bytes) -> None:
        """Send frames unchanged: for tests of behaviour that an engine never shows."""
        self._pub.send_multipart([self._config.topic.encode(), seq.to_bytes(8, "big"), payload], zmq.DONTWAIT)

    def restart(self) -> None:
        """Restart as a new engine process at the same ports: numbers begin at 0, the ring is empty."""
        self._close_sockets()
        self._ring.clear()
        self.next_seq = 0
        self._config = replace(self._config, endpoint=self.endpoint, replay_endpoint=self.replay_endpoint)
        self._open(0)

    def close(self) -> None:
        """Close the sockets; queued messages are dropped."""
        self._close_sockets()
        if not self._shared:
            self._context.destroy(linger=0)

    def _open(self, offset: int) -> None:
        endpoint = offset_port(self._config.endpoint, offset)
        self._pub = self._socket(zmq.PUB, self._config.hwm)
        if self._binds:
            _bind(self._pub, endpoint)
        else:
            self._pub.connect(endpoint)
        self.endpoint = _reachable(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        if self._config.replay_endpoint is not None:
            self._open_replay(offset_port(self._config.replay_endpoint, offset))

    def _open_replay(self, endpoint: str) -> None:
        config = self._config
        self._router = self._socket(zmq.ROUTER, config.replay_hwm or 2 * (config.buffer_steps + 1))
        _bind(self._router, endpoint)
        self.replay_endpoint = _reachable(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        asyncio.get_running_loop().add_reader(int(self._router.getsockopt(zmq.FD)), self._serve)

    def _socket(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, hwm)
        return socket

    def _close_sockets(self) -> None:
        if self.replay_endpoint is not None and not self._router.closed:
            asyncio.get_running_loop().remove_reader(int(self._router.getsockopt(zmq.FD)))
            self._router.close(0)
        self._pub.close(0)

    def _serve(self) -> None:
        """Answers all requests that wait; the descriptor is edge triggered, so it must be read dry."""
        while not self._router.closed:
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[2]) == 8:
                self._replay(frames[0], int.from_bytes(frames[2], "big"))

    def _replay(self, identity: bytes, start: int) -> None:
        self.replays.append(start)
        topic = [self._config.topic.encode()] if self._config.replay_topic else []
        for seq, payload in self._ring:
            if seq >= start:
                self._router.send_multipart([identity, b"", *topic, seq.to_bytes(8, "big"), payload])
        end = [b""] if self._config.replay_topic else []
        self._router.send_multipart([identity, b"", *end, END_SEQ, b""])


def _binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind a socket, with retries, because a closed socket releases its port a moment later."""
    for _ in range(200):
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            time.sleep(0.01)
        else:
            return
    socket.bind(endpoint)


def _reachable(endpoint: str) -> str:
    """Return a bound address as a peer on this machine would write it."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def offset_port(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank (``offset_endpoint_port``): rank r adds r to a TCP port (0 stays
    0), and ``_dp{r}`` to an inproc name."""
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    if endpoint.startswith("ipc://"):
        if rank:
            raise ValueError("an ipc endpoint serves one rank")
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return endpoint if port in {"0", "*"} else f"{head}:{int(port) + rank}"
