"""Whose turn it is to be asked for again, while a pool is short of caches. Pure.

A pool that misses a pod misses its cache too, and a pod that is new holds little; engines evict what was not
asked for longest, hot or not. To be asked for is what keeps a beginning: it costs the pod one block.
"""

from collections import deque
from typing import Final

from kvist_epp.prefix_stats.hot_prefixes import Beginning, Hot, Place

ROUND_SECONDS: Final = 15.0
"""In which each hot beginning has its turn once: caches near their capacity keep what nobody asks for about
three times as long (``groups`` of ``kvist bench handover``)."""


class Rounds:
    """One round after the other, each beginning of it at its time."""

    def __init__(self, hot: Hot) -> None:
        self._hot = hot
        self._left: deque[tuple[Place, int]] = deque()
        self._next = 0.0
        """When the first of them has its turn."""
        self._gap = ROUND_SECONDS

    def due(self, budget: int, now: float) -> list[Beginning]:
        """Those whose time has come since the last call, of the hottest within ``budget`` tokens."""
        found = []
        while now >= self._next:
            if not self._left and not self._begin(budget, now):
                break
            place, matches = self._left.popleft()
            if place[1] <= len(place[0].hashes):
                found.append(self._hot.beginning(place, matches))
            self._next += self._gap
        return found

    def _begin(self, budget: int, now: float) -> bool:
        """Another round; False: nothing is hot."""
        self._left.extend(self._hot.places(budget, now))
        self._gap = ROUND_SECONDS / max(1, len(self._left))
        self._next = now if self._left else now + ROUND_SECONDS
        return bool(self._left)

    def stop(self) -> None:
        """The next one begins anew."""
        self._left.clear()
        self._next = 0.0
