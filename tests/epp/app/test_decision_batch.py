"""Requests of one turn of the event loop are decided together, and each as if it were alone."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.parts import CHAT, Clock, Parts, ask, chat, make
from tests.epp.queued_director import QueuedDirector

from kvist_epp.app import decision_batch
from kvist_epp.app.decision_batch import DecisionBatch
from kvist_epp.errors import PickError
from kvist_epp.extproc.pick_request import PickRequest, PickResult
from kvist_epp.flowcontrol.driver import FlowDriver
from kvist_epp.names import PRIORITY_HEADER, SESSION_HEADER

TEXTS = st.sampled_from(["short", "a shared beginning " * 40, "a shared beginning " * 40 + "and an end"])


def asked(text: str, priority: str, path: str, number: int) -> PickRequest:
    """A request with a session of its own; the priority may be no number."""
    headers = {SESSION_HEADER: f"s{number}", **({PRIORITY_HEADER: priority} if priority else {})}
    return ask(chat(text), path, headers)


def broken(decision: Any) -> None:
    """A stream whose answer cannot be sent."""
    raise ZeroDivisionError(decision)


class Answers:
    """Keeps what each request of a batch was answered."""

    def __init__(self, batch: DecisionBatch) -> None:
        self.batch = batch
        self.found: dict[int, Any] = {}

    def send(self, number: int, request: PickRequest) -> Any:
        """Ask, and keep the answer when it comes."""
        pending = self.batch.decide(request)
        pending.then(lambda decision: self.found.update({number: decision}))
        return pending


def batch_of(parts: Parts) -> DecisionBatch:
    """A batch over a director that lets nothing wait."""
    return DecisionBatch(parts.director, FlowDriver(parts.clock), parts.clock)


def shown(answer: Any) -> Any:
    """An answer, or its error, in comparable form."""
    return (type(answer), str(answer)) if isinstance(answer, Exception) else answer


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(TEXTS, st.sampled_from(["", "", "1", "none"]), st.sampled_from([CHAT, "/v1/models"])),
        min_size=1,
        max_size=12,
    )
)
def test_a_batch_decides_what_one_after_the_other_would(requests: list[tuple[str, str, str]]) -> None:
    """Answers, log lines and their order are the same; a pick of the batch is known to the next one."""
    together, apart = make(3, replica="r"), make(3, replica="r")
    asks = [asked(*one, number) for number, one in enumerate(requests)]
    alone: list[Any] = []
    for one in asks:
        try:
            alone.append(apart.director.offer(one, apart.clock()))
        except PickError as error:
            alone.append(error)

    assert list(map(shown, together.director.offer_all(asks, together.clock()))) == list(map(shown, alone))
    lines = [
        [(line.session, line.endpoint, line.cost) for line in parts.log.lines] for parts in (together, apart)
    ]
    assert lines[0] == lines[1]


async def test_requests_of_one_turn_are_answered_in_the_next() -> None:
    """Nothing is decided while sockets are read; then all are, in their order."""
    parts = make(2)
    answers = Answers(batch_of(parts))
    for number in range(3):
        answers.send(number, asked("hello", "", CHAT, number))
    assert answers.found == {}

    await asyncio.sleep(0)
    assert list(answers.found) == [0, 1, 2]
    assert all(isinstance(answer, PickResult) for answer in answers.found.values())


async def test_a_flood_is_decided_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two batches the event loop reads sockets and runs timers."""
    monkeypatch.setattr(decision_batch, "LARGEST", 2)
    parts = make(2)
    answers = Answers(batch_of(parts))
    for number in range(5):
        answers.send(number, asked("hello", "", CHAT, number))
    seen = []
    for _ in range(4):
        await asyncio.sleep(0)
        seen.append(len(answers.found))

    assert seen == [2, 4, 5, 5]


async def test_a_bug_costs_one_request_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    """An exception while one is understood, or while its answer is sent, leaves the others their answers."""
    parts = make(2)
    answers = Answers(batch_of(parts))
    answers.send(0, asked("hello", "", CHAT, 0))
    answers.send(1, PickRequest("POST", CHAT, {}, ["no bytes"], None))  # type: ignore[arg-type]
    answers.batch.decide(asked("hello", "", CHAT, 2)).then(broken)
    answers.send(3, asked("hello", "", CHAT, 3))
    await asyncio.sleep(0)

    assert isinstance(answers.found[0], PickResult)
    assert isinstance(answers.found[1], Exception)
    assert isinstance(answers.found[3], PickResult)
    assert "an answer could not be sent" in caplog.text


async def test_a_bug_outside_of_any_request_fails_the_batch() -> None:
    """No stream waits for ever: each gets the exception, and the next batch is decided."""
    parts = make(2)
    answers = Answers(batch_of(parts))
    answers.send(0, PickRequest("POST", CHAT, {}, None, None))  # type: ignore[arg-type]
    answers.send(1, asked("hello", "", CHAT, 1))
    await asyncio.sleep(0)
    answers.send(2, asked("hello", "", CHAT, 2))
    await asyncio.sleep(0)

    assert [type(answers.found[number]) for number in range(3)] == [TypeError, TypeError, PickResult]


async def test_a_request_cancelled_in_the_same_turn_is_not_decided() -> None:
    """No pick is counted for a request whose stream is gone."""
    parts = make(2)
    answers = Answers(batch_of(parts))
    answers.send(0, asked("hello", "", CHAT, 0)).cancel()
    answers.send(1, asked("hello", "", CHAT, 1))
    await asyncio.sleep(0)

    assert list(answers.found) == [1]
    assert [line.session for line in parts.log.lines] == ["s1"]


async def test_a_request_that_has_to_wait_is_answered_by_flow_control_or_cancelled() -> None:
    """The batch hands it over: it is answered when there is a slot, and can be cancelled until then."""
    picker = QueuedDirector(1, 1, Clock())
    batch = DecisionBatch(picker.director, picker.driver, picker.clock)
    answers = Answers(batch)
    pending = [answers.send(number, asked("hello", "", CHAT, number)) for number in range(3)]
    await asyncio.sleep(0)
    assert list(answers.found) == [0]
    assert picker.queue.requests == 2

    pending[1].cancel()
    assert picker.queue.requests == 1
    picker.ends("s0")
    await asyncio.sleep(0.05)
    assert list(answers.found) == [0, 2]
    picker.driver.close()
