"""Counters that the picker increments and the metrics page reads: histograms, stage times, statistics.

All are plain Python numbers, converted to Prometheus families only at a scrape: ``prometheus_client`` takes
two microseconds per observation, more than a stage of a short request does. No decision depends on them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        found = {stage: round(seconds * 1e6) for stage, seconds in self.laps}
        if len(found) == len(self.laps):
            return found
        sums: dict[str, float] = {}
        for stage, seconds in self.laps:
            sums[stage] = sums.get(stage, 0.0) + seconds
        return {stage: round(seconds * 1e6) for stage, seconds in sums.items()}


@dataclass(slots=True)
class ReplicationStats:
    """Counters of the exchange between replicas since the start, and figures of the last snapshot taken."""

    messages: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    message_bytes: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    forwarded: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    """Access-log entries of requests that another replica routed."""
    broken: int = 0
    """Connections that ended without a farewell."""
    snapshots: Counter[str] = field(default_factory=lambda: Counter(given=0, taken=0, failed=0))
    snapshot_seconds: float = 0.0
    """Duration of the last snapshot taken."""
    snapshot_blocks: int = 0
    """Distinct blocks in the last snapshot taken."""
    snapshot_publishers: int = 0

    def on_sent(self, size: int) -> None:
        """Count an update or a chunk that was sent."""
        self.messages["sent"] += 1
        self.message_bytes["sent"] += size

    def on_received(self, size: int) -> None:
        """Count an update or a chunk that was received."""
        self.messages["received"] += 1
        self.message_bytes["received"] += size


@dataclass(frozen=True, slots=True)
class ReplicationReport:
    """State of the exchange at one moment, for the metrics page."""

    stats: ReplicationStats = field(default_factory=ReplicationStats)
    states: Mapping[str, int] = field(default_factory=dict)
    """Other replicas by state."""
    requests: int = 0
    """Open requests that other replicas routed."""
    lag: float = 0.0
    """Delay of the slowest follower, in seconds."""


@dataclass(slots=True)
class PrewarmStats:
    """Counters of prewarming since the start."""

    begun: int = 0
    """Prefixes selected."""
    dropped: int = 0
    """Selected prefixes whose prewarming was not finished."""
    kept: int = 0
    """Requests for a prefix that an endpoint holds already, so that its engine does not evict it."""
    steps: int = 0
    """Requests that engines answered."""
    failed: int = 0
    """Requests without an answer, or with an error."""
    tokens: int = 0
    """Prompt tokens that the answered requests computed."""
    seconds: float = 0.0
    """Total duration of all requests."""
