"""Prewarming in a picker: heat from picks, names of models, and steps as requests in flight."""

import asyncio
import dataclasses

import pytest
from tests.epp.parts import Parts, ask, chat, make

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.engines.vllm.engine_metrics import EngineSample, ServedModels
from kvist_epp.index.cached_part import Member
from kvist_epp.kvevents.observation import Observation
from kvist_epp.names import TENANT_HEADERS
from kvist_epp.prefix_stats.hot_prefixes import HotPrefixes
from kvist_epp.prewarm.prewarm_planner import PrewarmLimits, PrewarmPlanner
from kvist_epp.prewarm.prewarmer import cache_tokens_of, model_of, open_prewarmer
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.counters import PrewarmStats

LONG = "A shared beginning of prompts that many tenants have in common. " * 20


@pytest.fixture
async def registry() -> EndpointRegistry:
    """Return a registry without scrapes, in which every engine counts as ready."""
    parts = make(0, hot=HotPrefixes())
    return EndpointRegistry(Settings(), parts.director, parts.clock, scrape_interval=0.0)


def endpoint(number: int) -> Endpoint:
    """Return an endpoint that exists by name only."""
    return Endpoint(f"e{number}", "t", f"10.0.0.{number}", 80)


def picks(parts: Parts, *tenants: str) -> None:
    """Pick for a request of each tenant."""
    for tenant in tenants:
        parts.decide(ask(chat(LONG + tenant), headers={TENANT_HEADERS[0]: tenant} if tenant else {}))


@pytest.mark.parametrize(
    ("tenants", "told"),
    [(("one", "two"), 1), (("one", "one"), 0), (("", ""), 0), (("", "one"), 1)],
)
def test_picks_note_heat_with_the_tenant(tenants: tuple[str, ...], told: int) -> None:
    """A prefix is hot as far as two tenants had it cached; requests without a tenant count as one tenant."""
    hot = HotPrefixes()
    parts = make(2, hot=hot)
    shared = parts.warm(0, chat(LONG))
    picks(parts, *tenants)
    found = hot.hottest(10**6, parts.clock())
    assert len(found) == told
    assert all(0 < one.tokens <= shared and LONG[:100].encode() in one.text for one in found)


def test_without_prewarming_nothing_is_noted() -> None:
    """By default a picker records no heat and pays nothing."""
    parts = make(2)
    parts.warm(0, chat(LONG))
    picks(parts, "one", "two")
    assert parts.director.hot is None


async def test_what_is_known_of_an_engine_is_used(registry: EndpointRegistry) -> None:
    """A base model's name and the size of the cache are known after a scrape, and None before it."""
    registry.follow(EndpointSet((endpoint(1),)))
    state = registry.scraper.states["t/e1"]
    assert (model_of(registry, "t/e1"), cache_tokens_of(registry, "t/e1")) == (None, None)
    state.served = ServedModels(models=frozenset({"m", "alias"}), adapters=frozenset({"a"}))
    state.sample = EngineSample(block_size=16, blocks=100)
    assert (model_of(registry, "t/e1"), cache_tokens_of(registry, "t/e1")) == ("alias", 1600)
    assert (model_of(registry, "t/gone"), cache_tokens_of(registry, "t/gone")) == (None, None)


async def test_a_step_is_in_flight_until_it_ends() -> None:
    """Events of the engine change no other request's backlog, and the step counts as no client's request."""
    hot = HotPrefixes()
    parts = make(1, hot=hot)
    director, tracker = parts.director, parts.director.tracker
    parts.warm(0, chat(LONG))
    picks(parts, "one", "two")
    requests, backlog, count = dict(director.metrics.requests), tracker.backlog("t/e0"), len(director.table)
    planner = PrewarmPlanner(director, hot, PrewarmLimits(tokens=10_000), stats=PrewarmStats())
    planner.poll(parts.clock())
    other = dataclasses.replace(parts.endpoints[0], name="e1", address="10.0.0.9")
    director.lookup.join(other.key, Member((director.index.publisher("t/e1/0"),), block_size=16))
    director.set_endpoints([*parts.candidates(), Candidate(other, tracker.load(other.key))], parts.clock())
    [step] = planner.poll(parts.clock())
    assert (len(director.table), tracker.backlog(other.key)) == (count + 1, step.uncached)
    event = Observation(f"{other.key}/0", other.key, step.session, step.tokens, 0, "prefill", step.tokens)
    director.progress.on_observation(event, parts.clock())
    assert (tracker.backlog(other.key), tracker.backlog("t/e0")) == (0, backlog)
    planner.on_ended(step, parts.clock())
    assert len(director.table) == count
    assert director.metrics.requests == requests


async def test_the_planner_learns_of_an_endpoint_that_leaves_before_it_is_forgotten(
    registry: EndpointRegistry,
) -> None:
    """The callback runs while the index knows the endpoint; one that is only refused does not trigger it."""
    told: list[tuple[list[str], bool]] = []
    members = registry.director.lookup.members
    registry.add_leaving_listener(lambda keys: told.append((list(keys), keys[0] in members)))
    registry.follow(EndpointSet((endpoint(1), endpoint(2))))
    registry.follow(EndpointSet((dataclasses.replace(endpoint(1), refusal="terminating"), endpoint(2))))
    assert told == []
    registry.follow(EndpointSet((endpoint(2),)))
    assert told == [(["t/e1"], True)]


async def test_an_open_prewarmer_records_heat_and_has_metrics(registry: EndpointRegistry) -> None:
    """Heat is recorded from then on, and the metrics page has the counters."""
    settings = Settings(prewarm_tokens=1_000)
    async with open_prewarmer(settings, registry) as prewarmer:
        task = asyncio.create_task(prewarmer.run())
        await asyncio.sleep(0)
        assert registry.director.hot is not None
        page, _ = registry.director.metrics.snapshot().format("")
        task.cancel()
    for name in ("tokens", "steps", "prefixes", "seconds"):
        assert f"kvist_epp_prewarm_{name}_total".encode() in page
