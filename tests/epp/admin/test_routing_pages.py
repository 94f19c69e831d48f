"""The pages /debug/pick and /debug/queue, and the queue's gauges."""

from collections import defaultdict
from collections.abc import AsyncIterator

import pytest
from tests.epp.parts import Parts, ask, chat, make

from kvist_epp.admin import routing_pages
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.errors import PickError
from kvist_epp.flowcontrol.flow_controller import Bounds, Held, Queue
from kvist_epp.names import PRIORITY_HEADER, TENANT_HEADERS
from kvist_epp.scheduling.pick import Scored
from kvist_epp.telemetry.histogram import Histogram
from kvist_epp.telemetry.picker_metrics import Gauges

A = Endpoint("a", "ns", "10.0.0.1", 8000)
B = Endpoint("b", "ns", "fd00::2", 8000)
SECRET = "the password of the library"


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    """Return a picker whose two endpoints are full."""
    made = make(2)
    picker = made.picker
    waits: defaultdict[str, Histogram] = defaultdict(Histogram)
    picker.queue = Queue(Bounds(), lambda: picker.candidates, picker.clock, waits)
    for endpoint in made.endpoints:
        picker.ledger.calibrate(endpoint.key, slots=1)
        picker.ledger.routed(endpoint.key, endpoint.key, 15_928 * 4, 15_928 * 4, made.clock.now)
    yield made
    picker.queue.close()


def wait(parts: Parts, priority: int, tenant: str = "") -> Held:
    """Queue one more request."""
    headers = {PRIORITY_HEADER: str(priority), TENANT_HEADERS[0]: tenant}
    held = parts.picker.decide(ask(chat(SECRET), headers=headers))
    assert isinstance(held, Held)
    return held


async def test_the_page_shows_numbers_only(parts: Parts) -> None:
    """The page has priority levels from the top, the backlog and the bounds; neither prompts nor tenants."""
    for priority, tenant in ((0, "anna"), (0, "bert"), (7, "anna"), (-2, "anna")):
        wait(parts, priority, tenant)
    parts.clock.now += 2.0
    page = routing_pages.queue_document(parts.picker.queue)

    assert [(level["priority"], level["requests"], level["tenants"]) for level in page["levels"]] == [
        *((7, 1, 1), (0, 2, 2), (-2, 1, 1)),
    ]
    assert page["requests"] == 4
    assert (page["tokens"], page["bytes"]) == (
        sum(level["tokens"] for level in page["levels"]),
        sum(level["bytes"] for level in page["levels"]),
    )
    assert (page["oldest_seconds"], page["full_endpoints"], page["pool_empty"]) == (2.0, 2, False)
    assert page["owed_seconds"] == 2.0
    assert page["bounds"]["room_seconds"] == 60.0
    assert SECRET not in str(page)
    assert "anna" not in str(page)
    assert routing_pages.queue_document(None) == {}


async def test_a_level_that_emptied_is_reported_as_zero_for_a_while(parts: Parts) -> None:
    """Autoscalers see that it is empty; after ten minutes the series ends. Level 0 is always present."""
    queue, gauges = parts.picker.queue, Gauges()
    assert queue is not None
    routing_pages.QueueGauges(queue).attach(gauges)
    assert gauges.queue_requests() == {"0": 0}

    held = wait(parts, -3)
    assert gauges.queue_requests() == {"-3": 1, "0": 0}
    assert (gauges.queue_tokens(), gauges.queue_bytes()) == (held.tokens, held.size)
    held.cancel()
    parts.clock.now += 599.0
    assert gauges.queue_requests() == {"-3": 0, "0": 0}
    parts.clock.now += 2.0
    assert gauges.queue_requests() == {"0": 0}
    assert (gauges.queue_tokens(), gauges.queue_bytes(), gauges.full_endpoints()) == (0, 0, 2)


async def test_the_number_of_levels_is_bounded(parts: Parts) -> None:
    """Clients choose priorities, so beyond 32 levels the others are summed."""
    queue, gauges = parts.picker.queue, Gauges()
    assert queue is not None
    routing_pages.QueueGauges(queue).attach(gauges)
    held = [wait(parts, priority) for priority in range(1, 101)]
    told = gauges.queue_requests()

    assert (len(told), told["other"], sum(told.values())) == (33, 69, 100)
    for one in held:
        one.cancel()
    assert sum(gauges.queue_requests().values()) == 0


async def test_an_empty_pool_has_no_backlog(parts: Parts) -> None:
    """Without endpoints the mean is 0, not an error."""
    queue = parts.picker.queue
    assert queue is not None
    parts.picker.gather(())
    assert (routing_pages.backlog_seconds(queue), routing_pages.full_endpoints(queue)) == (0.0, 0)
    assert routing_pages.queue_document(queue)["pool_empty"] is True


async def test_queue_waits_are_counted_by_outcome(parts: Parts) -> None:
    """A request that leaves the queue is counted with the time it waited."""
    held = wait(parts, 0)
    parts.clock.now += 3.0
    held.cancel()
    told: list[object] = []
    held.then(told.append)
    waits = parts.picker.queue._waits if parts.picker.queue else {}

    assert {outcome: round(histogram.total) for outcome, histogram in waits.items()} == {
        "rejected-context-cancelled": 3
    }
    assert not [error for error in told if isinstance(error, PickError)]


def test_pick_document_is_the_fixed_interface() -> None:
    """Rows have the fields that others rely on; ``picked`` has eligible endpoints, best first, up to the
    limit."""
    rows = [
        Scored(B, True, 16, 64, 10, 5, 0.0123456789, "cost"),
        Scored(A, False, 0, 0, 26, 0, 1.0, "unreachable"),
    ]

    assert routing_pages.pick_document("precise", 104, rows) == {
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
                "predicted_ttft_seconds": 0.012346,
                "reason": "cost",
            },
            {
                "endpoint": "10.0.0.1:8000",
                "name": "ns/a",
                "eligible": False,
                "matched_tokens": 0,
                "matched_bytes": 0,
                "uncached_tokens": 26,
                "owed_tokens": 0,
                "predicted_ttft_seconds": 1.0,
                "reason": "unreachable",
            },
        ],
        "picked": ["[fd00::2]:8000"],
        "full": False,
    }
