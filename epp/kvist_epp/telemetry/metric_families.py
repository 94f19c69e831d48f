"""Prometheus families of ports, certificates, prewarming and replicas, made when the page is read."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvist_epp.http2.port_stats import PortStats
from kvist_epp.prewarm.prewarm_stats import PrewarmStats
from kvist_epp.replicas.replication_stats import ReplicationReport
from kvist_epp.telemetry.histogram import Histogram

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)
Values = Mapping[str, float] | Mapping[tuple[str, str], float] | float


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a gauge: one value, or values by the label (or by both labels as a tuple)."""
    return _fill(GaugeMetricFamily(f"kvist_epp_{name}", text, labels=labels), values)


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a counter: one value, or values by the label (or by both labels as a tuple)."""
    return _fill(CounterMetricFamily(f"kvist_epp_{name}", text, labels=labels), values)


def _fill(family: F, values: Values) -> F:
    if isinstance(values, Mapping):
        for key, value in values.items():
            family.add_metric(key if isinstance(key, tuple) else (key,), value)
    else:
        family.add_metric((), values)
    return family


def histogram(name: str, text: str, histograms: Mapping[str, Histogram] | Histogram, *labels: str) -> Metric:
    """Return a histogram in seconds: one, or several by the label."""
    family = HistogramMetricFamily(f"kvist_epp_{name}", text, labels=labels)
    rows = {(): histograms} if isinstance(histograms, Histogram) else {(k,): h for k, h in histograms.items()}
    for key, found in rows.items():
        family.add_metric(key, list(found.cumulative()), found.total)
    return family


def port_families(ports: Mapping[str, PortStats]) -> Iterable[Metric]:
    """Return ``kvist_epp_http2_…`` and ``kvist_epp_tls_…`` of each gRPC port by its name."""
    loads = {name: stats.load() for name, stats in ports.items()}
    yield gauge(
        "http2_connections",
        "Number of open connections.",
        {name: load.connections for name, load in loads.items()},
        "port",
    )
    yield gauge(
        "http2_streams",
        "Number of open streams: requests, health watches and access logs.",
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
    text = "Number of TLS handshakes that failed, by the reason that OpenSSL reports."
    refused = {name: stats.handshake_failures.counts for name, stats in ports.items()}
    yield counter("tls_refusals", text, _by_port(refused), "port", "reason")


def _by_port(counts: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], float]:
    return {(port, reason): count for port, found in counts.items() for reason, count in found.items()}


def certificate_families(counters: Mapping[str, float]) -> Iterable[Metric]:
    """Return the metrics of the ext_proc port's certificate.

    ``counters`` are those of ``Certificates``; they are empty without TLS, and so are the families then.
    """
    text = "Time at which the certificate in use expires, in Unix seconds; absent without TLS."
    expiry = counters["expires"] if counters else dict[str, float]()
    yield gauge("certificate_expiry_timestamp_seconds", text, expiry)
    text = "Number of changed certificates, keys or authorities, by whether they were taken or refused."
    changes = {outcome: int(counters[outcome]) for outcome in ("taken", "refused")} if counters else {}
    yield counter("certificate_changes", text, changes, "outcome")


def prewarm_families(stats: PrewarmStats) -> Iterable[Metric]:
    """Return the metrics of prewarming; all are zero where it is off."""
    text = "Number of prompt tokens that engines computed in advance, for prewarming."
    yield counter("prewarm_tokens", text, stats.tokens)
    text = "Number of prewarming requests to engines, by outcome: done or failed."
    yield counter("prewarm_steps", text, {"done": stats.steps, "failed": stats.failed}, "outcome")
    text = "Number of prefixes that prewarming has begun, dropped unfinished, or kept by a refresh."
    found = {"begun": stats.begun, "dropped": stats.dropped, "kept": stats.kept}
    yield counter("prewarm_prefixes", text, found, "what")
    yield counter("prewarm_seconds", "Seconds that prewarming requests took in total.", stats.seconds)


def replication_families(report: ReplicationReport) -> Iterable[Metric]:
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
    text = "Number of access-log entries forwarded to the replica that routed the request: sent or received."
    yield counter("gossip_passed_entries", text, stats.forwarded, "direction")
    yield counter(
        "gossip_broken",
        "Number of connections to other replicas that broke without a farewell.",
        stats.broken,
    )
    text = "Number of index snapshots given to other replicas, taken from one of them, or failed to be taken."
    yield counter("snapshots", text, stats.snapshots, "outcome")
    text = "Seconds that the copy of another replica's index took at startup; 0 if none was copied."
    yield gauge("snapshot_seconds", text, stats.snapshot_seconds)
    text = "Number of distinct blocks in the index that was copied from another replica at startup."
    yield gauge("snapshot_blocks", text, stats.snapshot_blocks)
