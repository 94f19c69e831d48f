"""The self-check of engines with slower KV tiers: recorded requests, events and metrics of a real vLLM."""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from tests.epp.kvevents.recorded_tiers import Step, recorded
from tests.epp.parts import MODEL, ask, make

from kvist_epp.admin.debug_pages import endpoint_row
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.director.endpoint_state import EndpointState
from kvist_epp.director.request_progress import before_promotion
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.engines.vllm.engine_metrics import EngineSample, parse_metrics
from kvist_epp.engines.vllm.kv_events import GPU, Batch, Event, Removed, Stored, decode
from kvist_epp.engines.vllm.tier_metrics import TierCounters
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.index.storage_trust import PARTED_SECONDS
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.names import SESSION_HEADER
from kvist_epp.settings.settings import Settings

KEY, SOURCE = "t/e1", "u/0"
ENGINE = Endpoint(
    name="e1", namespace="t", address="10.0.0.1", port=80, kv_events="tcp://127.0.0.1:9", uid="u"
)


class Following:
    """A picker that sends one engine the recorded requests, and learns its recorded events and metrics."""

    def __init__(self) -> None:
        self.parts = make(0)
        self.registry = EndpointRegistry(
            Settings(), self.parts.director, self.parts.clock, scrape_interval=0.0
        )
        director, clock = self.parts.director, self.parts.clock
        self.ingestor = Ingestor(
            director.index,
            MODEL,
            on_prefill_started=lambda publisher, endpoint, session: director.progress.on_prefill_started(
                publisher, endpoint, session, clock()
            ),
            clock=clock,
        )
        self.subscriber = Subscriber(self.ingestor, observe=lambda _: None)
        self.registry.activate(MODEL, self.ingestor, self.subscriber)
        self.registry.follow(EndpointSet((ENGINE,)))
        self.subscriber.stats_of(KEY)[0].warm = True
        self.subscriber.stats_of(KEY)[0].messages = 1

    @property
    def state(self) -> EndpointState:
        """Return the endpoint's state."""
        return self.registry.states[KEY]

    @property
    def why_not(self) -> str:
        """Return why the endpoint's index is not trusted; empty when it is."""
        self.registry.on_tick()
        return self.registry.why_approximate(KEY)

    def run(
        self, step: Step, life: str = "", keep: Callable[[Event], bool] = lambda _: True, scrape: bool = True
    ) -> None:
        """Send a recorded request, apply what followed, and scrape."""
        body = {"model": "m", "prompt": step.prompt, "cache_salt": step.salt}
        self.parts.decide(ask(body, path="/v1/completions", headers={SESSION_HEADER: life + step.session}))
        for _, payload in step.batches:
            batch = decode(payload)
            events = [_renamed(event, life) for event in batch.events if keep(event)]
            at = batch.ts + float(life or 0) * 1e6  # another life is later
            for seen in self.ingestor.apply(SOURCE, Batch(ts=at, events=events)):
                self.parts.director.progress.on_observation(seen, self.parts.clock())
        self.parts.end(life + step.session)
        if scrape:
            self.scrape(parse_metrics(step.metrics))

    def scrape(self, sample: EngineSample) -> None:
        """An answer of the engine's /metrics."""
        self.parts.clock.now += 2.0
        self.registry.on_tick()
        self.state.scrape.sample = sample
        self.registry.on_scrape(self.state.scrape)

    def blocks(self) -> Mapping[str, int]:
        """Blocks by medium, after all that expired was removed; those of shared storage included."""
        while self.ingestor.needs_sweep:
            self.ingestor.sweep()
        index = self.parts.director.index
        own, shared = index.publisher(SOURCE), self.ingestor.tiers.numbers.get("")
        return {**index.blocks(own), **({} if shared is None else index.blocks(shared))}


def _renamed(event: Event, life: str) -> Event:
    """Return the event with the session of another life of the engine."""
    if not isinstance(event, Stored) or event.session is None:
        return event
    return replace(event, session=life + event.session)


@pytest.fixture
async def following() -> AsyncIterator[Following]:
    """A picker that follows one engine."""
    found = Following()
    yield found
    await found.subscriber.close()


