"""``/debug/decisions`` over HTTP: this replica's decisions, the other replicas', and replicas that do not
answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from tests.epp.parts import Clock, Parts, ask, chat, make

from kvist_epp.admin import replica_pages
from kvist_epp.admin.admin_server import PickerPages, serve
from kvist_epp.admin.decision_pages import MAX_LIMIT, DecisionPages
from kvist_epp.admin.replica_pages import ReplicaPages
from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.telemetry.metrics import PickerMetrics


@dataclass
class Replica:
    """A picker of which only the pages are served."""

    parts: Parts
    log: DecisionLog
    port: int = 0

    def send(self, name: str) -> None:
        """Decide on a request with this id."""
        self.parts.decide(ask(chat("hello"), headers={"x-request-id": name}))
        self.parts.clock.now += 1.0

    async def get(self, path: str) -> tuple[int, Any]:
        """Return status and document of a page."""
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def replica(
    name: str, addresses: dict[str, str] | None = None, *, limit: int = 5
) -> AsyncIterator[Replica]:
    """Serve a replica's pages; ``addresses`` of the other replicas, None where there are none."""
    clock = Clock()
    log = DecisionLog(limit, name, clock=clock, wall=lambda: 1e9 + clock.now)
    others = None if addresses is None else ReplicaPages(lambda: addresses)
    pages = PickerPages(
        metrics=PickerMetrics().snapshot,
        explain=lambda _path, _headers, _body: {},
        debug_fleet=dict,
        index=dict,
        not_ready=str,
        decisions=DecisionPages(log, others),
    )
    server = await serve(pages, "127.0.0.1", 0)
    try:
        yield Replica(make(2, clock=clock, decisions=log), log, server.port)
    finally:
        if others is not None:
            await others.close()
        await server.close()


@asynccontextmanager
async def server_that(answers: web.StreamResponse | None, seconds: float = 0.0) -> AsyncIterator[str]:
    """Serve this answer to everything, after some time; yield the base URL."""

    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return answers or web.json_response([])

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_the_decisions_of_all_replicas_are_shown_in_order() -> None:
    """Newest first, whichever replica decided, up to the limit; ``replicas=false`` shows this replica's."""
    async with replica("b") as second, AsyncExitStack() as stack:
        others = {"b": f"http://127.0.0.1:{second.port}"}
        first = await stack.enter_async_context(replica("a", others))
        first.send("1")
        second.parts.clock.now += 0.5
        second.send("1.5")
        first.send("2")
        _, both = await first.get("/debug/decisions")
        _, one = await first.get("/debug/decisions?limit=1")
        _, own = await first.get("/debug/decisions?replicas=false")

    assert [(row["id"], row["replica"]) for row in both["decisions"]] == [
        ("2", "a"),
        ("1.5", "b"),
        ("1", "a"),
    ]
    assert (both["replica"], both["unreachable"]) == ("a", [])
    assert both["kept"] == {"limit": 5, "decisions": 2, "oldest_at": 1e9 + 100}
    assert both["others"] == {"b": {"limit": 5, "decisions": 1, "oldest_at": 1e9 + 100.5}}
    assert [row["id"] for row in one["decisions"]] == ["2"]
    assert [row["id"] for row in own["decisions"]] == ["2", "1"]


async def test_one_decision_is_found_at_the_replica_that_made_it() -> None:
    """With the earlier ones of its id; ids may contain anything, and an unknown one is answered 404."""
    odd = "a/b?c&d=é%2F #"
    async with replica("b") as second, AsyncExitStack() as stack:
        others = {"b": f"http://127.0.0.1:{second.port}", "gone": ""}
        first = await stack.enter_async_context(replica("a", others))
        second.send(odd)
        second.send(odd)
        path = f"/debug/decisions/{quote(odd, safe='')}"
        status, found = await first.get(path)
        alone, _ = await first.get(f"{path}?replicas=false")
        missing, document = await first.get("/debug/decisions/unknown%0Aat%20all")

    assert (status, found["id"], found["replica"]) == (200, odd, "b")
    assert [row["id"] for row in found["earlier"]] == [odd]
    assert (alone, missing) == (404, 404)
    assert document["error"]["message"] == (
        "no decision on unknown?at all is among the last 5 of this replica and of 1 other replica "
        "(--decision-log); no answer from gone"
    )


@pytest.mark.parametrize("limit", ["0", "-1", "x", str(MAX_LIMIT + 1), "9" * 30, "²"])
async def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    """The error names the parameter and its bounds."""
    async with replica("a") as one:
        status, document = await one.get(f"/debug/decisions?limit={limit}")

    assert (status, document["error"]["message"]) == (400, f"limit: a number from 1 to {MAX_LIMIT}")


async def test_without_a_log_the_page_says_so() -> None:
    """``--decision-log=0`` keeps no decisions."""
    pages = PickerPages(
        metrics=PickerMetrics().snapshot,
        explain=lambda _path, _headers, _body: {},
        debug_fleet=dict,
        index=dict,
        not_ready=str,
    )
    server = await serve(pages, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}/debug/decisions"
    async with aiohttp.ClientSession() as session:
        answers = [await session.get(f"{url}{path}") for path in ("", "/one")]
        documents = [(answer.status, await answer.json()) for answer in answers]
    await server.close()

    wanted = {"message": "no decisions are kept: set --decision-log above 0", "type": "invalid_request_error"}
    assert documents == [(404, {"error": wanted | {"code": None}})] * 2


async def test_a_replica_that_does_not_answer_well_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreachable, late, refusing, too large, no JSON, no object, redirecting, or unknown: None, in bounded
    time, and the others are shown."""
    monkeypatch.setattr(replica_pages, "MAX_PAGE_BYTES", 1000)
    answers = {
        "good": web.json_response({"a": 1}),
        "refusing": web.json_response({"error": {}}, status=404),
        "large": web.json_response({"a": "x" * 1000}),
        "text": web.Response(text="hello"),
        "bytes": web.Response(body=b"\xff\xfe{"),
        "list": web.json_response([]),
        "redirecting": web.Response(status=302, headers={"Location": "/elsewhere"}),
    }
    async with AsyncExitStack() as stack:
        addresses = {
            name: await stack.enter_async_context(server_that(answer)) for name, answer in answers.items()
        }
        addresses["late"] = await stack.enter_async_context(server_that(None, 30.0))
        addresses |= {"unreachable": "http://127.0.0.1:1", "no port": "http://127.0.0.1:99999", "unknown": ""}
        pages = ReplicaPages(lambda: addresses)
        found = await pages.get("/page", timeout=1.0)
        await pages.close()
        closed = await pages.get("/page")

    assert {name: page for name, page in found.items() if page is not None} == {"good": {"a": 1}}
    assert found.keys() == addresses.keys()
    assert set(closed.values()) == {None}


async def test_a_page_of_a_replica_is_asked_for_itself_alone() -> None:
    """A request on behalf of a replica says so, so that it is not passed on again."""
    asked: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/page", handler)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pages = ReplicaPages(lambda: {"one": f"http://127.0.0.1:{runner.addresses[0][1]}"})
    await pages.get("/page")
    await pages.get("/page?id=a%2Fb")
    await pages.close()
    await runner.cleanup()

    assert asked == [{"replicas": "false"}, {"id": "a/b", "replicas": "false"}]
