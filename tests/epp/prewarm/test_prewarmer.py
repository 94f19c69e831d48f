"""Prewarming while time passes: requests, answers, cancellation, API keys."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from tests.epp.prewarm.prewarm_pool import Pool

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.prewarm.prewarm_client import PrewarmOutcome
from kvist_epp.prewarm.prewarmer import Prewarmer


class Engines:
    """Engines that answer when the test lets them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.asked: list[tuple[str, str, str | None]] = []
        self.answers = asyncio.Queue[PrewarmOutcome]()
        self.cancelled: list[str] = []

    async def send(self, endpoint: Endpoint, session: str, text: bytes, model: str | None) -> PrewarmOutcome:
        """Return the next answer."""
        self.asked.append((endpoint.name, text.decode(), model))
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.cancelled.append(session)
            raise
        if answer is PrewarmOutcome.DONE:
            self.pool.hold(endpoint.name, text.decode())
        return answer


@asynccontextmanager
async def running(pool: Pool, engines: Engines, *, keyed: bool = False) -> AsyncIterator[Prewarmer]:
    """Run a prewarmer."""
    prewarmer = Prewarmer(
        pool.planner,
        engines.send,
        pool.log,
        clock=lambda: pool.now,
        model=lambda key: f"model of {key}",
        keyed=keyed,
    )
    task = asyncio.create_task(prewarmer.run())
    try:
        yield prewarmer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the time limit of the test bounds the wait."""
    while not condition():
        await asyncio.sleep(0.005)


def hot_pool(*names: str) -> Pool:
    """Return a pool whose first endpoint holds a hot prefix, with another one that has just joined."""
    pool = Pool("a", *names)
    pool.hold("a", "abcdef")
    pool.heat("abcdef")
    pool.join("b")
    return pool


async def test_steps_follow_each_other_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each step is sent when the last is answered, with the endpoint's name of the model; the log has two
    lines."""
    pool = hot_pool()
    engines = Engines(pool)
    for _ in range(3):
        engines.answers.put_nowait(PrewarmOutcome.DONE)
    with caplog.at_level(logging.INFO):
        async with running(pool, engines):
            await until(lambda: "prewarming ends" in caplog.text)
    assert engines.asked == [("b", text, "model of t/b") for text in ("ab", "abcd", "abcdef")]
    assert len(pool.tracker.table) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "prewarming of t/b starts: 96 tokens",
        "prewarming ends: 96 tokens computed in 0.0 s, 0 requests failed",
    ]


async def test_the_step_of_an_endpoint_that_vanishes_is_cancelled() -> None:
    """The step is no longer in flight, and other endpoints get the prefixes that are lost."""
    pool = hot_pool("c")
    engines = Engines(pool)
    async with running(pool, engines) as prewarmer:
        await until(lambda: len(engines.asked) == 1)
        pool.leave("b")
        await until(lambda: len(engines.cancelled) == 1 and pool.planner.idle)
        assert pool.tracker.running("t/b") == 0
        assert not prewarmer.denied


async def test_the_end_of_the_picker_leaves_nothing_behind() -> None:
    """A prewarmer that is cancelled cancels its steps and waits for their end."""
    pool = hot_pool()
    engines = Engines(pool)
    async with running(pool, engines):
        await until(lambda: len(engines.asked) == 1)
    assert (len(engines.cancelled), len(pool.tracker)) == (1, 0)


async def test_an_error_is_tried_again_later() -> None:
    """The step is repeated after a delay, from what the engine holds."""
    pool = hot_pool()
    engines = Engines(pool)
    engines.answers.put_nowait(PrewarmOutcome.DONE)
    engines.answers.put_nowait(PrewarmOutcome.FAILED)
    async with running(pool, engines):
        await until(lambda: pool.stats.failed == 1)
        await asyncio.sleep(0.1)
        assert len(engines.asked) == 2
        pool.now += 1.0
        await until(lambda: len(engines.asked) == 3)
    assert [text for _, text, _ in engines.asked] == ["ab", "abcd", "abcd"]


async def test_text_that_no_engine_accepts_is_requested_once() -> None:
    """A prefix that an engine rejects is dropped."""
    pool = hot_pool()
    engines = Engines(pool)
    engines.answers.put_nowait(PrewarmOutcome.UNFIT)
    async with running(pool, engines):
        await until(lambda: pool.stats.dropped == 1)
        pool.now += 5.0
        await asyncio.sleep(0.1)
    assert (len(engines.asked), pool.planner.idle) == (1, True)


async def test_a_missing_api_key_ends_prewarming_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing more is requested from any engine; the log names the flag for the key."""
    pool = hot_pool()
    pool.join("c")
    engines = Engines(pool)
    for _ in range(2):
        engines.answers.put_nowait(PrewarmOutcome.DENIED)
    async with running(pool, engines) as prewarmer:
        await until(lambda: pool.stats.failed == 2)
        pool.now += 60.0
        await asyncio.sleep(0.1)
        assert (prewarmer.denied, len(engines.asked)) == (True, 2)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "--engine-key-file" in warnings[0]


async def test_a_key_that_is_rejected_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """While a key is replaced, an engine may reject it for a while: the log says so once, and the step is
    repeated until the engine accepts the key."""
    pool = hot_pool()
    engines = Engines(pool)
    for answer in (PrewarmOutcome.DENIED, PrewarmOutcome.DENIED, PrewarmOutcome.DONE):
        engines.answers.put_nowait(answer)
    async with running(pool, engines, keyed=True) as prewarmer:
        await until(lambda: pool.stats.failed == 1)
        assert prewarmer.denied
        pool.now += 2.0
        await until(lambda: pool.stats.failed == 2)
        assert prewarmer.denied
        pool.now += 2.0
        await until(lambda: pool.stats.steps == 1)
        assert not prewarmer.denied
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "has to be restarted to read a new one" in line
