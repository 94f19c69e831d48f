"""A server to scrape, and callbacks of the scraper that tests wait for."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.engine_key import EngineKey
from kvist_epp.endpoints.engine_state import EngineState, ScrapeState
from kvist_epp.endpoints.scraper import Scraper

METRICS = b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
MODELS = {"data": [{"id": "m", "max_model_len": 100}, {"id": "lora", "parent": "m"}]}


class Engine:
    """Return a server with both pages; each answer can be changed."""

    def __init__(self) -> None:
        self.page = METRICS.decode()
        self.status = 200
        self.models_status = 200
        self.health = 200
        self.hangs: set[str] = set()
        """Paths that are not answered."""
        self.keys: set[str] = set()
        self.wants_user_agent = False
        self.models_may_be_sent = asyncio.Event()
        self.models_may_be_sent.set()
        self.connections: set[object] = set()
        self.asked: list[str] = []
        app = web.Application()
        app.add_routes([web.get("/metrics", self.metrics), web.get("/v1/models", self.models)])
        app.add_routes([web.get("/health", self.healthy)])
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    def _note(self, request: web.Request) -> None:
        self.asked.append(request.path)
        self.connections.add(request.transport)
        if self.wants_user_agent and "User-Agent" not in request.headers:
            raise web.HTTPForbidden

    async def _answerable(self, request: web.Request) -> None:
        self._note(request)
        if request.path in self.hangs:
            await asyncio.Event().wait()

    async def metrics(self, request: web.Request) -> web.Response:
        await self._answerable(request)
        return web.Response(text=self.page, status=self.status)

    async def healthy(self, request: web.Request) -> web.Response:
        await self._answerable(request)
        return web.Response(status=self.health)

    async def models(self, request: web.Request) -> web.Response:
        self._note(request)
        await self.models_may_be_sent.wait()
        if self.keys and request.headers.get("Authorization", "") not in {
            f"Bearer {key}" for key in self.keys
        }:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response(MODELS, status=self.models_status)

    async def start(self) -> Endpoint:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return Endpoint("a", "ns", "127.0.0.1", self.runner.addresses[0][1])


class Told:
    """Callbacks of the scraper, and a way to wait for them."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ScrapeState]] = []
        self.scrapes = 0
        self.unmeasured: list[str] = []
        self._news = asyncio.Condition()

    def changed(self, state: EngineState) -> None:
        self.changes.append((state.endpoint.key, state.state))
        self._wake()

    def missed(self, state: EngineState) -> None:
        self.unmeasured.append(state.endpoint.key)
        self._wake()

    def scraped(self, state: EngineState) -> None:
        self.scrapes += 1
        self._wake()

    def _wake(self) -> None:
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self._news:
            await self._news.wait_for(condition)


def scraper(told: Told, **more: float | EngineKey) -> Scraper:
    options = {"interval": 0.01, "timeout": 5.0, **more}
    callbacks = {"on_scrape": told.scraped, "on_change": told.changed, "on_unmeasured": told.missed}
    return Scraper(**callbacks, **options)  # type: ignore[arg-type]
