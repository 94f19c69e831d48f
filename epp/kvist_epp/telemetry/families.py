"""Families of Prometheus, made of plain numbers at a scrape: helpers, and those that several roles have.

Every name begins with ``kvist_epp_``; ``counter`` adds ``_total``. Values are base units: seconds, bytes,
tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
)

from kvist_epp.http2.limits import PortStats
from kvist_epp.telemetry.counters import DisaggregationStats, Histogram, PrewarmStats, ReplicationReport

SLICE_SECONDS: Final = 0.001
"""Work of a thread between two pauses."""
MAX_ID: Final = 64
"""Longest request id in an exemplar: names and values of its labels may have 128 characters in all."""

Values = Mapping[str, float] | Mapping[tuple[str, str], float] | float
Buckets = list[tuple[str, float] | tuple[str, float, Exemplar]]


@dataclass(frozen=True, slots=True)
class Family:
    """A family with its values of one moment, which another thread may format.

    A thousand endpoints have 13,000 values, and formatting them takes 100 ms, in which the event loop waits
    for the interpreter's lock, 5 ms each time. So the thread pauses between slices (``Pauses``), and the
    samples are made one by one, since so many objects at once would be searched for garbage.
    """

    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]
    name: str
    """Without the prefix ``kvist_epp_``."""
    text: str
    labels: tuple[str, ...]
    rows: Mapping[Any, Any]
    """Value, or buckets and sum, by the label, or by several labels as a tuple."""

    def metric(self, pauses: "Pauses") -> Metric:
        """Return the family as Prometheus's library has it, with samples that are made when they are read."""
        metric = self._empty()
        metric.samples = _Samples(self, pauses)  # type: ignore[assignment]  # formats only iterate over them
        return metric

    def samples(self) -> Iterator[Sample]:
        """Make the samples one by one."""
        made = self._empty()
        for key, row in self.rows.items():
            labels = key if isinstance(key, tuple) else (key,)
            if isinstance(made, HistogramMetricFamily):
                made.add_metric(labels, *row)
            else:
                made.add_metric(labels, row)
            yield from made.samples
            made.samples.clear()

    def _empty(self) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
        return self.kind(f"kvist_epp_{self.name}", self.text, labels=self.labels)


class Pauses:
    """Pauses of a thread that formats a page: it sleeps after each slice of work, in which it has held the
    interpreter's lock."""

    def __init__(self) -> None:
        self._until = perf_counter() + SLICE_SECONDS

    def between(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield these samples, with pauses when a slice is over."""
        for sample in samples:
            yield sample
            if perf_counter() > self._until:
                sleep(SLICE_SECONDS)
                self._until = perf_counter() + SLICE_SECONDS


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of a family, made anew each time that they are read."""

    family: Family
    pauses: Pauses

    def __iter__(self) -> Iterator[Sample]:
        return self.pauses.between(self.family.samples())


def gauge(name: str, text: str, values: Values, *labels: str) -> Family:
    """Return a gauge: one value, or values by the label (or by both labels as a tuple)."""
    return Family(GaugeMetricFamily, name, text, labels, _rows(values))


def counter(name: str, text: str, values: Values, *labels: str) -> Family:
    """Return a counter: one value, or values by the label (or by both labels as a tuple)."""
    return Family(CounterMetricFamily, name, text, labels, _rows(values))


def _rows(values: Values) -> Mapping[Any, float]:
    return dict(values) if isinstance(values, Mapping) else {(): values}


def histogram(name: str, text: str, histograms: Mapping[str, Histogram] | Histogram, *labels: str) -> Family:
    """Return a histogram: one, or several by the label.

    Buckets carry the exemplars, which only OpenMetrics shows.
    """
    found = (
        {(): histograms} if isinstance(histograms, Histogram) else {(k,): h for k, h in histograms.items()}
    )
    rows = {key: (_buckets(one), one.total) for key, one in found.items()}
    return Family(HistogramMetricFamily, name, text, labels, rows)


def _buckets(found: Histogram) -> Buckets:
    exemplars = found.exemplars()
    buckets: Buckets = []
    for at, (bound, count) in enumerate(found.cumulative()):
        one = exemplars.get(at)
        # a client may choose its id: one that could break the page, or that Prometheus refuses, is left out
        if one is None or len(one.request_id) > MAX_ID or not _plain(one.request_id):
            buckets.append((bound, count))
            continue
        ids = {"request_id": one.request_id, "trace_id": one.trace_id}
        labels = {name: value for name, value in ids.items() if value}
        buckets.append((bound, count, Exemplar(labels, one.value, one.at)))
    return buckets


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def port_families(ports: Mapping[str, PortStats]) -> Iterable[Family]:
    """Return ``kvist_epp_http2_…`` and ``kvist_epp_tls_…`` of each gRPC port by its name."""
    loads = {name: stats.load() for name, stats in ports.items()}
    yield gauge(
        "http2_connections",
        "Number of open connections of each gRPC port.",
        {name: load.connections for name, load in loads.items()},
        "port",
    )
    yield gauge(
        "http2_streams",
        "Number of open streams of each gRPC port: requests, health watches and access logs.",
        {name: load.streams for name, load in loads.items()},
        "port",
    )
    held: dict[tuple[str, str], float] = {}
    for name, load in loads.items():
        held[name, "receiving"], held[name, "unsent"] = load.receiving_bytes, load.unsent_bytes
    text = (
        "Bytes held for incomplete or unanswered requests (receiving) and for answers not yet read (unsent)."
    )
    yield gauge("http2_held_bytes", text, held, "port", "kind")
    text = "Number of connections that the picker closed or refused, by reason."
    ended = {name: stats.connections_ended for name, stats in ports.items()}
    yield counter("http2_connections_ended", text, _by_port(ended), "port", "reason")
    text = "Number of streams that the picker ended or refused while their connection stayed open, by reason."
    ended = {name: stats.streams_ended for name, stats in ports.items()}
    yield counter("http2_streams_ended", text, _by_port(ended), "port", "reason")
    text = "Number of failed TLS handshakes, by OpenSSL's reason."
    refused = {name: stats.handshake_failures.counts for name, stats in ports.items()}
    yield counter("tls_refusals", text, _by_port(refused), "port", "reason")


def _by_port(counts: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], float]:
    return {(port, reason): count for port, found in counts.items() for reason, count in found.items()}


