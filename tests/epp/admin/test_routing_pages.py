"""The pages /debug/pick and /debug/queue, and the queue's gauges."""

import pytest
from tests.epp.parts import Parts, ask, chat, make

from kvist_epp.admin import routing_pages
from kvist_epp.director.director import Explanation
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.flowcontrol.flow_controller import FlowController, FlowLimits, QueuedRequest
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.names import PRIORITY_HEADER, TENANT_HEADERS
from kvist_epp.scheduling.pick import ScoredEndpoint
from kvist_epp.telemetry.picker_metrics import Gauges

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
    page = routing_pages.queue_document(flow_of(parts), parts.clock())

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
    assert routing_pages.queue_document(None, 0.0) == {}


async def test_a_level_that_emptied_is_reported_as_zero_for_a_while(parts: Parts) -> None:
    """Autoscalers see that it is empty; after ten minutes the series ends. Level 0 is always present."""
    flow, gauges = flow_of(parts), Gauges()
    routing_pages.QueueGauges(flow, parts.clock).attach(gauges)
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
    routing_pages.QueueGauges(flow, parts.clock).attach(gauges)
    held = [wait(parts, priority) for priority in range(1, 101)]
    told = gauges.queue_requests()

    assert (len(told), told["other"], sum(told.values())) == (33, 69, 100)
    for one in held:
        flow_of(parts).cancel(one, parts.clock())
    assert sum(gauges.queue_requests().values()) == 0


async def test_an_empty_pool_has_no_backlog(parts: Parts) -> None:
    """Without endpoints the mean is 0, not an error."""
    flow, now = flow_of(parts), parts.clock()
    parts.director.set_endpoints((), now)
    assert (routing_pages.backlog_seconds(flow, now), routing_pages.full_endpoints(flow, now)) == (0.0, 0)
    assert routing_pages.queue_document(flow, now)["pool_empty"] is True


async def test_queue_waits_are_counted_by_outcome(parts: Parts) -> None:
    """A request that leaves the queue is counted with the time it waited."""
    held = wait(parts, 0)
    parts.clock.now += 3.0
    flow_of(parts).cancel(held, parts.clock())
    waits = parts.director.metrics.queue_waits

    assert {outcome: round(histogram.total) for outcome, histogram in waits.items()} == {
        "rejected-context-cancelled": 3
    }


def test_pick_document_is_the_fixed_interface() -> None:
    """Rows have the fields that others rely on; ``picked`` has eligible endpoints, best first, up to the
    limit."""
    rows = [
        ScoredEndpoint(
            *(B, True, 16, 64, 10, 5, 0.0123456789, "cost"),
            cost_seconds=0.25,
            terms={"wait": 0.2, "work": 0.05},
        ),
        ScoredEndpoint(A, False, 0, 0, 26, 0, 1.0, "unreachable"),
    ]

    assert routing_pages.pick_document(Explanation("precise", 104, rows, limit=3)) == {
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
                "reason": "cost",
                "cost_seconds": 0.25,
                "terms": {"wait": 0.2, "work": 0.05},
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
                "terms": {},
            },
        ],
        "picked": ["[fd00::2]:8000"],
        "full": False,
    }
