"""The page ``/fleet``: its contents, and the low cost of requesting it."""

import asyncio
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.epp.parts import BLOCK, Parts, ask, chat, make

from kvist_epp.admin import fleet_page, slices
from kvist_epp.admin.debug_pages import fleet_document, index_document
from kvist_epp.admin.fleet_page import FleetPage
from kvist_epp.admin.slices import run_in_slices
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.http2.limits import PortStats
from kvist_epp.settings.settings import Settings
from kvist_kube.object_cache import WatchStatus

LONG = "The library opens at nine and closes when the last reader has left. " * 12


@pytest.fixture
async def parts() -> Parts:
    """Return a picker without endpoints."""
    return make(0)


@pytest.fixture
async def registry(parts: Parts) -> EndpointRegistry:
    """Return a registry of two engines that are ready and precise."""
    made = EndpointRegistry(Settings(), parts.director, parts.clock, scrape_interval=0.0)
    director = parts.director
    parts.endpoints = [
        Endpoint(name=f"e{n}", namespace="t", address=f"10.0.0.{n}", port=80, uid=f"u{n}") for n in (0, 1)
    ]
    made.follow(EndpointSet(tuple(parts.endpoints)))
    for one in parts.endpoints:
        member = director.lookup.members[one.key]
        member.publishers, member.precise = (director.index.publisher(f"{one.key}/0"),), True
        director.lookup.join(one.key, member)
    return made