def certificate_families(counters: Mapping[str, float]) -> Iterable[Family]:
    """Return the metrics of the ext_proc port's certificate.

    ``counters`` are those of ``Certificates``; they are empty without TLS, and so are the families then.
    """
    text = "Time at which the certificate in use expires, in Unix seconds; absent without TLS."
    expiry = counters["expires"] if counters else dict[str, float]()
    yield gauge("certificate_expiry_timestamp_seconds", text, expiry)
    text = "Number of changes of the certificate files, by outcome: taken (loaded) or refused (invalid)."
    changes = {outcome: int(counters[outcome]) for outcome in ("taken", "refused")} if counters else {}
    yield counter("certificate_changes", text, changes, "outcome")


def prewarm_families(stats: PrewarmStats) -> Iterable[Family]:
    """Return the metrics of prewarming; all are zero where it is off."""
    text = "Number of prompt tokens that engines computed in advance, for prewarming."
    yield counter("prewarm_tokens", text, stats.tokens)
    text = "Number of prewarming requests to engines, by outcome: done or failed."
    yield counter("prewarm_steps", text, {"done": stats.steps, "failed": stats.failed}, "outcome")
    text = "Number of prefixes that prewarming began, dropped unfinished, or keeps cached by requests."
    found = {"begun": stats.begun, "dropped": stats.dropped, "kept": stats.kept}
    yield counter("prewarm_prefixes", text, found, "what")
    yield counter("prewarm_seconds", "Seconds that prewarming requests took in total.", stats.seconds)


def replication_families(report: ReplicationReport) -> Iterable[Family]:
    """Return the metrics of the exchange between replicas; all are empty or zero without ``--replicas``."""
    stats = report.stats
    yield gauge(
        "peers",
        "Number of other replicas of the picker, by state: heard, silent or left.",
        report.states,
        "state",
    )
    text = "Number of requests in flight that other replicas of the picker routed."
    yield gauge("peer_requests", text, report.requests)
    text = "Seconds that the slowest other replica takes to acknowledge a load update."
    yield gauge("gossip_lag_seconds", text, report.lag)
    text = "Number of messages exchanged with other replicas, by direction: sent or received."
    yield counter("gossip_messages", text, stats.messages, "direction")
    text = "Bytes of the messages exchanged with other replicas, by direction: sent or received."
    yield counter("gossip_bytes", text, stats.message_bytes, "direction")
    text = "Number of access-log entries forwarded to the replica that routed the request, by direction."
    yield counter("gossip_passed_entries", text, stats.forwarded, "direction")
    yield counter(
        "gossip_broken",
        "Number of connections that broke although the other replica had not announced its shutdown.",
        stats.broken,
    )
    text = "Number of index snapshots, by outcome: given to another replica, taken from one, or failed."
    yield counter("snapshots", text, stats.snapshots, "outcome")
    text = "Seconds that the copy of another replica's index took at startup; 0 if none was copied."
    yield gauge("snapshot_seconds", text, stats.snapshot_seconds)
    text = "Number of distinct blocks in the index that was copied from another replica at startup."
    yield gauge("snapshot_blocks", text, stats.snapshot_blocks)


def disaggregation_families(stats: DisaggregationStats) -> Iterable[Family]:
    """Return the families ``kvist_epp_disaggregation_…``."""
    text = "Number of picks, by whether the prompt is computed at another endpoint (split), or why it is not."
    yield counter("disaggregation_decisions", text, stats.decisions, "decision")
    text = "Seconds from the request to a prefill endpoint to its answer, or to its failure."
    yield histogram("disaggregation_prefill_seconds", text, stats.prefill_seconds)
    text = "Number of split requests whose prompt the decode endpoint computed nevertheless, by reason."
    yield counter("disaggregation_fallbacks", text, stats.fallbacks, "reason")
    text = "Number of pairs of endpoints, by state: warm (blocks were transferred before) or connecting."
    yield gauge("disaggregation_pairs", text, stats.pairs, "state")
    text = "Number of failed attempts to connect a pair of endpoints."
    yield counter("disaggregation_pair_failures", text, stats.pair_failures)
