"""What the role ``model-header`` counts. No name of a model is a label: clients choose those."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric

from kvist_epp.http2.port_stats import PortStats
from kvist_epp.telemetry.histogram import Histogram
from kvist_epp.telemetry.metric_families import certificate_families, counter, gauge, histogram, port_families
from kvist_epp.telemetry.metrics import PROCESS, MetricsPage

OUTCOMES: Final = ("named", "no-body", "no-model", "unusable", "partial")
"""``named``: the header was set. ``unusable``: no header can carry the name. ``partial``: the gateway showed
the beginning of the body only."""


def _no_certificate() -> Mapping[str, float]:
    return {}


@dataclass(slots=True)
class HeaderMetrics:
    """The counters; ``snapshot`` for the page."""

    version: str = ""
    ports: dict[str, PortStats] = field(default_factory=dict)
    """The gRPC ports by name."""
    requests: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    forged: int = 0
    """Requests that came with one of the headers already."""
    find: Histogram = field(default_factory=Histogram)
    protocol_errors: Counter[str] = field(default_factory=Counter)
    certificate: Callable[[], Mapping[str, float]] = _no_certificate
    log_dropped: Callable[[], int] = int

    def count(self, outcome: str, seconds: float, *, forged: bool) -> None:
        """One request was answered."""
        self.requests[outcome] += 1
        self.forged += forged
        self.find.observe(seconds)

    def snapshot(self) -> MetricsPage:
        """All families as they are now, ready to be written by another thread."""
        return MetricsPage([*PROCESS.collect(), *self._families()])

    def _families(self) -> Iterable[Metric]:
        yield gauge("build_info", "Version of this picker; always 1.", {self.version: 1}, "version")
        yield counter("model_header_requests", "Number of requests, by outcome.", self.requests, "outcome")
        text = "Number of requests whose client had set the header itself."
        yield counter("model_header_forged", text, self.forged)
        yield histogram("model_header_seconds", "Seconds that finding a body's model took.", self.find)
        text = "Number of gateway messages that could not be read, by kind."
        yield counter("protocol_errors", text, self.protocol_errors, "kind")
        yield from port_families(self.ports)
        yield from certificate_families(self.certificate())
        text = "Number of log lines that were dropped because stderr was slow."
        yield counter("log_lines_dropped", text, self.log_dropped())
