"""How often each beginning of prompts was asked for in the last moments. Pure; the clock is a parameter.

A copy of a beginning on one more pod is worth its work when others will use it there. Who is asked for sixty
times a second has sixty uses to share the work among; a conversation that goes on has none, and a burst of
one prompt is over before a copy could serve it.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import exp
from typing import Final, NamedTuple

USE_SECONDS: Final = 1.0
"""A use counts for so long (an exponential's time constant): as long as one pod takes to fall behind. 0.3 s
and 1 s differ little (``docs/decisions/0014``)."""
BURST_SECONDS: Final = 0.05
"""What comes within this of the first is one burst, and counts when the burst is over: many answers to one
prompt come together, and none asks for it again. Counted at once they made copies for nothing: 82 % of
the tokens of ``rollouts`` were cached, with this 92 % (``docs/decisions/0015``)."""
PLACES: Final = 8_192
"""Beginnings remembered; of those that go, the last use is longest ago."""


class _Count(NamedTuple):
    settled: float
    """Uses before the burst …"""
    at: float
    """… as of then."""
    burst: int
    since: float


class RecentUses:
    """By place: whatever tells one beginning from another."""

    __slots__ = ("_places", "replicas")

    def __init__(self) -> None:
        self.replicas = 1
        """Of the picker: each sees its share of the uses, so it looks back as many times as long. To multiply
        what it sees in a second would make three of one, and cold prefixes look hot."""
        self._places: OrderedDict[Hashable, _Count] = OrderedDict()
        """Least recent first."""

    def __len__(self) -> int:
        return len(self._places)

    def decayed_count(self, place: Hashable, now: float) -> float:
        """Return the uses in ``USE_SECONDS``, older ones fading, the present burst left out."""
        count = self._places.get(place)
        if count is None:
            return 0.0
        over = count.burst if now - count.since >= BURST_SECONDS else 0
        return count.settled * self._faded(now - count.at) + over * self._faded(now - count.since)

    def record(self, place: Hashable, now: float) -> None:
        """Count a use."""
        count = self._places.get(place)
        if count is None or now - count.since >= BURST_SECONDS:
            count = _Count(self.decayed_count(place, now), now, 0, now)
        self._places[place] = count._replace(burst=count.burst + 1)
        self._places.move_to_end(place)
        if len(self._places) > PLACES:
            self._places.popitem(last=False)

    def _faded(self, seconds: float) -> float:
        return exp(-seconds / (USE_SECONDS * self.replicas))
