"""A sliding window: the last ten minutes in slots that expire one by one. Pure; the clock is a parameter."""

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

WINDOW_SECONDS: Final = 600.0
SLOTS: Final = 20

T = TypeVar("T")


class Window(Generic[T]):
    """Slots of 30 seconds, each with a record of type ``T`` of what happened in it.

    A slot is live while fewer than 20 slot boundaries lie between it and now: for 9.5 to 10 minutes.
    """

    __slots__ = ("_make", "_newest", "_seconds", "_slots", "_until")

    def __init__(self, make: Callable[[], T], seconds: float = WINDOW_SECONDS, slots: int = SLOTS) -> None:
        """``make`` returns the empty record of a new slot."""
        self._make = make
        self._newest = make()
        self._seconds = seconds / slots
        self._slots: deque[tuple[int, T]] = deque(maxlen=slots)
        self._until = -math.inf
        """End of the newest slot."""

    def current(self, now: float) -> T:
        """Return the record of the slot that contains ``now``, to be written to.

        If the clock runs backwards, this is the newest slot.
        """
        if now >= self._until:
            number = math.floor(now / self._seconds)
            self._newest, self._until = self._make(), (number + 1) * self._seconds
            self._slots.append((number, self._newest))
        return self._newest

    def live(self, now: float) -> list[T]:
        """Return the records of slots that have not expired, oldest first."""
        slots = self._slots
        newest = max(math.floor(now / self._seconds), slots[-1][0] if slots else 0)
        return [record for number, record in slots if newest - number < (slots.maxlen or 0)]

    def all(self) -> list[T]:
        """Return all records in memory, expired ones included."""
        return [record for _, record in self._slots]
