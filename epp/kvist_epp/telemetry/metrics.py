"""Every metric of the picker, once. Counters are plain numbers on ``Metrics``; gauges are asked for when
scraped.

The hot path only does ``metrics.requests[outcome] += 1`` and the like. Series of endpoints that have left are
dropped (``forget``), so that a fleet that comes and goes does not grow the page.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvist_epp.endpoints.discovery import Watched
from kvist_epp.http2.port_stats import Tally
from kvist_epp.prewarm.prewarm_stats import Given
from kvist_epp.replicas.replication_stats import ReplicationReport
from kvist_epp.telemetry import certificate_metrics, port_metrics
from kvist_epp.telemetry import prewarm_metrics as handover_metrics
from kvist_epp.telemetry import replication_metrics as peer_metrics
from kvist_epp.telemetry.histogram import WAIT_BUCKETS, Histogram, Stages

Counts = defaultdict[str, int]
Key = TypeVar("Key")

NO_COUNTS: Final[Mapping[str, int]] = {}


def _none() -> Mapping[str, int]:
    return NO_COUNTS


def _no_blocks() -> Mapping[str, Mapping[str, int]]:
    return {}


@dataclass(slots=True)
class Gauges:
    """What is asked for at each scrape; each callable must be quick and is called on the event loop."""

    index_blocks: Callable[[], Mapping[str, Mapping[str, int]]] = _no_blocks
    """Blocks held by endpoint and medium."""
    trust: Callable[[], Mapping[str, int]] = _none
    """By endpoint: 1 precise, 0 approximate."""
    owed: Callable[[], Mapping[str, int]] = _none
    """Prefill tokens owed by endpoint."""
    owed_seconds: Callable[[], float] = float
    """Mean time in which the endpoints that can be picked would have prefilled what they owe."""
    queue_requests: Callable[[], Mapping[str, int]] = _none
    """Requests that wait, by priority."""
    queue_tokens: Callable[[], int] = int
    queue_bytes: Callable[[], int] = int
    full_endpoints: Callable[[], int] = int
    endpoints: Callable[[], Mapping[str, int]] = _none
    """Endpoints by state."""
    model_faithful: Callable[[], bool] = bool
    """Whether the tokenizer's bytes are faithful: precise mode is possible."""
    tokenizer: Callable[[], tuple[bool, int]] = lambda: (False, 0)
    """Whether the one that was asked for is missing; how often it could not be fetched."""
    log_dropped: Callable[[], int] = int
    """Log lines dropped because stderr was slow."""
    watches: Callable[[], Iterable[Watched]] = tuple
    """What is followed in Kubernetes."""
    replication: Callable[[], ReplicationReport] = ReplicationReport
    """Other replicas."""
    hand_over: Callable[[], Given] = Given
    """Hot beginnings computed ahead."""
    certificate: Callable[[], Mapping[str, float]] = _none
    """Of the ext_proc port: ``expires`` in Unix seconds, changes ``taken`` and ``refused``; empty: no TLS."""


def _counts(*begun: str) -> Counts:
    """Counters; those ``begun`` are there from the start, so that a rate sees their first step."""
    return defaultdict(int, dict.fromkeys(begun, 0))


