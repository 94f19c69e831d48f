"""Sizes of a demo: a pool close to its cache capacity, because there routing matters.

All engines' caches together hold every system prompt with room to spare; one engine's alone does not.
A policy that sends a prompt anywhere makes every engine cache every prompt, and all of them thrash.
"""

from dataclasses import dataclass
from typing import Final

from kvist_sim.workloads import Shape

MODEL_NAME: Final = "kvist-demo"
GROUPS_PER_ENGINE: Final = 12
SYSTEM_WORDS: Final = 2_750
"""About 6,000 tokens of the demo's vocabulary."""
RATE_PER_ENGINE: Final = 6.0
BLOCK_SIZE: Final = 16
BLOCKS_PER_ENGINE: Final = 6_600


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """Settings of a run; times in seconds."""

    seconds: float = 25.0
    """Measured part of each of the two runs."""
    engines: int = 4
    rate: float = 4 * RATE_PER_ENGINE
    """Requests per second to the whole pool."""
    seed: int = 0
    lead_in_seconds: float = 5.0
    """Traffic before the measured part, so that no policy is judged on empty caches."""
    drain_seconds: float = 8.0
    """Longest wait for answers after the last request was sent."""

    @property
    def shape(self) -> Shape:
        """Return the traffic."""
        return Shape(groups=GROUPS_PER_ENGINE * self.engines, system_words=SYSTEM_WORDS)

    @property
    def warm_up_seconds(self) -> float:
        """Seconds to send each system prompt once, at half the rate of the traffic."""
        return self.shape.groups / self.warm_up_rate

    @property
    def warm_up_rate(self) -> float:
        """Requests per second of the warm-up."""
        return self.rate / 2

    @property
    def run_seconds(self) -> float:
        """Sending time of one run, all parts."""
        return self.warm_up_seconds + self.lead_in_seconds + self.seconds
