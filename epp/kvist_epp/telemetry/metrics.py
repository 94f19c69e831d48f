"""Metrics of the picker, and the page made of them.

Counters are plain numbers on ``PickerMetrics``, of which the hot path only executes
``metrics.requests[outcome] += 1`` and the like; gauges are read at each scrape. Series of endpoints that have
left are removed (``forget``), so that the page does not grow with each endpoint that comes and goes.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvist_epp.http2.limits import PortStats
from kvist_epp.telemetry.counters import (
    RATIO_BUCKETS,
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    WAIT_BUCKETS,
    DisaggregationStats,
    Histogram,
    PrewarmStats,
    ReplicationReport,
    Stages,
    TraceStats,
)
from kvist_epp.telemetry.families import (
    Family,
    Pauses,
    certificate_families,
    counter,
    disaggregation_families,
    gauge,
    histogram,
    port_families,
    prewarm_families,
    replication_families,
)
from kvist_kube.object_cache import WatchStatus

Counts = defaultdict[str, int]


@dataclass(slots=True)
class Gauges:
    """Sources of the gauges, called on the event loop at each scrape; each must be quick."""

    index_blocks: Callable[[], Mapping[str, Mapping[str, int]]] = dict
    """Blocks held, by endpoint and medium."""
    precise: Callable[[], Mapping[str, int]] = dict
    """By endpoint: 1 if it is matched precisely, 0 if approximately."""
    backlog_tokens: Callable[[], Mapping[str, int]] = dict
    """Tokens still to prefill, by endpoint."""
    backlog_seconds: Callable[[], float] = float
    """Mean time that eligible endpoints need to prefill their backlog."""
    queue_requests: Callable[[], Mapping[str, int]] = dict
    """Queued requests, by priority."""
    queue_tokens: Callable[[], int] = int
    queue_bytes: Callable[[], int] = int
    full_endpoints: Callable[[], int] = int
    evicted_requested_tokens: Callable[[], int] = int
    """Tokens that were computed again after they had been evicted everywhere."""
    endpoints: Callable[[], Mapping[str, int]] = dict
    """Endpoints by state."""
    model_faithful: Callable[[], bool] = bool
    """Whether the tokenizer maps tokens to bytes without loss, so that precise mode is possible."""
    tokenizer: Callable[[], tuple[bool, int]] = lambda: (False, 0)
    """Whether the configured tokenizer is missing, and how often loading it failed."""
    ends_reported: Callable[[], bool] = bool
    """Whether gateways report how requests end."""
    log_dropped: Callable[[], int] = int
    """Log lines dropped because stderr was slow."""
    traces: Callable[[], TraceStats] = TraceStats
    watches: Callable[[], Iterable[WatchStatus]] = tuple
    """Watches of the Kubernetes API."""
    replication: Callable[[], ReplicationReport] = ReplicationReport
    """Figures of the exchange with other replicas."""
    prewarm: Callable[[], PrewarmStats] = PrewarmStats
    """Counters of prewarming."""
    disaggregation: Callable[[], DisaggregationStats] = DisaggregationStats
    """Counters of disaggregated requests."""
    certificate: Callable[[], Mapping[str, float]] = dict
    """Of the ext_proc port: ``expires`` in Unix seconds, changes ``taken`` and ``refused``; empty without
    TLS."""


def _counts(*initial: str) -> Counts:
    """Return counters; the ``initial`` ones exist from the start, so that a rate sees their first step."""
    return defaultdict(int, dict.fromkeys(initial, 0))


@dataclass(slots=True)
class PickerMetrics:
    """Counters of the picker, and the page made of them."""

    version: str = ""
    gauges: Gauges = field(default_factory=Gauges)
    ports: dict[str, PortStats] = field(default_factory=dict)
    """Statistics of the gRPC ports by name: ``grpc``, ``grpc-health`` …"""
    requests: Counts = field(default_factory=lambda: _counts("picked"))
    """Requests by outcome: ``picked`` or the reason of a PickError."""
    pick: Histogram = field(default_factory=Histogram)
    """Duration of picks, without the wait for request bodies."""
    stages: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    queue_waits: defaultdict[str, Histogram] = field(
        default_factory=lambda: defaultdict(
            lambda: Histogram(WAIT_BUCKETS), {"picked": Histogram(WAIT_BUCKETS)}
        )
    )
    """Time that queued requests waited, by outcome as in ``requests``."""
    predicted_cached: Counts = field(default_factory=_counts)
    """Tokens predicted to be cached on the picked endpoint, by endpoint."""
    prompt_tokens: Counts = field(default_factory=_counts)
    """Tokens of the prompts for which ``predicted_cached`` counts, by the picked endpoint."""
    true_cached: Counts = field(default_factory=_counts)
    """Tokens that were cached according to the engine's events, by endpoint."""
    verified_prompt: Counts = field(default_factory=_counts)
    """Tokens of the prompts for which ``true_cached`` counts, by endpoint."""
    verified_predicted: Counts = field(default_factory=_counts)
    """Tokens that were predicted to be cached of those same prompts, by endpoint."""
    saved_tokens: int = 0
    """Prompt tokens that no engine had to compute: cached according to the engine, else as predicted."""
    saved_seconds: float = 0.0
    """Their prefill, at the rate of the endpoint."""
    predicted_first_token: Histogram = field(default_factory=lambda: Histogram(TIME_TO_FIRST_TOKEN_BUCKETS))
    """Predicted time to the first token of picks, from the pick on."""
    first_token: Histogram = field(default_factory=lambda: Histogram(TIME_TO_FIRST_TOKEN_BUCKETS))
    """Time from the arrival of a request to the first token of its streamed response."""
    first_token_ratio: Histogram = field(default_factory=lambda: Histogram(RATIO_BUCKETS))
    """Time from the pick to the first token, divided by its prediction."""
    prefill_ratio: Histogram = field(default_factory=lambda: Histogram(RATIO_BUCKETS))
    """Time from the pick until KV events show the prompt computed, divided by the same prediction."""
    output_token: Histogram = field(default_factory=lambda: Histogram(TIME_PER_OUTPUT_TOKEN_BUCKETS))
    """Mean time of an output token after the first, of a streamed response."""
    predicted_loads: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Tokens predicted to be loaded from slower tiers, of prompts that the engine has taken up, by endpoint
    and medium."""
    tier_resets: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Times that the blocks of a slower tier were forgotten, by endpoint and medium."""
    events: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Applied KV events by endpoint and type: ``stored``, ``removed``, ``cleared``."""
    gaps: Counts = field(default_factory=_counts)
    """Gaps in the numbering of event batches, by endpoint."""
    resets: Counts = field(default_factory=_counts)
    """Times that all blocks of an endpoint were forgotten, because it restarted or could not replay."""
    undecodable: Counts = field(default_factory=_counts)
    """Event messages that could not be decoded, by endpoint."""
    ended: Counts = field(
        default_factory=lambda: _counts(
            *("access-log", "cancelled", "estimated", "expired", "left", "reconciled"),
            *("response", "websocket"),
        )
    )
    """Requests that ended, by the source of that information: ``access-log``, ``expired`` …"""
    served_elsewhere: Counts = field(default_factory=_counts)
    """Requests that another endpoint served than the picked one, by the picked one."""
    responses: Counts = field(default_factory=_counts)
    """Observed responses: ``usage`` was read, there was ``none``, or the response was ``cut``."""
    usage: Counts = field(default_factory=_counts)
    """Tokens according to observed responses: ``prompt``, ``completion``, ``cached``."""
    bad_endpoints_files: int = 0
    protocol_errors: Counts = field(default_factory=_counts)
    """Messages of gateways that could not be read, and picks that failed, by kind."""
    template_failures: Counts = field(default_factory=_counts)
    """Prompts that could not be rendered, so that plain texts were matched."""

    def observe(self, stages: Stages, request_id: str = "", trace_id: str = "") -> None:
        """Count one pick and its stages."""
        total = 0.0
        by_stage = self.stages
        for stage, seconds in stages.laps:
            by_stage[stage].observe(seconds)
            total += seconds
        self.pick.observe(total, request_id, trace_id)

    def on_saved(self, tokens: int, rate: float) -> None:
        """Count prompt tokens that an engine did not compute, and the seconds that they take at ``rate``
        tokens/s."""
        self.saved_tokens += tokens
        self.saved_seconds += tokens / rate

    def on_loaded(self, endpoint: str, tokens: int, rate: float) -> None:
        """Count prompt tokens that an engine has loaded from a slower tier instead of computing them."""
        self.true_cached[endpoint] += tokens
        self.on_saved(tokens, rate)

    def forget(self, endpoint: str) -> None:
        """Remove the series of an endpoint that has left."""
        cache = (self.predicted_cached, self.prompt_tokens, self.true_cached)
        verified = (self.verified_prompt, self.verified_predicted)
        for counts in (*cache, *verified, self.served_elsewhere, self.gaps, self.resets, self.undecodable):
            counts.pop(endpoint, None)
        for pairs in (self.events, self.predicted_loads, self.tier_resets):
            for key in [key for key in pairs if key[0] == endpoint]:
                del pairs[key]

    def snapshot(self) -> "MetricsPage":
        """Return the page of all families."""
        return MetricsPage(self._families())

    def _families(self) -> Iterable[Family]:
        gauges = self.gauges
        yield gauge("build_info", "Version of this picker; always 1.", {self.version: 1}, "version")
        yield counter(
            "requests",
            "Number of requests, by outcome: picked, or the reason of the rejection.",
            self.requests,
            "outcome",
        )
        text = (
            "Seconds that a pick took, without the time spent waiting for the request body or in the queue."
        )
        yield histogram("pick_seconds", text, self.pick)
        yield histogram("stage_seconds", "Seconds that each stage of a pick took.", self.stages, "stage")
        yield from self._queue_families()
        yield from self._token_time_families()
        yield from self._cache_families()
        yield from self._saving_families()
        yield from port_families(self.ports)
        yield from replication_families(gauges.replication())
        yield from prewarm_families(gauges.prewarm())
        yield from disaggregation_families(gauges.disaggregation())
        yield from certificate_families(gauges.certificate())
        yield from self._discovery_families()
        text = "Number of tokens that an endpoint still has to prefill."
        yield gauge("backlog_tokens", text, gauges.backlog_tokens(), "endpoint")
        yield gauge(
            "endpoints",
            "Number of endpoints, by state of the engine or of its pod.",
            gauges.endpoints(),
            "state",
        )
        text = "1 if the tokenizer decodes tokens to exact bytes, as precise mode needs; otherwise 0."
        yield gauge("model_faithful", text, int(gauges.model_faithful()))
        missing, failures = gauges.tokenizer()
        text = (
            "1 while the tokenizer of --model is not loaded (all endpoints in approximate mode); otherwise 0."
        )
        yield gauge("tokenizer_missing", text, int(missing))
        yield counter("tokenizer_failures", "Number of failed attempts to load the tokenizer.", failures)
        text = "Number of invalid versions of the endpoints file, which were not used."
        yield counter("bad_endpoints_files", text, self.bad_endpoints_files)
        text = "Number of gateway messages that could not be decoded and picks that failed, by kind."
        yield counter("protocol_errors", text, self.protocol_errors, "kind")
        text = "Number of prompts that could not be rendered (their plain text is matched), by reason."
        yield counter("template_failures", text, self.template_failures, "reason")
        text = "Number of requests that ended, by the source that reported the end."
        yield counter("requests_ended", text, self.ended, "source")
        text = "Number of requests for which this endpoint was picked, but which another one served."
        yield counter("served_elsewhere", text, self.served_elsewhere, "endpoint")
        text = "Number of observed responses, by outcome: usage, none (without usage) or cut (ended early)."
        yield counter("observed_responses", text, self.responses, "outcome")
        text = "Number of tokens that observed responses report, by kind: prompt, completion or cached."
        yield counter("usage_tokens", text, self.usage, "kind")
        text = "Number of log lines that were dropped because stderr was slow."
        yield counter("log_lines_dropped", text, gauges.log_dropped())
        text = "Number of spans of picks that the collector of --trace-endpoint accepted."
        yield counter("trace_spans_exported", text, gauges.traces().exported)
        text = "Number of spans that were lost, by reason: queue-full, unreachable, refused or failed."
        yield counter("trace_spans_dropped", text, gauges.traces().dropped, "reason")
        text = "1 while gateways report how requests end; 0 while load is estimated from scrapes."
        yield gauge("ends_reported", text, int(gauges.ends_reported()))

    def _queue_families(self) -> Iterable[Family]:
        gauges = self.gauges
        text = "Number of queued requests, by priority."
        yield gauge("queue_requests", text, gauges.queue_requests(), "priority")
        yield gauge("queue_tokens", "Number of prompt tokens in the queue.", gauges.queue_tokens())
        yield gauge("queue_bytes", "Bytes of memory held for queued requests.", gauges.queue_bytes())
        text = "Seconds that requests spent in the queue, by outcome as in kvist_epp_requests_total."
        yield histogram("queue_seconds", text, self.queue_waits, "outcome")
        text = "Number of endpoints that could be picked if their batch, backlog or KV cache were not full."
        yield gauge("full_endpoints", text, gauges.full_endpoints())
        text = "Seconds that an eligible endpoint needs on average to prefill its backlog."
        yield gauge("backlog_seconds", text, gauges.backlog_seconds())

    def _token_time_families(self) -> Iterable[Family]:
        text = "Seconds from the arrival of a request to the first token of its observed, streamed response."
        yield histogram("time_to_first_token_seconds", text, self.first_token)
        text = "Seconds between two output tokens of an observed, streamed response, as its mean."
        yield histogram("time_per_output_token_seconds", text, self.output_token)
        text = "Seconds from the pick to the first token, as predicted at the pick."
        yield histogram("predicted_time_to_first_token_seconds", text, self.predicted_first_token)
        text = "Ratio of the observed to the predicted time from the pick to the first token."
        yield histogram("time_to_first_token_ratio", text, self.first_token_ratio)
        text = "Ratio of the time from the pick to the end of prefill by KV events, to that prediction."
        yield histogram("prefill_time_ratio", text, self.prefill_ratio)

    def _saving_families(self) -> Iterable[Family]:
        text = (
            "Number of prompt tokens that engines did not compute, by their KV events or else as predicted."
        )
        yield counter("saved_prefill_tokens", text, self.saved_tokens)
        text = "Seconds of prefill that engines saved by cached tokens, at the prefill rate of the endpoint."
        yield counter("saved_prefill_seconds", text, self.saved_seconds)
        text = "Number of evicted prompt tokens that were computed again while no endpoint held them."
        yield counter("evicted_requested_tokens", text, self.gauges.evicted_requested_tokens())

    def _cache_families(self) -> Iterable[Family]:
        text = "Number of prompt tokens that were predicted to be cached on the picked endpoint."
        yield counter("predicted_cached_tokens", text, self.predicted_cached, "endpoint")
        text = "Number of tokens of the picked prompts for which cached tokens were predicted."
        yield counter("prompt_tokens", text, self.prompt_tokens, "endpoint")
        text = "Number of prompt tokens that were cached according to the engine."
        yield counter("true_cached_tokens", text, self.true_cached, "endpoint")
        text = "Number of tokens of the prompts whose cached tokens the engine reported."
        yield counter("verified_prompt_tokens", text, self.verified_prompt, "endpoint")
        text = "Number of tokens predicted to be cached of the prompts whose true cached tokens are known."
        yield counter("verified_predicted_tokens", text, self.verified_predicted, "endpoint")
        text = "Number of prompt tokens predicted to be loaded from a slower tier, once admitted, by medium."
        yield counter("predicted_loaded_tokens", text, self.predicted_loads, "endpoint", "medium")
        text = "Number of times that all blocks of a slower tier left the index, as it did not give them."
        yield counter("tier_resets", text, self.tier_resets, "endpoint", "medium")
        text = "Number of KV events applied to the index, by type: stored, removed or cleared."
        yield counter("index_events", text, self.events, "endpoint", "type")
        text = "Number of gaps in the sequence numbers of an endpoint's KV event batches."
        yield counter("index_gaps", text, self.gaps, "endpoint")
        text = "Number of times that all blocks of an endpoint left the index (restart, lost events)."
        yield counter("index_resets", text, self.resets, "endpoint")
        text = "Number of KV event messages that could not be decoded, or applied whole."
        yield counter("index_undecodable", text, self.undecodable, "endpoint")
        blocks = {
            (endpoint, medium): count
            for endpoint, media in self.gauges.index_blocks().items()
            for medium, count in media.items()
        }
        text = "Number of KV cache blocks that an endpoint holds according to the index, by medium."
        yield gauge("index_blocks", text, blocks, "endpoint", "medium")
        text = "1 if the endpoint's KV events are used for matching, 0 if it is in approximate mode."
        yield gauge("index_trust", text, self.gauges.precise(), "endpoint")

    def _discovery_families(self) -> Iterable[Family]:
        watches = list(self.gauges.watches())
        text = "1 while a watch of the Kubernetes API is open, otherwise 0; by resource."
        yield gauge("discovery_watching", text, {w.resource: int(w.open) for w in watches}, "resource")
        silent = {w.resource: w.silent_seconds for w in watches if w.silent_seconds is not None}
        text = "Seconds since the last message of a watch of the Kubernetes API, by resource."
        yield gauge("discovery_silent_seconds", text, silent, "resource")
        text = "Number of complete lists that were read from the Kubernetes API, by resource."
        yield counter("discovery_lists", text, {w.resource: w.lists for w in watches}, "resource")
        errors = {(w.resource, status): n for w in watches for status, n in w.errors.items()}
        text = "Number of lists and watches of the Kubernetes API that failed, by resource and HTTP status."
        yield counter("discovery_errors", text, errors, "resource", "status")


class MetricsPage(Collector):
    """Families whose values are read on the event loop, and which another thread may then format.

    CPU time, memory and open files of this process are on each page.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        """``families`` may read the values while it is iterated over, which happens once."""
        self._families: Iterable[Metric | Family] = chain(_PROCESS.collect(), families)

    def read(self) -> Generator[None, None, None]:
        """Read the values, a family a step; ``format`` does so at once if this was not called."""
        found: list[Metric | Family] = []
        for family in self._families:
            found.append(family)
            yield
        self._families = found

    def collect(self) -> Iterable[Metric]:
        """Return the families as Prometheus's library has them."""
        pauses = Pauses()
        for family in self._families:
            yield family.metric(pauses) if isinstance(family, Family) else family

    def format(self, accept: str) -> tuple[bytes, str]:
        """Return the page in the format that an ``Accept`` header asks for, and its content type."""
        registry = CollectorRegistry()
        registry.register(self)
        encoder, content_type = choose_encoder(accept)
        return encoder(registry), content_type


_PROCESS: Final = ProcessCollector(registry=None)
