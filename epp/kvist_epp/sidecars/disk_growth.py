"""The growth of a folder between two walks, from the use of its file system.

A walk through a large folder takes seconds; one call of ``statvfs`` takes microseconds. On a file system that
others use too, their growth counts as growth of the folder: an upper estimate, which the next walk corrects.
Only where others free space at the same moment does the estimate miss something, until the next walk.
"""

import os
from collections.abc import Callable
from typing import Final

DECAY: Final = 0.9
"""Part of the largest step that is left after each walk, so that it is forgotten."""


class DiskGrowth:
    """The growth of a folder since it was counted, and the most of it between two looks."""

    def __init__(self, used_bytes: Callable[[], int]) -> None:
        self._used_bytes = used_bytes
        self._base = self._last = used_bytes()
        self.largest_step = 0.0
        """Bytes, the most between two looks: fast writes and a busy machine make it large."""

    def grown(self) -> int:
        """Look; return the bytes by which the folder has grown at most since it was counted."""
        used = self._used_bytes()
        self.largest_step = max(self.largest_step, used - self._last)
        self._last = used
        self._base = min(self._base, used)
        return used - self._base

    def freed(self, size: int) -> None:
        """Take note of bytes that the cleaner itself has freed."""
        self._base -= size
        self._last -= size

    def counted(self, grown_meanwhile: int) -> None:
        """Begin anew after a walk, during which the folder grew by so much."""
        self._base = self._used_bytes() - grown_meanwhile
        self.largest_step *= DECAY


def used_bytes(folder: str) -> int:
    """Return the bytes in use on the file system of a folder."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize
