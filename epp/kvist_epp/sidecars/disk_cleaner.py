"""The disk cleaner: keeps the folder of an engine's file-system tier below a bound, beside the engine.

vLLM's tier (``vllm/v1/kv_offload/tiering/fs``, 0.32) writes one file for each block and never deletes any. It
opens a file for each read, and a file that is gone is a miss whose block is computed again, so that any block
may be unlinked at any time. A block is written to ``….tmp`` and renamed.

A walk through the folder counts it and remembers the files that were used least recently. Above the high
watermark these are unlinked, oldest first, down to the low watermark; the others stay in reserve. Twenty
times a second, during a walk too, one call of ``statvfs`` says how much the folder can have grown since it
was counted. Growth above the high watermark brings the next walk; growth above the urgent watermark has no
time for a walk, and files of the reserve go at once. So the folder exceeds its bound only if the engine
writes what is left above the urgent watermark between two looks, or faster than files can be unlinked. The
watermarks are lowered where the growth between two looks, as measured, needs more room.

The program needs only the standard library, and the user of the engine, who owns the files.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from .block_files import FolderWalk, OldFile, last_use, size_on_disk, walk
from .disk_growth import DiskGrowth, used_bytes

logger = logging.getLogger(__name__)

CANDIDATES: Final = 65_536
"""Most files that a walk remembers: the process then takes 40 MiB, whatever the folder has."""
UNLINKERS: Final = 16
"""Files that are unlinked at the same time: a file system makes each wait for writes that it has begun."""
LOOK_SECONDS: Final = 0.05
"""Seconds between two looks at the growth."""
LONGEST_PAUSE: Final = 30.0
PAUSE_FACTOR: Final = 3
"""A pause lasts at least this many times as long as the walk before it, which bounds the use of the CPU,
unless the folder has grown far above the high watermark; then as long."""
SAFETY: Final = 2.0
"""The room above the urgent watermark is at least this many times the most that was written between two
looks."""
LOWEST: Final = 0.25
"""Part of the limit below which the low watermark is never lowered."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Sizes in bytes: removal begins above ``high`` and ends at ``low``; ``limit`` is that of the volume."""

    low: int
    high: int
    limit: int

    @property
    def urgent(self) -> int:
        """Size above which there is no time for a walk: in the middle between ``high`` and ``limit``."""
        return (self.high + self.limit) // 2

    def with_room(self, room: float) -> "Watermarks":
        """Return watermarks that leave so many bytes above ``urgent``, or as many as possible."""
        least = int(LOWEST * self.limit)
        lower = min(max(0, int(room) - (self.limit - self.urgent)), max(0, self.low - least))
        # high is halfway between limit and urgent, so it has to fall twice as far
        return Watermarks(self.low - lower, max(self.low - lower + 1, self.high - 2 * lower), self.limit)


@dataclass(slots=True)
class Pass:
    """Result of one pass: what it found and removed, in bytes on disk."""

    total: int = 0
    """Size of everything in the folder, after removal."""
    found: int = 0
    """Size before removal, without what was removed during the walk."""
    files: int = 0
    removed: int = 0
    """Number of files."""
    newest_removed: float = 0.0
    """Last use, in seconds since 1970, of the most recently used file among those removed."""
    seconds: float = 0.0
    walk_seconds: float = 0.0
    """Duration of the last walk alone."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A file to unlink, with the nanosecond of its last use and its bytes on disk."""

    path: str
    used: int
    size: int