@pytest.mark.parametrize("mode", ["self-describing", "placeholders"])
async def test_loads_from_tiers_do_not_cost_trust(following: Following, mode: str) -> None:
    """After a load the engine reports the loaded blocks as if it had computed them, which was taken for no
    reuse at all: 20 requests of a real engine, two of them loaded from host memory and two from a disk, show
    no error. What was loaded counts as cached, in the figures of truth as in those of prediction."""
    for step in recorded(mode).steps:
        following.run(step)
    metrics, name = following.parts.director.metrics, ENGINE.hostport

    assert (following.why_not, following.state.accuracy.error) == ("", 0.0)
    assert following.state.accuracy.sums[0] == 640
    assert following.state.tiers.predicted == {"host": 640, "disk": 640}
    assert dict(metrics.predicted_loads) == {(name, "CPU"): 640, (name, "SHARED"): 640}
    assert metrics.true_cached[name] == metrics.verified_predicted[name] == 1280
    assert metrics.tier_resets == {}


async def test_an_index_that_is_wrong_costs_trust_all_the_same(following: Following) -> None:
    """Evictions of the GPU whose events are lost: the index expects hits there, which the engine has to load
    or to compute."""
    for step in recorded("self-describing").steps:
        following.run(step, keep=lambda event: not isinstance(event, Removed) or event.medium != GPU)

    assert following.why_not.startswith("predictions are off by ")
    assert following.state.accuracy.error > 0.9


async def test_a_warm_disk_that_no_event_announced_costs_no_trust(following: Following) -> None:
    """A restarted engine loads what its disk has kept and no event has announced: nothing was promised."""
    for life in range(12):
        following.ingestor.forget(SOURCE)
        for step in recorded("warm-disk").steps:
            following.run(step, life=f"{life}.", scrape=False)

    assert following.why_not == ""


async def test_a_disk_that_was_wiped_is_forgotten_and_the_gpu_stays_trusted(following: Following) -> None:
    """Requests that were promised blocks of a disk, and an engine that counts none from there: the blocks are
    forgotten, for this engine's storage only, and the endpoint stays precise."""
    for step in recorded("self-describing").steps:
        following.run(step)
    before = following.blocks()
    cached = dict(following.state.scrape.sample.tiers.cached)
    following.state.tiers.on_taken_up({"disk": 3000})
    following.scrape(EngineSample(tiers=TierCounters(cached)))
    after = following.blocks()

    assert before["SHARED"] > 100
    assert after == {medium: count for medium, count in before.items() if medium != "SHARED"}
    assert following.parts.director.metrics.tier_resets == {(ENGINE.hostport, "SHARED"): 1}
    assert following.why_not == ""


async def test_a_host_tier_that_gives_nothing_is_forgotten(following: Following) -> None:
    """Removals of host memory that were lost: its blocks go, those of GPU and disk stay."""
    for step in recorded("self-describing").steps:
        following.run(step)
    before = following.blocks()
    following.state.tiers.on_taken_up({"host": 3000})
    following.scrape(EngineSample(tiers=following.state.scrape.sample.tiers))

    assert following.blocks() == {medium: count for medium, count in before.items() if medium != "CPU"}


async def test_engines_without_counters_by_source_are_not_judged_by_them(following: Following) -> None:
    """Older engines do not say where cached tokens came from: their tiers stay in the index, and the GPU's
    part is compared request by request."""
    for step in recorded("self-describing").steps:
        following.run(step, scrape=False)
        following.scrape(EngineSample())
    following.state.tiers.on_taken_up({"disk": 10**6})
    following.scrape(EngineSample())

    assert following.blocks()["SHARED"] > 100
    assert (following.why_not, following.state.accuracy.error) == ("", 0.0)


async def test_an_engine_s_restart_begins_the_comparison_anew(following: Following) -> None:
    """Counters from before an engine's restart are not compared with what is predicted after it."""
    following.scrape(EngineSample(tiers=TierCounters({"disk": 5000.0})))
    following.state.tiers.on_taken_up({"disk": 3000})
    following.scrape(EngineSample(tiers=TierCounters({"disk": 100.0})))

    assert following.parts.director.metrics.tier_resets == {}


