"""What the picker says of its other replicas."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvist_epp.peers.tally import Report


def families(report: Report) -> Iterable[Metric]:
    """All of them; without ``--peers`` they have no series, or zeros."""
    tally = report.tally
    yield _gauge("peers", "Other replicas by how they stand with us.", report.standings, "state")
    yield _gauge("peer_requests", "Open requests that other replicas routed.", {"": report.entries})
    yield _gauge("gossip_lag_seconds", "How long the slowest replica takes to take in.", {"": report.lag})
    yield _counter("gossip_messages", "Messages between replicas.", tally.messages, "direction")
    yield _counter("gossip_bytes", "Bytes of messages between replicas.", tally.octets, "direction")
    text = "Access-log entries of requests that another replica routed."
    yield _counter("gossip_passed_entries", text, tally.passed, "direction")
    text = "Conversations with replicas that broke off."
    yield _counter("gossip_broken", text, {"": tally.broken})
    yield _counter("snapshots", "Snapshots of an index, given and taken.", tally.snapshots, "outcome")
    text = "Time the snapshot took that this replica started from; 0: none."
    yield _gauge("snapshot_seconds", text, {"": tally.snapshot_seconds})
    text = "Distinct blocks in the snapshot this replica started from."
    yield _gauge("snapshot_blocks", text, {"": tally.snapshot_blocks})


def _gauge(name: str, text: str, values: Mapping[str, float], *labels: str) -> Metric:
    family = GaugeMetricFamily(f"kvist_epp_{name}", text, labels=labels)
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)
    return family


def _counter(name: str, text: str, values: Mapping[str, int], *labels: str) -> Metric:
    family = CounterMetricFamily(f"kvist_epp_{name}", text, labels=labels)
    for label, value in values.items():
        family.add_metric([label] if labels else [], value)
    return family
