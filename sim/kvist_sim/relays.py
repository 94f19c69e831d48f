"""Relays that drop, reorder and interrupt on command: real networks do so, but not on demand.

`EventRelay` stands between an engine's KV events and the pickers, `TcpRelay` between two processes.
"""

import asyncio
import random
from contextlib import suppress
from typing import Final, Self, cast

import zmq
import zmq.asyncio

HOST: Final = "127.0.0.1"
Message = list[bytes]


class MessageFaults:
    """Faults that are applied to messages; pure. Without ``begin``, every message passes."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._drop = self._swap = 0.0
        self._burst = 0
        self._held: Message | None = None
        self.dropped = 0
        """Number of messages dropped so far."""
        self.swapped = 0
        """Messages that were overtaken by the next one."""

    def begin(self, *, drop: float, swap: float, burst: int = 0) -> None:
        """Start faults: shares of messages dropped and swapped with the next; the first ``burst`` are
        all dropped."""
        self._drop, self._swap, self._burst = drop, swap, burst

    def end(self) -> None:
        """End the faults: every message passes, in order."""
        self.begin(drop=0.0, swap=0.0)

    def through(self, message: Message) -> list[Message]:
        """Return the messages to send after this one arrived."""
        if self._burst or self._rng.random() < self._drop:
            self._burst = max(0, self._burst - 1)
            self.dropped += 1
            return []
        if self._held is not None:
            held, self._held = self._held, None
            return [message, held]
        if self._rng.random() < self._swap:
            self._held = message
            self.swapped += 1
            return []
        return [message]


class EventRelay:
    """SUB to an engine, PUB to the pickers: ``async with EventRelay(engine's port) as relay``."""

    def __init__(self, engine_port: int, port: int, *, seed: int = 0) -> None:
        """``port`` is where the pickers connect to."""
        self._engine_port, self._port = engine_port, port
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self.faults = MessageFaults(seed)
        self.passed = 0
        """Messages that came."""

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        source, out = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        source.setsockopt(zmq.SUBSCRIBE, b"")
        source.setsockopt(zmq.RCVHWM, 0)
        out.setsockopt(zmq.SNDHWM, 0)
        # a restarted engine is found again at once, as a subscriber of its own would find it
        source.setsockopt(zmq.RECONNECT_IVL, 50)
        out.bind(f"tcp://{HOST}:{self._port}")
        source.connect(f"tcp://{HOST}:{self._engine_port}")
        self._task = asyncio.create_task(self._relay(source, out))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _relay(self, source: zmq.asyncio.Socket, out: zmq.asyncio.Socket) -> None:
        while True:
            frames = await source.recv_multipart()
            self.passed += 1
            for message in self.faults.through(frames):
                await out.send_multipart(message)


class TcpRelay:
    """A TCP port that leads to another one, and can be parted from it as by a network that drops packets.

    Parted, connections stay open and nothing passes, in both directions; new ones are taken by the
    kernel and lead nowhere. Healed, what was held passes, as TCP would send it again.
    """

    def __init__(self, target: int) -> None:
        """``target`` is a port of the loopback."""
        self._target = target
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self.healed = asyncio.Event()
        self.healed.set()
        self.port = 0
        """Port on which the relay listens."""
        self.connections = 0
        """Taken so far."""

    @property
    def address(self) -> str:
        """Address for clients."""
        return f"{HOST}:{self.port}"

    def part(self) -> None:
        """Stop the traffic."""
        self.healed.clear()
        for end in self._ends:
            end.pause()

    def heal(self) -> None:
        """Let the traffic pass again."""
        self.healed.set()
        for end in self._ends:
            end.resume()

    def cut(self) -> None:
        """Every connection breaks, as by a peer that died; new ones are taken."""
        for end in tuple(self._ends):
            end.abort()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Taken(self, self._target), HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        ends = list(self._ends)
        for end in ends:
            end.abort()
        await asyncio.gather(*(end.gone.wait() for end in ends))

    def joined(self, end: "_End") -> None:
        """Add an end of a connection that was opened."""
        self._ends.add(end)
        if not self.healed.is_set():
            end.pause()

    def left(self, end: "_End") -> None:
        """Remove an end that is closed."""
        self._ends.discard(end)


class _End(asyncio.Protocol):
    """One of the two ends of a relayed connection: what it receives goes to the other one."""

    def __init__(self, relay: TcpRelay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport | None = None
        self._early = b""
        self.other: _End | None = None
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._relay.joined(self)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._relay.left(self)
        self.gone.set()
        if self.other is not None:
            self.other.abort()

    def bound(self, other: "_End") -> None:
        """Both are open: pass on what came before."""
        self.other = other
        early, self._early = self._early, b""
        if early:
            other.write(early)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class _Taken(_End):
    """The end that was accepted; it opens the other one, once the way is free."""

    def __init__(self, relay: TcpRelay, target: int) -> None:
        super().__init__(relay)
        self._target = target
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._relay.connections += 1
        self._opening = asyncio.ensure_future(self._open())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._opening is not None:
            self._opening.cancel()

    async def _open(self) -> None:
        await self._relay.healed.wait()
        loop = asyncio.get_running_loop()
        try:
            _, other = await loop.create_connection(lambda: _End(self._relay), HOST, self._target)
        except OSError:
            self.abort()
            return
        other.bound(self)
        self.bound(other)
