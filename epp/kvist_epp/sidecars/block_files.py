"""The files of an engine's file-system tier: the walk through its folder, and the least recently used blocks.

The last use of a file is its access time or, if later, its modification time: vLLM writes a file once. File
systems mounted with ``relatime``, which is usual, record a read only where the access time is older than the
change time (or a day old), so a walk that finds a recorded read sets the same times again: that renews the
change time, and the next read is recorded again.
"""

import heapq
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

BLOCK: Final = ".bin"
"""Suffix of a block's file; other files, such as the tier's config.json, are never removed."""
GROUP: Final = re.compile(r"/[0-9a-f]{3}/[0-9a-f]{2}_g[0-9]+/[^/]+$")
"""End of the path of a block's file, ``<hhh>/<hh>_g<group>/<hash>.bin`` (``file_mapper.py`` of vLLM): weights
are called ``.bin``, too, and may be in a folder that was given by mistake."""
UNFINISHED: Final = ".tmp"
"""Suffix of a file that is being written."""
ABANDONED_SECONDS: Final = 600.0
"""Age after which an unfinished file is of an engine that died: a block of a few MiB takes less than a
second."""
STEP: Final = 256
"""Files between two calls of the caller during a walk."""
STAT_BLOCK: Final = 512
"""Bytes of one block of ``st_blocks``, on any file system."""

OldFile = tuple[int, str]
"""Nanosecond of the last use (0: an abandoned file), and path."""


@dataclass(slots=True)
class FolderWalk:
    """Sizes, in bytes on disk, and the oldest files of one walk through a folder."""

    most: int
    """Largest number of files that are remembered."""
    total: int = 0
    files: int = 0
    _oldest: list[OldFile] = field(default_factory=list)
    """A heap by minus the last use; its first entry is the youngest."""

    def remember(self, used: int, path: str) -> None:
        """Keep a file if it is among the oldest so far."""
        heap = self._oldest
        if len(heap) < self.most:
            heapq.heappush(heap, (-used, path))
        elif -used > heap[0][0]:
            heapq.heapreplace(heap, (-used, path))

    def take_oldest(self) -> list[OldFile]:
        """Return the oldest files so far, the oldest last, and forget them; another thread may go on."""
        heap, self._oldest = self._oldest, []
        return [(-negative, path) for negative, path in sorted(heap)]


def walk(folder: str, result: FolderWalk, each_step: Callable[[], object]) -> None:
    """Walk through a folder and fill ``result``; call ``each_step`` after every 256 files."""
    renew = bool(os.statvfs(folder).f_flag & os.ST_RELATIME)
    abandoned = time.time_ns() - int(ABANDONED_SECONDS * 1e9)
    for number, (path, seen) in enumerate(_files(folder, result), 1):
        result.files += 1
        result.total += size_on_disk(seen)
        ours = path.endswith((BLOCK, UNFINISHED)) and GROUP.search(path)
        if ours and path.endswith(BLOCK):
            result.remember(last_use(seen), path)
            if renew and seen.st_atime_ns > seen.st_mtime_ns and seen.st_atime_ns > seen.st_ctime_ns:
                with suppress(OSError):
                    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns), follow_symlinks=False)
        elif ours and seen.st_mtime_ns < abandoned:
            result.remember(0, path)
        if number % STEP == 0:
            each_step()


def last_use(seen: os.stat_result) -> int:
    """Return the nanosecond of a file's last recorded read or write, since 1970."""
    return max(seen.st_atime_ns, seen.st_mtime_ns)


def size_on_disk(seen: os.stat_result) -> int:
    """Return the bytes that a file takes on disk, as the kubelet counts them."""
    return seen.st_blocks * STAT_BLOCK


def _files(folder: str, result: FolderWalk) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder; folders count only for the total. What vanishes is left out."""
    folders = [folder]
    while folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    seen = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(seen.st_mode):
                        result.total += size_on_disk(seen)
                        folders.append(entry.path)
                    else:
                        yield entry.path, seen
