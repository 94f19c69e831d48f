"""The disk cleaner: keeps the folder of an engine's file-system tier below a bound, beside the engine.

vLLM's tier (``vllm/v1/kv_offload/tiering/fs``, 0.32) writes one file for each block and never deletes any. It
opens a file for each read, and a file that is gone is a miss whose block is computed again, so that any block
may be unlinked at any time. A block is written to ``….tmp`` and renamed.

A pass walks through the folder and remembers the files that were used least recently. Where the folder has
grown above the high watermark, it unlinks those, oldest first, down to the low watermark. The less room is
left, the sooner comes the next pass; the free space of the file system would tell nothing, because others use
the disk of a node too. The last use of a file is its access
time or, if later, its modification time: vLLM writes a file once. File systems mounted with ``relatime``,
which is usual, record a read only where the access time is older than the change time (or a day old), so a
pass that finds a recorded read sets the same times again: that renews the change time, and the next read is
recorded again.

The program needs only the standard library, and the user of the engine, who owns the files.
"""

import argparse
import heapq
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

BLOCK: Final = ".bin"
"""Suffix of a block's file; other files, such as the tier's config.json, are never removed."""
UNFINISHED: Final = ".tmp"
"""Suffix of a file that is being written."""
ABANDONED_SECONDS: Final = 600.0
"""Age after which an unfinished file is of an engine that died: a block of a few MiB takes less than a
second."""
CANDIDATES: Final = 65_536
"""Most files that a pass remembers: the process then takes 36 MiB, whatever the folder has."""
SPEED: Final = 4 << 30
"""Bytes per second that the engine may write: 4 GiB, what fast NVMe drives take."""
SHORTEST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 60.0
PAUSE_FACTOR: Final = 3
"""A pause lasts at least this many times as long as the walk before it, which bounds the use of the CPU."""
STEP: Final = 256
"""Files between two pauses of a pass that is not urgent; a pause is as long as the work before it."""
STAT_BLOCK: Final = 512
"""Bytes of one block of ``st_blocks``, on any file system."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Sizes in bytes: removal begins above ``high`` and ends at ``low``; ``limit`` is that of the volume."""

    low: int
    high: int
    limit: int


@dataclass(slots=True)
class Pass:
    """Result of one pass: what it found and removed, in bytes on disk."""

    total: int = 0
    """Size of everything in the folder, after removal."""
    found: int = 0
    """Size before removal."""
    files: int = 0
    removed: int = 0
    """Number of files."""
    newest_removed: float = 0.0
    """Last use, in seconds since 1970, of the most recently used file among those removed."""
    seconds: float = 0.0
    walk_seconds: float = 0.0
    """Duration of the last walk alone."""


@dataclass(slots=True)
class _FolderWalk:
    """Sizes and the oldest files of one walk through the folder."""

    total: int = 0
    files: int = 0
    oldest: list[tuple[int, str]] = field(default_factory=list)
    """A heap of (minus the nanosecond of the last use, path); its first entry is the youngest."""


