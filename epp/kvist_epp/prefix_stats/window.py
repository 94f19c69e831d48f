"""The last ten minutes, cut in pieces that fade one by one. Pure; the clock is a parameter."""

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

WINDOW_SECONDS: Final = 600.0
PIECES: Final = 20

T = TypeVar("T")


class Window(Generic[T]):
    """Pieces of 30 seconds, each with what was noted in it.

    What was noted at ``t`` is there as long as fewer than 20 borders of pieces lie between ``t`` and now: for
    9.5 to 10 minutes.
    """

    __slots__ = ("_make", "_newest", "_pieces", "_seconds", "_until")

    def __init__(self, make: Callable[[], T], seconds: float = WINDOW_SECONDS, pieces: int = PIECES) -> None:
        self._make = make
        self._newest = make()
        self._seconds = seconds / pieces
        self._pieces: deque[tuple[int, T]] = deque(maxlen=pieces)
        self._until = -math.inf
        """When the newest piece is over."""

    def at(self, now: float) -> T:
        """The piece of this moment, to be written to; time that runs backwards stays in the newest."""
        if now >= self._until:
            number = self._number(now)
            self._newest, self._until = self._make(), (number + 1) * self._seconds
            self._pieces.append((number, self._newest))
        return self._newest

    def live(self, now: float) -> list[T]:
        """Pieces that have not faded, oldest first."""
        pieces = self._pieces
        newest = max(self._number(now), pieces[-1][0] if pieces else 0)
        return [piece for number, piece in pieces if newest - number < (pieces.maxlen or 0)]

    def all(self) -> list[T]:
        """Every piece that is still kept, faded or not."""
        return [piece for _, piece in self._pieces]

    def _number(self, now: float) -> int:
        return math.floor(now / self._seconds)
