"""Tests of the shutdown: signals, parts that fail, drains that are cut short."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvist_epp.app.process import Shutdown
from kvist_epp.errors import UncleanShutdownError


@pytest.fixture
async def shutdown() -> AsyncIterator[Shutdown]:
    """Return a shutdown that handles signals, and remove its handlers afterwards."""
    made = Shutdown()
    made.handle_signals()
    yield made
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def _until(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 10)


@pytest.mark.parametrize(("number", "interactive"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
async def test_a_signal_begins_a_clean_shutdown(
    shutdown: Shutdown, number: signal.Signals, interactive: bool
) -> None:
    """After one signal the drain completes and the shutdown is clean; SIGINT marks it as interactive."""
    drained = asyncio.Event()

    async def drain() -> None:
        drained.set()

    os.kill(os.getpid(), number)
    await asyncio.wait_for(shutdown.wait(), 10)
    await shutdown.run_drain(drain())

    shutdown.raise_if_unclean()
    assert (drained.is_set(), shutdown.interactive) == (True, interactive)


async def test_a_second_signal_cuts_the_drain_short(shutdown: Shutdown) -> None:
    """A second signal cancels the drain at once, and the shutdown is not a clean one."""
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(shutdown.wait(), 10)
    cut = asyncio.ensure_future(shutdown.run_drain(drain()))
    await _until(running)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(cut, 10)

    assert cancelled.is_set()
    with pytest.raises(UncleanShutdownError, match="a second signal"):
        shutdown.raise_if_unclean()


async def test_a_drain_that_fails_is_not_hidden(shutdown: Shutdown) -> None:
    """An exception of the drain ends the process."""

    async def drain() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await shutdown.run_drain(drain())


@pytest.mark.parametrize("error", [RuntimeError("a bug"), None], ids=["raises", "returns"])
async def test_a_part_that_ends_begins_an_unclean_shutdown(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that fails or returns early begins the shutdown and is named."""
    shutdown = Shutdown()

    async def part() -> None:
        if error is not None:
            raise error

    async with AsyncExitStack() as stack:
        shutdown.start_task(stack, part(), "some part")
        await asyncio.wait_for(shutdown.wait(), 10)

    assert "the task 'some part' ended unexpectedly" in caplog.text
    with pytest.raises(UncleanShutdownError, match="some part"):
        shutdown.raise_if_unclean()


async def test_parts_are_stopped_with_the_picker() -> None:
    """Parts are cancelled and awaited on exit, and the shutdown is clean."""
    shutdown, running, stopped = Shutdown(), asyncio.Event(), asyncio.Event()

    async def part() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            stopped.set()

    async with AsyncExitStack() as stack:
        shutdown.start_task(stack, part(), "some part")
        await _until(running)

    assert stopped.is_set()
    shutdown.raise_if_unclean()


async def test_a_drain_that_is_cancelled_is_waited_for(shutdown: Shutdown) -> None:
    """Cancelling the caller of a drain cancels the drain and waits for it."""
    running, stopped = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    outer = asyncio.ensure_future(shutdown.run_drain(drain()))
    await _until(running)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer

    assert stopped.is_set()


def test_buffers_of_long_bodies_do_not_come_from_the_kernel_each_time() -> None:
    """A freed buffer of a few hundred KB is used again, without page faults."""
    code = """
import resource
from kvist_epp.app.process import keep_freed_memory
keep_freed_memory()
pieces = [bytes(16_000)] * 28
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        held = [b"".join(pieces) for _ in range(5)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert int(done.stdout) < 1_000, "each of the 50,000 pages of these buffers used to be a fault"
