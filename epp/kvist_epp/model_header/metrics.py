"""What the role ``model-header`` counts. No name of a model is a label: clients choose those."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvist_epp.http2.port_stats import Tally
from kvist_epp.telemetry import certificate_metrics, port_metrics
from kvist_epp.telemetry.histogram import Histogram
from kvist_epp.telemetry.metrics import PROCESS, Page

OUTCOMES: Final = ("named", "no-body", "no-model", "unusable", "partial")
"""``named``: the header was set. ``unusable``: no header can carry the name. ``partial``: the gateway showed
the beginning of the body only."""


def _no_certificate() -> Mapping[str, float]:
    return {}


@dataclass(slots=True)
class HeaderMetrics:
    """The counters; ``snapshot`` for the page."""

    version: str = ""
    ports: dict[str, Tally] = field(default_factory=dict)
    """The gRPC ports by name."""
    requests: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    forged: int = 0
    """Requests that came with one of the headers already."""
    find: Histogram = field(default_factory=Histogram)
    troubles: Counter[str] = field(default_factory=Counter)
    certificate: Callable[[], Mapping[str, float]] = _no_certificate
    log_dropped: Callable[[], int] = int

    def count(self, outcome: str, seconds: float, *, forged: bool) -> None:
        """One request was answered."""
        self.requests[outcome] += 1
        self.forged += forged
        self.find.observe(seconds)

    def snapshot(self) -> Page:
        """All families as they are now, ready to be written by another thread."""
        return Page([*PROCESS.collect(), *self._families()])

    def _families(self) -> Iterable[Metric]:
        build = GaugeMetricFamily(
            "kvist_epp_build_info", "Version of this picker; always 1.", labels=["version"]
        )
        build.add_metric([self.version], 1)
        yield build
        yield _counts("model_header_requests", "Requests by outcome.", "outcome", self.requests)
        text = "Requests whose client had set the header itself."
        yield CounterMetricFamily("kvist_epp_model_header_forged", text, value=self.forged)
        find = HistogramMetricFamily("kvist_epp_model_header_seconds", "Time to find a body's model.")
        find.add_metric([], list(self.find.cumulative()), self.find.total)
        yield find
        yield _counts("wire_troubles", "What gateways, or picks, got wrong, by kind.", "kind", self.troubles)
        yield from port_metrics.families(self.ports)
        yield from certificate_metrics.families(self.certificate())
        text = "Log lines dropped, stderr being slow."
        yield CounterMetricFamily("kvist_epp_log_lines_dropped", text, value=self.log_dropped())


def _counts(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvist_epp_{name}", text, labels=[label])
    for key, count in counts.items():
        family.add_metric([key], count)
    return family
