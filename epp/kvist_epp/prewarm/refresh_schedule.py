"""Schedule in which hot prefixes are requested again while endpoints are missing. Pure.

With an endpoint its cache is gone too, and a new endpoint holds little. Engines evict what was not requested
for longest, hot or not. A request keeps a prefix in the cache, at the cost of one block.
"""

from collections import deque
from typing import Final

from kvist_epp.prefix_stats.hot_prefixes import HotPrefix, HotPrefixes, Place

ROUND_SECONDS: Final = 15.0
"""Time in which each hot prefix is due once: caches near their capacity keep what is not requested about
three times as long (``groups`` of ``kvist bench prewarm``)."""


class RefreshSchedule:
    """Rounds, one after the other, in each of which every hot prefix is due once."""

    def __init__(self, hot: HotPrefixes) -> None:
        self._hot = hot
        self._places: deque[tuple[Place, int]] = deque()
        """Places left in this round, with their matches."""
        self._next_at = 0.0
        """Time at which the first of them is due."""
        self._gap = ROUND_SECONDS

    def poll(self, budget: int, now: float) -> list[HotPrefix]:
        """Return the prefixes due since the last call, of the hottest within ``budget`` tokens."""
        found = []
        while now >= self._next_at:
            if not self._places:
                self._places.extend(self._hot.places(budget, now))
                self._gap = ROUND_SECONDS / max(1, len(self._places))
                if not self._places:
                    self._next_at = now + ROUND_SECONDS
                    break
                self._next_at = now
            place, matches = self._places.popleft()
            whole = place[1] <= len(place[0].hashes)
            if whole and (prefix := self._hot.prefix_at(place, matches)) is not None:
                found.append(prefix)
            self._next_at += self._gap
        return found

    def reset(self) -> None:
        """Start a new round at the next call of ``poll``."""
        self._places.clear()
        self._next_at = 0.0
