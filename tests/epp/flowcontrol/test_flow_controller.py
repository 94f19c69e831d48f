"""Flow control: which requests wait, in which order they are dispatched, and how the others are refused."""

import asyncio
import time
from typing import Any

import pytest
from tests.epp.parts import ask, chat
from tests.epp.queued_director import Wait, refusal

from kvist_epp.errors import NoEndpoints, Shed, ShuttingDown
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.names import SESSION_HEADER
from kvist_epp.scheduling.pick import Candidate

LONG = "The library opens at nine and closes when the last reader has left. " * 12


async def test_a_request_waits_for_capacity(pickers: Any) -> None:
    """With capacity the answer is immediate, otherwise it comes as soon as a request has ended."""
    picker = pickers(2)
    assert isinstance(picker.ask("a"), PickResult)
    second = picker.ask("b")
    waits = picker.ask("c")
    assert isinstance(waits, Wait)

    picker.ends("b")
    freed = await waits

    assert isinstance(freed, PickResult)
    assert freed.endpoints == second.endpoints
    assert len(freed.endpoints) == 2
    line = picker.parts.log.lines[-1]
    assert (line.outcome, line.session, line.waited_ms >= 0) == ("picked", "c", True)
    assert picker.director.metrics.requests == {"picked": 3}


async def test_no_request_is_overtaken(pickers: Any) -> None:
    """A new request queues behind waiting ones even if there is capacity, unless its priority is higher."""
    picker = pickers()
    picker.ask("a")
    first = picker.ask("first")
    picker.ends("a")  # and before anybody is let go:
    second, third = picker.ask("second"), picker.ask("urgent", priority=1)
    assert isinstance(third, PickResult)
    picker.ends("urgent")

    assert isinstance(await first, PickResult)
    assert picker.queue.requests == 1
    picker.ends("first")
    assert isinstance(await second, PickResult)
    assert [line.session for line in picker.parts.log.lines] == ["a", "urgent", "first", "second"]


async def test_higher_priorities_go_first_and_tenants_take_turns(pickers: Any) -> None:
    """Waiting requests are dispatched by priority, and tenants of one priority take turns."""
    picker = pickers()
    picker.ask("running")
    waiting = {
        name: picker.ask(name, priority=priority, tenant=tenant, text=LONG * 4)
        for name, priority, tenant in [
            *(("x1", 0, "x"), ("x2", 0, "x"), ("x3", 0, "x"), ("y1", 0, "y")),
            *(("low", -1, "z"), ("high", 5, "x")),
        ]
    }
    order = ["running"]
    while waiting:
        picker.ends(order[-1])
        while len(picker.parts.log.lines) == len(order):
            await asyncio.sleep(0)
        order.append(picker.parts.log.lines[-1].session)
        assert isinstance(await waiting.pop(order[-1]), PickResult)

    assert order == ["running", "high", "x1", "y1", "x2", "x3", "low"]


async def test_the_cache_at_the_time_of_dispatch_counts(pickers: Any) -> None:
    """A prompt that was stored somewhere while the request waited is found there."""
    picker = pickers(3)
    for name in ("a", "b", "c"):
        picker.ask(name)
    waits = picker.ask("d", text=LONG)
    held = picker.parts.warm(1, chat(LONG))
    picker.ends("a", "b", "c")
    freed = await waits

    assert freed.endpoints[0] == picker.parts.endpoints[1].hostport
    assert picker.parts.log.lines[-1].matched_tokens >= held - 32


async def test_a_request_that_gives_up_leaves_at_once(pickers: Any) -> None:
    """A request whose client has disconnected leaves the queue at once and uses no capacity."""
    picker = pickers()
    picker.ask("a")
    gone, stays = picker.ask("gone", text=LONG), picker.ask("stays")
    gone.pending.cancel()
    gone.pending.cancel()

    assert (picker.queue.requests, picker.outcomes["gone"]) == (1, "rejected-context-cancelled")
    assert picker.director.metrics.requests["rejected-context-cancelled"] == 1
    picker.ends("a")
    assert isinstance(await stays, PickResult)
    assert (picker.queue.requests, picker.queue.size, picker.queue.tokens) == (0, 0, 0)