class DiskCleaner:
    """Keeps one folder below its limit."""

    def __init__(
        self,
        folder: str,
        watermarks: Watermarks,
        *,
        candidates: int = CANDIDATES,
        sleep: Callable[[float], object] = time.sleep,
        used: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``used``: bytes in use on the folder's file system."""
        self._folder = folder
        self._marks = watermarks
        self._candidates = candidates
        self._sleep = sleep
        self._clock = clock
        self._growth = DiskGrowth(used or partial(used_bytes, folder))
        self._reserve: list[OldFile] = []
        self._total = 0
        """Size at the last walk, less what was removed since."""
        self._freed = 0
        """Bytes that were removed so far."""
        self._threads = ThreadPoolExecutor(UNLINKERS + 1)
        self._urgent_removals = 0
        self._warned = False

    @property
    def marks(self) -> Watermarks:
        """The watermarks, lowered where the growth between two looks needs more room."""
        return self._marks.with_room(SAFETY * self._growth.largest_step)

    def run(self, stop: threading.Event) -> None:
        """Clean again and again until the event is set."""
        made, walked = self.clean(), self._clock()
        self._report(made)
        while not stop.wait(LOOK_SECONDS):
            estimate = self.look()
            if self._clock() - walked < self.pause_after(made, estimate):
                continue
            made, walked = self.clean(urgent=estimate > self.marks.high), self._clock()
            self._report(made)

    def look(self) -> int:
        """Return the bytes that the folder has at most; above the urgent watermark remove files at once."""
        estimate = self._estimate()
        if estimate > self.marks.urgent:
            self._urgent_removals += self._remove_reserve(Pass())
            estimate = self._estimate()
        return estimate

    def pause_after(self, made: Pass, estimate: int) -> float:
        """Return the seconds from the end of a pass to the next one, for what the folder has now at most."""
        marks = self.marks
        if estimate > (marks.high + marks.urgent) // 2:
            return made.walk_seconds
        rest = PAUSE_FACTOR * made.walk_seconds
        return rest if estimate > marks.high else max(rest, LONGEST_PAUSE)

    def clean(self, *, urgent: bool = True) -> Pass:
        """Walk through the folder and remove the least recently used files if there is too much.

        ``urgent``: without pauses; a pass that is not takes at most half a core.
        """
        begun, made = self._clock(), Pass()
        while True:
            started, freed = self._clock(), self._freed
            found = self._walk(urgent=urgent)
            made.walk_seconds = self._clock() - started
            # a walk may count files that were removed before its end, and those that came in their place
            made.files, made.found = found.files, made.found or found.total - (self._freed - freed)
            marks = self.marks
            if found.total <= (marks.low if made.removed else marks.high):
                break
            removed = self._remove(marks.low, lambda: self._total, made)
            made.files -= removed
            if self._total <= marks.low or not removed:
                break
        made.total, made.seconds = self._total, self._clock() - begun
        return made

    def _estimate(self) -> int:
        return self._total + self._growth.grown()

    def _walk(self, *, urgent: bool) -> FolderWalk:
        """Count the folder; what is removed meanwhile, because it grows too fast, may be counted."""
        result = FolderWalk(self._candidates)
        before = self._growth.grown()
        rested = self._clock()

        def rest() -> None:
            nonlocal rested
            if not urgent:
                self._sleep(self._clock() - rested)
                rested = self._clock()

        # a file system that is busy with writes can stop a walk for seconds
        walking = self._threads.submit(walk, self._folder, result, rest)
        while wait([walking], LOOK_SECONDS).not_done:
            if self._estimate() > self.marks.urgent:
                self._reserve = self._reserve or result.take_oldest()
                self._urgent_removals += self._remove_reserve(Pass())
        walking.result()
        self._total, self._reserve = result.total, result.take_oldest()
        self._growth.counted(max(0, self._growth.grown() - before))
        return result

    def _remove_reserve(self, made: Pass) -> int:
        """Remove files of the reserve down to the high watermark, growth included; return how many."""
        return self._remove(self.marks.high, self._estimate, made)

    def _remove(self, target: int, size: Callable[[], int], made: Pass) -> int:
        """Unlink the oldest files until ``size`` is at most ``target``; return how many."""
        count, running = 0, dict[Future[int], Victim]()
        leaving = 0
        while True:
            while len(running) < UNLINKERS and size() - leaving > target:
                victim = self._next_victim()
                if victim is None:
                    break
                leaving += victim.size
                running[self._threads.submit(self._unlink, victim)] = victim
            if not running:
                break
            for done in wait(running, LOOK_SECONDS, FIRST_COMPLETED).done:
                victim = running.pop(done)
                leaving -= victim.size
                if done.result():
                    self._total -= victim.size
                    self._freed += victim.size
                    self._growth.freed(victim.size)
                    made.newest_removed = max(made.newest_removed, victim.used / 1e9)
                    count += 1
            self._growth.grown()
        made.removed += count
        return count

    def _next_victim(self) -> Victim | None:
        """Take the oldest file from the reserve that is still there and was not used meanwhile."""
        while self._reserve:
            used, path = self._reserve.pop()
            with suppress(FileNotFoundError):  # vLLM removes files that are too short
                seen = os.lstat(path)
                if not used or last_use(seen) <= used:
                    return Victim(path, used, size_on_disk(seen))
        return None

    def _unlink(self, victim: Victim) -> bool:
        """Remove a file; return whether it was there."""
        path = Path(victim.path)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn(f"{path} cannot be removed: {error.strerror}")
            return False
        with suppress(OSError):  # another block is in it
            path.parent.rmdir()
        return True

    def _report(self, made: Pass) -> None:
        marks = self.marks
        if made.removed or self._urgent_removals:
            age = max(0.0, time.time() - made.newest_removed)
            logger.info(
                "removed %d blocks, last used at least %.0f s ago, and %d at once: %s of %s in use (%.1f s)",
                *(made.removed, age if made.removed else 0.0, self._urgent_removals),
                *(_text(made.total), _text(marks.limit), made.seconds),
            )
            self._urgent_removals = 0
        if made.found > marks.limit:
            self._warn(
                f"the folder had {_text(made.found)}, more than the volume's {_text(marks.limit)}: blocks "
                "are written faster than they are removed; raise spec.offload.disk"
            )
        elif made.total > self._marks.high:
            self._warn(
                f"the folder has {_text(made.total)}, and nothing more can be removed: files other than "
                "blocks are in it"
            )
        else:
            self._warned = False

    def _warn(self, text: str) -> None:
        """Log a warning, unless the pass before had one too."""
        if not self._warned:
            logger.warning("%s", text)
        self._warned = True


def _text(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.1f} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="python -m kvist_epp.sidecars.disk_cleaner", description=__doc__)
    parser.add_argument("folder", help="folder of the file-system tier")
    parser.add_argument("--limit", type=int, required=True, metavar="BYTES", help="size of its volume")
    parser.add_argument("--high", type=int, default=85, metavar="PERCENT", help="removal begins above")
    parser.add_argument("--low", type=int, default=75, metavar="PERCENT", help="removal ends at")
    parser.add_argument("--create", action="store_true", help="make the folder if it is not there")
    given = parser.parse_args(argv)
    if not 0 < given.low < given.high < 100 or given.limit <= 0:
        parser.error("--limit is above 0, and 0 < --low < --high < 100")
    if given.create:
        try:
            Path(given.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{given.folder} cannot be made: {error.strerror}")
    if not Path(given.folder).is_dir():
        parser.error(f"{given.folder} is not a folder")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    marks = Watermarks(
        low=given.limit * given.low // 100, high=given.limit * given.high // 100, limit=given.limit
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logger.info("keeps %s between %s and %s", given.folder, _text(marks.low), _text(marks.high))
    DiskCleaner(given.folder, marks).run(stop)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
