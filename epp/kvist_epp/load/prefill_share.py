"""The share of an endpoint's time that it spends on prompts, by what was sent there. Pure."""

from math import exp
from typing import Final

MEMORY_SECONDS: Final = 10.0
"""Time constant of the exponential mean: a few prompts of a busy endpoint, and less than most answers
take."""


class PrefillShare:
    """Prefill seconds sent to one endpoint, fading with time."""

    __slots__ = ("noted_at", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of prefill, faded until …"""
        self.noted_at = 0.0
        """… this time: that of the newest prompt."""

    def add(self, seconds: float, now: float) -> None:
        """Add a prompt that takes ``seconds`` of undisturbed prefill."""
        self.seconds = self._faded(now) + seconds
        self.noted_at = max(self.noted_at, now)

    def at(self, now: float) -> float:
        """Return the share at this time: 0 without prompts; 1 and more where they come faster than they can
        be computed.

        Example: prompts of 0.5 s that come once a second have the share 0.5 after some ``MEMORY_SECONDS``.
        """
        return self._faded(now) / MEMORY_SECONDS

    def _faded(self, now: float) -> float:
        return self.seconds * exp(min(0.0, self.noted_at - now) / MEMORY_SECONDS)
