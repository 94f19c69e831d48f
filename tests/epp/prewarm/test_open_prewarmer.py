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
