"""What the picker says of warm hand-over."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from kvist_epp.handover.tally import Given


def families(given: Given) -> Iterable[Metric]:
    """All of them; zeros where nothing is handed over."""
    text = "Prompt tokens that engines were asked to compute for hand-over, as answered."
    yield _counter("tokens", text, {"": given.tokens})
    outcomes = {"done": given.steps, "failed": given.failed}
    yield _counter("steps", "Requests of hand-over to engines.", outcomes, "outcome")
    text = (
        "Beginnings of prompts that hand-over decided on, that it gave up, or asked for again to keep them."
    )
    found = {"begun": given.begun, "dropped": given.dropped, "kept": given.kept}
    yield _counter("beginnings", text, found, "what")
    yield _counter("seconds", "Time that requests of hand-over took.", {"": given.seconds})


def _counter(name: str, text: str, values: Mapping[str, float], *labels: str) -> Metric:
    family = CounterMetricFamily(f"kvist_epp_hand_over_{name}", text, labels=labels)
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)
    return family
