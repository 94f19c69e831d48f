"""Deadlines of queued requests, and the rate at which the pool takes requests up. Pure.

Every clock is a parameter.
"""

from math import ceil
from typing import Final

RATE_SECONDS: Final = 10.0
"""Time over which the dispatch rate is averaged."""


class QueueDeadlines:
    """Deadlines of queued requests: the wait for capacity, and for an empty pool to get an endpoint.

    Each of the two has its own clock, which runs only while the pool is in that state. A request that waited
    two minutes for the first endpoint still has its whole time to wait for capacity on it; and requests
    become too old in the order they came.
    """

    __slots__ = ("_at", "_capacity_seconds", "_empty", "_empty_seconds", "_waited_capacity", "_waited_empty")

    def __init__(self, capacity_seconds: float, empty_seconds: float, now: float) -> None:
        self._capacity_seconds = capacity_seconds
        self._empty_seconds = empty_seconds
        self._waited_capacity = self._waited_empty = 0.0
        self._empty = False
        self._at = now

    @property
    def pool_empty(self) -> bool:
        """True if the pool has no endpoint."""
        return self._empty

    def observe(self, now: float, *, pool_empty: bool) -> None:
        """Set the state from now on; the time since the last call counts as the state set then."""
        self._advance(now)
        self._empty = pool_empty

    def stamp(self, now: float) -> tuple[float, float]:
        """Return what both clocks show, to be kept by a request that begins to wait."""
        self._advance(now)
        return self._waited_capacity, self._waited_empty

    def seconds_left(self, stamp: tuple[float, float], now: float) -> float:
        """Return the seconds that a request with this stamp may go on waiting; not above 0: it is too old."""
        self._advance(now)
        if self._empty:
            return stamp[1] + self._empty_seconds - self._waited_empty
        return stamp[0] + self._capacity_seconds - self._waited_capacity

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._at)
        self._at = max(now, self._at)
        if self._empty:
            self._waited_empty += elapsed
        else:
            self._waited_capacity += elapsed


class DispatchRate:
    """Requests picked per second, averaged so that the last ten seconds weigh most."""

    __slots__ = ("_at", "_picked", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self._picked = 0
        self._at: float | None = None

    def observe(self, picked: int, now: float) -> None:
        """Update the rate; ``picked``: number of requests picked until now."""
        if self._at is not None and now > self._at:
            share = min(1.0, (now - self._at) / RATE_SECONDS)
            self.rate += share * ((picked - self._picked) / (now - self._at) - self.rate)
        self._picked, self._at = picked, now

    def seconds(self, requests: int, low: int, high: int) -> int:
        """Return the whole seconds until ``requests`` are picked, within the bounds; ``high`` if none are."""
        return max(low, min(high, ceil(requests / self.rate))) if self.rate * high > 1 else high
