"""Which pool is looked at next, and when. Pure: the time is told.

A pool is looked at by one at a time. What happens meanwhile is not lost: it is looked at again. The earliest
time that anybody asked for counts.
"""

import heapq
from typing import Final, Generic, TypeVar

FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 300.0

Key = TypeVar("Key")


class Schedule(Generic[Key]):
    """Keys and the times at which they are due, in seconds of any clock."""

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
        """Keys that are being looked at."""
        return len(self._busy)

    def add(self, key: Key, at: float) -> None:
        """Due then, or earlier if it is due earlier already."""
        if self._due.get(key, at + 1) <= at:
            return
        self._due[key] = at
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, key))

    def pop(self, now: float) -> Key | None:
        """One that is due and not being looked at; it is being looked at from now on."""
        held: list[tuple[float, int, Key]] = []
        found: Key | None = None
        while self._heap and self._heap[0][0] <= now:
            at, serial, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue  # asked for again, earlier, or taken
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
        """When the next one is due that is not being looked at; None = nothing is."""
        free = [at for key, at in self._due.items() if key not in self._busy]
        return min(free, default=None)

    def done(self, key: Key) -> None:
        """It has been looked at, and all is well."""
        self._busy.discard(key)
        self._failures.pop(key, None)

    def failed(self, key: Key) -> float:
        """It has been looked at, and did not end well: seconds to wait, doubled each time."""
        self._busy.discard(key)
        count = self._failures[key] = self._failures.get(key, 0) + 1
        return min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(count - 1, 20))
