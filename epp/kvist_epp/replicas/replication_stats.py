"""Counters of the exchange between replicas, for the metrics page; no decision depends on them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReplicationStats:
    """Counters since the start, and figures of the last snapshot that was taken."""

    messages: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    message_bytes: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    forwarded: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    """Access-log entries of requests that another replica routed."""
    broken: int = 0
    """Connections that ended without a farewell."""
    snapshots: Counter[str] = field(default_factory=lambda: Counter(given=0, taken=0, failed=0))
    snapshot_seconds: float = 0.0
    """Duration of the last snapshot taken."""
    snapshot_blocks: int = 0
    """Distinct blocks in the last snapshot taken."""
    snapshot_publishers: int = 0

    def on_sent(self, size: int) -> None:
        """Count an update or a chunk that was sent."""
        self.messages["sent"] += 1
        self.message_bytes["sent"] += size

    def on_received(self, size: int) -> None:
        """Count an update or a chunk that was received."""
        self.messages["received"] += 1
        self.message_bytes["received"] += size


@dataclass(frozen=True, slots=True)
class ReplicationReport:
    """State of the exchange at one moment, for the metrics page."""

    stats: ReplicationStats = field(default_factory=ReplicationStats)
    states: Mapping[str, int] = field(default_factory=dict)
    """Other replicas by state."""
    requests: int = 0
    """Open requests that other replicas routed."""
    lag: float = 0.0
    """Delay of the slowest follower, in seconds."""