async def test_the_page_has_cache_values_and_engine_states(parts: Parts, registry: EndpointRegistry) -> None:
    """Tokens that one endpoint alone holds count as its value, until another one has a copy."""
    held = parts.warm(0, chat(LONG))
    state = registry.scraper.states["t/e0"]
    state.sample = EngineSample(
        running=3, waiting=1, cache_usage=0.5, block_size=BLOCK, blocks=100, size_tokens=1500
    )
    parts.decide(ask(chat(LONG, "fine", "and?")))
    page = await FleetPage(registry).document()

    first, second = page["endpoints"]
    assert (page["version"], page["window_seconds"], page["prompts"]["requests"]) == (1, 600.0, 1)
    assert (first["pod"], first["endpoint"], first["uid"]) == ("e0", "10.0.0.0:80", "u0")
    assert (first["role"], first["ready"], first["draining"], first["state"]) == (
        "both",
        True,
        False,
        "ready",
    )
    assert held - 2 * BLOCK <= first["worth_tokens"] <= held
    assert first["blocks"] == {"GPU": first["exclusive_blocks"]} == {"GPU": held // BLOCK}
    assert (first["kv_tokens"], first["running"], first["waiting"]) == (1500, 3, 1)
    assert (second["worth_tokens"], second["blocks"], second["kv_tokens"]) == (0, {}, None)


async def test_the_guide_shows_the_page_as_it_is(registry: EndpointRegistry) -> None:
    """Every field of the page is in the guide's example, which has no other field, and the version is
    equal."""
    text = (Path(__file__).parents[3] / "docs" / "guides" / "fleet.md").read_text()
    shown = json.loads(text.partition("```json")[2].partition("```")[0])
    page = await FleetPage(registry).document()
    assert shown.keys() == page.keys()
    assert shown["version"] == page["version"]
    assert shown["prompts"].keys() == page["prompts"].keys()
    assert shown["endpoints"][0].keys() == page["endpoints"][0].keys()
    assert shown["endpoints"][0]["counted"].keys() == page["endpoints"][0]["counted"].keys()


async def test_the_page_counts_what_gateways_asked_in_half_an_hour(
    parts: Parts, registry: EndpointRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Picks and failed handshakes are those of the last half hour, whenever the page is requested; after half
    an hour without a request it begins again."""
    monkeypatch.setattr(fleet_page, "CPU_SHARE", 1e9)
    page, port = FleetPage(registry), PortStats(limit=1 << 20)
    parts.director.metrics.ports["grpc"] = port

    async def after(seconds: float) -> dict[str, Any]:
        parts.clock.now += seconds
        return dict((await page.document())["gateway"])

    assert await after(0) == {"seconds": 0.0, "picked": 0, "tls_refusals": 0}
    parts.decide(ask(chat(LONG)))
    port.handshake_failures.add("http request", "10.0.0.9", 0.0)
    assert await after(100) == {"seconds": 100.0, "picked": 1, "tls_refusals": 1}
    for _ in range(14):
        seen = await after(100)
    assert (seen["picked"], seen["tls_refusals"]) == (1, 1)
    for _ in range(6):
        seen = await after(100)
    assert (seen["picked"], seen["tls_refusals"], 1600 <= seen["seconds"] <= 1800) == (0, 0, True)
    assert await after(5000) == {"seconds": 0.0, "picked": 0, "tls_refusals": 0}


async def test_asking_again_at_once_costs_nothing(
    parts: Parts, registry: EndpointRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes too soon gets the last result with its age; later the page is computed again."""
    page = FleetPage(registry)
    monkeypatch.setattr(fleet_page, "CPU_SHARE", 1e-9)
    before = await page.document()
    parts.warm(0, chat(LONG))
    again = await page.document()
    assert again["endpoints"] == before["endpoints"]
    assert again["age_seconds"] >= before["age_seconds"]

    fresh = FleetPage(registry)
    monkeypatch.setattr(fleet_page, "CPU_SHARE", 1e9)
    for held in (True, False):
        assert bool((await fresh.document())["endpoints"][0]["blocks"]) == held
        parts.director.index.forget(parts.director.index.publisher("t/e0/0"))


async def test_a_cancelled_request_does_not_stop_the_others(registry: EndpointRegistry) -> None:
    """If one of two simultaneous requests is cancelled, the other is answered, and the page is computed
    once."""
    page = FleetPage(registry)
    leaver, stayer = (asyncio.create_task(page.document()) for _ in range(2))
    await asyncio.sleep(0)
    leaver.cancel()
    assert len((await stayer)["endpoints"]) == 2
    await asyncio.wait((leaver,))
    assert leaver.cancelled()


async def test_closing_ends_a_computation_in_progress(registry: EndpointRegistry) -> None:
    """Closing during a request ends both the computation and the wait."""
    page = FleetPage(registry)
    waiter = asyncio.create_task(page.document())
    await asyncio.sleep(0)
    await page.close()
    await asyncio.wait((waiter,))
    assert waiter.cancelled()
    await page.close()


class NoDiscovery:
    """A discovery of nothing."""

    problem = ""

    async def run(self) -> None:
        """End at once."""

    def describe(self) -> dict[str, Any]:
        """Return what is empty here."""
        return {}

    def watches(self) -> Sequence[WatchStatus]:
        """Return what is empty here."""
        return ()


@pytest.mark.parametrize("turns", range(12))
async def test_an_endpoint_that_leaves_while_pages_are_made_is_left_out(
    registry: EndpointRegistry, parts: Parts, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Endpoints come and go between the slices of a page, whose other endpoints are all there."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)  # one step in each turn of the event loop
    pages = [
        asyncio.create_task(FleetPage(registry).document()),
        asyncio.create_task(fleet_document(registry, NoDiscovery())),
        asyncio.create_task(index_document(registry)),
    ]
    for _ in range(turns):
        await asyncio.sleep(0)
    registry.follow(EndpointSet((parts.endpoints[1],)))
    fleet, debug, _ = [await page for page in pages]

    assert [row["pod"] for row in fleet["endpoints"]][-1] == "e1"
    assert [row["name"] for row in debug["endpoints"]][-1] == "t/e1"
    assert len(fleet["endpoints"]) <= 2
    assert len(debug["endpoints"]) <= 2


async def test_work_goes_on_in_slices() -> None:
    """The event loop runs other tasks in between; the result is that of the generator."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def work() -> Generator[None, None, str]:
        while turns < 5:
            yield
        return "done"

    task = asyncio.create_task(other())
    found, seconds = await run_in_slices(work())
    task.cancel()
    await asyncio.wait((task,))
    assert found == "done"
    assert seconds > 0
