"""Children always end with their parent, however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvist_sim.processes import ChildFailedError, Children, time_of_process

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
IGNORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STUBBORN = [sys.executable, "-S", "-c", f"{IGNORE}; print('on', flush=True); time.sleep(600)"]
FAMILY = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from kvist_sim.processes import Children, Stopped, run

    async def main():
        async with Children(Path(sys.argv[1])) as children:
            child = children.start("sleeper", [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
            print(child.pid, flush=True)
            await asyncio.Event().wait()
    try:
        run(main())
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    """
)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> bool:
    """Return whether the process ends within ten seconds."""
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_a_signal_to_the_parent_ends_the_children(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C, SIGTERM, a closed terminal and even SIGKILL leave no process behind."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(number)
        assert parent.wait() == code

    assert wait_until_gone(child)


async def test_leaving_the_block_stops_all_children(tmp_path: Path) -> None:
    """A child that ignores SIGTERM is killed after the grace."""
    async with Children(tmp_path, grace_seconds=0.2) as children:
        stubborn, willing = children.start("stubborn", STUBBORN), children.start("willing", SLEEP)
        await children.ready(stubborn, lambda: asyncio.sleep(0, stubborn.tail() != ""), 10)

    assert (stubborn.process.returncode, willing.process.returncode) == (-9, -15)


async def test_a_child_is_ended_on_purpose_and_another_takes_its_place(tmp_path: Path) -> None:
    """The status names the cause, the end does not count as a failure, and the log continues."""
    async with Children(tmp_path) as children:
        first, other = children.start("picker", SLEEP), children.start("other", SLEEP)
        status = await children.end(first, signal.SIGKILL, 10)
        again = children.start("picker", SLEEP)
        children.check()
        assert (status, again.log, other.running()) == (-9, first.log, True)


async def test_a_child_that_ignores_its_signal_is_an_error_and_is_killed(tmp_path: Path) -> None:
    """An end on purpose has a limit; what is over it does not stay behind."""
    async with Children(tmp_path) as children:
        stubborn = children.start("stubborn", STUBBORN)
        await children.ready(stubborn, lambda: asyncio.sleep(0, stubborn.tail() != ""), 10)
        with pytest.raises(ChildFailedError, match=r"stubborn: still runs 0\.1 s after SIGTERM"):
            await children.end(stubborn, signal.SIGTERM, 0.1)
        assert not alive(stubborn.pid)
        children.check()


async def test_grandchildren_end_too(tmp_path: Path) -> None:
    """The whole process group is ended, also when its leader has gone first."""
    code = f"import subprocess; print(subprocess.Popen({SLEEP!r}).pid, flush=True)"
    async with Children(tmp_path) as children:
        leader = children.start("leader", [sys.executable, "-S", "-c", code])
        await children.ready(leader, lambda: asyncio.sleep(0, not leader.running()), 10)
        grandchild = int(leader.log.read_text())
        assert alive(grandchild)

    assert wait_until_gone(grandchild)


async def test_a_child_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    """The error says which component ended, how, and shows the end of its log."""
    async with Children(tmp_path) as children:
        child = children.start("picker", [sys.executable, "-S", "-c", "raise SystemExit('no such model')"])
        with pytest.raises(
            ChildFailedError, match=r"picker: ended with exit code 1\n  picker \| no such model"
        ):
            await children.ready(child, lambda: asyncio.sleep(0, False), 10)


async def test_a_child_that_never_gets_ready_is_an_error(tmp_path: Path) -> None:
    """Waiting for readiness has an end."""
    async with Children(tmp_path) as children:
        child = children.start("envoy", SLEEP)
        with pytest.raises(ChildFailedError, match="envoy: not ready after 0 s"):
            await children.ready(child, lambda: asyncio.sleep(0, False), 0.01)


def test_cpu_time_of_a_process_grows_with_its_work() -> None:
    """The CPU clock read from outside counts what a process has burnt."""
    before = time_of_process(os.getpid())
    sum(range(200_000))
    assert time_of_process(os.getpid()) > before