class DiskCleaner:
    """Keeps one folder between two watermarks."""

    def __init__(
        self,
        folder: str,
        watermarks: Watermarks,
        *,
        candidates: int = CANDIDATES,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._folder = folder
        self._marks = watermarks
        self._candidates = candidates
        self._sleep = sleep
        self._warned = False

    def clean(self, *, urgent: bool = True) -> Pass:
        """Walk through the folder and remove the least recently used files if there is too much.

        ``urgent``: without pauses; a pass that is not takes at most half a core.
        """
        begun = time.monotonic()
        made = Pass()
        while True:
            started = time.monotonic()
            walk = self._walk(urgent=urgent)
            made.walk_seconds = time.monotonic() - started
            made.files, made.total = walk.files, walk.total
            made.found = made.found or walk.total
            if walk.total <= (self._marks.low if made.removed else self._marks.high):
                break
            removed = self._remove(walk, made)
            made.files -= removed
            if made.total <= self._marks.low or not removed:
                break
        made.seconds = time.monotonic() - begun
        return made

    def run(self, stop: threading.Event) -> None:
        """Clean again and again until the event is set."""
        pause = 0.0
        while not stop.wait(pause):
            made = self.clean(urgent=pause < 1.0)
            self._report(made)
            pause = self.pause_after(made)

    def pause_after(self, made: Pass) -> float:
        """Return the seconds until the next pass: by then at most half of the room up to the limit is used.

        After a removal, during which the engine went on writing, it comes at once.
        """
        if made.removed:
            return max(SHORTEST_PAUSE, made.walk_seconds)
        until_half = (self._marks.limit - made.total) / 2 / SPEED
        return min(max(SHORTEST_PAUSE, until_half, PAUSE_FACTOR * made.walk_seconds), LONGEST_PAUSE)

    def _walk(self, *, urgent: bool) -> _FolderWalk:
        found, renew = _FolderWalk(), bool(os.statvfs(self._folder).f_flag & os.ST_RELATIME)
        abandoned = time.time_ns() - int(ABANDONED_SECONDS * 1e9)
        begun = time.monotonic()
        for number, (path, seen) in enumerate(_files(self._folder, found), 1):
            found.files += 1
            found.total += seen.st_blocks * STAT_BLOCK
            if path.endswith(BLOCK):
                self._remember(found, last_use(seen), path)
                if renew and seen.st_atime_ns > seen.st_mtime_ns and seen.st_atime_ns > seen.st_ctime_ns:
                    with suppress(OSError):
                        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns), follow_symlinks=False)
            elif path.endswith(UNFINISHED) and seen.st_mtime_ns < abandoned:
                self._remember(found, 0, path)
            if number % STEP == 0 and not urgent:
                self._sleep(time.monotonic() - begun)
                begun = time.monotonic()
        return found

    def _remember(self, found: _FolderWalk, used: int, path: str) -> None:
        if len(found.oldest) < self._candidates:
            heapq.heappush(found.oldest, (-used, path))
        elif -used > found.oldest[0][0]:
            heapq.heapreplace(found.oldest, (-used, path))

    def _remove(self, walk: _FolderWalk, made: Pass) -> int:
        """Unlink the oldest files down to the low watermark; return how many."""
        count = 0
        for negative, path in sorted(walk.oldest, reverse=True):
            if made.total <= self._marks.low:
                break
            try:
                seen = os.lstat(path)
                if last_use(seen) > -negative > 0:
                    continue  # used meanwhile
                Path(path).unlink()
            except FileNotFoundError:
                continue  # vLLM removes files that are too short
            except OSError as error:
                self._warn(f"{path} cannot be removed: {error.strerror}")
                continue
            made.total -= seen.st_blocks * STAT_BLOCK
            made.newest_removed = max(made.newest_removed, -negative / 1e9)
            made.removed += 1
            count += 1
            with suppress(OSError):  # another block is in it
                Path(path).parent.rmdir()
        return count

    def _report(self, made: Pass) -> None:
        marks = self._marks
        if made.removed:
            age = max(0.0, time.time() - made.newest_removed)
            logger.info(
                "removed %d blocks, last used at least %.0f s ago: %s of %s are in use (%.1f s)",
                *(made.removed, age, _text(made.total), _text(marks.limit), made.seconds),
            )
        if made.found > marks.limit:
            self._warn(
                f"the folder had {_text(made.found)}, more than the volume's {_text(marks.limit)}: blocks "
                "are written faster than they are removed; raise spec.offload.disk"
            )
        elif made.total > marks.high:
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


def last_use(seen: os.stat_result) -> int:
    """Return the nanosecond of a file's last recorded read or write, since 1970."""
    return max(seen.st_atime_ns, seen.st_mtime_ns)


def _files(folder: str, found: _FolderWalk) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder; folders count only for the total. What vanishes is left out."""
    folders = [folder]
    while folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    seen = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(seen.st_mode):
                        found.total += seen.st_blocks * STAT_BLOCK
                        folders.append(entry.path)
                    else:
                        yield entry.path, seen


def _text(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.1f} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; return 2 for invalid arguments."""
    parser = argparse.ArgumentParser(prog="python -m kvist_epp.disk_cleaner", description=__doc__)
    parser.add_argument("folder", help="folder of the file-system tier")
    parser.add_argument("--limit", type=int, required=True, metavar="BYTES", help="size of its volume")
    parser.add_argument("--high", type=int, default=85, metavar="PERCENT", help="removal begins above")
    parser.add_argument("--low", type=int, default=75, metavar="PERCENT", help="removal ends at")
    given = parser.parse_args(argv)
    if not 0 < given.low < given.high < 100 or given.limit <= 0:
        parser.error("--limit is above 0, and 0 < --low < --high < 100")
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
