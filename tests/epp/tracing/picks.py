"""Recorded picks for the tests of tracing."""

from typing import Any

from tests.epp.telemetry.request_lines import line

from kvist_epp.telemetry.counters import TimedStages
from kvist_epp.tracing.trace_context import RecordedEnd, RecordedPick, TraceContext

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SPAN = "d75597dee50b0cac"
LAPS = (("parse", 0.001), ("render", 0.002), ("match", 0.003), ("pick", 0.001), ("book", 0.001))


def stages(*laps: tuple[str, float], gap: float = 0.0) -> TimedStages:
    """Laps from 100 s on, with a gap before each one but the first."""
    found = TimedStages()
    found.started = at = 100.0
    for number, (stage, seconds) in enumerate(laps):
        at += seconds + (gap if number else 0.0)
        found.laps.append((stage, seconds))
        found.intervals.append((stage, at - seconds, at))
    return found


def pick(*laps: tuple[str, float], parent: str = PARENT, failed: bool = False, **more: Any) -> RecordedPick:
    """One recorded pick; ``more`` are fields of its line."""
    trace = TraceContext(TRACE, parent, sampled=True, state="vendor=1", span_id=SPAN, failed=failed)
    timed = stages(*(laps or LAPS))
    return RecordedPick(
        trace, line(**more), timed, 250, timed.intervals[-1][2] + 0.5 if timed.intervals else 101.0
    )


def end(**more: Any) -> RecordedEnd:
    """The recorded end of the request of ``pick``."""
    fields: dict[str, Any] = {
        "trace": TraceContext(TRACE, PARENT, sampled=True, span_id=SPAN),
        "endpoint": "10.0.0.2:8000",
        "predicted_tokens": 160,
        "cached_tokens": 144,
        "first_token_seconds": 0.25,
        "how": "response",
        "status": 200,
        "began": 101.0,
        "ended": 103.5,
    }
    return RecordedEnd(**fields | more)
