"""Judge a chaos run from the client's records, the pickers' logs and the list of faults.

Pure. The words, exactly:

*healthy pod*
    An engine process from the moment it answered ``/health`` with 200 until the moment it was sent SIGKILL.
*lost*
    A request whose client got no byte of an answer, or an error in its place (whatever status is not 200),
    although at least one healthy pod existed all the time from the request's first byte to its end. The
    bound is stricter than "no response byte": an error page is bytes, too.
*cut*
    Status 200 came, the end of the stream did not. By an engine's death when that very engine was killed
    between the first byte and the end (`SLACK_SECONDS` for the clock); every other cut counts as a picker's.
*error*
    ``|sum predicted - sum reported| / sum reported``, cached tokens, over requests that one engine answered
    at the first attempt: predicted by the picker that was asked (its log), reported by the engine's usage.
*healed*
    Seconds from the fault to the end of the last run of `WINDOW` requests that was not under the bound.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvist_sim.bench.harness.records import Record
from kvist_sim.load import OK, percentile

WINDOW: Final = 100
"""Requests over which the prediction is judged."""
JUDGED_SHARE: Final = 0.9
"""Share of a window that must have been picked and reported; with fewer, no error is computed."""
ERROR_BOUND: Final = 0.01
SETTLE_SECONDS: Final = 30.0
"""Seconds after the begin of a fault until the prediction is judged."""
SLACK_SECONDS: Final = 0.5
EXAMPLES: Final = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """A picker's log entry for one request."""

    endpoint: str
    cached: int


@dataclass(slots=True)
class Life:
    """One run of an engine's process, seconds after the load began."""

    engine: str
    since: float
    """Time at which the engine answered its health check."""
    killed: float | None = None


@dataclass(slots=True)
class Phase:
    """A stretch of the load with at most one fault."""

    name: str
    begin: float
    fault: float
    """Time at which the fault began; in a quiet phase, the time at which it would have begun."""
    end: float
    steps: list[tuple[float, str]] = field(default_factory=list)
    """Actions and observations with their times."""


@dataclass(frozen=True, slots=True)
class Error:
    """Predicted and reported cached tokens."""

    predicted: int
    reported: int
    judged: int
    """Number of requests in the sums."""
    of: int

    @property
    def share(self) -> float:
        """Relative error, 0.01 for one per cent; infinite when too few requests were judged."""
        if self.judged < JUDGED_SHARE * self.of or not self.reported:
            return float("inf")
        return abs(self.predicted - self.reported) / self.reported


@dataclass(frozen=True, slots=True)
class ChaosFigures:
    """Figures of one phase; times in seconds."""

    phase: Phase
    sent: int
    answered: int
    lost: int
    cut_by_engine: int
    cut_by_picker: int
    no_pod: int
    """Requests that failed while no pod was healthy; these are not counted as lost."""
    retried: int
    unpicked: int
    """Requests answered without a pick, by Envoy's own balancing."""
    ttft_p50: float
    ttft_p90: float
    before: Error
    """Over the requests before the fault, at most `WINDOW`."""
    after: Error
    """Over the `WINDOW` requests that begin `SETTLE_SECONDS` after the fault."""
    healed: float
    examples: Sequence[str] = ()
    """Descriptions of a few lost or cut requests."""

    def broken(self) -> list[str]:
        """Bounds that do not hold, in words; empty is good."""
        found = []
        if self.lost:
            found.append(f"{self.lost} requests lost")
        if self.cut_by_picker:
            found.append(f"{self.cut_by_picker} responses cut by a picker's death")
        if not self.after.of:
            found.append(f"no request began {SETTLE_SECONDS:g} s after the fault")
        elif self.after.share >= ERROR_BOUND:
            found.append(f"prediction off by {self.after.share:.2%} {SETTLE_SECONDS:g} s after the fault")
        return found


@dataclass(frozen=True, slots=True)
class Evidence:
    """All records of a run."""

    records: Sequence[Record]
    predictions: Mapping[str, Prediction]
    """By request id."""
    lives: Sequence[Life]


def judge(phase: Phase, evidence: Evidence, *, settle: float = SETTLE_SECONDS) -> ChaosFigures:
    """Return the figures of the requests that began in the phase."""
    begun = [r for r in evidence.records if phase.begin <= r.began < phase.end]
    failed = [r for r in begun if r.status != OK]
    lost = [r for r in failed if healthy(evidence.lives, r.began, r.ended)]
    cut = [r for r in begun if r.status == OK and not r.whole]
    by_engine = [r for r in cut if died_under(r, evidence.lives)]
    waits = [r.token - r.began for r in begun if r.good and r.token is not None]
    earlier = [r for r in begun if r.began < phase.fault][-WINDOW:]
    later = [r for r in begun if r.began >= phase.fault + settle][:WINDOW]
    return ChaosFigures(
        phase=phase,
        sent=len(begun),
        answered=sum(r.good for r in begun),
        lost=len(lost),
        cut_by_engine=len(by_engine),
        cut_by_picker=len(cut) - len(by_engine),
        no_pod=len(failed) - len(lost),
        retried=sum(r.retried for r in begun),
        unpicked=sum(r.first is not None and not r.picked for r in begun),
        ttft_p50=percentile(waits, 0.5),
        ttft_p90=percentile(waits, 0.9),
        before=error(earlier, evidence.predictions),
        after=error(later, evidence.predictions),
        healed=_healed(phase, begun, evidence.predictions),
        examples=[_told(phase, record) for record in (*lost, *cut)[:EXAMPLES]],
    )


def _told(phase: Phase, record: Record) -> str:
    return (
        f"{record.id}: began {record.began - phase.fault:+.2f} s, ended {record.ended - phase.fault:+.2f} s, "
        f"status {record.status}, {record.attempts} attempts, answered by {record.upstream or 'no engine'}, "
        f"picked {record.picked or 'nothing'}; {record.error}"
    )


def healthy(lives: Iterable[Life], begin: float, end: float) -> bool:
    """Return whether one pod was healthy all the time from ``begin`` to ``end``."""
    return any(life.since <= begin and (life.killed is None or life.killed > end) for life in lives)


def died_under(record: Record, lives: Iterable[Life]) -> bool:
    """Return whether the engine that was answering was killed at that time."""
    begin = record.began if record.first is None else record.first
    return any(
        life.engine == record.upstream
        and life.killed is not None
        and begin - SLACK_SECONDS <= life.killed <= record.ended + SLACK_SECONDS
        for life in lives
    )


def error(records: Sequence[Record], predictions: Mapping[str, Prediction]) -> Error:
    """Return predicted against reported cached tokens, over the records that have both."""
    pairs = [pair for record in records if (pair := _pair(record, predictions)) is not None]
    return Error(sum(p for p, _ in pairs), sum(r for _, r in pairs), len(pairs), len(records))


def _pair(record: Record, predictions: Mapping[str, Prediction]) -> tuple[int, int] | None:
    predicted = predictions.get(record.id)
    if predicted is None or not record.good or record.retried or predicted.endpoint != record.upstream:
        return None
    return predicted.cached, record.cached


def _healed(phase: Phase, begun: Sequence[Record], predictions: Mapping[str, Prediction]) -> float:
    since = [r for r in begun if r.began >= phase.fault]
    last = phase.fault
    for at in range(0, len(since) - WINDOW + 1, WINDOW):
        run = since[at : at + WINDOW]
        if error(run, predictions).share >= ERROR_BOUND:
            last = run[-1].began
    return last - phase.fault
