"""A tiny HTTP server behind Envoy that keeps what it received."""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aiohttp import web

LAST_CHUNK = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Received:
    """One request as the upstream saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Upstream:
    """Answers every path with its own address; ``/stream`` ends only after ``release``."""

    received: list[Received] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Refuse connections from now on."""
        self.release.set()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        headers = {key.lower(): value for key, value in request.headers.items()}
        body = await request.read()
        self.received.append(Received(request.method, request.path, headers, body))
        if request.path == "/stream":
            return await self._stream(request)
        return web.Response(text=self.address)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        await self.release.wait()
        for i in range(20):
            await response.write(b"data: %d\n\n" % i)
        await response.write(LAST_CHUNK)
        return response
