"""A container's process, from the outside."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from .errors import StartError
from .sandbox import Identity, Launch, entering

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STARTED: Final = b"up\n"
_COMPLAINT: Final = b"sigprocmask"


class Process:
    """One start of one container."""

    def __init__(self, process: asyncio.subprocess.Process, pid: int, launch: Launch) -> None:
        self._process = process
        self._complaints = _complaints(launch)
        self._pid = pid
        self._identity: Identity = launch.identity
        self._environment: Mapping[str, str] = launch.environment
        self.killed = False
        """By us, with SIGKILL."""

    @classmethod
    async def start(cls, launch: Launch, log: Path) -> Self:
        """Returns when the container's own program is about to run. Raises StartError."""
        reading, writing = os.pipe()
        try:
            process = await _spawn(launch, log, writing)
        finally:
            os.close(writing)
        if await _line(reading) != STARTED:
            await process.wait()
            raise StartError(_tail(log))
        return cls(process, _only_child(process.pid), launch)

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the exit code; a negative one is the signal that ended the process."""
        code = await self._process.wait()
        # unshare passes signals on, but fails at SIGKILL, which has no handler to take away (util-linux 2.38)
        return -signal.SIGKILL if code == 1 and _COMPLAINT in self._complaints.read_bytes() else code

    def signal(self, number: signal.Signals) -> None:
        """To its first process: without a handler for it nothing happens, but for SIGKILL, which ends all."""
        if self.ended:
            return
        self.killed |= number is signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    async def execute(self, command: Sequence[str], seconds: float) -> int:
        """The exit code of a command inside. Raises TimeoutError; the command is killed then."""
        argv = entering(self._pid, self._identity, self._environment, command)
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": PATH},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(seconds):
                return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _complaints(launch: Launch) -> Path:
    """Return the file with the errors of the commands around the container."""
    return launch.folder.with_name(f"{launch.folder.name}.complaints")


async def _spawn(launch: Launch, log: Path, keep: int) -> asyncio.subprocess.Process:
    with log.open("ab") as out, _complaints(launch).open("wb") as complaints:
        os.fchmod(out.fileno(), 0o666)  # a container may write to its /proc/1/fd/1, which elsewhere is a pipe
        return await asyncio.create_subprocess_exec(
            *launch.argv(keep),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=complaints,
            env={"PATH": PATH},
            pass_fds=(keep,),
            start_new_session=True,
        )


async def _line(descriptor: int) -> bytes:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]


def _only_child(pid: int) -> int:
    """Return the only child of ``unshare``, which waits for it."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    except (OSError, IndexError):  # it has ended already
        return pid