@dataclass(slots=True)
class Metrics:
    """The picker's counters; ``requests["picked"] += 1`` on the hot path, ``render`` on the page."""

    version: str = ""
    gauges: Gauges = field(default_factory=Gauges)
    ports: dict[str, Tally] = field(default_factory=dict)
    """The gRPC ports by name: ``grpc``, ``grpc-health`` …"""
    requests: Counts = field(default_factory=lambda: _counts("picked"))
    """By outcome: ``picked`` or the reason of a PickError."""
    pick: Histogram = field(default_factory=Histogram)
    """Whole picks, the waiting for bodies not included."""
    stages: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    queue_waits: defaultdict[str, Histogram] = field(
        default_factory=lambda: defaultdict(lambda: Histogram(WAIT_BUCKETS))
    )
    """How long requests waited that had to, by what became of them, as ``requests``."""
    predicted_cached: Counts = field(default_factory=_counts)
    """Tokens predicted to be cached on the picked pod, by endpoint."""
    true_cached: Counts = field(default_factory=_counts)
    """Tokens that the engine's events then showed to be cached, by endpoint, of the requests they told of."""
    events: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Applied KV events by endpoint and type: ``stored``, ``removed``, ``cleared``."""
    gaps: Counts = field(default_factory=_counts)
    """Gaps in the numbering of event batches, by endpoint."""
    resets: Counts = field(default_factory=_counts)
    """Times all that was known of an endpoint was forgotten: it restarted or could not replay."""
    undecodable: Counts = field(default_factory=_counts)
    """Event messages that could not be understood, by endpoint."""
    ended: Counts = field(
        default_factory=lambda: _counts("access-log", "expired", "left", "reconciled", "response")
    )
    """Requests that ended, by how it was learned: ``access-log``, ``expired``, ``reconciled`` …"""
    served_elsewhere: Counts = field(default_factory=_counts)
    """Requests that another endpoint served than the picked one, by the picked one."""
    responses: Counts = field(default_factory=_counts)
    """Observed responses: ``usage`` was read, there was ``none``, or the response was ``cut``."""
    usage: Counts = field(default_factory=_counts)
    """Tokens that observed responses counted: ``prompt``, ``completion``, ``cached``."""
    bad_endpoints_files: int = 0
    troubles: Counts = field(default_factory=_counts)
    """``wire.service.TROUBLES``: messages that could not be read, picks that failed."""
    template_failures: Counts = field(default_factory=_counts)
    """Prompts the model's chat template refused: routed by load."""

    def observe(self, stages: Stages) -> None:
        """Count one pick and its stages."""
        total = 0.0
        by_stage = self.stages
        for stage, seconds in stages.laps:
            by_stage[stage].observe(seconds)
            total += seconds
        self.pick.observe(total)

    def forget(self, endpoint: str) -> None:
        """The endpoint has left: drop its series."""
        by_endpoint = (self.predicted_cached, self.true_cached, self.served_elsewhere)
        for counts in (*by_endpoint, self.gaps, self.resets, self.undecodable):
            counts.pop(endpoint, None)
        for key in [key for key in self.events if key[0] == endpoint]:
            del self.events[key]

    def snapshot(self) -> "Page":
        """All families as they are now, ready to be written by another thread."""
        return Page([*PROCESS.collect(), *self._families()])

    def _families(self) -> Iterable[Metric]:
        gauges = self.gauges
        yield _gauge("build_info", "Version of this picker; always 1.", ["version"], {self.version: 1})
        yield _counter("requests", "Requests by outcome.", ["outcome"], self.requests)
        yield _histogram("pick_seconds", "Time to pick, waiting for bodies not included.", {(): self.pick})
        yield _histogram("stage_seconds", "Time of each stage of a pick.", _single(self.stages), ["stage"])
        yield from self._queue_families()
        yield from self._cached_families()
        yield from self._event_families()
        yield from port_metrics.families(self.ports)
        yield from peer_metrics.families(self.gauges.replication())
        yield from handover_metrics.families(gauges.hand_over())
        yield from certificate_metrics.families(gauges.certificate())
        yield from self._discovery_families()
        owed = gauges.owed()
        yield _gauge("owed_tokens", "Prefill tokens the endpoint still owes.", ["endpoint"], owed)
        yield _gauge("endpoints", "Endpoints by state.", ["state"], gauges.endpoints())
        faithful = int(gauges.model_faithful())
        yield _gauge(
            "model_faithful", "1: token ids decode to the prompt's bytes; 0: not.", [], {(): faithful}
        )
        missing, failures = gauges.tokenizer()
        text = "1: the tokenizer of --model has not come yet, everything is approximate."
        yield _gauge("tokenizer_missing", text, [], {(): int(missing)})
        yield _counter("tokenizer_failures", "Times it could not be fetched.", [], {(): failures})
        yield _counter("bad_endpoints_files", "Endpoints files refused.", [], {(): self.bad_endpoints_files})
        troubles = self.troubles
        yield _counter("wire_troubles", "What gateways, or picks, got wrong, by kind.", ["kind"], troubles)
        yield _counter(
            "template_failures",
            "Prompts not rendered, so routed by load.",
            ["reason"],
            self.template_failures,
        )
        yield _counter("requests_ended", "Ended requests by how it was learned.", ["source"], self.ended)
        text = "Requests that another endpoint served than the picked one, by the picked one."
        yield _counter("served_elsewhere", text, ["endpoint"], self.served_elsewhere)
        yield from self._response_families()
        dropped = {(): gauges.log_dropped()}
        yield _counter("log_lines_dropped", "Log lines dropped, stderr being slow.", [], dropped)

    def _queue_families(self) -> Iterable[Metric]:
        gauges, waits = self.gauges, _single(self.queue_waits)
        waiting = gauges.queue_requests()
        yield _gauge("queue_requests", "Requests that wait, by priority.", ["priority"], waiting)
        yield _gauge("queue_tokens", "Prompt tokens that wait.", [], {(): gauges.queue_tokens()})
        yield _gauge("queue_bytes", "Memory held for what waits.", [], {(): gauges.queue_bytes()})
        text = "Time that requests waited which had to, by what became of them."
        yield _histogram("queue_seconds", text, waits, ["outcome"])
        yield _gauge("full_endpoints", "Endpoints without room.", [], {(): gauges.full_endpoints()})
        text = "Mean time in which the endpoints would have prefilled what they owe."
        yield _gauge("owed_seconds", text, [], {(): gauges.owed_seconds()})

    def _cached_families(self) -> Iterable[Metric]:
        label = ["endpoint"]
        text = "Prompt tokens predicted to be cached on the picked endpoint."
        yield _counter("predicted_cached_tokens", text, label, self.predicted_cached)
        text = "Prompt tokens that were cached, by the engine's events."
        yield _counter("true_cached_tokens", text, label, self.true_cached)

    def _response_families(self) -> Iterable[Metric]:
        text = "Responses seen with --observe-responses, by whether they told their usage."
        yield _counter("observed_responses", text, ["outcome"], self.responses)
        yield _counter("usage_tokens", "Tokens that observed responses counted.", ["kind"], self.usage)

    def _discovery_families(self) -> Iterable[Metric]:
        watches = list(self.gauges.watches())
        label = ["resource"]
        found = {w.resource: int(w.open) for w in watches}
        yield _gauge("discovery_watching", "1: a watch of the Kubernetes API is open.", label, found)
        silent = {w.resource: w.silent_seconds for w in watches if w.silent_seconds is not None}
        text = "Time since the Kubernetes API was last heard of this."
        yield _gauge("discovery_silent_seconds", text, label, silent)
        lists = {w.resource: w.lists for w in watches}
        yield _counter("discovery_lists", "Complete lists read from the Kubernetes API.", label, lists)
        errors = {(w.resource, status): n for w in watches for status, n in w.errors.items()}
        text = "Lists and watches of the Kubernetes API that failed, by HTTP status."
        yield _counter("discovery_errors", text, ["resource", "status"], errors)

    def _event_families(self) -> Iterable[Metric]:
        label = ["endpoint"]
        yield _counter("index_events", "KV events applied.", ["endpoint", "type"], self.events)
        yield _counter("index_gaps", "Gaps in the numbering of event batches.", label, self.gaps)
        yield _counter("index_resets", "Times an endpoint's blocks were forgotten.", label, self.resets)
        yield _counter("index_undecodable", "Event messages not understood.", label, self.undecodable)
        blocks = {
            (endpoint, medium): count
            for endpoint, media in self.gauges.index_blocks().items()
            for medium, count in media.items()
        }
        yield _gauge("index_blocks", "Blocks held.", ["endpoint", "medium"], blocks)
        yield _gauge("index_trust", "1: matched precisely; 0: approximately.", label, self.gauges.trust())


