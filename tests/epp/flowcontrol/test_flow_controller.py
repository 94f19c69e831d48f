"""Flow control: which requests wait, in which order they are dispatched, and how the others are refused."""

import asyncio
import time
from typing import Any

import pytest
from tests.epp.doors import Wait, refusal
from tests.epp.parts import ask, chat

from kvist_epp.errors import NoEndpoints, Shed, ShuttingDown
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.names import SESSION_HEADER
from kvist_epp.scheduling.pick import Candidate

LONG = "The library opens at nine and closes when the last reader has left. " * 12


async def test_a_request_waits_for_capacity(doors: Any) -> None:
    """With capacity the answer is immediate, otherwise it comes as soon as a request has ended."""
    door = doors(2)
    assert isinstance(door.ask("a"), PickResult)
    second = door.ask("b")
    waits = door.ask("c")
    assert isinstance(waits, Wait)

    door.ends("b")
    freed = await waits

    assert isinstance(freed, PickResult)
    assert freed.endpoints == second.endpoints
    assert len(freed.endpoints) == 2
    line = door.parts.log.lines[-1]
    assert (line.outcome, line.session, line.waited_ms >= 0) == ("picked", "c", True)
    assert door.director.metrics.requests == {"picked": 3}


async def test_no_request_is_overtaken(doors: Any) -> None:
    """A new request queues behind waiting ones even if there is capacity, unless its priority is higher."""
    door = doors()
    door.ask("a")
    first = door.ask("first")
    door.ends("a")  # and before anybody is let go:
    second, third = door.ask("second"), door.ask("urgent", priority=1)
    assert isinstance(third, PickResult)
    door.ends("urgent")

    assert isinstance(await first, PickResult)
    assert door.queue.requests == 1
    door.ends("first")
    assert isinstance(await second, PickResult)
    assert [line.session for line in door.parts.log.lines] == ["a", "urgent", "first", "second"]


async def test_higher_priorities_go_first_and_tenants_take_turns(doors: Any) -> None:
    """Waiting requests are dispatched by priority, and tenants of one priority take turns."""
    door = doors()
    door.ask("running")
    waiting = {
        name: door.ask(name, priority=priority, tenant=tenant, text=LONG * 4)
        for name, priority, tenant in [
            *(("x1", 0, "x"), ("x2", 0, "x"), ("x3", 0, "x"), ("y1", 0, "y")),
            *(("low", -1, "z"), ("high", 5, "x")),
        ]
    }
    order = ["running"]
    while waiting:
        door.ends(order[-1])
        while len(door.parts.log.lines) == len(order):
            await asyncio.sleep(0)
        order.append(door.parts.log.lines[-1].session)
        assert isinstance(await waiting.pop(order[-1]), PickResult)

    assert order == ["running", "high", "x1", "y1", "x2", "x3", "low"]


async def test_what_is_known_of_the_cache_when_the_turn_comes_counts(doors: Any) -> None:
    """A prompt that was stored somewhere while the request waited is found there."""
    door = doors(3)
    for name in ("a", "b", "c"):
        door.ask(name)
    waits = door.ask("d", text=LONG)
    held = door.parts.warm(1, chat(LONG))
    door.ends("a", "b", "c")
    freed = await waits

    assert freed.endpoints[0] == door.parts.endpoints[1].hostport
    assert door.parts.log.lines[-1].matched_tokens >= held - 32


async def test_a_request_that_gives_up_leaves_at_once(doors: Any) -> None:
    """A request whose client has disconnected leaves the queue at once and uses no capacity."""
    door = doors()
    door.ask("a")
    gone, stays = door.ask("gone", text=LONG), door.ask("stays")
    gone.pending.cancel()
    gone.pending.cancel()

    assert (door.queue.requests, door.outcomes["gone"]) == (1, "rejected-context-cancelled")
    assert door.director.metrics.requests["rejected-context-cancelled"] == 1
    door.ends("a")
    assert isinstance(await stays, PickResult)
    assert (door.queue.requests, door.queue.size, door.queue.tokens) == (0, 0, 0)


async def test_a_cancelled_wait_leaves(doors: Any) -> None:
    """A request that is cancelled leaves the queue and gets no answer."""
    door = doors()
    door.ask("a")
    pending = door.decide(ask(chat("b"), headers={SESSION_HEADER: "b"}))
    answers: list[object] = []
    pending.then(answers.append)
    await asyncio.sleep(0)
    pending.cancel()
    await asyncio.sleep(0)

    assert answers == []
    assert (door.queue.requests, door.outcomes["b"]) == (0, "rejected-context-cancelled")