async def test_a_cancelled_wait_leaves(pickers: Any) -> None:
    """A request that is cancelled leaves the queue and gets no answer."""
    picker = pickers()
    picker.ask("a")
    pending = picker.decide(ask(chat("b"), headers={SESSION_HEADER: "b"}))
    answers: list[object] = []
    pending.then(answers.append)
    await asyncio.sleep(0)
    pending.cancel()
    await asyncio.sleep(0)

    assert answers == []
    assert (picker.queue.requests, picker.outcomes["b"]) == (0, "rejected-context-cancelled")


async def test_a_request_that_waited_too_long_is_refused_with_retry_after(pickers: Any) -> None:
    """After --queue-seconds without room: 429, the reason, and Retry-After within its bounds."""
    picker = pickers(live=True, capacity_seconds=0.02)
    picker.ask("a")
    error = await refusal(picker.ask("b"))

    assert isinstance(error, Shed)
    assert (error.reason, error.retry_after) == ("rejected-ttl-expired", 60)
    assert picker.outcomes["b"] == "rejected-ttl-expired"
    waits = picker.director.metrics.queue_waits
    assert {outcome for outcome, found in waits.items() if found.count} == {"rejected-ttl-expired"}


async def test_the_dispatch_rate_says_when_to_retry(pickers: Any) -> None:
    """Retry-After is what those before it take, at the pace of the last seconds."""
    picker = pickers(requests=28)
    picker.ask("running")
    for number in range(28):
        picker.ask(str(number), priority=number % 2)
    for picked in range(0, 2000, 2):
        picker.flow.on_tick(picked, picker.clock())
        picker.parts.clock.now += 1.0
    retries = []
    for priority in (0, 1):
        with pytest.raises(Shed) as caught:
            picker.ask("more", priority=priority)
        retries.append(caught.value.retry_after)

    assert retries == [15, 8]  # 29 and 15 requests, at two a second


async def test_a_full_queue_refuses_and_sheds(pickers: Any) -> None:
    """A full queue evicts the newest sheddable request of the lowest priority, or refuses the new one."""
    picker = pickers(requests=2)
    picker.ask("a")
    shed = [picker.ask("s1", priority=-1), picker.ask("s2", priority=-1)]
    stays = picker.ask("b")
    error = await refusal(shed[1])
    assert (error.reason, error.status, picker.outcomes["s2"]) == (
        "evicted-priority",
        429,
        "evicted-priority",
    )
    with pytest.raises(Shed) as caught:
        picker.ask("s3", priority=-1)
    assert (caught.value.reason, picker.outcomes["s3"]) == ("rejected-saturated", "rejected-saturated")

    picker.ends("a")
    assert isinstance(await stays, PickResult)
    picker.ends("b")
    assert isinstance(await shed[0], PickResult)


async def test_without_a_queue_only_the_sheddable_are_refused(pickers: Any) -> None:
    """--queue-requests=0: requests go to full endpoints, negative priorities get 429, an empty pool 503."""
    picker = pickers(requests=0)
    picker.ask("a")
    assert isinstance(picker.ask("b"), PickResult)
    with pytest.raises(Shed):
        picker.ask("c", priority=-1)
    picker.director.set_endpoints((), picker.clock())
    with pytest.raises(NoEndpoints):
        picker.ask("d")


