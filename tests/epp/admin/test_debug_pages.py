"""The pages under /debug, and the gauges of the queue."""

import asyncio
import json
from functools import partial

import msgspec
import pytest
from tests.epp.parts import Parts, ask, chat, make

from kvist_epp.admin import debug_pages
from kvist_epp.admin.debug_pages import endpoint_row, in_flight_document
from kvist_epp.director.explanation import Explanation
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.flowcontrol.flow_controller import FlowController, FlowLimits, QueuedRequest
from kvist_epp.http2.limits import PortLoad, PortStats
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.names import PRIORITY_HEADER, TENANT_HEADERS
from kvist_epp.scheduling.pick import ScoredEndpoint
from kvist_epp.telemetry.metrics import Gauges


def zeros(page: dict[str, object]) -> bool:
    """Return whether every count but those of tasks and streams is 0."""
    return not any(value for name, value in page.items() if name not in {"tasks", "streams", "stream_bytes"})


async def test_a_request_is_held_until_it_has_ended() -> None:
    """Load, request, prompt and history note are present after the pick, and gone after the access log."""
    parts = make()
    before = in_flight_document(parts.director)
    decision = parts.decide(ask(chat("What is held for me?")))
    assert isinstance(decision, PickResult)
    during = in_flight_document(parts.director)
    parts.end(decision.session)
    after = in_flight_document(parts.director)

    assert zeros(before)
    assert (during["attempts"], during["requests_in_flight"], during["routing_history"]) == (1, 1, 1)
    assert during["prompt_bytes"] > len("What is held for me?")
    assert zeros(after)
    assert json.loads(json.dumps(after)) == after


async def test_tasks_are_counted_by_their_coroutine() -> None:
    """A task that stays can be found by its name."""

    async def waits() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(waits()) for _ in range(2)]
    found = in_flight_document(make().director)["tasks"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    [name] = [name for name in found if name.endswith("waits")]
    assert found[name] == 2


async def test_streams_of_gateways_are_counted_and_those_of_replicas_are_not() -> None:
    """Streams between replicas are always open; those of gateways end."""
    director = make().director
    for port, streams in (("grpc", 3), ("grpc-health", 1), ("peer", 2)):
        director.metrics.ports[port] = PortStats(1 << 20, partial(PortLoad, 1, streams, 10, 5))
    found = in_flight_document(director, remote_requests=4)

    assert found["streams"] == {"grpc": 3, "grpc-health": 1}
    assert found["stream_bytes"] == {"grpc": 15, "grpc-health": 15}
    assert found["remote_requests"] == 4


def test_the_page_of_endpoints_joins_scrapes_and_load() -> None:
    """An endpoint has its state and its backlog, and the document can be written as JSON."""
    endpoint = Endpoint("a", "ns", "10.0.0.1", 8000, {"k": "v"}, "tcp://10.0.0.1:5557", ranks=2)
    tracker = LoadTracker(default_rate=1000.0)
    tracker.add(InFlightRequest("s", 900), "ns/a", 500, now=1.0)
    read = msgspec.json.decode(msgspec.json.encode(endpoint_row(EngineState(endpoint), tracker, now=1.1)))

    assert (read["state"], read["problem"], read["backlog_tokens"], read["requests"]) == (
        "new",
        "not scraped yet",
        400,
        1,
    )
    assert read["kv_events"] == ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]


A = Endpoint("a", "ns", "10.0.0.1", 8000)
B = Endpoint("b", "ns", "fd00::2", 8000)
SECRET = "the password of the library"


@pytest.fixture
async def parts() -> Parts:
    """Return a picker whose two endpoints are full."""
    made = make(2, limits=FlowLimits())
    tracker = made.director.tracker
    for endpoint in made.endpoints:
        tracker.calibrate(endpoint.key, slots=1)
        request = InFlightRequest(endpoint.key, 15_928 * 4)
        tracker.add(request, endpoint.key, 15_928 * 4, made.clock.now)
    return made


def flow_of(parts: Parts) -> FlowController:
    """Return its flow controller."""
    assert parts.director.flow is not None
    return parts.director.flow


def wait(parts: Parts, priority: int, tenant: str = "") -> QueuedRequest:
    """Queue one more request."""
    headers = {PRIORITY_HEADER: str(priority), TENANT_HEADERS[0]: tenant}
    queued = parts.decide(ask(chat(SECRET), headers=headers))
    assert isinstance(queued, QueuedRequest)
    return queued


async def test_the_page_shows_numbers_only(parts: Parts) -> None:
    """The page has priority levels from the top, the backlog and the bounds; neither prompts nor tenants."""
    for priority, tenant in ((0, "anna"), (0, "bert"), (7, "anna"), (-2, "anna")):
        wait(parts, priority, tenant)
    parts.clock.now += 2.0
    page = debug_pages.queue_document(flow_of(parts), parts.clock())

    assert [(level["priority"], level["requests"], level["tenants"]) for level in page["levels"]] == [
        *((7, 1, 1), (0, 2, 2), (-2, 1, 1)),
    ]
    assert page["requests"] == 4
    assert (page["tokens"], page["bytes"]) == (
        sum(level["tokens"] for level in page["levels"]),
        sum(level["bytes"] for level in page["levels"]),
    )
    assert (page["oldest_seconds"], page["full_endpoints"], page["pool_empty"]) == (2.0, 2, False)
    assert page["backlog_seconds"] == 2.0
    assert page["bounds"]["queue_seconds"] == 60.0
    assert SECRET not in str(page)
    assert "anna" not in str(page)
    assert debug_pages.queue_document(None, 0.0) == {}


