"""Hand-over while time passes: asking, answers, cancellation, keys."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from tests.epp.prewarm.pool import Pool

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.prewarm.keeper import Keeper
from kvist_epp.prewarm.plan import Step
from kvist_epp.prewarm.sender import Answer


class Engines:
    """Answer when the test lets them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.asked: list[tuple[str, str, str | None]] = []
        self.answers = asyncio.Queue[Answer]()
        self.cancelled: list[str] = []

    async def ask(self, endpoint: Endpoint, session: str, text: bytes, model: str | None) -> Answer:
        """The next answer."""
        self.asked.append((endpoint.name, text.decode(), model))
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.cancelled.append(session)
            raise
        if answer is Answer.DONE:
            self.pool.hold(endpoint.name, text.decode())
        return answer


@asynccontextmanager
async def running(pool: Pool, engines: Engines, **hooks: Callable[[Step], None]) -> AsyncIterator[Keeper]:
    """A keeper at work."""
    keeper = Keeper(pool.plan, engines, clock=lambda: pool.now, model=lambda key: f"model of {key}", **hooks)
    task = asyncio.create_task(keeper.run())
    try:
        yield keeper
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    """Wait; the test's time limit bounds it."""
    while not condition():
        await asyncio.sleep(0.005)


def hot_pool(*names: str) -> Pool:
    """The first pod holds what is hot, and another one joins."""
    pool = Pool("a", *names)
    pool.hold("a", "abcdef")
    pool.heat("abcdef")
    pool.join("b")
    return pool


async def test_steps_follow_each_other_and_the_log_tells(caplog: pytest.LogCaptureFixture) -> None:
    """Each is asked for when the last is answered, by the name that the endpoint serves its model by; one
    line tells of the beginning, one of the end."""
    pool = hot_pool()
    engines, told = Engines(pool), list[str]()
    for _ in range(3):
        engines.answers.put_nowait(Answer.DONE)
    with caplog.at_level(logging.INFO):
        async with running(
            pool, engines, begun=lambda s: told.append(s.session), ended=lambda s: told.append(s.session)
        ):
            await until(lambda: "hand-over ends" in caplog.text)
    assert engines.asked == [("b", text, "model of t/b") for text in ("ab", "abcd", "abcdef")]
    assert told == ["hand-over.1"] * 2 + ["hand-over.2"] * 2 + ["hand-over.3"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "hand-over to t/b begins: 96 tokens",
        "hand-over ends: 96 tokens computed in 0.0 s, 0 steps failed",
    ]


async def test_a_pod_that_vanishes_is_not_waited_for() -> None:
    """Its step is cancelled and off the books, and others are asked for what it leaves."""
    pool = hot_pool("c")
    engines, ended = Engines(pool), list[str]()
    async with running(pool, engines, ended=lambda step: ended.append(step.endpoint.name)) as keeper:
        await until(lambda: len(engines.asked) == 1)
        pool.leave("b")
        await until(lambda: len(ended) == 1)
        assert (len(engines.cancelled), ended, pool.plan.idle) == (1, ["b"], True)
        assert pool.ledger.running("t/b") == 0
        assert not keeper.denied


async def test_the_end_of_the_picker_leaves_nothing_behind() -> None:
    """Cancelled, it cancels what is under way, and waits for that."""
    pool = hot_pool()
    engines, ended = Engines(pool), list[str]()
    async with running(pool, engines, ended=lambda step: ended.append(step.session)):
        await until(lambda: len(engines.asked) == 1)
    assert (len(engines.cancelled), len(ended), len(pool.ledger)) == (1, 1, 0)


async def test_an_error_is_tried_again_later() -> None:
    """Not at once, and from what the engine holds."""
    pool = hot_pool()
    engines = Engines(pool)
    engines.answers.put_nowait(Answer.DONE)
    engines.answers.put_nowait(Answer.FAILED)
    async with running(pool, engines):
        await until(lambda: pool.plan.given.failed == 1)
        await asyncio.sleep(0.1)
        assert len(engines.asked) == 2
        pool.now += 1.0
        await until(lambda: len(engines.asked) == 3)
    assert [text for _, text, _ in engines.asked] == ["ab", "abcd", "abcd"]


async def test_text_that_no_engine_takes_is_asked_for_once() -> None:
    """Its beginning is dropped."""
    pool = hot_pool()
    engines = Engines(pool)
    engines.answers.put_nowait(Answer.UNFIT)
    async with running(pool, engines):
        await until(lambda: pool.plan.given.dropped == 1)
        pool.now += 5.0
        await asyncio.sleep(0.1)
    assert (len(engines.asked), pool.plan.idle) == (1, True)


async def test_a_key_that_is_wanted_ends_it_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing more is asked of anybody; the log says which flag has the key."""
    pool = hot_pool()
    pool.join("c")
    engines = Engines(pool)
    for _ in range(2):
        engines.answers.put_nowait(Answer.DENIED)
    async with running(pool, engines) as keeper:
        await until(lambda: pool.plan.given.failed == 2)
        pool.now += 60.0
        await asyncio.sleep(0.1)
        assert (keeper.denied, len(engines.asked)) == (True, 2)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "--engine-key-file" in warnings[0]