async def test_requests_wait_for_the_first_endpoint(pickers: Any) -> None:
    """Requests wait for an endpoint of an empty or unready pool; only then does their time for capacity
    begin."""
    picker = pickers()
    fleet, endpoint = picker.director.candidates, picker.parts.endpoints[0]
    picker.director.set_endpoints((), picker.clock())
    early = picker.ask("early")
    picker.director.set_endpoints(
        [Candidate(endpoint, fleet[0].load, ready=False, reason="new")], picker.clock()
    )
    still = picker.ask("still")
    await asyncio.sleep(0)
    assert picker.queue.requests == 2

    picker.parts.clock.now += 170.0
    picker.director.set_endpoints(fleet, picker.clock())
    assert isinstance(await early, PickResult)
    picker.parts.clock.now += 59.0
    picker.flow.wake()
    await asyncio.sleep(0)
    assert picker.queue.requests == 1
    picker.ends("early")
    assert isinstance(await still, PickResult)


async def test_an_empty_pool_is_not_waited_for_for_ever(pickers: Any) -> None:
    """After --empty-pool-seconds: 503 with the reason for it."""
    picker = pickers(live=True, empty_seconds=0.02)
    picker.director.set_endpoints((), picker.clock())
    error = await refusal(picker.ask("a"))

    assert isinstance(error, NoEndpoints)
    assert (error.status, error.reason) == (503, "rejected-no-endpoints")


async def test_a_subset_without_endpoints_is_refused_at_once(pickers: Any) -> None:
    """The protocol wants 503 there; also when its endpoints go while a request waits for room."""
    picker = pickers(2)
    fleet, (first, second) = picker.director.candidates, picker.parts.endpoints
    with pytest.raises(NoEndpoints):
        picker.ask("a", subset=("192.0.2.1",))
    with pytest.raises(NoEndpoints):
        picker.ask("b", subset=())
    picker.ask("c", subset=(first.address,))
    waits, other = picker.ask("d", subset=(first.address,)), picker.ask("e", subset=(second.address,))
    assert isinstance(other, PickResult)
    picker.director.set_endpoints([one for one in fleet if one.endpoint is second], picker.clock())

    assert isinstance(await refusal(waits), NoEndpoints)


async def test_a_full_subset_delays_no_other_request(pickers: Any) -> None:
    """Requests for other endpoints pass those that wait for theirs."""
    picker = pickers(2)
    first, second = (endpoint.address for endpoint in picker.parts.endpoints)
    picker.ask("a", subset=(first,))
    waits = picker.ask("b", subset=(first,))
    passes = picker.ask("c", subset=(second,))
    assert isinstance(passes, PickResult)
    assert picker.queue.requests == 1
    picker.ends("a")
    assert isinstance(await waits, PickResult)


async def test_a_queue_full_for_one_subset_refuses_no_request_of_another(pickers: Any) -> None:
    """A request whose subset has capacity is sent although the queue is full of requests for another."""
    picker = pickers(2, requests=2)
    first, second = (endpoint.address for endpoint in picker.parts.endpoints)
    picker.ask("a", subset=(first,))
    waits = [picker.ask(name, subset=(first,)) for name in ("b", "c")]
    assert picker.queue.requests == 2

    assert isinstance(picker.ask("d", subset=(second,)), PickResult)

    picker.ends("a", "d")
    assert isinstance(await waits[0], PickResult)


async def test_a_request_for_any_endpoint_overtakes_no_subset(pickers: Any) -> None:
    """A request for any endpoint passes those for a full subset, and waits if its best is one of theirs."""
    picker = pickers(2, requests=8)
    first = picker.parts.endpoints[0].address
    picker.ask("a", subset=(first,))
    waits = picker.ask("b", subset=(first,))

    passes = picker.ask("c")
    assert isinstance(passes, PickResult)
    assert not passes.endpoints[0].startswith(f"{first}:")
    picker.ends("a")  # before the queue is looked at:
    behind = picker.ask("d")
    assert isinstance(behind, Wait)

    assert isinstance(await waits, PickResult)
    picker.ends("b")
    assert isinstance(await behind, PickResult)


