import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
from tests.epp.endpoints.kubernetes.documents import parsed, pod
from tests.epp.parts import MODEL, Parts, ask, chat, make

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_state import ScrapeState
from kvist_epp.endpoints.kubernetes import pod_endpoints as pods
from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.engines.vllm.kv_events import Batch, Cleared
from kvist_epp.errors import NoEndpoints
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.names import SESSION_HEADER
from kvist_epp.settings.settings import Settings
from kvist_sim.publisher import Publisher, PublisherConfig

NOBODY = "tcp://127.0.0.1:9"
"""The discard port: no process listens there."""


def endpoint(number: int, **more: object) -> Endpoint:
    """An engine that exists by name only."""
    return Endpoint(name=f"e{number}", namespace="t", address=f"10.0.0.{number}", port=80, **more)  # type: ignore[arg-type]


@pytest.fixture
async def parts() -> Parts:
    """A picker without endpoints."""
    return make(0)


@pytest.fixture
async def registry(parts: Parts) -> EndpointRegistry:
    """Follows no events and scrapes no engine: every engine counts as ready."""
    return EndpointRegistry(Settings(max_num_seqs=7), parts.director, parts.clock, scrape_interval=0.0)


@pytest.fixture
async def following(registry: EndpointRegistry) -> AsyncIterator[EndpointRegistry]:
    """Give the registry a subscriber that receives no events."""
    ingestor = Ingestor(registry.director.index, MODEL)
    subscriber = Subscriber(ingestor, observe=lambda _seen: None)
    registry.activate(MODEL, ingestor, subscriber)
    yield registry
    await subscriber.close()


async def test_the_fleet_is_followed(registry: EndpointRegistry) -> None:
    """Endpoints that join are picked from at once; those that leave are forgotten in every part."""
    director = registry.director
    registry.follow(EndpointSet((endpoint(1), endpoint(2))))
    assert [c.endpoint.name for c in director.candidates] == ["e1", "e2"]

    director.offer(ask(chat("x"), headers={SESSION_HEADER: "s"}), 100.0)
    registry.follow(EndpointSet((endpoint(3),)))

    assert [c.endpoint.name for c in director.candidates] == ["e3"]
    assert list(director.lookup.members) == ["t/e3"]
    assert (len(director.table), len(director.tracker)) == (0, 0)
    assert director.metrics.ended["left"] == 1
    assert director.metrics.predicted_cached == {}


async def test_an_endpoint_that_changed_has_left_and_joined(registry: EndpointRegistry) -> None:
    """An endpoint with a new address starts without the backlog of the old address."""
    registry.follow(EndpointSet((endpoint(1),)))
    registry.director.offer(ask(chat("x" * 500)), registry.clock())
    assert registry.director.tracker.backlog("t/e1") > 0

    moved = Endpoint(name="e1", namespace="t", address="10.9.9.9", port=80)
    registry.follow(EndpointSet((moved,)))

    assert [c.endpoint.hostport for c in registry.director.candidates] == ["10.9.9.9:80"]
    assert registry.director.candidates[0].load is registry.director.tracker.load("t/e1")
    assert registry.director.tracker.backlog("t/e1") == 0


async def test_a_moment_of_unreadiness_costs_no_knowledge(following: EndpointRegistry) -> None:
    """An endpoint that is not ready for a while keeps its index, its backlog and its requests."""
    director = following.director
    engine = endpoint(1, kv_events=NOBODY, kv_replay=None, uid="u")
    following.follow(EndpointSet((engine,)))
    director.offer(ask(chat("x" * 500)), 100.0)
    publisher, owed = director.index.publisher("u/0"), director.tracker.backlog("t/e1")
    director.index.stored(publisher, (None, None), None, [7], [b"a block"], block_size=16)

    following.follow(EndpointSet((dataclasses.replace(engine, refusal="not ready"),)))

    assert [c.refusal for c in director.candidates] == ["not ready"]
    assert following.cold() == []
    with pytest.raises(NoEndpoints, match="1 not ready"):
        director.offer(ask(chat("y")), 100.0)

    following.follow(EndpointSet((engine,)))

    assert [c.refusal for c in director.candidates] == [""]
    assert sum(director.index.blocks(publisher).values()) == 1
    assert (director.tracker.backlog("t/e1"), len(director.table)) == (owed, 1)


