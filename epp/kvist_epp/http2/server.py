"""The fast server: which connections are taken, looked after, drained; any asyncio loop will do."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from ssl import SSLContext
from typing import Final

from kvist_epp.http2.call import Method, Server
from kvist_epp.http2.fair_reads import FairReads
from kvist_epp.http2.limits import Limits
from kvist_epp.http2.port_stats import PortLoad, PortStats
from kvist_epp.http2.server_transport import ServerTransport
from kvist_epp.names import LASTING_METHODS

_BACKLOG: Final = 1024
_QUIET_SECONDS: Final = 0.1


async def serve_http2(
    methods: Mapping[str, Method],
    host: str,
    port: int,
    limits: Limits | None = None,
    *,
    ssl: SSLContext | None = None,
    lasting: Collection[str] = LASTING_METHODS,
    stats: PortStats | None = None,
) -> Server:
    """Listen on ``host:port`` (port 0: the system chooses); raises OSError when it cannot.

    Plaintext is HTTP/2 with prior knowledge; an ``ssl`` context must offer ``h2`` by ALPN, and is asked for
    every connection anew (``wrap_bio``). ``stats`` is kept up to date; without it the server keeps its own.
    """
    limits = limits or Limits()
    server = _FastServer(methods, limits, lasting, ssl, stats or PortStats(limits.held_bytes))
    await server.listen(host, port)
    return server


class _FastServer:
    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: Limits,
        lasting: Collection[str],
        ssl: SSLContext | None,
        stats: PortStats,
    ) -> None:
        self.ssl = ssl
        self.stats = stats
        self.stats.load = self._load
        self.methods = methods
        self.limits = limits
        self.lasting = lasting
        self.links: set[ServerTransport] = set()
        self.turns = FairReads(asyncio.get_running_loop().call_soon)
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._joined = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._crowded = False
        self._port = 0

    def __repr__(self) -> str:
        return f"<FastServer port {self._port}, {len(self.links)} connections>"

    @property
    def port(self) -> int:
        return self._port

    async def listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: ServerTransport(self, loop), host, port, backlog=_BACKLOG
        )
        self._port = self._listener.sockets[0].getsockname()[1]
        self._sweeper = loop.create_task(self._sweep(loop), name=f"sweep of port {self._port}")

    async def drain(self, grace_seconds: float) -> None:
        """Let running calls end and send their connections away, then stop listening; at most this long.

        Gateways that have not noticed yet may still connect, because to be refused would cost them requests;
        they are sent away in turn.
        """
        self.draining = True
        for link in list(self.links):
            link.drain()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._deserted()
        except TimeoutError:
            pass  # What still runs has had its time.
        await self.close()

    async def close(self) -> None:
        """Close at once: open calls are cancelled."""
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
        for link in list(self.links):
            link.abort()
        await self.gone()

    async def gone(self) -> None:
        """Wait until no connection is left."""
        await self._empty.wait()

    async def _deserted(self) -> None:
        """Wait until no connection is left, and no client comes back at once: one that is sent away does, and
        a socket that stops listening resets those it has not accepted yet."""
        quiet = False
        while not quiet:
            await self.gone()
            self._joined.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), _QUIET_SECONDS)
            quiet = not self._joined.is_set()

    def admit(self, link: ServerTransport) -> bool:
        full = len(self.links) >= self.limits.connections
        self.links.add(link)
        self.stats.connections = len(self.links)
        self._empty.clear()
        self._joined.set()
        if not full or self._make_room():
            return True
        self.stats.connections_ended["too-many"] += 1
        return False

    def left(self, link: ServerTransport) -> None:
        self.links.discard(link)
        self.stats.connections = len(self.links)
        if not self.links:
            self._empty.set()

    def _make_room(self) -> bool:
        """Cut the connection that has been without a call for longest, if that is long."""
        if self._crowded:
            return False
        now = asyncio.get_running_loop().time()
        idlest = max(self.links, key=lambda link: link.idle_for(now))
        self._crowded = idlest.idle_for(now) <= self.limits.handshake_seconds
        if not self._crowded:
            idlest.abort("idle")
        return not self._crowded

    def _load(self) -> PortLoad:
        links = self.links
        return PortLoad(
            connections=len(links),
            streams=sum(link.connection.streams for link in links),
            receiving_bytes=sum(link.connection.share.receiving for link in links),
            unsent_bytes=sum(link.unsent_bytes for link in links),
        )

    def _stop_listening(self) -> None:
        # Not wait_closed(): on Python 3.12 it waits for the connections too.
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look after each connection; the others get their turn in between."""
        while True:
            await asyncio.sleep(self.limits.sweep_seconds)
            self._crowded = False
            for link in list(self.links):
                link.check(loop.time())
                await asyncio.sleep(0)
