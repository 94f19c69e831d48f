"""Figures of one run over time: waits for the first token, share of cached tokens, GPU-seconds saved. Pure.

GPU-seconds of prefill saved = prompt tokens that an engine read from its cache / tokens that the simulated
engine computes per second (``Timing.prefill_tokens_per_second``, one H100). Only answered requests count,
because only answers have a usage, and only those sent in the measured part.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvist_sim.engine.timing import Timing
from kvist_sim.load import Outcome, percentile

from .plan import DemoPlan

PREFILL_RATE: Final = Timing().prefill_tokens_per_second
"""Prompt tokens that a GPU of the demo computes per second."""
WINDOW_SECONDS: Final = 1.0
"""Requests sent within one window have one point of the curves."""


def gpu_seconds_saved(cached_tokens: float) -> float:
    """Return the GPU-seconds that computing these tokens would have taken."""
    return cached_tokens / PREFILL_RATE


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of one request for its first token; times in seconds."""

    sent: float
    """Time of sending, after the load began."""
    seconds: float
    """Time to the first token; without one, the time that the request has waited."""
    answered: bool


@dataclass(frozen=True, slots=True)
class Window:
    """Requests sent within one window, of which at least half were answered."""

    at: float
    """Middle of the window, in seconds after the load began."""
    wait: float
    """Median of the waits. A request without an answer has waited longer than all that have one, so the
    median is exact."""
    cached_share: float
    """Share of the answered requests' prompt tokens that came from a cache."""


@dataclass(frozen=True, slots=True)
class RunSeries:
    """One run over time, its warm-up included."""

    waits: tuple[Wait, ...]
    windows: tuple[Window, ...]
    """Without those of which most requests got no answer: their waits are not known, and the few answers are
    the fast ones."""
    unanswered: int
    """Requests without an answer when the run was over."""
    saved: tuple[tuple[float, float], ...]
    """Moments of first tokens, and the GPU-seconds saved until then; the last is the total of the run."""

    @property
    def total_saved(self) -> float:
        """GPU-seconds of prefill saved by requests of the measured part."""
        return self.saved[-1][1]


def run_series(outcomes: Iterable[Outcome], plan: DemoPlan) -> RunSeries:
    """Return the series of a run; its requests are counted as in ``load.summarise``."""
    every = sorted(outcomes, key=lambda outcome: outcome.started)
    counted = [o for o in every if o.good or not o.finished]
    waits = tuple(Wait(o.started, o.latency if o.ttft is None else o.ttft, o.good) for o in counted)
    by_window: dict[int, list[Outcome]] = {}
    last = int(plan.run_seconds // WINDOW_SECONDS)
    for outcome in counted:
        if outcome.started < last * WINDOW_SECONDS:  # the window at the end may be a short one
            by_window.setdefault(int(outcome.started // WINDOW_SECONDS), []).append(outcome)
    windows = (_window(number, found) for number, found in sorted(by_window.items()))
    return RunSeries(
        waits=waits,
        windows=tuple(window for window in windows if window),
        unanswered=sum(not wait.answered for wait in waits),
        saved=_saved(every, plan),
    )


def _window(number: int, outcomes: list[Outcome]) -> Window | None:
    answered = [o for o in outcomes if o.good]
    if 2 * len(answered) < len(outcomes):
        return None
    prompt = sum(o.prompt_tokens for o in answered)
    return Window(
        at=(number + 0.5) * WINDOW_SECONDS,
        wait=percentile([o.latency if o.ttft is None else o.ttft for o in outcomes], 0.5),
        cached_share=sum(o.cached_tokens for o in answered) / prompt if prompt else 0.0,
    )


def _saved(outcomes: Iterable[Outcome], plan: DemoPlan) -> tuple[tuple[float, float], ...]:
    begin = plan.warm_up_seconds + plan.lead_in_seconds
    answered = [o for o in outcomes if o.ttft is not None and begin <= o.started < begin + plan.seconds]
    moments = sorted((o.started + (o.ttft or 0.0), o.cached_tokens) for o in answered)
    points, total = [(begin, 0.0)], 0.0
    for moment, tokens in moments:
        total += gpu_seconds_saved(tokens)
        points.append((moment, total))
    return tuple(points)
