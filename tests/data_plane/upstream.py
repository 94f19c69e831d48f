"""A tiny HTTP server behind Envoy that keeps what it received."""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aiohttp import web

from kvist_epp.endpoints.endpoint import hostport

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
    """Answers every path with its own address; ``/stream`` ends only after ``release``, and a WebSocket's
    messages are sent back.

    ``responses`` has other answers by path: content type and the parts of the body, each sent by itself.
    """

    host: str = "127.0.0.1"
    received: list[Received] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    responses: dict[str, tuple[str, list[bytes]]] = field(default_factory=dict)
    address: str = ""

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, 0)
        await site.start()
        self.address = hostport(self.host, self._runner.addresses[0][1])
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
        if "upgrade" in headers:
            return await self._echo(request)
        if request.path == "/stream":
            return await self._stream(request)
        if request.path in self.responses:
            return await self._other(request, *self.responses[request.path])
        return web.Response(text=self.address)

    async def _other(self, request: web.Request, content_type: str, parts: list[bytes]) -> web.StreamResponse:
        if content_type == "application/json":
            return web.Response(body=b"".join(parts), content_type=content_type)
        response = web.StreamResponse(headers={"content-type": content_type})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)  # so that parts leave one by one
        return response

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data)
        return socket

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        await self.release.wait()
        for i in range(20):
            await response.write(b"data: %d\n\n" % i)
        await response.write(LAST_CHUNK)
        return response
