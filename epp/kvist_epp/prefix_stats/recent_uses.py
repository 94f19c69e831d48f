"""Number of recent uses of each prefix, decayed exponentially. Pure; the clock is a parameter.

Copying a prefix to one more endpoint pays if other requests will use the copy. A prefix requested sixty times
a second has sixty uses to share the cost among. A conversation that continues has none, and a burst of
identical prompts is over before a copy could serve it.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import exp
from typing import Final

import msgspec

USE_SECONDS: Final = 1.0
"""Time constant of the exponential decay: about the time in which one endpoint falls behind. 0.3 s and 1 s
differ little (``docs/decisions/0014``)."""
BURST_SECONDS: Final = 0.05
"""Uses within this time of the first form one burst, and count once the burst is over: many completions of
one prompt arrive together, and none follows. When they counted at once they caused useless copies: 82 % of
the tokens of ``rollouts`` were cached, against 92 % with this rule (``docs/decisions/0015``)."""
PLACES: Final = 8_192
"""Prefixes kept in memory; the least recently used one is removed first."""


class _Count(msgspec.Struct, frozen=True, gc=False):
    settled: float
    """Decayed uses before the burst, as of ``at``."""
    at: float
    burst: int
    """Uses in the burst that began at ``since``."""
    since: float


class RecentUses:
    """Decayed counts by place: any key that identifies a prefix."""

    __slots__ = ("_places", "replicas")

    def __init__(self) -> None:
        self.replicas = 1
        """Number of picker replicas. Each sees only its share of the uses, so the time constant is multiplied
        by it. Multiplying the count instead would make three uses of one: cold prefixes would look hot."""
        self._places: OrderedDict[Hashable, _Count] = OrderedDict()
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._places)

    def decayed_count(self, place: Hashable, now: float) -> float:
        """Return the decayed number of uses, without those of the present burst.

        For a steady rate this is the number of uses in ``USE_SECONDS``.
        """
        count = self._places.get(place)
        return 0.0 if count is None else self._decayed(count, now)

    def _decayed(self, count: _Count, now: float) -> float:
        seconds = USE_SECONDS * self.replicas
        burst = count.burst if now - count.since >= BURST_SECONDS else 0
        return count.settled * exp((count.at - now) / seconds) + burst * exp((count.since - now) / seconds)

    def record(self, place: Hashable, now: float) -> None:
        """Count a use."""
        places = self._places
        count = places.pop(place, None)
        if count is None:
            count = _Count(0.0, now, 1, now)
        elif now - count.since >= BURST_SECONDS:
            count = _Count(self._decayed(count, now), now, 1, now)
        else:
            count = _Count(count.settled, count.at, count.burst + 1, count.since)
        places[place] = count
        if len(places) > PLACES:
            places.popitem(last=False)
