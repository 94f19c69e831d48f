import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
from tests.epp.endpoints.kubernetes.documents import parsed, pod
from tests.epp.parts import MODEL, Parts, ask, chat, make

from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_state import ScrapeState
from kvist_epp.endpoints.kubernetes import pods
from kvist_epp.endpoints.scraper import Scraper
from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.engines.vllm.kv_events import Batch, Cleared
from kvist_epp.errors import NoEndpoints
from kvist_epp.index.index_accuracy import Trust
from kvist_epp.kvevents.ingestion import Learner
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.names import SESSION_HEADER
from kvist_epp.settings.settings import Settings
from kvist_sim.publisher import Publisher, PublisherConfig

NOBODY = "tcp://127.0.0.1:9"
"""The discard port: nobody listens."""


def endpoint(number: int, **more: object) -> Endpoint:
    """An engine that exists by name only."""
    return Endpoint(name=f"e{number}", namespace="t", address=f"10.0.0.{number}", port=80, **more)  # type: ignore[arg-type]


@pytest.fixture
async def parts() -> Parts:
    """A picker without endpoints."""
    return make(0)


@pytest.fixture
async def membership(parts: Parts) -> AsyncIterator[Membership]:
    """Follows no events and scrapes nobody: every engine counts as ready."""
    made = Membership(Settings(max_num_seqs=7), parts.picker, None, None, Trust())
    parts.picker.truth, parts.picker.departed = made.truth, made.departed
    async with Scraper(on_scrape=made.scraped, on_change=made.changed, interval=0) as made.scraper:
        yield made


@pytest.fixture
async def following(membership: Membership) -> AsyncIterator[Membership]:
    """The same with a subscriber that nobody answers."""
    membership.learner = Learner(membership.picker.index, MODEL)
    membership.subscriber = Subscriber(membership.learner, observe=membership.picker.observed)
    yield membership
    await membership.subscriber.close()


async def test_the_fleet_is_followed(membership: Membership) -> None:
    """Endpoints that join are picked from at once; those that leave are forgotten in every part."""
    picker = membership.picker
    membership.follow(EndpointSet((endpoint(1), endpoint(2))))
    assert [c.endpoint.name for c in picker.candidates] == ["e1", "e2"]

    picker.decide(ask(chat("x"), headers={SESSION_HEADER: "s"}))
    membership.follow(EndpointSet((endpoint(3),)))

    assert [c.endpoint.name for c in picker.candidates] == ["e3"]
    assert list(picker.lookup.members) == ["t/e3"]
    assert (len(picker.flights), len(picker.ledger)) == (0, 0)
    assert picker.metrics.ended["left"] == 1
    assert picker.metrics.predicted_cached == {}


async def test_an_endpoint_that_changed_has_left_and_joined(membership: Membership) -> None:
    """What was owed at the old address does not count for the new one."""
    membership.follow(EndpointSet((endpoint(1),)))
    membership.picker.decide(ask(chat("x" * 500)))
    assert membership.picker.ledger.owed("t/e1") > 0

    moved = Endpoint(name="e1", namespace="t", address="10.9.9.9", port=80)
    membership.follow(EndpointSet((moved,)))

    assert [c.endpoint.hostport for c in membership.picker.candidates] == ["10.9.9.9:80"]
    assert membership.picker.candidates[0].load is membership.picker.ledger.load("t/e1")
    assert membership.picker.ledger.owed("t/e1") == 0


async def test_a_moment_of_unreadiness_costs_no_knowledge(following: Membership) -> None:
    """An endpoint that is not to be picked for a while keeps its index, its debts and its place in line."""
    picker = following.picker
    engine = endpoint(1, kv_events=NOBODY, kv_replay=None, uid="u")
    following.follow(EndpointSet((engine,)))
    picker.decide(ask(chat("x" * 500)))
    publisher, owed = picker.index.publisher("u/0"), picker.ledger.owed("t/e1")
    picker.index.stored(publisher, (None, None), None, [7], [b"a block"], block_size=16)

    following.follow(EndpointSet((dataclasses.replace(engine, refusal="not ready"),)))

    assert [c.refusal for c in picker.candidates] == ["not ready"]
    assert following.cold() == []
    with pytest.raises(NoEndpoints, match="1 not ready"):
        picker.decide(ask(chat("y")))

    following.follow(EndpointSet((engine,)))

    assert [c.refusal for c in picker.candidates] == [""]
    assert sum(picker.index.blocks(publisher).values()) == 1
    assert (picker.ledger.owed("t/e1"), len(picker.flights)) == (owed, 1)


