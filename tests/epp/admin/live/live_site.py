"""The live page on a real HTTP server, over a state without a picker."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from tests.epp.admin.live.documents import AT, document, pick

from kvist_epp.admin.admin_server import AdminServer, PickerPages, serve
from kvist_epp.admin.live.live_page import LivePage
from kvist_epp.admin.live.live_state import LiveState
from kvist_epp.admin.live.request_origin import RequestOrigin
from kvist_epp.errors import BadRequest
from kvist_epp.telemetry.metrics import PickerMetrics

SECRET = "the name of the rose"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PATHS = ("/", "/live/state", "/live/page.css", "/live/page.js", "/live/icon.svg")


class State(LiveState):
    """A state without a picker: it counts how often its document is made."""

    def __init__(self) -> None:
        self.started = AT
        self.made = 0
        self.samples = 0

    def document(self) -> Any:
        """Return a document, one step at a time."""
        self.made += 1
        yield
        return document(picks=1)

    def sample(self) -> Any:
        """Count the sample."""
        self.samples += 1
        yield


class Site:
    """A running admin server with the live page, and a client of it."""

    def __init__(
        self, page: LivePage, state: State, server: AdminServer, client: aiohttp.ClientSession
    ) -> None:
        self.page, self.state, self.server, self.client = page, state, server, client
        self.url = f"http://127.0.0.1:{server.port}"

    async def get(self, path: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
        """Return status, text and headers."""
        async with self.client.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.text(), answer.headers

    async def post(self, form: Any, query: str = "", **headers: str) -> tuple[int, str]:
        """Send the form."""
        async with self.client.post(f"{self.url}/{query}", data=form, headers=headers) as answer:
            return answer.status, await answer.text()

    async def watch(self, query: str = "") -> tuple[aiohttp.ClientResponse, "asyncio.Queue[tuple[str, str]]"]:
        """Open a stream; return it and the (name, data) of its events as they come."""
        answer = await self.client.get(f"{self.url}/live/events{query}")
        events: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._tasks = [*getattr(self, "_tasks", []), asyncio.create_task(_read(answer, events))]
        return answer, events

    async def close(self) -> None:
        """End the readers of streams."""
        for task in getattr(self, "_tasks", []):
            task.cancel()
            await asyncio.wait((task,))


async def _read(answer: aiohttp.ClientResponse, events: "asyncio.Queue[tuple[str, str]]") -> None:
    name = ""
    try:
        async for line in answer.content:
            key, _, value = line.decode().rstrip("\n").partition(": ")
            name = value if key == "event" else name
            if key == "data":
                events.put_nowait((name, value))
    except aiohttp.ClientError:
        pass
    events.put_nowait(("end", ""))


def explain(path: str, _headers: Mapping[str, str], body: bytes) -> Mapping[str, Any]:
    """Answer as the picker does."""
    if body == b"bad":
        raise BadRequest("the body is not JSON")
    if body == b"fault":
        raise RuntimeError(SECRET)
    return {
        "mode": "precise",
        "prompt_bytes": len(body),
        "full": False,
        "picked": [f"10.0.0.1:8000{path}"],
        "endpoints": pick(0)["endpoints"],
    }


@asynccontextmanager
async def site(others: Mapping[str, Mapping[str, Any] | None] | None = None) -> AsyncIterator[Site]:
    """Yield a site; everything is closed behind it."""
    asked: list[str] = []

    async def replicas(path: str) -> Mapping[str, Mapping[str, Any] | None]:
        asked.append(path)
        return others or {}

    state = State()
    page = LivePage(state, explain, replicas, RequestOrigin(("kvist.example.com",)), replica="a")
    pages = PickerPages(
        metrics=PickerMetrics().snapshot,
        explain=explain,
        debug_fleet=dict,
        index=dict,
        not_ready=str,
        live=page.routes(),
    )
    server = await serve(pages, "127.0.0.1", 0)
    async with aiohttp.ClientSession(auto_decompress=True) as client:
        running = Site(page, state, server, client)
        try:
            yield running
        finally:
            await page.close()
            await running.close()
            await server.close()


async def next_event(events: "asyncio.Queue[tuple[str, str]]") -> tuple[str, str]:
    """Return the next event; the time limit is generous."""
    return await asyncio.wait_for(events.get(), 10)
