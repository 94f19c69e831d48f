"""Waiting for one endpoint, which has room but may not take up more prefill."""

import asyncio
from typing import Any

import pytest
from tests.epp.queued_director import QueuedDirector, Wait, refusal

from kvist_epp.errors import Shed, ShuttingDown
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.flowcontrol.deficit_round_robin import EndpointFlow
from kvist_epp.load.replica_rotation import OVERDUE_SECONDS
from kvist_epp.load.tpot_admission import TpotAdmission
from kvist_epp.scheduling.pick import Candidate

LONG = "The library opens at nine and closes when the last reader has left. " * 12
OTHER = "No reader here pays for anything at all, and no reader has ever asked why. " * 12


def paced(pickers: Any, endpoints: int = 1, **more: Any) -> QueuedDirector:
    """Endpoints that compute 100 tokens/s, so that half of a long prompt is enough for one to wait."""
    picker: QueuedDirector = pickers(endpoints, slots=None, **more)
    for endpoint in picker.parts.endpoints:
        load = picker.director.tracker.load(endpoint.key)
        load.rate, load.tpot = 100.0, TpotAdmission(0.06)
    return picker


def crowded(picker: QueuedDirector) -> tuple[Wait, Candidate]:
    """Both endpoints compute a prompt, ``a`` or ``b``; who waits for one of them, and the other one."""
    for name in "ab":
        picker.ask(name, text=name * 800)
    waits = picker.ask("c", text="c" * 800)
    assert isinstance(waits, Wait)
    subset = waits.queued.key.subset
    assert isinstance(subset, EndpointFlow)
    return waits, next(c for c in picker.director.candidates if c.endpoint.key != subset.endpoint)


async def test_the_newest_goes_first(pickers: Any) -> None:
    """Under overload, the newest request is served first, in time; older ones follow."""
    picker = paced(pickers)
    picker.ask("a", text=LONG)
    older, newer = picker.ask("older", text=LONG + "1"), picker.ask("newer", text=OTHER)
    assert isinstance(older, Wait)
    assert isinstance(newer, Wait)
    picker.computed("a")
    assert isinstance(await newer, PickResult)
    picker.computed("newer")
    assert isinstance(await older, PickResult)
    assert [line.session for line in picker.parts.log.lines] == ["a", "newer", "older"]


async def test_overdue_requests_give_way_to_new_ones(pickers: Any) -> None:
    """For a moment an endpoint with room leaves it to the next who comes; then it takes up who has waited
    longest."""
    picker = paced(pickers)
    clock = picker.parts.clock
    picker.ask("a", text=LONG)
    late = picker.ask("late", text=OTHER * 4)
    assert isinstance(late, Wait)
    clock.now += OVERDUE_SECONDS + 0.1
    picker.computed("a")
    await asyncio.sleep(0.01)
    assert not late.answer.done()
    assert isinstance(picker.ask("new", text=LONG * 4), PickResult)
    picker.computed("new")
    await asyncio.sleep(0.01)
    assert not late.answer.done()
    clock.now += OVERDUE_SECONDS
    picker.flow.wake()
    assert isinstance(await late, PickResult)


async def test_no_request_waits_behind_those_of_another_endpoint(pickers: Any) -> None:
    """A request that waits for one endpoint does not delay others that go to an endpoint with capacity."""
    picker = paced(pickers, 2)
    _, other = crowded(picker)
    other.load.rate = 10_000.0
    assert isinstance(picker.ask("d", text="d" * 800), PickResult)
    assert picker.queue.requests == 1


async def test_what_is_small_passes_what_is_large(pickers: Any) -> None:
    """A few new tokens are not held back by a prompt that waits for an allowance."""
    picker = paced(pickers)
    load = picker.director.tracker.load(picker.parts.endpoints[0].key)
    assert load.tpot is not None
    load.tpot.prefill_share = 0.5
    for name in "abcdefg":
        picker.ask(name, text=name)
        picker.computed(name)
    load.tpot.debit(1_000, load.rate, picker.clock())
    large = picker.ask("large", text=LONG * 4)
    assert isinstance(large, Wait)
    assert isinstance(picker.ask("small", text="h"), PickResult)


async def test_the_endpoint_of_a_queued_request_leaves(pickers: Any) -> None:
    """If the endpoint that a request waits for leaves, the request goes to another one."""
    picker = paced(pickers, 2)
    waits, stays = crowded(picker)
    for name in "ab":
        if picker.director.table.find(name).endpoint == stays.endpoint.key:  # type: ignore[union-attr]
            picker.computed(name)
    picker.director.set_endpoints([stays], picker.clock())
    freed = await waits
    assert isinstance(freed, PickResult)
    assert freed.endpoints == (stays.endpoint.hostport,)


async def test_a_queued_request_waits_for_another_endpoint(pickers: Any) -> None:
    """If the other endpoint is busy, too, the request waits for that one and is not lost."""
    picker = paced(pickers, 2)
    waits, stays = crowded(picker)
    picker.director.set_endpoints([stays], picker.clock())
    await asyncio.sleep(0.02)
    assert (picker.queue.requests, waits.answer.done()) == (1, False)
    for name in "ab":
        picker.computed(name)
    assert isinstance(await waits, PickResult)
    assert (picker.queue.requests, picker.queue.size) == (0, 0)


async def test_a_request_that_gives_up_is_forgotten(pickers: Any) -> None:
    """A client that disconnects takes its tokens out of the endpoint's queue."""
    picker = paced(pickers)
    admission = picker.director.tracker.load(picker.parts.endpoints[0].key).tpot
    assert admission is not None
    picker.ask("a", text=LONG)
    waits = picker.ask("b", text=OTHER)
    assert isinstance(waits, Wait)
    assert admission.queued_tokens > 100
    waits.pending.cancel()
    assert (admission.queued_tokens, admission.queued) == (0, {})


async def test_a_request_that_waited_too_long_is_refused(pickers: Any) -> None:
    """A request that has waited for the longest time allowed is refused."""
    picker = paced(pickers, live=True, capacity_seconds=0.05)
    picker.ask("a", text=LONG)
    error = await refusal(picker.ask("b", text=OTHER))
    assert isinstance(error, Shed)


@pytest.mark.parametrize("requests", [0, 10])
async def test_no_request_waits_without_a_queue_or_at_the_end(pickers: Any, requests: int) -> None:
    """With a queue of no length, and when the picker shuts down, requests go to the engine as they come."""
    picker = paced(pickers, requests=requests)
    picker.ask("a", text=LONG)
    if requests:
        waits = picker.ask("b", text=OTHER)
        assert isinstance(waits, Wait)
        picker.flow.shut()
        assert isinstance(await waits, PickResult)
    assert isinstance(picker.ask("c", text=OTHER), PickResult)
    assert not isinstance(picker.outcomes["c"], ShuttingDown)