async def test_scrapes_calibrate(membership: Membership) -> None:
    """Block size, foreign requests and slots come from the page; an unreachable engine is not picked."""
    membership.follow(EndpointSet((endpoint(1),)))
    state = membership.scraper.states["t/e1"]
    state.sample = EngineSample(running=5, block_size=64, blocks=100)
    membership.scraped(state)

    load = membership.picker.ledger.load("t/e1")
    assert (load.foreign, load.slots) == (5, 7)
    assert membership.picker.lookup.members["t/e1"].block_size == 64

    state.state = ScrapeState.UNREACHABLE
    membership.changed(state)
    assert membership.picker.candidates[0].refusal == "unreachable"


async def test_without_events_everything_is_approximate(membership: Membership) -> None:
    """A picker that follows no events says so for each endpoint, and is never cold."""
    membership.follow(EndpointSet((endpoint(1),)))
    membership.tick()
    assert membership.trusted() == {"10.0.0.1:80": 0}
    assert membership.why_approximate("t/e1") == "no KV events are followed"
    assert membership.cold() == []


async def test_an_engine_is_believed_once_it_is_warm_and_as_long_as_it_is_right(
    following: Membership,
) -> None:
    """Before its first replay is over an engine is approximate; then precise; then its errors decide."""
    following.follow(EndpointSet((endpoint(1, kv_events=NOBODY, kv_replay=None),)))
    assert following.cold() == ["t/e1"]
    assert following.why_approximate("t/e1") == "its first replay is not over"

    assert following.subscriber is not None
    following.subscriber.stats()["t/e1/0"].warm = True
    following.tick()
    assert (following.cold(), following.trusted()) == ([], {"10.0.0.1:80": 1})

    for number in range(200):
        following.trust.record("t/e1", 1000, 0, float(number))
    following.tick()
    assert following.trusted() == {"10.0.0.1:80": 0}
    assert "off by" in following.why_approximate("t/e1")

    for number in range(400):
        following.trust.record("t/e1", 1000, 1000, float(200 + number))
    following.tick()
    assert following.trusted() == {"10.0.0.1:80": 1}


async def test_a_silent_engine_is_not_believed(following: Membership) -> None:
    """An engine that takes requests and never publishes is approximate, and /debug says why (5.7)."""
    following.follow(EndpointSet((endpoint(1, kv_events=NOBODY, kv_replay=None),)))
    assert following.subscriber is not None
    following.subscriber.stats()["t/e1/0"].warm = True
    for number in range(20):
        assert following.why_approximate("t/e1") == "", number
        following.picker.decide(ask(chat(f"q{number}")))
    assert following.why_approximate("t/e1") == "it publishes no events"


async def test_requests_that_show_no_life_expire(membership: Membership, parts: Parts) -> None:
    """A request nobody hears of again leaves the books, and is counted as expired."""
    membership.follow(EndpointSet((endpoint(1),)))
    membership.picker.decide(ask(chat("x")))
    parts.clock.now += 10_000
    membership.tick()
    assert len(membership.picker.flights) == 0
    assert membership.picker.metrics.ended["expired"] == 1


async def test_a_tick_brings_the_counters_up_to_date(following: Membership) -> None:
    """Events, gaps, resets and garbage of all ranks are counted under the endpoint's address."""
    following.follow(EndpointSet((endpoint(1, kv_events=NOBODY, kv_replay=None, ranks=2),)))
    assert following.subscriber is not None
    stats = following.subscriber.stats()
    stats["t/e1/0"].stored, stats["t/e1/1"].stored, stats["t/e1/1"].gaps = 3, 4, 1
    stats["t/e1/0"].garbage, stats["t/e1/0"].malformed = 1, 2
    following.tick()

    metrics, name = following.picker.metrics, "10.0.0.1:80"
    assert metrics.events[name, "stored"] == 7
    assert (metrics.gaps[name], metrics.resets[name], metrics.undecodable[name]) == (1, 0, 3)


async def test_ranks_of_a_pod_with_a_port_each_may_connect_to_us(membership: Membership) -> None:
    """In bind mode all ranks of a pod name it alike; each batch's own rank tells which endpoint it is of."""
    membership.learner = Learner(membership.picker.index, MODEL)
    bound = membership.subscriber = Subscriber(
        membership.learner, observe=membership.picker.observed, bind="tcp://127.0.0.1:*"
    )
    membership.follow(EndpointSet(pods.endpoints_of(parsed(pod()), (8000, 8001), print)))
    publisher = Publisher(PublisherConfig(endpoint=bound.bound or "", topic="kv@10.0.0.1:8000@m"))
    try:
        while not bound.stats()["uid-a/1"].messages:
            publisher.publish(Batch(ts=1.0, rank=1, events=[Cleared()]))
            await asyncio.sleep(0.01)
        assert (bound.stats()["uid-a/0"].messages, bound.strangers) == (0, 0)
    finally:
        publisher.close()
        await bound.close()