async def test_a_request_that_waited_too_long_is_refused_with_retry_after(doors: Any) -> None:
    """After --queue-seconds without room: 429, the reason, and Retry-After within its bounds."""
    door = doors(live=True, capacity_seconds=0.02)
    door.ask("a")
    error = await refusal(door.ask("b"))

    assert isinstance(error, Shed)
    assert (error.reason, error.retry_after) == ("rejected-ttl-expired", 60)
    assert door.outcomes["b"] == "rejected-ttl-expired"
    assert door.director.metrics.queue_waits.keys() == {"rejected-ttl-expired"}


async def test_the_dispatch_rate_says_when_to_retry(doors: Any) -> None:
    """Retry-After is what those before it take, at the pace of the last seconds."""
    door = doors(requests=28)
    door.ask("running")
    for number in range(28):
        door.ask(str(number), priority=number % 2)
    for picked in range(0, 2000, 2):
        door.flow.on_tick(picked, door.clock())
        door.parts.clock.now += 1.0
    told = []
    for priority in (0, 1):
        with pytest.raises(Shed) as caught:
            door.ask("more", priority=priority)
        told.append(caught.value.retry_after)

    assert told == [15, 8]  # 29 and 15 requests, at two a second


async def test_a_full_queue_refuses_and_sheds(doors: Any) -> None:
    """A full queue evicts the newest sheddable request of the lowest priority, or refuses the new one."""
    door = doors(requests=2)
    door.ask("a")
    shed = [door.ask("s1", priority=-1), door.ask("s2", priority=-1)]
    stays = door.ask("b")
    told = await refusal(shed[1])
    assert (told.reason, told.status, door.outcomes["s2"]) == ("evicted-priority", 429, "evicted-priority")
    with pytest.raises(Shed) as caught:
        door.ask("s3", priority=-1)
    assert (caught.value.reason, door.outcomes["s3"]) == ("rejected-saturated", "rejected-saturated")

    door.ends("a")
    assert isinstance(await stays, PickResult)
    door.ends("b")
    assert isinstance(await shed[0], PickResult)


async def test_without_a_queue_only_the_sheddable_are_refused(doors: Any) -> None:
    """--queue-requests=0: requests go to full endpoints, negative priorities get 429, an empty pool 503."""
    door = doors(requests=0)
    door.ask("a")
    assert isinstance(door.ask("b"), PickResult)
    with pytest.raises(Shed):
        door.ask("c", priority=-1)
    door.director.set_endpoints((), door.clock())
    with pytest.raises(NoEndpoints):
        door.ask("d")


async def test_requests_wait_for_the_first_endpoint(doors: Any) -> None:
    """Requests wait for an endpoint of an empty or unready pool; only then does their time for capacity
    begin."""
    door = doors()
    fleet, endpoint = door.director.candidates, door.parts.endpoints[0]
    door.director.set_endpoints((), door.clock())
    early = door.ask("early")
    door.director.set_endpoints([Candidate(endpoint, fleet[0].load, ready=False, reason="new")], door.clock())
    still = door.ask("still")
    await asyncio.sleep(0)
    assert door.queue.requests == 2

    door.parts.clock.now += 170.0
    door.director.set_endpoints(fleet, door.clock())
    assert isinstance(await early, PickResult)
    door.parts.clock.now += 59.0
    door.flow.wake()
    await asyncio.sleep(0)
    assert door.queue.requests == 1
    door.ends("early")
    assert isinstance(await still, PickResult)


async def test_an_empty_pool_is_not_waited_for_for_ever(doors: Any) -> None:
    """After --empty-pool-seconds: 503 with the reason for it."""
    door = doors(live=True, empty_seconds=0.02)
    door.director.set_endpoints((), door.clock())
    error = await refusal(door.ask("a"))

    assert isinstance(error, NoEndpoints)
    assert (error.status, error.reason) == (503, "rejected-no-endpoints")


async def test_a_subset_without_endpoints_is_refused_at_once(doors: Any) -> None:
    """The protocol wants 503 there; also when its endpoints go while a request waits for room."""
    door = doors(2)
    fleet, (first, second) = door.director.candidates, door.parts.endpoints
    with pytest.raises(NoEndpoints):
        door.ask("a", subset=("192.0.2.1",))
    with pytest.raises(NoEndpoints):
        door.ask("b", subset=())
    door.ask("c", subset=(first.address,))
    waits, other = door.ask("d", subset=(first.address,)), door.ask("e", subset=(second.address,))
    assert isinstance(await other, PickResult)
    door.director.set_endpoints([one for one in fleet if one.endpoint is second], door.clock())

    assert isinstance(await refusal(waits), NoEndpoints)