async def test_what_computes_nothing_does_not_wait(pickers: Any) -> None:
    """A request without a body, such as GET /v1/models, goes to a full endpoint, and not to an empty pool."""
    picker = pickers()
    picker.ask("a")
    listing = ask(b"", "/v1/models")
    assert isinstance(picker.decide(listing), PickResult)
    picker.director.set_endpoints((), picker.clock())
    with pytest.raises(NoEndpoints):
        picker.decide(listing)


async def test_a_backlog_of_prefill_is_waited_for(pickers: Any) -> None:
    """An endpoint with too large a backlog is full until time or events have reduced it; a prompt that
    exceeds the bound by itself goes to an endpoint without backlog."""
    picker = pickers(slots=None, live=True, max_backlog=0.05)
    tokens = 15_928
    long = InFlightRequest("long", int(tokens * 0.1))
    picker.director.tracker.add(long, "t/e0", int(tokens * 0.1), time.monotonic())
    assert isinstance(await picker.ask("a"), PickResult)

    picker.ends("long", "a")
    assert isinstance(picker.ask("b", text="x " * 10_000), PickResult)
    late = picker.ask("c")
    assert isinstance(late, Wait)
    picker.computed("b")
    assert isinstance(await late, PickResult)


@pytest.mark.parametrize("waits", [1, 5])
async def test_a_queued_request_of_a_picker_that_shuts_down_goes_to_a_full_endpoint(
    pickers: Any, waits: int
) -> None:
    """At the end of the drain all that wait are picked, and so is who would have to wait: nothing is lost."""
    picker = pickers()
    picker.ask("a")
    waiting = [picker.ask(f"w{n}") for n in range(waits)]
    picker.driver.shut_in(0.01)
    decisions = [await decision for decision in waiting]

    assert all(isinstance(decision, PickResult) for decision in decisions)
    assert isinstance(picker.ask("more"), PickResult)


async def test_a_picker_that_shuts_down_says_so_to_the_sheddable(pickers: Any) -> None:
    """503 for those of a negative priority, whether they wait already or come now."""
    picker = pickers()
    picker.ask("a")
    held, other = picker.ask("held", priority=-1), picker.ask("other")
    picker.flow.shut()
    error = await refusal(held)

    assert isinstance(await other, PickResult)
    assert (error.reason, error.status) == ("rejected-shutting-down", 503)
    with pytest.raises(ShuttingDown):
        picker.ask("more", priority=-1)
    picker.ends("a", "other")
    assert isinstance(picker.ask("room", priority=-1), PickResult)


async def test_a_picker_that_shuts_down_without_endpoints_says_so(pickers: Any) -> None:
    """503 for those who wait for a pool of none."""
    picker = pickers(0)
    waiting = picker.ask("first")
    picker.flow.shut()
    error = await refusal(waiting)

    assert (error.reason, error.status) == ("rejected-shutting-down", 503)


async def test_a_bug_costs_one_request(pickers: Any) -> None:
    """An exception while dispatching one request fails that request alone."""
    picker = pickers(2)
    picker.ask("a"), picker.ask("b")
    bad, good = picker.ask("bad"), picker.ask("good")
    bad.queued.context.match.prompts = None
    picker.ends("a", "b")
    with pytest.raises(TypeError):
        await bad

    assert isinstance(await good, PickResult)


async def test_thousands_go_without_a_standstill(pickers: Any) -> None:
    """While 3,000 requests leave a picker that shuts down, other tasks on the loop have many turns."""
    picker = pickers()
    picker.ask("running")
    decisions: list[object] = []
    for number in range(3000):
        picker.ask(str(number), text="x").pending.then(decisions.append)
    picker.flow.shut()
    turns = 0
    while len(decisions) < 3000:
        turns += 1
        await asyncio.sleep(0)

    assert turns > 10
    assert all(isinstance(decision, PickResult) for decision in decisions)