class Page(Collector):
    """Families that no longer change: formatting them may take its time elsewhere."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families

    def write(self, accept: str) -> tuple[bytes, str]:
        """The page in the format an ``Accept`` header asks for, and its content type."""
        registry = CollectorRegistry()
        registry.register(self)
        encoder, content_type = choose_encoder(accept)
        return encoder(registry), content_type


PROCESS: Final = ProcessCollector(registry=None)
"""CPU, memory, files of this process."""


def _single(histograms: Mapping[str, Histogram]) -> dict[tuple[str, ...], Histogram]:
    return {(name,): histogram for name, histogram in histograms.items()}


def _labels(key: object) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (str(key),)


def _counter(name: str, text: str, labels: list[str], counts: Mapping[Key, int]) -> Metric:
    family = CounterMetricFamily(f"kvist_epp_{name}", text, labels=labels)
    for key, count in counts.items():
        family.add_metric(_labels(key), count)
    return family


def _gauge(name: str, text: str, labels: list[str], values: Mapping[Key, float]) -> Metric:
    family = GaugeMetricFamily(f"kvist_epp_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(_labels(key), value)
    return family


def _histogram(
    name: str, text: str, histograms: Mapping[tuple[str, ...], Histogram], labels: list[str] | None = None
) -> Metric:
    family = HistogramMetricFamily(f"kvist_epp_{name}", text, labels=labels or [])
    for key, histogram in histograms.items():
        family.add_metric(key, list(histogram.cumulative()), histogram.total)
    return family
