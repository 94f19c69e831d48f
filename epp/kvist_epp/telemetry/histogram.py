"""Histograms and stage times that cost the hot path well under a microsecond each.

``prometheus_client`` takes two microseconds per observation, more than a stage of a short request does. These
are plain Python numbers, converted to Prometheus families only at a scrape.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Final

BUCKETS: Final = (
    5e-6,
    1e-5,
    2.5e-5,
    5e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    2.5e-2,
    5e-2,
    0.1,
    0.25,
    1.0,
)
"""Upper bounds in seconds: a stage of a short request takes 5 us; a pick that takes a second is a fault."""

WAIT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0),
)
"""Upper bounds, in seconds, of waits in the queue, up to its default limits."""


class Histogram:
    """Counts of durations by bucket, and the sum of the durations in seconds."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """Yield (upper bound as text, count up to it), the last bound being ``+Inf``, as Prometheus
        expects."""
        count = 0
        for bound, here in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            count += here
            yield bound, count


class Stages:
    """Stopwatch with named laps: how long each stage of one request took."""

    __slots__ = ("_at", "laps", "started")

    def __init__(self) -> None:
        self.started = self._at = perf_counter()
        self.laps: list[tuple[str, float]] = []
        """List of (stage, seconds) in order; a stage may occur twice."""

    def mark(self, stage: str) -> None:
        """Attribute the time since the last mark to ``stage``."""
        now = perf_counter()
        self.laps.append((stage, now - self._at))
        self._at = now

    def skip(self) -> None:
        """Discard the time since the last mark, for example a wait."""
        self._at = perf_counter()

    @property
    def seconds(self) -> float:
        """Sum of all marked stages."""
        return sum(seconds for _, seconds in self.laps)

    def microseconds(self) -> dict[str, int]:
        """Return whole microseconds by stage, for the log line."""
        sums: dict[str, float] = {}
        for stage, seconds in self.laps:
            sums[stage] = sums.get(stage, 0.0) + seconds
        return {stage: round(seconds * 1e6) for stage, seconds in sums.items()}