async def test_a_full_subset_delays_no_other_request(doors: Any) -> None:
    """Requests for other endpoints pass those that wait for theirs."""
    door = doors(2)
    first, second = (endpoint.address for endpoint in door.parts.endpoints)
    door.ask("a", subset=(first,))
    waits = door.ask("b", subset=(first,))
    passes = door.ask("c", subset=(second,))
    assert isinstance(passes, Wait)
    assert isinstance(await passes, PickResult)
    assert door.queue.requests == 1
    door.ends("a")
    assert isinstance(await waits, PickResult)


async def test_what_computes_nothing_does_not_wait(doors: Any) -> None:
    """A request without a body, such as GET /v1/models, goes to a full endpoint, and not to an empty pool."""
    door = doors()
    door.ask("a")
    listing = ask(b"", "/v1/models")
    assert isinstance(door.decide(listing), PickResult)
    door.director.set_endpoints((), door.clock())
    with pytest.raises(NoEndpoints):
        door.decide(listing)


async def test_a_backlog_of_prefill_is_waited_for(doors: Any) -> None:
    """An endpoint with too large a backlog is full until time or events have reduced it; a prompt that
    exceeds the bound by itself goes to an endpoint without backlog."""
    door = doors(slots=None, live=True, max_backlog=0.05)
    tokens = 15_928
    long = InFlightRequest("long", int(tokens * 0.1))
    door.director.tracker.add(long, "t/e0", int(tokens * 0.1), time.monotonic())
    assert isinstance(await door.ask("a"), PickResult)

    door.ends("long", "a")
    assert isinstance(door.ask("b", text="x " * 10_000), PickResult)
    late = door.ask("c")
    assert isinstance(late, Wait)
    door.computed("b")
    assert isinstance(await late, PickResult)


@pytest.mark.parametrize("waits", [1, 5])
async def test_a_queued_request_of_a_picker_that_shuts_down_goes_to_a_full_endpoint(
    doors: Any, waits: int
) -> None:
    """At the end of the drain all that wait are picked, and so is who would have to wait: nothing is lost."""
    door = doors()
    door.ask("a")
    waiting = [door.ask(f"w{n}") for n in range(waits)]
    door.driver.shut_in(0.01)
    decisions = [await decision for decision in waiting]

    assert all(isinstance(decision, PickResult) for decision in decisions)
    assert isinstance(door.ask("more"), PickResult)


async def test_a_picker_that_shuts_down_says_so_to_the_sheddable(doors: Any) -> None:
    """503 for those of a negative priority, whether they wait already or come now."""
    door = doors()
    door.ask("a")
    held, other = door.ask("held", priority=-1), door.ask("other")
    door.flow.shut()
    error = await refusal(held)

    assert isinstance(await other, PickResult)
    assert (error.reason, error.status) == ("rejected-shutting-down", 503)
    with pytest.raises(ShuttingDown):
        door.ask("more", priority=-1)
    door.ends("a", "other")
    assert isinstance(door.ask("room", priority=-1), PickResult)


async def test_a_picker_that_shuts_down_without_endpoints_says_so(doors: Any) -> None:
    """503 for those who wait for a pool of none."""
    door = doors(0)
    waiting = door.ask("first")
    door.flow.shut()
    error = await refusal(waiting)

    assert (error.reason, error.status) == ("rejected-shutting-down", 503)


async def test_a_bug_costs_one_request(doors: Any) -> None:
    """An exception while dispatching one request fails that request alone."""
    door = doors(2)
    door.ask("a"), door.ask("b")
    bad, good = door.ask("bad"), door.ask("good")
    bad.queued.context.match.prompts = None
    door.ends("a", "b")
    with pytest.raises(TypeError):
        await bad

    assert isinstance(await good, PickResult)


async def test_thousands_go_without_a_standstill(doors: Any) -> None:
    """While 3,000 requests leave a picker that shuts down, everybody else on the loop has many turns."""
    door = doors()
    door.ask("running")
    told: list[object] = []
    for number in range(3000):
        door.ask(str(number), text="x").pending.then(told.append)
    door.flow.shut()
    turns = 0
    while len(told) < 3000:
        turns += 1
        await asyncio.sleep(0)

    assert turns > 10
    assert all(isinstance(decision, PickResult) for decision in told)
