"""How often each beginning of prompts was asked for in the last moments. Pure; the clock is a parameter.

A copy of a beginning on one more pod is worth its work when others will use it there. Who is asked for sixty
times a second has sixty uses to share the work among; a conversation that goes on has none.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import exp
from typing import Final

USE_SECONDS: Final = 1.0
"""A use counts for so long (an exponential's time constant): as long as one pod takes to fall behind. 0.3 s
and 1 s differ little (``docs/decisions/0014``)."""
PLACES: Final = 8_192
"""Beginnings remembered; of those that go, the last use is longest ago."""


class Uses:
    """By place: whatever tells one beginning from another."""

    __slots__ = ("_places", "replicas")

    def __init__(self) -> None:
        self.replicas = 1
        """Of the picker: each sees its share of the uses, so it looks back as many times as long. To multiply
        what it sees in a second would make three of one, and cold prefixes look hot."""
        self._places: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """Place → (uses, as of when), least recent first."""

    def __len__(self) -> int:
        return len(self._places)

    def lately(self, place: Hashable, now: float) -> float:
        """Uses in ``USE_SECONDS``, older ones fading."""
        uses, at = self._places.get(place, (0.0, now))
        return uses * exp((at - now) / (USE_SECONDS * self.replicas))

    def note(self, place: Hashable, now: float) -> None:
        """It was asked for once more."""
        self._places[place] = self.lately(place, now) + 1.0, now
        self._places.move_to_end(place)
        if len(self._places) > PLACES:
            self._places.popitem(last=False)
