"""The queue under many requests: each is answered, and nothing is left."""

import asyncio
import gc
import random
import weakref
from typing import Any

import pytest
from tests.epp.queued_director import QueuedDirector, Wait, refusal

from kvist_epp.errors import Shed
from kvist_epp.extproc.pick_request import PendingResult, PickResult
from kvist_epp.flowcontrol.driver import LONGEST_SLICE_SECONDS, SLICE_SECONDS, slice_seconds

LONG = "The library opens at nine and closes when the last reader has left. " * 12


class Crowd:
    """Requests that arrive, end and give up at random, with the answer of each."""

    def __init__(self, picker: QueuedDirector, seed: int) -> None:
        self.picker = picker
        self.dice = random.Random(seed)
        self.running: set[str] = set()
        self.waiting: dict[str, PendingResult] = {}
        self.answers: dict[str, object] = {}

    def come(self, name: str) -> None:
        """Send one more request."""
        dice = self.dice
        subset = dice.choice((None, None, (self.picker.parts.endpoints[0].address,)))
        try:
            decision = self.picker.ask(
                name, priority=dice.randint(-1, 1), tenant=dice.choice("ab"), subset=subset
            )
        except Shed as error:
            self._answered(name, error)
            return
        if isinstance(decision, Wait):
            self.waiting[name] = decision.pending
            decision.pending.then(lambda answer: self._answered(name, answer))
        else:
            self._answered(name, decision)

    def leave(self) -> None:
        """One that waits gives up."""
        if self.waiting:
            name = self.dice.choice(sorted(self.waiting))
            self.waiting.pop(name).cancel()
            self.answers[name] = "left"

    def end(self) -> None:
        """One that runs has ended."""
        if self.running:
            name = self.dice.choice(sorted(self.running))
            self.running.discard(name)
            self.picker.ends(name)

    def _answered(self, name: str, decision: object) -> None:
        assert name not in self.answers
        self.answers[name] = decision
        self.waiting.pop(name, None)
        if isinstance(decision, PickResult):
            self.running.add(name)


@pytest.mark.parametrize("seed", range(20))
async def test_every_request_gets_one_answer_and_no_endpoint_too_many(pickers: Any, seed: int) -> None:
    """Each request gets exactly one answer, bounds hold, no slot is used twice, and no request waits while
    there is capacity."""
    picker = pickers(3, 2, requests=8)
    crowd, tracker = Crowd(picker, seed), picker.director.tracker
    for number in range(200):
        crowd.come(f"r{number}")
        crowd.dice.choice((crowd.end, crowd.end, crowd.leave))()
        if crowd.dice.random() < 0.7:
            await _settled(picker)
            assert not crowd.waiting or tracker.running(picker.parts.endpoints[0].key) == 2
        assert max(tracker.running(endpoint.key) for endpoint in picker.parts.endpoints) <= 2
        assert len(crowd.waiting) <= picker.queue.requests <= 8
    while crowd.running or crowd.waiting:
        crowd.end()
        await _settled(picker)

    assert len(crowd.answers) == 200
    assert (picker.queue.requests, len(tracker)) == (0, 0)


async def _settled(picker: QueuedDirector) -> None:
    """Let the queue do what is due, rests included."""
    for _ in range(3):
        await asyncio.sleep(0)
    while picker.queue.requests and picker.driver.busy:
        await asyncio.sleep(0)


def test_queued_requests_get_as_much_time_as_a_flood_of_new_ones() -> None:
    """A short slice in peace; after a long turn of others as long a one, so that the queue shrinks, too."""
    assert slice_seconds(None, 100.0) == SLICE_SECONDS
    assert slice_seconds(99.9999, 100.0) == SLICE_SECONDS
    assert slice_seconds(99.8, 100.0) == pytest.approx(0.2)
    assert slice_seconds(90.0, 100.0) == LONGEST_SLICE_SECONDS


async def test_nothing_is_left_of_a_queued_request(pickers: Any) -> None:
    """However it ended, neither the request nor its prompt is kept in the queue."""
    picker = pickers(requests=3)
    picker.ask("running")
    gone = [picker.ask(name, priority=-1, text=LONG) for name in ("picked", "left", "displaced")]
    traces = [weakref.ref(wait.queued) for wait in gone]
    gone[1].pending.cancel()
    last = picker.ask("last"), picker.ask("last2")
    assert (await refusal(gone[2])).reason == "evicted-priority"
    for name, wait in (("running", last[0]), ("last", last[1]), ("last2", gone[0])):
        picker.ends(name)
        await wait
    del gone, last, wait
    gc.collect()

    assert [trace() for trace in traces] == [None] * 3