async def test_a_level_that_emptied_is_reported_as_zero_for_a_while(parts: Parts) -> None:
    """Autoscalers see that it is empty; after ten minutes the series ends. Level 0 is always present."""
    flow, gauges = flow_of(parts), Gauges()
    debug_pages.QueueGauges(flow, parts.clock).attach(gauges)
    assert gauges.queue_requests() == {"0": 0}

    held = wait(parts, -3)
    assert gauges.queue_requests() == {"-3": 1, "0": 0}
    assert (gauges.queue_tokens(), gauges.queue_bytes()) == (held.tokens, held.size)
    flow_of(parts).cancel(held, parts.clock())
    parts.clock.now += 599.0
    assert gauges.queue_requests() == {"-3": 0, "0": 0}
    parts.clock.now += 2.0
    assert gauges.queue_requests() == {"0": 0}
    assert (gauges.queue_tokens(), gauges.queue_bytes(), gauges.full_endpoints()) == (0, 0, 2)


async def test_the_number_of_levels_is_bounded(parts: Parts) -> None:
    """Clients choose priorities, so beyond 32 levels the others are summed."""
    flow, gauges = flow_of(parts), Gauges()
    debug_pages.QueueGauges(flow, parts.clock).attach(gauges)
    held = [wait(parts, priority) for priority in range(1, 101)]
    told = gauges.queue_requests()

    assert (len(told), told["other"], sum(told.values())) == (33, 69, 100)
    for one in held:
        flow_of(parts).cancel(one, parts.clock())
    assert sum(gauges.queue_requests().values()) == 0


async def test_an_endpoint_with_a_full_kv_cache_counts_as_full() -> None:
    """The gauge counts every endpoint to which no queued request may be sent, whatever it is full of."""
    made = make(2, limits=FlowLimits())
    flow = flow_of(made)
    before = debug_pages.full_endpoints(flow, made.clock())
    made.director.tracker.calibrate(made.endpoints[0].key, slots=1000, kv_full_at=0)

    assert (before, debug_pages.full_endpoints(flow, made.clock())) == (0, 1)


async def test_an_empty_pool_has_no_backlog(parts: Parts) -> None:
    """Without endpoints the mean is 0, not an error."""
    flow, now = flow_of(parts), parts.clock()
    parts.director.set_endpoints((), now)
    assert (debug_pages.backlog_seconds(flow, now), debug_pages.full_endpoints(flow, now)) == (0.0, 0)
    assert debug_pages.queue_document(flow, now)["pool_empty"] is True


async def test_queue_waits_are_counted_by_outcome(parts: Parts) -> None:
    """A request that leaves the queue is counted with the time it waited."""
    held = wait(parts, 0)
    parts.clock.now += 3.0
    flow_of(parts).cancel(held, parts.clock())
    waits = parts.director.metrics.queue_waits

    assert {outcome: round(histogram.total) for outcome, histogram in waits.items()} == {
        "picked": 0,
        "rejected-context-cancelled": 3,
    }


NO_TERMS = dict.fromkeys(("wait", "slot", "deferral", "work", "load", "decode", "eviction", "copy"), 0.0)


def test_pick_document_is_the_fixed_interface() -> None:
    """Rows have the fields that others rely on; ``picked`` has eligible endpoints, best first, up to the
    limit."""
    rows = [
        ScoredEndpoint(
            *(B, 16, 64, 10, 5, 2, 0.0123456789),
            seconds=(0.2, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.0),
        ),
        ScoredEndpoint(*(A, 0, 0, 26, 0, 0, 1.0), seconds=(0.0,) * 8, refusal="unreachable"),
    ]

    assert debug_pages.pick_document(Explanation("precise", 104, rows, limit=3)) == {
        "mode": "precise",
        "prompt_bytes": 104,
        "endpoints": [
            {
                "endpoint": "[fd00::2]:8000",
                "name": "ns/b",
                "eligible": True,
                "matched_tokens": 16,
                "matched_bytes": 64,
                "uncached_tokens": 10,
                "owed_tokens": 5,
                "backlog_tokens": 5,
                "predicted_ttft_seconds": 0.012346,
                "reason": "cost 0.2500 s, 2 running",
                "cost_seconds": 0.25,
                "terms": {**NO_TERMS, "wait": 0.2, "work": 0.05},
            },
            {
                "endpoint": "10.0.0.1:8000",
                "name": "ns/a",
                "eligible": False,
                "matched_tokens": 0,
                "matched_bytes": 0,
                "uncached_tokens": 26,
                "owed_tokens": 0,
                "backlog_tokens": 0,
                "predicted_ttft_seconds": 1.0,
                "reason": "unreachable",
                "cost_seconds": 0.0,
                "terms": NO_TERMS,
            },
        ],
        "picked": ["[fd00::2]:8000"],
        "full": False,
    }
