"""What the picker says of its other replicas."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from kvist_epp.replicas.replication_stats import ReplicationReport
from kvist_epp.telemetry.families import counter, gauge


def families(report: ReplicationReport) -> Iterable[Metric]:
    """All of them; without ``--peers`` they have no series, or zeros."""
    stats = report.stats
    yield gauge("peers", "Other replicas by how they stand with us.", report.states, "state")
    yield gauge("peer_requests", "Open requests that other replicas routed.", {"": report.requests})
    yield gauge("gossip_lag_seconds", "How long the slowest replica takes to take in.", {"": report.lag})
    yield counter("gossip_messages", "Messages between replicas.", stats.messages, "direction")
    yield counter("gossip_bytes", "Bytes of messages between replicas.", stats.message_bytes, "direction")
    text = "Access-log entries of requests that another replica routed."
    yield counter("gossip_passed_entries", text, stats.forwarded, "direction")
    text = "Conversations with replicas that broke off."
    yield counter("gossip_broken", text, {"": stats.broken})
    yield counter("snapshots", "Snapshots of an index, given and taken.", stats.snapshots, "outcome")
    text = "Time the snapshot took that this replica started from; 0: none."
    yield gauge("snapshot_seconds", text, {"": stats.snapshot_seconds})
    text = "Distinct blocks in the snapshot this replica started from."
    yield gauge("snapshot_blocks", text, {"": stats.snapshot_blocks})