@pytest.mark.parametrize(
    ("at_pick", "now", "expected"),
    [
        ({"STORAGE": 320}, {"CPU": 320}, {"STORAGE": 320}),
        ({"STORAGE": 320, "CPU": 64}, {"CPU": 384}, {"CPU": 64, "STORAGE": 320}),
        ({"STORAGE": 320}, {"CPU": 64, "STORAGE": 256}, {"STORAGE": 320}),
        ({"STORAGE": 320}, {"CPU": 64}, {"STORAGE": 64}),
        ({"CPU": 320}, {"CPU": 320}, {"CPU": 320}),
        ({"CPU": 320}, {"STORAGE": 320}, {"STORAGE": 320}),
    ],
)
def test_what_passes_through_host_memory_came_from_storage(
    at_pick: Mapping[str, int], now: Mapping[str, int], expected: Mapping[str, int]
) -> None:
    """An engine reports what it reads from storage as stored in host memory before the GPU has it."""
    assert before_promotion(at_pick, now) == expected


async def test_a_request_is_kept_from_a_tier_slower_than_computing(following: Following) -> None:
    """If an engine's metrics show a disk slower than its prefill, the request's body tells the engine not
    to load from it, and its tokens count as computed; without such metrics the body stays as it is."""
    steps = recorded("self-describing").steps
    following.registry.on_tick()
    for step in steps[:10]:  # then the first prompt is on the disk alone
        following.run(step)
    body, load = {"model": "m", "prompt": steps[0].prompt}, following.state.load
    first = following.parts.decide(ask(body, path="/v1/completions", headers={SESSION_HEADER: "x"}))
    following.parts.end("x")
    load.tier_rates, load.skipped_media = {"SHARED": 100.0}, frozenset({"SHARED"})
    second = following.parts.decide(ask(body, path="/v1/completions", headers={SESSION_HEADER: "y"}))

    assert isinstance(first, PickResult)
    assert isinstance(second, PickResult)
    assert first.body is None
    assert second.body is not None
    assert json.loads(second.body)["kv_transfer_params"] == {"kv_load_tiers": [{"medium": "CPU"}]}
    assert [line.matched_tokens for line in following.parts.log.lines[-2:]] == [320, 0]


async def test_blocks_of_shared_storage_are_counted_for_each_endpoint(following: Following) -> None:
    """The metric of index blocks has what an endpoint can load from storage that it shares, as SHARED."""
    for step in recorded("self-describing").steps:
        following.run(step)
    [held] = following.registry.blocks().values()

    assert held == following.blocks()
    assert set(held) == {"GPU", "CPU", "SHARED"}


async def test_a_skipped_tier_breaks_no_promise(following: Following) -> None:
    """Blocks that the engine is kept from loading are not expected of the tier, so that they stay in the
    index."""
    steps = recorded("self-describing").steps
    for step in steps[:10]:
        following.run(step)
    load, held = following.state.load, following.blocks()
    load.tier_rates, load.skipped_media = {"SHARED": 100.0}, frozenset({"SHARED"})
    before = dict(following.state.tiers.predicted)
    body = {"model": "m", "prompt": steps[0].prompt}
    answer = following.parts.decide(ask(body, path="/v1/completions", headers={SESSION_HEADER: "y"}))
    [request] = following.parts.director.table.of_session("y")
    following.parts.director.progress.on_prefill_started(SOURCE, KEY, "y", following.parts.clock())
    following.registry.on_cache_truth(request, 0, following.parts.clock())

    assert isinstance(answer, PickResult)
    assert request.index_compared
    assert request.indexed_lower == {"SHARED": 320}
    assert following.state.tiers.predicted == before
    assert following.blocks() == held


async def test_speeds_of_tiers_are_taken_from_scrapes(following: Following) -> None:
    """An endpoint's loads are priced by its own metrics, and a slow tier is skipped unless that is off."""
    following.state.scrape.tier_speed.observe(TierCounters({"host": 0.0, "disk": 0.0}), 0.0)
    fast = TierCounters({"host": 5000.0, "disk": 5000.0}, 1e7, 0.1, 5e6, 50.0)
    following.state.scrape.tier_speed.observe(fast, 1.0)
    following.scrape(EngineSample(tiers=fast))
    load = following.state.load

    assert load.tier_rates["CPU"] == pytest.approx(100_000.0)
    assert load.tier_rates["SHARED"] < 101
    assert load.skipped_media == {"STORAGE", "SHARED"}
    assert load.limits_loads
    tiers: Any = endpoint_row(following.state.scrape, following.parts.director.tracker, 0.0)["tiers"]
    assert tiers["measured"] == ["CPU", "SHARED", "STORAGE"]
    assert tiers["skipped"] == ["SHARED", "STORAGE"]


