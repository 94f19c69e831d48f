"""Counters that the picker increments and the metrics page reads: histograms, stage times, statistics.

All are plain Python numbers, converted to Prometheus families only at a scrape: ``prometheus_client`` takes
two microseconds per observation, more than a stage of a short request does. No decision depends on them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Final, NamedTuple

import msgspec

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

TIME_TO_FIRST_TOKEN_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Upper bounds in seconds: those of ``vllm:time_to_first_token_seconds``, so that quantiles of picker and
engines err alike."""
TIME_PER_OUTPUT_TOKEN_BUCKETS: Final = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0),
)
"""Upper bounds in seconds: those of ``vllm:request_time_per_output_token_seconds`` up to 5 s, and two below
them."""
RATIO_BUCKETS: Final = (
    *(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0),
)
"""Upper bounds of observed over predicted time: close to 1 fine, since that is what a prediction aims at."""


class Exemplar(NamedTuple):
    """One request of a bucket, by which logs and traces of its like can be found."""

    request_id: str
    trace_id: str
    """Empty: the request has no trace."""
    value: float
    at: float
    """Unix seconds."""


class Histogram:
    """Counts of values by bucket, their sum, and the last request of each bucket."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "total")

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._exemplars: dict[int, tuple[str, str, float, float]] = {}
        self.total = 0.0

    def observe(self, value: float, request_id: str = "", trace_id: str = "") -> None:
        """Count one value; with the id of its request, if there is one, as the exemplar of its bucket."""
        at = bisect_left(self._bounds, value)
        self._counts[at] += 1
        self.total += value
        if request_id:
            self._exemplars[at] = (request_id, trace_id, value, time())

    @property
    def count(self) -> int:
        """Number of values so far."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[str, float]]:
        """Yield (upper bound as text, count up to it), the last bound being ``+Inf``, as Prometheus
        expects."""
        count = 0
        for bound, here in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            count += here
            yield bound, count

    def exemplars(self) -> Mapping[int, Exemplar]:
        """Return the exemplars by the number of their bucket, in the order of ``cumulative``."""
        return {at: Exemplar(*found) for at, found in self._exemplars.items()}


class Stages(msgspec.Struct, eq=False):
    """Stopwatch with named laps: how long each stage of one request took."""

    _at: float = msgspec.field(default_factory=perf_counter)
    laps: list[tuple[str, float]] = []
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


class TimedStages(Stages):
    """A stopwatch that also keeps when each lap began and ended, for the spans of a recorded pick."""

    intervals: list[tuple[str, float, float]] = []
    """List of (stage, begin, end) in order, by ``perf_counter``."""
    started: float = 0.0

    def __post_init__(self) -> None:
        self.started = self._at

    def mark(self, stage: str) -> None:
        """Attribute the time since the last mark to ``stage``, and keep when that was."""
        before, self._at = self._at, perf_counter()  # not by super(): a call for each of six marks
        self.laps.append((stage, self._at - before))
        self.intervals.append((stage, before, self._at))


@dataclass(slots=True)
class TraceStats:
    """Counters of exported spans since the start."""

    exported: int = 0
    """Spans that the collector accepted."""
    dropped: Counter[str] = field(
        default_factory=lambda: Counter({"queue-full": 0, "unreachable": 0, "refused": 0, "failed": 0})
    )
    """Lost spans by reason; ``failed`` is a bug."""


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


@dataclass(slots=True)
class DisaggregationStats:
    """Counters of disaggregated requests since the start."""

    decisions: Counter[str] = field(default_factory=lambda: Counter({"split": 0}))
    """Picks by decision: ``split``, or why the request was not split."""
    prefill_seconds: Histogram = field(default_factory=lambda: Histogram(TIME_TO_FIRST_TOKEN_BUCKETS))
    """Duration of leg 1, by whatever it ended."""
    fallbacks: Counter[str] = field(default_factory=lambda: Counter({"lease": 0, "unreachable": 0}))
    """Requests whose prompt the decode endpoint computed after leg 1, by reason."""
    pairs: Counter[str] = field(default_factory=lambda: Counter({"warm": 0, "connecting": 0}))
    """Pairs of endpoints now, by state."""
    pair_failures: int = 0
    """Attempts to connect a pair that failed."""
