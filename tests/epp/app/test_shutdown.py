"""How a picker comes to its end: signals, parts that fail, drains that are cut short."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvist_epp.app.shutdown import Ending
from kvist_epp.errors import UncleanEnd


@pytest.fixture
async def ending() -> AsyncIterator[Ending]:
    """One that heeds signals, which are put back as they were."""
    made = Ending()
    made.heed_signals()
    yield made
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def _until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 10)


@pytest.mark.parametrize(("number", "watched"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
async def test_a_signal_begins_a_clean_end(ending: Ending, number: signal.Signals, watched: bool) -> None:
    """After one signal the drain runs to its end, and all is well; SIGINT is somebody at a terminal."""
    drained = asyncio.Event()

    async def drain() -> None:
        drained.set()

    os.kill(os.getpid(), number)
    await asyncio.wait_for(ending.begun(), 10)
    await ending.unless_cut(drain())

    ending.check()
    assert (drained.is_set(), ending.watched) == (True, watched)


async def test_a_second_signal_cuts_the_drain_short(ending: Ending) -> None:
    """The drain is cancelled at once and the end is not a clean one."""
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(ending.begun(), 10)
    cut = asyncio.ensure_future(ending.unless_cut(drain()))
    await _until(running)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(cut, 10)

    assert cancelled.is_set()
    with pytest.raises(UncleanEnd, match="a second signal"):
        ending.check()


async def test_a_drain_that_fails_is_not_hidden(ending: Ending) -> None:
    """Its exception ends the process."""

    async def drain() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await ending.unless_cut(drain())


@pytest.mark.parametrize("error", [RuntimeError("a bug"), None], ids=["raises", "returns"])
async def test_a_part_that_ends_begins_an_unclean_end(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Parts live as long as the picker: one that fails, or just returns, is named."""
    ending = Ending()

    async def part() -> None:
        if error is not None:
            raise error

    async with AsyncExitStack() as stack:
        ending.keep(stack, part(), "some part")
        await asyncio.wait_for(ending.begun(), 10)

    assert "some part ended" in caplog.text
    with pytest.raises(UncleanEnd, match="some part"):
        ending.check()


async def test_parts_are_stopped_with_the_picker() -> None:
    """On the way out a part is cancelled and waited for, and that is a clean end."""
    ending, running, stopped = Ending(), asyncio.Event(), asyncio.Event()

    async def part() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            stopped.set()

    async with AsyncExitStack() as stack:
        ending.keep(stack, part(), "some part")
        await _until(running)

    assert stopped.is_set()
    ending.check()


async def test_a_drain_that_is_cancelled_is_waited_for(ending: Ending) -> None:
    """Whoever is cancelled while it drains leaves nothing behind."""
    running, stopped = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    outer = asyncio.ensure_future(ending.unless_cut(drain()))
    await _until(running)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer

    assert stopped.is_set()
