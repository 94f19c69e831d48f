"""What is counted of the talk between replicas. Metrics read it; nothing decides by it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """All only grow, but for the snapshot's."""

    messages: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    octets: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    passed: Counter[str] = field(default_factory=lambda: Counter(sent=0, received=0))
    """Access-log entries of requests that another replica routed."""
    broken: int = 0
    """Conversations that ended otherwise than by a farewell."""
    snapshots: Counter[str] = field(default_factory=lambda: Counter(given=0, taken=0, failed=0))
    snapshot_seconds: float = 0.0
    """The last snapshot taken: how long it took, …"""
    snapshot_blocks: int = 0
    """… and its distinct blocks."""
    snapshot_publishers: int = 0

    def sent(self, size: int) -> None:
        """An update or a chunk was sent."""
        self.messages["sent"] += 1
        self.octets["sent"] += size

    def received(self, size: int) -> None:
        """An update or a chunk came."""
        self.messages["received"] += 1
        self.octets["received"] += size


@dataclass(frozen=True, slots=True)
class Report:
    """What the metrics page asks for."""

    tally: Tally = field(default_factory=Tally)
    standings: Mapping[str, int] = field(default_factory=dict)
    """Replicas by standing."""
    entries: int = 0
    """Open requests that other replicas routed."""
    lag: float = 0.0
    """Seconds that the slowest follower is behind."""
