"""How long requests may wait, and how fast the pool takes them up. Pure; every clock is a parameter."""

from math import ceil
from typing import Final

PACE_SECONDS: Final = 10.0
"""Over so much time the pace is averaged."""


class Patience:
    """How long anybody may wait: for room, and for a pool without endpoints to get one.

    Each has its own clock, which runs only while the pool is so. A request that waited two minutes for the
    first pod still has its whole time to wait for room on it; and all become too old in the order they came.
    """

    __slots__ = ("_at", "_empty", "_empty_seconds", "_room_seconds", "_waited_empty", "_waited_room")

    def __init__(self, room_seconds: float, empty_seconds: float, now: float) -> None:
        self._room_seconds = room_seconds
        self._empty_seconds = empty_seconds
        self._waited_room = self._waited_empty = 0.0
        self._empty = False
        self._at = now

    @property
    def empty(self) -> bool:
        """The pool has no endpoint."""
        return self._empty

    def regard(self, now: float, *, empty: bool) -> None:
        """The time since the last call was as said then; from now on it is as said."""
        self._advance(now)
        self._empty = empty

    def stamp(self, now: float) -> tuple[float, float]:
        """What both clocks show, to be kept by who comes now."""
        self._advance(now)
        return self._waited_room, self._waited_empty

    def left(self, stamp: tuple[float, float], now: float) -> float:
        """Seconds that who came then may go on waiting, as the pool is; not above 0: too old."""
        self._advance(now)
        if self._empty:
            return stamp[1] + self._empty_seconds - self._waited_empty
        return stamp[0] + self._room_seconds - self._waited_room

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._at)
        self._at = max(now, self._at)
        if self._empty:
            self._waited_empty += elapsed
        else:
            self._waited_room += elapsed


class Pace:
    """Requests picked per second, averaged so that the last ten seconds weigh most."""

    __slots__ = ("_at", "_picked", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self._picked = 0
        self._at: float | None = None

    def observe(self, picked: int, now: float) -> None:
        """So many were picked until now."""
        if self._at is not None and now > self._at:
            share = min(1.0, (now - self._at) / PACE_SECONDS)
            self.rate += share * ((picked - self._picked) / (now - self._at) - self.rate)
        self._picked, self._at = picked, now

    def seconds(self, requests: int, low: int, high: int) -> int:
        """Whole seconds in which so many are picked, within bounds; the upper one where none are."""
        return max(low, min(high, ceil(requests / self.rate))) if self.rate * high > 1 else high
