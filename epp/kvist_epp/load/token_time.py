"""The time of a token on one endpoint while no prompt is computed, and what each sequence adds to it. Pure.

A decode step reads the weights once, and the keys and values of each of its sequences. Where sequences are
packed on few endpoints, one of these gets more of them between two scrapes than it had, and would look as
free as before.
"""

from typing import Final

CALM: Final = 0.2
"""Share of the time that prompts may have taken for a token's time to count as the least: what prompts took
is an estimate."""


class TokenTime:
    """The undisturbed token of one endpoint."""

    __slots__ = ("least", "seconds", "sequences")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of a token, in the last seconds; 0: not learned."""
        self.sequences = 0.0
        """Mean number of them at that time."""
        self.least = 0.0
        """The least ``seconds`` of all times at which prompts took little; 0: there was none."""

    def learn(self, seconds: float, sequences: float, prompts: float) -> None:
        """Learn from the last seconds; ``prompts``: the share of them that prompts took."""
        self.seconds, self.sequences = seconds, sequences
        if prompts < CALM:
            self.least = min(self.least or seconds, seconds)

    def forget(self) -> None:
        """Forget the last seconds: no sequence runs there."""
        self.seconds = self.sequences = 0.0

    @property
    def slowdown(self) -> float:
        """Seconds by which its sequences prolong a token; 0 while that is not learned."""
        return max(0.0, self.seconds - self.least) if self.least else 0.0

    def with_sequences(self, sequences: float, per_sequence: float) -> float:
        """Return the seconds of a token with so many sequences, each of which adds ``per_sequence``."""
        return self.seconds + per_sequence * (sequences - self.sequences)
