"""Watches the endpoints file and hands over each fleet it describes; a bad file changes nothing."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvist_epp.endpoints.endpoint import Fleet
from kvist_epp.endpoints.endpoints_file import MAX_FILE_BYTES, parse
from kvist_epp.errors import EndpointsFileError

logger = logging.getLogger(__name__)

Signature = tuple[int, int, int]


class FileWatch:
    """Rereads the endpoints file when it changes and tells the outcome.

    Polling ``stat`` works where inotify does not: ConfigMap symlink swaps, atomic renames, network file
    systems. A file that cannot be used, or has gone, leaves ``fleet`` as it was.
    """

    SETTLE_SECONDS: Final = 0.05
    """A change counts when two readings this far apart are equal: a writer in the middle of it is waited
    for."""
    RACY_NS: Final = 2_000_000_000
    """A file modified this recently is read again although its stat is the same: clocks of file systems tick
    coarsely."""

    def __init__(
        self,
        path: Path,
        changed: Callable[[Fleet], None],
        complained: Callable[[str], None] | None = None,
        *,
        interval: float = 0.5,
    ) -> None:
        self.path = path
        self.fleet: Fleet | None = None
        """None until the file could be read once: the picker is not ready."""
        self.problem = ""
        """Why the file as it is now is not used; empty when it is."""
        self.bad_files = 0
        """How many times a file was refused."""
        self._changed = changed
        self._complained = complained
        self._interval = interval
        self._seen: tuple[Signature, bytes] | None = None

    def describe(self) -> dict[str, Any]:
        """For ``/debug/fleet``."""
        path = str(self.path)
        return {"kind": "file", "path": path, "problem": self.problem, "refused": self.bad_files}

    def watches(self) -> tuple[()]:
        """Nothing in Kubernetes."""
        return ()

    async def run(self) -> None:
        """Look at the file for ever; the first look is at once."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Look once; call ``changed`` or ``complained`` when there is news."""
        try:
            text = await self._fresh()
            fleet = None if text is None else await asyncio.to_thread(parse, text)
        except OSError as error:
            self._seen = None
            self._complain(f"{self.path}: {error.strerror or type(error).__name__}")
        except EndpointsFileError as error:
            self._complain(f"{self.path}: {error}")
        else:
            if fleet is not None:
                self._accept(fleet)

    async def _fresh(self) -> bytes | None:
        """The file's content if it is not the one last looked at, once it stands still."""
        before = self._signature()
        if self._seen and before == self._seen[0] and not self._racy(before):
            return None
        text = await asyncio.to_thread(_read, self.path)
        if self._same(before, text):
            return None
        while True:
            await asyncio.sleep(self.SETTLE_SECONDS)
            before, again = self._signature(), await asyncio.to_thread(_read, self.path)
            if again == text:
                break
            text = again
        if self._same(before, text):
            return None
        self._seen = (before, hashlib.sha256(text).digest())
        return text

    def _same(self, signature: Signature, text: bytes) -> bool:
        digest = hashlib.sha256(text).digest()
        if self._seen is None or self._seen[1] != digest:
            return False
        self._seen = (signature, digest)
        return True

    def _signature(self) -> Signature:
        stat = self.path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _racy(self, signature: Signature) -> bool:
        return abs(time.time_ns() - signature[2]) < self.RACY_NS

    def _accept(self, fleet: Fleet) -> None:
        self.problem = ""
        if fleet == self.fleet:
            return
        self.fleet = fleet
        logger.info("%s: %d endpoints", self.path, len(fleet))
        self._changed(fleet)

    def _complain(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        self.bad_files += 1
        kept = "waiting for it" if self.fleet is None else f"keeping the old {len(self.fleet)} endpoints"
        logger.warning("endpoints file not used, %s: %s", kept, problem)
        if self._complained:
            self._complained(problem)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)
