"""Child processes of the demo and the benchmarks: each with a log, and always stopped.

No way of ending the parent leaves a child behind: an ordinary end, an exception, Ctrl-C and SIGTERM
stop them in order; when the parent itself is killed with SIGKILL the kernel kills them
(``PR_SET_PDEATHSIG``). Processes are signalled by pid, never by name.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)  # before any fork: nothing is loaded between fork and exec
_CPUCLOCK_SCHED: Final = 2
TAIL_LINES: Final = 15
_T = TypeVar("_T")
STOPPED_BY_SIGNAL: Final = 128
"""Exit code of a run ended by signal n is 128 + n, as shells write it."""


class ChildFailedError(Exception):
    """A component ended or did not become ready; the text has its name, the reason, and the tail of its
    log."""

    def __init__(self, component: str, what: str, tail: str) -> None:
        super().__init__(f"{component}: {what}" + (f"\n{tail}" if tail else ""))
        self.component = component
        self.tail = tail


@dataclass(slots=True)
class Child:
    """One started process, leader of its own process group."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    """File with the child's stdout and stderr."""

    @property
    def pid(self) -> int:
        """Process id and process group id."""
        return self.process.pid

    def running(self) -> bool:
        """True if the process has not ended yet; does not reap it, so that its pid stays its own."""
        return self.process.returncode is None and _ended(self.pid) is None

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(f"  {self.name} | {line}" for line in text.splitlines()[-lines:])

    def cpu_seconds(self) -> float:
        """CPU seconds of all threads so far, user and system, to the nanosecond.

        The kernel's CPU clock of another process (``clock_getcpuclockid``): ``/proc`` counts in steps
        of 10 ms, which is too coarse for a benchmark window of a second.
        """
        return time_of_process(self.pid)

    def check(self) -> None:
        """Raise ChildFailedError if the child has ended."""
        status = _ended(self.pid) if self.process.returncode is None else self.process.returncode
        if status is not None:
            raise ChildFailedError(self.name, f"ended with {describe_exit(status)}", self.tail())


def time_of_process(pid: int) -> float:
    """Return the CPU seconds of a running process, any pid. Raises OSError when there is none."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def describe_exit(status: int) -> str:
    """Return an exit status in words: negative is the signal that ended the process."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"


class Children:
    """Starts processes and stops them all on the way out: ``async with Children(folder) as children``."""

    def __init__(self, folder: Path, *, grace_seconds: float = 4.0) -> None:
        """Use ``folder`` for logs; ``grace_seconds`` is the time between SIGTERM and SIGKILL."""
        self._folder = folder
        self._grace = grace_seconds
        self._children: list[Child] = []

    def start(self, name: str, argv: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Child:
        """Start a process. Raises ChildFailedError when its program cannot be run.

        Call it from the main thread: the kernel ties the death signal to the thread.
        """
        log = self._folder / f"{name.replace('/', '-').replace(' ', '-')}.log"
        try:
            process = _spawn(argv, log, {**os.environ, **(environment or {})})
        except OSError as error:
            raise ChildFailedError(name, f"cannot be started: {error}", "") from error
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raise ChildFailedError if one of the children has ended."""
        for child in self._children:
            child.check()

    async def watch(self, work: asyncio.Task[None]) -> None:
        """Wait for a task, and cancel it on exit; raises ChildFailedError as soon as a component has died."""
        try:
            while not work.done():
                self.check()
                await asyncio.wait((work,), timeout=1.0)
            work.result()
        finally:
            work.cancel()
            await asyncio.wait((work,))

    async def ready(self, child: Child, probe: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Wait until the probe succeeds. Raises ChildFailedError when the child ends or time is up."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await probe():
            child.check()
            if asyncio.get_running_loop().time() > deadline:
                raise ChildFailedError(child.name, f"not ready after {seconds:.0f} s", child.tail())
            await asyncio.sleep(0.05)

    async def end(self, child: Child, number: signal.Signals, seconds: float) -> int:
        """End a child on purpose and forget it; return its exit status (negative: signal).

        Raises ChildFailedError when it still runs after ``seconds``; it is killed then.
        """
        _signal_group(child, number)
        try:
            async with asyncio.timeout(seconds):
                await _exit_of(child)
        except TimeoutError:
            raise ChildFailedError(
                child.name, f"still runs {seconds:g} s after {number.name}", child.tail()
            ) from None
        finally:
            _signal_group(child, signal.SIGKILL)
            status = child.process.wait()
            self._children.remove(child)
        return status

    async def stop(self) -> None:
        """Send SIGTERM to every group, SIGKILL to the rest after the grace time; returns when all are gone.

        Cancelled while it waits (a second Ctrl-C), it kills at once.
        """
        for child in self._children:
            _signal_group(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace):
                await asyncio.gather(*(_exit_of(child) for child in self._children))
        except TimeoutError:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to every group, then reap; also ends grandchildren that outlived their parent."""
        for child in self._children:
            _signal_group(child, signal.SIGKILL)
        for child in self._children:
            child.process.wait()
        self._children.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all children."""
        await self.stop()


class Stopped(Exception):
    """A signal requested the stop; carries its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """Return the exit code that a shell would report."""
        return STOPPED_BY_SIGNAL + self.number


def run(
    main: Coroutine[Any, Any, _T], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> _T:
    """Run to the end, or until SIGINT, SIGTERM or SIGHUP; then raise Stopped after all clean-up."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_until_signal(main))


async def _until_signal(main: Coroutine[Any, Any, _T]) -> _T:
    task = asyncio.ensure_future(main)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Stopped(received[0]) from None
        raise


def _spawn(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509  one prctl call, loaded before the fork
        )


def _die_with(parent: int) -> Callable[[], None]:
    """Runs in the child between fork and exec: SIGKILL me when my parent dies, even if it just has."""

    def arm() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return arm


def _ended(pid: int) -> int | None:
    """Exit status (negative: signal) of a child that has ended but is not reaped, else None."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _signal_group(child: Child, number: signal.Signals) -> None:
    """To the whole group; safe because an unreaped leader keeps the id from being used again."""
    if child.process.returncode is None:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return


async def _exit_of(child: Child) -> None:
    """Wait until the child has ended, without reaping it."""
    if child.process.returncode is not None:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    handle = os.pidfd_open(child.pid)
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
