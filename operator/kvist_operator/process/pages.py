"""The metrics port: ``/metrics``, ``/healthz``, ``/readyz``."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from kvist_operator.errors import StartError

SHUTDOWN_SECONDS = 1.0
Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(
    host: str, port: int, metrics: Callable[[], bytes], alive: Callable[[], str], ready: Callable[[], str]
) -> AsyncIterator[int]:
    """The port it listens on. ``alive`` and ``ready`` say what is wrong; empty = nothing.

    Raises StartError when the port cannot be had.
    """
    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", _metrics(metrics)),
            web.get("/healthz", _judged(alive)),
            web.get("/readyz", _judged(ready)),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
    except OSError as error:
        await runner.cleanup()
        problem = f"cannot listen on {host or '*'}:{port}: {error.strerror}"
        raise StartError(f"--metrics-port: {problem}") from error
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _metrics(metrics: Callable[[], bytes]) -> Page:
    async def page(_request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=metrics(), headers=headers)

    return page


def _judged(judge: Callable[[], str]) -> Page:
    async def page(_request: web.Request) -> web.Response:
        problem = judge()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    return page
