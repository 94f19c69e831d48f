"""The HTTP/2 server: accepts, checks and drains connections, on any asyncio event loop."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from ssl import SSLContext
from typing import Final

from kvist_epp.http2.call import Method
from kvist_epp.http2.limits import Limits, PortLoad, PortStats
from kvist_epp.http2.server_transport import FairReads, ServerTransport

_BACKLOG: Final = 1024
_QUIET_SECONDS: Final = 0.1
"""Time without a new connection that ends a drain, and between two requests to leave."""


async def serve_http2(
    methods: Mapping[str, Method],
    host: str,
    port: int,
    limits: Limits | None = None,
    *,
    ssl: SSLContext | None = None,
    lasting: Collection[str] = (),
) -> "Http2Server":
    """Listen on ``host:port`` (port 0: the system chooses); raises OSError when it cannot.

    Plaintext is HTTP/2 with prior knowledge; an ``ssl`` context must offer ``h2`` by ALPN, and is used anew
    for every connection (``wrap_bio``). ``lasting`` names the methods whose calls never end by themselves.
    """
    server = Http2Server(methods, limits or Limits(), lasting, ssl)
    await server.listen(host, port)
    return server


class Http2Server:
    """One listening port and its connections."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: Limits,
        lasting: Collection[str],
        ssl: SSLContext | None,
    ) -> None:
        self.ssl = ssl
        self.stats = PortStats(limits.held_bytes, self._load)
        self.methods = methods
        self.limits = limits
        self.lasting = lasting
        self.transports: set[ServerTransport] = set()
        self.fair_reads = FairReads(asyncio.get_running_loop().call_soon)
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._connected = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._none_idle = False
        self.port = 0
        """Port that the server listens on; the one the system chose if 0 was requested."""

    def __repr__(self) -> str:
        return f"<Http2Server port {self.port}, {len(self.transports)} connections>"

    async def listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: ServerTransport(self, loop), host, port, backlog=_BACKLOG
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        self._sweeper = loop.create_task(self._sweep(loop), name=f"sweep of port {self.port}")

    async def drain(self, grace_seconds: float) -> None:
        """Let running calls end, ask their clients to leave, then stop listening; at most this long.

        Gateways that have not noticed yet may still connect, because a refused connection would cost them
        requests; they are asked to leave in turn.
        """
        self.draining = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._wait_until_no_client_returns()
        except TimeoutError:
            pass  # The calls that still run have had their time.
        await self.close()

    async def close(self) -> None:
        """Close at once: open calls are cancelled."""
        # Not wait_closed(): on Python 3.12 it waits for the connections too.
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
        for transport in list(self.transports):
            transport.abort()
        await self._empty.wait()

    async def _wait_until_no_client_returns(self) -> None:
        """Wait until no connection is left and no client reconnects at once.

        A client that was asked to leave reconnects, and a socket that stops listening resets connections it
        has not accepted yet. Health checks of a gateway connect anew once a second or so: their connections
        have to be gone before the next check, or there is never a moment without any.
        """
        quiet = False
        while not quiet:
            while self.transports:
                for transport in list(self.transports):
                    transport.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._empty.wait(), _QUIET_SECONDS)
            self._connected.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._connected.wait(), _QUIET_SECONDS)
            quiet = not self._connected.is_set()

    def add(self, transport: ServerTransport) -> bool:
        """Add a new connection; return False if there are too many."""
        full = len(self.transports) >= self.limits.connections
        self.transports.add(transport)
        self.stats.connections = len(self.transports)
        self._empty.clear()
        self._connected.set()
        if not full or self._make_room():
            return True
        self.stats.connections_ended["too-many"] += 1
        return False

    def remove(self, transport: ServerTransport) -> None:
        """Remove a connection that is gone."""
        self.transports.discard(transport)
        self.stats.connections = len(self.transports)
        if not self.transports:
            self._empty.set()

    def _make_room(self) -> bool:
        """Cut the connection that has been without a call for longest, if that is long."""
        if self._none_idle:
            return False
        now = asyncio.get_running_loop().time()
        idlest = max(self.transports, key=lambda transport: transport.idle_for(now))
        self._none_idle = idlest.idle_for(now) <= self.limits.handshake_seconds
        if not self._none_idle:
            idlest.abort("idle")
        return not self._none_idle

    def _load(self) -> PortLoad:
        transports = self.transports
        return PortLoad(
            connections=len(transports),
            streams=sum(transport.connection.streams for transport in transports),
            receiving_bytes=sum(transport.connection.memory.receiving for transport in transports),
            unsent_bytes=sum(transport.unsent_bytes for transport in transports),
        )

    async def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check each connection in turn, and let other work run in between."""
        while True:
            await asyncio.sleep(self.limits.sweep_seconds)
            self._none_idle = False
            for transport in list(self.transports):
                transport.check(loop.time())
                await asyncio.sleep(0)
