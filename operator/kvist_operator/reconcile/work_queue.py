"""Which pool is reconciled next, and when. Pure: callers pass the time.

A key is processed by one worker at a time. If it is added meanwhile, it is processed again. Of several times
at which a key is due the earliest counts.
"""

import heapq
from typing import Final, Generic, TypeVar

from kvist_kube.backoff import backoff_seconds

FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 300.0

Key = TypeVar("Key")


class WorkQueue(Generic[Key]):
    """Keys with the times at which they are due, in seconds of any clock."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._due)

    @property
    def busy(self) -> int:
        """Number of keys that are being processed."""
        return len(self._busy)

    def add(self, key: Key, at: float) -> None:
        """Make a key due at this time, unless it is due earlier."""
        if self._due.get(key, at + 1) <= at:
            return
        self._due[key] = at
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, key))

    def pop(self, now: float) -> Key | None:
        """Return a key that is due and not being processed, and mark it as being processed; None when there
        is none."""
        held: list[tuple[float, int, Key]] = []
        found: Key | None = None
        while self._heap and self._heap[0][0] <= now:
            at, serial, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue  # added again for an earlier time, or taken
            if key in self._busy:
                held.append((at, serial, key))
                continue
            del self._due[key]
            self._busy.add(key)
            found = key
            break
        for entry in held:
            heapq.heappush(self._heap, entry)
        return found

    def next_at(self) -> float | None:
        """Return the time at which the next key is due that is not being processed; None when there is
        none."""
        free = [at for key, at in self._due.items() if key not in self._busy]
        return min(free, default=None)

    def done(self, key: Key) -> None:
        """Mark a key as processed successfully."""
        self._busy.discard(key)
        self._failures.pop(key, None)

    def failed(self, key: Key) -> float:
        """Mark a key as failed; return the seconds to wait, which double each time."""
        self._busy.discard(key)
        count = self._failures[key] = self._failures.get(key, 0) + 1
        return backoff_seconds(count, first=FIRST_SECONDS, longest=LONGEST_SECONDS)