async def test_scrapes_calibrate(registry: EndpointRegistry) -> None:
    """Block size, foreign requests and slots come from the page; an unreachable engine is not picked."""
    registry.follow(EndpointSet((endpoint(1),)))
    state = registry.scraper.states["t/e1"]
    state.sample = EngineSample(running=5, block_size=64, blocks=100)
    registry.on_scrape(state)

    load = registry.director.tracker.load("t/e1")
    assert (load.untracked_requests, load.slots) == (5, 7)
    assert registry.director.lookup.members["t/e1"].block_size == 64

    state.state = ScrapeState.UNREACHABLE
    registry.on_state_change(state)
    assert registry.director.candidates[0].refusal == "unreachable"


async def test_a_request_that_waits_in_the_engine_makes_no_index_wrong(
    registry: EndpointRegistry, parts: Parts
) -> None:
    """Hits are predicted before the engine counts them; once it runs a request without them, the index was
    wrong."""
    registry.follow(EndpointSet((endpoint(1),)))
    accuracy, state = registry.states["t/e1"].accuracy, registry.scraper.states["t/e1"]
    registry.on_scrape(state)
    request = InFlightRequest("s", 30_000, indexed_tokens=20_000)
    registry.director.tracker.add(request, "t/e1", 10_000, parts.clock())

    for sample, precise in (
        (EngineSample(waiting=1, queries=30_000.0), True),
        (EngineSample(running=0, queries=30_000.0), True),  # in a step that has not ended
        (EngineSample(running=1, queries=30_000.0), False),
    ):
        state.sample, state.asked_at = sample, parts.clock() + 5.0
        registry.on_scrape(state)
        assert accuracy.precise is precise


async def test_an_engine_that_computes_last_blocks_again_stays_trusted(
    registry: EndpointRegistry, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """Hits that are one block short of the index, as with EAGLE drafts, are expected after five requests."""
    caplog.set_level("INFO")
    registry.follow(EndpointSet((endpoint(1),)))
    state, tracker = registry.states["t/e1"], registry.director.tracker
    for number in range(40):
        held = 160 - 16 * state.member.drops_last_block
        request = InFlightRequest(f"s{number}", 400, indexed_tokens=held, index_compared=True)
        tracker.add(request, "t/e1", 400 - held, parts.clock())
        tracker.on_cache_truth(request, 144, parts.clock())

        assert state.accuracy.precise
        assert state.member.drops_last_block is (number >= 4)

    assert state.accuracy.error == 0.0
    assert "endpoint t/e1 (10.0.0.1:80) computes the last block of each hit again" in caplog.text


async def test_an_engine_without_metrics_is_known_by_what_was_sent(registry: EndpointRegistry) -> None:
    """The registry forgets what earlier scrapes showed of other requests and of a full cache. Slots do not
    count, even where ends are reported, because one lost report would keep a slot for minutes."""
    registry.follow(EndpointSet((endpoint(1),)))
    state = registry.scraper.states["t/e1"]
    state.sample = EngineSample(running=5, waiting=1, cache_usage=1.0)
    registry.on_scrape(state)
    load = registry.director.tracker.load("t/e1")
    assert (load.untracked_requests, load.kv_full_at) == (6, 5)

    state.sample, state.metrics_problem = EngineSample(), "GET /metrics returned HTTP status 404"
    registry.on_unmeasured(state)

    assert (load.untracked_requests, load.kv_full_at, load.slots) == (0, None, None)
    registry.director.tracker.end_reports.on_report()
    registry.on_unmeasured(state)
    assert load.slots is None
    assert registry.director.candidates[0].refusal == ""


async def test_without_events_everything_is_approximate(registry: EndpointRegistry) -> None:
    """A picker that follows no events says so for each endpoint, and is never cold."""
    registry.follow(EndpointSet((endpoint(1),)))
    registry.on_tick()
    assert registry.trusted() == {"10.0.0.1:80": 0}
    assert registry.why_approximate("t/e1") == "the picker does not subscribe to its KV events"
    assert registry.cold() == []


async def test_an_engine_is_believed_once_it_is_warm_and_as_long_as_it_is_right(
    following: EndpointRegistry,
) -> None:
    """Before its first replay is over an engine is approximate; then precise; then its errors decide."""
    following.follow(EndpointSet((endpoint(1, kv_events=NOBODY, kv_replay=None),)))
    assert following.cold() == ["t/e1"]
    assert following.why_approximate("t/e1") == "the first replay of its KV events has not finished"

    assert following.subscriber is not None
    following.subscriber.stats()["t/e1/0"].warm = True
    following.on_tick()
    assert (following.cold(), following.trusted()) == ([], {"10.0.0.1:80": 1})

    following.director.offer(ask(chat("x")), following.clock())
    [request] = [attempt.request for attempt in following.director.tracker.own()]
    request.indexed_tokens, request.index_compared = 1000, True
    for number in range(200):
        following.on_cache_truth(request, 0, float(number))
    following.on_tick()
    assert following.trusted() == {"10.0.0.1:80": 0}
    assert "off by" in following.why_approximate("t/e1")

    for number in range(400):
        following.on_cache_truth(request, 1000, float(200 + number))
    following.on_tick()
    assert following.trusted() == {"10.0.0.1:80": 1}


async def test_a_silent_engine_is_not_believed(following: EndpointRegistry) -> None:
    """An engine that takes requests and never publishes is approximate, and /debug says why (5.7)."""
    following.follow(EndpointSet((endpoint(1, kv_events=NOBODY, kv_replay=None),)))
    assert following.subscriber is not None
    following.subscriber.stats()["t/e1/0"].warm = True
    for number in range(20):
        assert following.why_approximate("t/e1") == "", number
        following.director.offer(ask(chat(f"q{number}")), following.clock())
    assert following.why_approximate("t/e1") == "it publishes no KV events"


async def test_requests_that_show_no_life_expire(registry: EndpointRegistry, parts: Parts) -> None:
    """A request without any further sign of life is removed and counted as expired."""
    registry.follow(EndpointSet((endpoint(1),)))
    registry.director.offer(ask(chat("x")), registry.clock())
    parts.clock.now += 10_000
    registry.on_tick()
    assert len(registry.director.table) == 0
    assert registry.director.metrics.ended["expired"] == 1


async def test_a_tick_brings_the_counters_up_to_date(following: EndpointRegistry) -> None:
    """Events, gaps, resets and garbage of all ranks are counted under the endpoint's address."""
    following.follow(EndpointSet((endpoint(1, kv_events=NOBODY, kv_replay=None, ranks=2),)))
    assert following.subscriber is not None
    stats = following.subscriber.stats()
    stats["t/e1/0"].stored, stats["t/e1/1"].stored, stats["t/e1/1"].gaps = 3, 4, 1
    stats["t/e1/0"].garbage, stats["t/e1/0"].malformed = 1, 2
    following.on_tick()

    metrics, name = following.director.metrics, "10.0.0.1:80"
    assert metrics.events[name, "stored"] == 7
    assert (metrics.gaps[name], metrics.resets[name], metrics.undecodable[name]) == (1, 0, 3)


async def test_ranks_of_a_pod_with_a_port_each_may_connect_to_us(registry: EndpointRegistry) -> None:
    """In bind mode all ranks of a pod use one name; the rank in each batch says which endpoint it belongs
    to."""
    registry.ingestor = Ingestor(registry.director.index, MODEL)
    bound = registry.subscriber = Subscriber(
        registry.ingestor, observe=lambda _seen: None, bind="tcp://127.0.0.1:*"
    )
    registry.follow(EndpointSet(pods.endpoints_of(parsed(pod()), (8000, 8001), print)))
    publisher = Publisher(PublisherConfig(endpoint=bound.bound_address or "", topic="kv@10.0.0.1:8000@m"))
    try:
        while not bound.stats()["uid-a/1"].messages:
            publisher.publish(Batch(ts=1.0, rank=1, events=[Cleared()]))
            await asyncio.sleep(0.01)
        assert (bound.stats()["uid-a/0"].messages, bound.unknown_publisher_messages) == (0, 0)
    finally:
        publisher.close()
        await bound.close()


async def test_without_prefixes_no_endpoint_is_approximate(parts: Parts) -> None:
    """``--prefix-matching=false``: there is no reason to report, and no gauge of trust in the index."""
    settings = Settings(prefix_matching=False)
    registry = EndpointRegistry(settings, parts.director, parts.clock, scrape_interval=0.0)
    registry.follow(EndpointSet((endpoint(1),)))
    registry.on_tick()

    [key] = registry.states
    assert (registry.why_approximate(key), registry.trusted()) == ("", {})
