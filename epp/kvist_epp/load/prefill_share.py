"""The share of an endpoint's time that it spends on prompts, by what was sent there. Pure."""

from collections.abc import Iterable
from math import exp
from typing import Final

import numpy as np
from numpy.typing import NDArray

MEMORY_SECONDS: Final = 10.0
"""Time constant of the exponential mean: a few prompts of a busy endpoint, and less than most answers
take."""


class PrefillShare:
    """Prefill seconds sent to one endpoint, fading with time."""

    __slots__ = ("_at", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Add a prompt that takes ``seconds`` of undisturbed prefill."""
        self._seconds = self._faded(now) + seconds
        self._at = max(self._at, now)

    def at(self, now: float) -> float:
        """Return the share at this time: 0 without prompts; 1 and more where they come faster than they can
        be computed.

        Example: prompts of 0.5 s that come once a second have the share 0.5 after some ``MEMORY_SECONDS``.
        """
        return self._faded(now) / MEMORY_SECONDS

    @staticmethod
    def of_all(shares: Iterable["PrefillShare"], now: float) -> NDArray[np.float64]:
        """Return the shares of many endpoints at this time."""
        seconds, at = np.array([(one._seconds, one._at) for one in shares], dtype=np.float64).reshape(-1, 2).T
        found: NDArray[np.float64] = (
            seconds * np.exp(np.minimum(0.0, at - now) / MEMORY_SECONDS) / MEMORY_SECONDS
        )
        return found

    def _faded(self, now: float) -> float:
        return self._seconds * exp(min(0.0, self._at - now) / MEMORY_SECONDS)
