"""What the operator tells of itself, for Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)


class Metrics:
    """A registry of its own: kopf and others have none to add to it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "kvist_operator_reconciles",
            "Looks at a pool, by how they ended: ok, or the reason of the error.",
            ["result"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvist_operator_reconcile_seconds",
            "Time one look at a pool took.",
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.queue = Gauge(
            "kvist_operator_queue_pools",
            "Pools that are to be looked at, now or later.",
            registry=self.registry,
        )
        self.pools = Gauge("kvist_operator_pools", "Pools there are.", registry=self.registry)
        self.objects = Gauge(
            "kvist_operator_objects", "Objects that are followed, pools and pods too.", registry=self.registry
        )
        self.restarts = Counter(
            "kvist_operator_watch_restarts",
            "Times that watching ended by itself and was begun again.",
            registry=self.registry,
        )

    def count_requests(self, answers: Callable[[], Mapping[str, int]]) -> None:
        """Requests to the API server, from a count by method and status."""
        self.registry.register(_Requests(answers))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Requests(Collector):
    """Counted where they are made."""

    def __init__(self, answers: Callable[[], Mapping[str, int]]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        """One series for each method and status."""
        found = CounterMetricFamily(
            "kvist_operator_api_requests",
            "Requests to the API server but for watches, by method and status.",
            labels=["method", "status"],
        )
        for key, number in self._rows():
            method, _, status = key.partition(" ")
            found.add_metric([method, status], number)
        yield found

    def _rows(self) -> Iterable[tuple[str, int]]:
        return sorted(self._answers().items())