async def test_an_engine_that_never_finds_shared_storage_is_parted_from_it(following: Following) -> None:
    """The first time the storage is forgotten for all, since it may have been wiped; the second time the
    engine is parted from it, whatever its label says, and the others keep it; minutes later it tries again.
    """
    for step in recorded("self-describing").steps:
        following.run(step)
    member, first = following.state.member, following.blocks()["SHARED"]
    following.state.tiers.on_taken_up({"disk": 3000})
    following.scrape(following.state.scrape.sample)
    wiped, shared = following.blocks(), member.storage
    for step in recorded("self-describing").steps[-8:]:
        following.run(step, life="2.", scrape=False)
    again = following.blocks()["SHARED"]
    following.scrape(following.state.scrape.sample)
    following.state.tiers.on_taken_up({"disk": 3000})
    following.scrape(following.state.scrape.sample)

    parted = member.storage
    following.parts.clock.now += PARTED_SECONDS[0]
    following.scrape(following.state.scrape.sample)

    assert (first > 100, "SHARED" in wiped, shared) == (True, False, "")
    assert (again, following.blocks()["SHARED"], parted) == (again, again, None)
    assert again > 0
    assert member.storage == ""


async def test_storage_that_is_wiped_again_and_again_stays_shared(following: Following) -> None:
    """An engine that found blocks of shared storage after it had been wiped shares it in truth: the next time
    that it is wiped its blocks are forgotten for all, as the first time."""
    tiers, parted, given = following.state.tiers, [], 0.0

    def promise(kept: float) -> None:
        """Expect 3,000 tokens of the disk, which gives so many."""
        nonlocal given
        tiers.on_engine_restart()  # what the recorded run has promised is not at issue
        following.scrape(EngineSample(tiers=TierCounters({"disk": given})))
        tiers.on_taken_up({"disk": 3000})
        given += kept
        following.scrape(EngineSample(tiers=TierCounters({"disk": given})))

    for life in range(3):
        for step in recorded("self-describing").steps:
            following.run(step, life=f"{life}.", scrape=False)
        promise(2500.0)
        promise(0.0)
        parted.append(following.state.member.storage)

    assert parted == [""] * 3
    assert following.parts.director.metrics.tier_resets == {(ENGINE.hostport, "SHARED"): 3}


async def test_a_server_of_lmcache_that_was_lost_is_forgotten(following: Following) -> None:
    """Engines count its blocks as external: one that got none of what was expected drops them, not its
    trust, and what it reports next is there again."""
    labels = {"kvist.dev/kv-tiers": "lmcache", "kvist.dev/kv-storage-namespace": "n1"}
    following.registry.follow(EndpointSet(()))
    following.registry.follow(EndpointSet((dataclasses.replace(ENGINE, labels=labels),)))
    following.subscriber.stats_of(KEY)[0].warm = True
    following.subscriber.stats_of(KEY)[0].messages = 1
    ids = list(range(3, 67))
    computed = Stored(hashes=[1, 2], parent=None, token_ids=ids, block_size=32)
    report = Stored(hashes=[9], parent=None, token_ids=ids, block_size=64, medium="CPU")
    ingestor, metrics = following.ingestor, following.parts.director.metrics
    ingestor.apply(SOURCE, Batch(ts=0.0, events=[computed, report]))
    server, index = ingestor.tiers.numbers["lmcache/n1"], following.parts.director.index
    held = [index.blocks(server)]
    counters = EngineSample(tiers=TierCounters({"external_unspecified": 100.0}))
    following.scrape(counters)
    following.state.tiers.on_taken_up({"external_unspecified": 3000})
    following.scrape(counters)
    while ingestor.needs_sweep:
        ingestor.sweep()
    held.append(index.blocks(server))
    ingestor.apply(SOURCE, Batch(ts=0.0, events=[report]))
    held.append(index.blocks(server))

    assert held == [{"LMCACHE": 2}, {}, {"LMCACHE": 2}]
    assert metrics.tier_resets == {(ENGINE.hostport, "LMCACHE"): 1}
    assert following.why_not == ""
