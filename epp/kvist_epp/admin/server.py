"""Serves the pages on the metrics port: sockets only."""

from aiohttp import web

from kvist_epp.admin.pages import Pages, Vitals, errors_as_json, routes, vital_routes
from kvist_epp.errors import SettingsError

SHUTDOWN_SECONDS = 2.0


class AdminServer:
    """The metrics port while it is open."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self.port = port
        self._runner = runner

    async def close(self) -> None:
        """Stop; requests under way get two seconds."""
        await self._runner.cleanup()


async def serve(
    pages: Vitals, host: str, port: int, *, body_limit: int = 32 << 20, flag: str = "--metrics-port"
) -> AdminServer:
    """Listen on ``host`` (empty: every address) and ``port`` (0: any free one; then IPv4 loopback or
    ``host``).

    Raises ``SettingsError`` naming the flag when the port cannot be had.
    """
    app = web.Application(client_max_size=body_limit, middlewares=[errors_as_json])
    app.add_routes(routes(pages) if isinstance(pages, Pages) else vital_routes(pages))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host or None, port)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise SettingsError(f"{flag}: cannot listen on {host or '*'}:{port}: {error.strerror}") from error
    return AdminServer(runner, runner.addresses[0][1])
