"""Sockets for ``http2.Connection``: accept, read, write with back-pressure, drain; any asyncio loop will do.

A peer that does not read is not read from either: once its socket is full, nothing more is taken from it
until it has caught up, or ``stall_seconds`` have passed.
"""

import asyncio
import socket
from collections.abc import Collection, Mapping
from ssl import SSLContext
from typing import Final, cast

from kvist_epp.names import ACCESS_LOG_METHOD, HEALTH_WATCH_METHOD
from kvist_epp.wire.call import Method, Server
from kvist_epp.wire.http2 import Connection
from kvist_epp.wire.limits import Limits

LASTING: Final = frozenset({ACCESS_LOG_METHOD, HEALTH_WATCH_METHOD})
"""Methods whose calls end only when one side leaves."""

_WRITE_BUFFER_BYTES = 1024 * 1024
_BACKLOG = 1024


async def serve_fast(
    methods: Mapping[str, Method],
    host: str,
    port: int,
    limits: Limits | None = None,
    *,
    ssl: SSLContext | None = None,
    lasting: Collection[str] = LASTING,
) -> Server:
    """Listen on ``host:port`` (port 0: the system chooses); raises OSError when it cannot.

    Plaintext is HTTP/2 with prior knowledge; an ``ssl`` context must offer ``h2`` by ALPN.
    """
    server = _FastServer(methods, limits or Limits(), lasting)
    await server.listen(host, port, ssl)
    return server


class _FastServer:
    def __init__(self, methods: Mapping[str, Method], limits: Limits, lasting: Collection[str]) -> None:
        self.methods = methods
        self.limits = limits
        self.lasting = lasting
        self.links: set[_Link] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._port = 0

    def __repr__(self) -> str:
        return f"<FastServer port {self._port}, {len(self.links)} connections>"

    @property
    def port(self) -> int:
        return self._port

    async def listen(self, host: str, port: int, ssl: SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: _Link(self, loop), host, port, ssl=ssl, backlog=_BACKLOG
        )
        self._port = self._listener.sockets[0].getsockname()[1]
        self._sweeper = loop.call_later(self.limits.sweep_seconds, self._sweep, loop)

    async def drain(self, grace_seconds: float) -> None:
        """Take no new connections or calls, let running calls end, then close; at most this long."""
        self._stop_listening()
        for link in list(self.links):
            link.drain()
        try:
            async with asyncio.timeout(grace_seconds):
                await self.gone()
        except TimeoutError:
            pass  # What still runs has had its time.
        await self.close()

    async def close(self) -> None:
        """Close at once: open calls are cancelled."""
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for link in list(self.links):
            link.abort()
        await self.gone()

    async def gone(self) -> None:
        """Wait until no connection is left."""
        await self._empty.wait()

    def joined(self, link: "_Link") -> None:
        self.links.add(link)
        self._empty.clear()

    def left(self, link: "_Link") -> None:
        self.links.discard(link)
        if not self.links:
            self._empty.set()

    def _stop_listening(self) -> None:
        # Not wait_closed(): on Python 3.12 it waits for the connections too.
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for link in list(self.links):
            link.check(now)
        self._sweeper = loop.call_later(self.limits.sweep_seconds, self._sweep, loop)


class _Link(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, server: _FastServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._limits = server.limits
        self._connection = Connection(
            server.methods, server.limits, wake=self._wake, clock=loop.time, lasting=server.lasting
        )
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._leaving = False
        self._since = loop.time()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._transport = stream
        full = len(self._server.links) >= self._limits.connections
        self._server.joined(self)
        if full:
            stream.abort()
            return
        stream.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        _keep_alive(stream)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        self._since = self._loop.time()
        self._connection.receive(data)
        self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True
        self._since = self._loop.time()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why it was lost changes nothing
        self._transport = None
        self._connection.lost()
        self._server.left(self)

    # -- the server's side

    def drain(self) -> None:
        """Send GOAWAY; a client that has not even introduced itself is cut off."""
        if self._connection.established:
            self._connection.drain()
            self._flush()
        else:
            self.abort()

    def abort(self) -> None:
        """Cut the connection; ``connection_lost`` follows."""
        if self._transport is not None:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Every so often: peers that do not introduce themselves, do not read, do not go, or do nothing."""
        limits = self._limits
        quiet = now - self._since
        if self._paused:
            late = quiet > limits.stall_seconds
        elif self._leaving:
            late = quiet > limits.linger_seconds
        else:
            late = not self._connection.established and quiet > limits.handshake_seconds
        if late:
            self.abort()
        elif not self._leaving and not self._connection.streams and quiet > limits.idle_seconds:
            self._dismiss(quiet)

    def _dismiss(self, quiet: float) -> None:
        if quiet > self._limits.idle_seconds + self._limits.stall_seconds:
            self.abort()
        else:
            self.drain()

    # -- writing

    def _wake(self) -> None:
        """A call answered later; one flush for all that the same turn of the loop brings."""
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or self._paused:
            return
        chunks = self._connection.take()
        if chunks:
            transport.write(b"".join(chunks))
        if self._connection.closing:
            self._leave(transport)

    def _leave(self, transport: asyncio.Transport) -> None:
        """Say goodbye and let the peer hang up.

        To close with bytes of the peer unread would make the kernel send a TCP reset, and the peer lose
        answers it has not read yet.
        """
        if self._leaving:
            return
        self._leaving = True
        self._since = self._loop.time()
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()


def _keep_alive(transport: asyncio.Transport) -> None:
    """So that a host that vanished is noticed even when nothing is sent to it."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
