"""What the picker says of warm hand-over."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from kvist_epp.prewarm.prewarm_stats import Given
from kvist_epp.telemetry.families import counter


def families(given: Given) -> Iterable[Metric]:
    """All of them; zeros where nothing is handed over."""
    text = "Prompt tokens that engines were asked to compute for hand-over, as answered."
    yield counter("hand_over_tokens", text, {"": given.tokens})
    outcomes = {"done": given.steps, "failed": given.failed}
    yield counter("hand_over_steps", "Requests of hand-over to engines.", outcomes, "outcome")
    text = (
        "Beginnings of prompts that hand-over decided on, that it gave up, or asked for again to keep them."
    )
    found = {"begun": given.begun, "dropped": given.dropped, "kept": given.kept}
    yield counter("hand_over_beginnings", text, found, "what")
    yield counter("hand_over_seconds", "Time that requests of hand-over took.", {"": given.seconds})
