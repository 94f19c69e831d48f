"""Prewarming in a picker: heat from picks, names of models, and steps as requests in flight."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
from tests.epp.parts import Parts, ask, chat, make

from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.engines.vllm.engine_metrics import EngineSample, Served
from kvist_epp.index.index_accuracy import Trust
from kvist_epp.kvevents.observed import Observed
from kvist_epp.names import TENANT_HEADERS
from kvist_epp.prefix_stats.hot_prefixes import Hot
from kvist_epp.prewarm.prewarm_planner import PrewarmStep
from kvist_epp.prewarm.prewarmer import (
    add_in_flight,
    cache_tokens_of,
    model_of,
    open_prewarmer,
    remove_in_flight,
)
from kvist_epp.settings.settings import Settings

LONG = "A shared beginning of prompts that many tenants have in common. " * 20


@pytest.fixture
async def membership() -> AsyncIterator[Membership]:
    """Return a registry without scrapes, in which every engine counts as ready."""
    parts = make(0)
    made = Membership(Settings(), parts.picker, None, None, Trust())
    async with Scraper(on_scrape=made.scraped, on_change=made.changed, interval=0) as made.scraper:
        yield made


def endpoint(number: int) -> Endpoint:
    """Return an endpoint that exists by name only."""
    return Endpoint(f"e{number}", "t", f"10.0.0.{number}", 80)


def picks(parts: Parts, *tenants: str) -> None:
    """Pick for a request of each tenant."""
    for tenant in tenants:
        parts.picker.decide(ask(chat(LONG + tenant), headers={TENANT_HEADERS[0]: tenant} if tenant else {}))


@pytest.mark.parametrize(
    ("tenants", "told"),
    [(("one", "two"), 1), (("one", "one"), 0), (("", ""), 0), (("", "one"), 1)],
)
def test_picks_note_heat_with_the_tenant(tenants: tuple[str, ...], told: int) -> None:
    """A prefix is hot as far as two tenants had it cached; requests without a tenant count as one tenant."""
    parts = make(2)
    parts.picker.hot = hot = Hot()
    shared = parts.warm(0, chat(LONG))
    picks(parts, *tenants)
    found = hot.beginnings(10**6, parts.clock())
    assert len(found) == told
    assert all(0 < one.tokens <= shared and LONG[:100].encode() in one.text for one in found)


def test_without_prewarming_nothing_is_noted() -> None:
    """By default a picker records no heat and pays nothing."""
    parts = make(2)
    parts.warm(0, chat(LONG))
    picks(parts, "one", "two")
    assert parts.picker.hot is None


async def test_what_is_known_of_an_engine_is_used(membership: Membership) -> None:
    """A base model's name and the size of the cache are known after a scrape, and None before it."""
    membership.follow(EndpointSet((endpoint(1),)))
    state = membership.scraper.states["t/e1"]
    assert (model_of(membership, "t/e1"), cache_tokens_of(membership, "t/e1")) == (None, None)
    state.served = Served(models=frozenset({"m", "alias"}), adapters=frozenset({"a"}))
    state.sample = EngineSample(block_size=16, blocks=100)
    assert (model_of(membership, "t/e1"), cache_tokens_of(membership, "t/e1")) == ("alias", 1600)
    assert (model_of(membership, "t/gone"), cache_tokens_of(membership, "t/gone")) == (None, None)


async def test_a_step_is_in_flight_until_it_ends() -> None:
    """Events of the engine advance the ledger, and the step counts as no client's request."""
    parts = make(1)
    picker, hot = parts.picker, Hot()
    parts.warm(0, chat(LONG))
    picker.hot = hot
    picks(parts, "one", "two")
    [one] = hot.beginnings(10**6, parts.clock())
    requests = dict(picker.metrics.requests)
    step = PrewarmStep("s.prewarm.1", parts.endpoints[0], one, len(one.sizes), one.tokens, 0)
    before = picker.ledger.owed(step.endpoint.key)
    picker.ledger.routed(step.session, step.endpoint.key, step.uncached, step.tokens, parts.clock())
    add_in_flight(picker, step)
    key = step.endpoint.key
    picker.observed(Observed(f"{key}/0", key, step.session, one.tokens, 0, "prompt", one.tokens))
    assert picker.ledger.owed(step.endpoint.key) == before
    flights = len(picker.flights)
    remove_in_flight(picker, step)
    assert len(picker.flights) == flights - 1
    assert picker.metrics.requests == requests


async def test_the_planner_learns_of_an_endpoint_that_leaves_before_it_is_forgotten(
    membership: Membership,
) -> None:
    """The callback runs while the index knows the endpoint; one that is only refused does not trigger it."""
    told: list[tuple[list[str], bool]] = []
    membership.going = lambda keys: told.append((list(keys), keys[0] in membership.picker.lookup.members))
    membership.follow(EndpointSet((endpoint(1), endpoint(2))))
    membership.follow(EndpointSet((dataclasses.replace(endpoint(1), refusal="terminating"), endpoint(2))))
    assert told == []
    membership.follow(EndpointSet((endpoint(2),)))
    assert told == [(["t/e1"], True)]


async def test_an_open_prewarmer_records_heat_and_has_metrics(membership: Membership) -> None:
    """Heat is recorded from then on, and the metrics page has the counters."""
    settings = Settings(hand_over_tokens=1_000)
    async with open_prewarmer(settings, membership) as prewarmer:
        task = asyncio.create_task(prewarmer.run())
        await asyncio.sleep(0)
        assert membership.picker.hot is not None
        page, _ = membership.picker.metrics.snapshot().format("")
        task.cancel()
    for name in ("tokens", "steps", "prefixes", "seconds"):
        assert f"kvist_epp_prewarm_{name}_total".encode() in page
