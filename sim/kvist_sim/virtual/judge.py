"""Figures of a run, and intervals over pairs of runs. Pure."""

from collections.abc import Sequence
from math import ceil, sqrt
from statistics import fmean, stdev
from typing import Final

import msgspec

from kvist_sim.virtual.jobs import Call, CallStatus
from kvist_sim.virtual.traffic import Shape
from kvist_sim.virtual.world import WARM_SHARE, Outcome

STUDENT: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom."""
STUDENT_MANY: Final = 2.09
"""Quantile for more degrees of freedom: exact at 20, a little wide above."""


class Verdict(msgspec.Struct, frozen=True):
    """Figures of the requests that began after the warm-up. Times in seconds; shares 0 to 1."""

    requests: int
    goodput: float
    """Share of the requests that were answered with TTFT and TPOT within the SLO."""
    good_per_second: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    hit_ratio: float
    """Share of prompt tokens found in the engine's cache."""
    tokens_per_second: float
    """Output tokens per second of answers that ended between the warm-up and the last arrival."""
    lost: int
    preemptions: int
    spread: float
    """Requests on the fullest pod over the mean, averaged over time: 1 is even."""


def judge(outcome: Outcome, shape: Shape) -> Verdict:
    """Raises ``ValueError`` when a request has not ended."""
    if any(call.status is None for call in outcome.calls):
        raise ValueError("a request has not ended")
    counted = [call for call in outcome.calls if call.measured]
    answered = [call for call in counted if call.status is CallStatus.DONE]
    ttft, tpot = sorted(map(first_after, answered)), sorted(map(token_time, answered))
    good = sum(first_after(c) <= shape.ttft and token_time(c) <= shape.tpot for c in answered)
    began = WARM_SHARE * outcome.seconds
    window = outcome.seconds - began
    written = sum(c.output for c in outcome.calls if began <= (c.last_token or 0.0) < outcome.seconds)
    return Verdict(
        requests=len(counted),
        goodput=good / max(1, len(counted)),
        good_per_second=good / window,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p90=quantile(ttft, 0.9),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile(tpot, 0.5),
        tpot_p90=quantile(tpot, 0.9),
        hit_ratio=sum(c.cached for c in answered) / max(1, sum(c.tokens for c in answered)),
        tokens_per_second=written / window,
        lost=len(counted) - len(answered),
        preemptions=outcome.preemptions,
        spread=_spread([loads for at, loads in outcome.loads if at >= began]),
    )


def first_after(call: Call) -> float:
    """Return seconds from arrival to the first token."""
    return (call.first_token or 0.0) - call.arrived


def token_time(call: Call) -> float:
    """Return seconds per token after the first; 0 for an answer of one token."""
    more = call.output - 1
    return ((call.last_token or 0.0) - (call.first_token or 0.0)) / more if more > 0 else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile; 0 without values."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _spread(loads: Sequence[Sequence[int]]) -> float:
    busy = [max(one) * len(one) / sum(one) for one in loads if sum(one)]
    return fmean(busy) if busy else 1.0


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds, and how far its 95 % interval (Student's t) reaches to each side."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Return mean and half width of a 95 % interval; for a single value the half width is infinite."""
    if len(values) < 2:
        return Interval(values[0] if values else 0.0, float("inf"))
    freedom = len(values) - 1
    factor = STUDENT[freedom - 1] if freedom <= len(STUDENT) else STUDENT_MANY
    return Interval(fmean(values), factor * stdev(values) / sqrt(len(values)))
