"""What the connections of one port hold together, and why some of them, or of their streams, were ended."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvist_epp.http2 import frames
from kvist_epp.http2.handshake_failures import HandshakeFailures

CONNECTION_ENDS: Final = (
    "too-many",
    "handshake",
    "tls",
    "protocol",
    "frame-size",
    "flow-control",
    "compression",
    "header-bytes",
    "resets",
    "pings",
    "settings",
    "empty-frames",
    "control-frames",
    "unread",
    "stalled",
    "keepalive",
    "idle",
    "internal",
)
"""Why we ended a connection; the values of a metric's label."""

STREAM_ENDS: Final = (
    "too-many",
    "draining",
    "protocol",
    "flow-control",
    "message-bytes",
    "held-bytes",
    "unread",
    "stalled-receiving",
    "stalled-sending",
    "stalled-ending",
    "silent",
)
"""Why we ended a stream before its call did; the values of a metric's label."""

_BY_CODE: Final = {
    frames.INTERNAL_ERROR: "internal",
    frames.FLOW_CONTROL_ERROR: "flow-control",
    frames.FRAME_SIZE_ERROR: "frame-size",
    frames.COMPRESSION_ERROR: "compression",
}


def reason_of(code: int) -> str:
    """What an HTTP/2 error code of ours says by itself."""
    return _BY_CODE.get(code, "protocol")


@dataclass(frozen=True, slots=True)
class PortLoad:
    """One port right now."""

    connections: int
    streams: int
    receiving_bytes: int
    """Messages not complete yet, and requests nobody has answered yet."""
    unsent_bytes: int
    """Answers that wait for the peer."""


class PortStats:
    """The sums of one port; its connections add to them."""

    __slots__ = ("connections", "connections_ended", "held", "limit", "load", "refusals", "streams_ended")

    def __init__(self, limit: int) -> None:
        """``limit``: how many bytes the connections may hold together."""
        self.limit = limit
        self.held = 0
        self.connections = 0
        self.connections_ended = dict.fromkeys(CONNECTION_ENDS, 0)
        self.streams_ended = dict.fromkeys(STREAM_ENDS, 0)
        self.refusals = HandshakeFailures()
        self.load: Callable[[], PortLoad] = lambda: PortLoad(0, 0, 0, 0)
        """Counted when asked for."""

    def __repr__(self) -> str:
        return f"<PortStats {self.held} of {self.limit} bytes, {self.connections} connections>"


class MemoryShare:
    """What one connection holds of its port's memory.

    A port that is full takes from those who have more than their part: as long as each keeps to
    ``limit / connections`` nobody loses a stream, whatever others do. So at most twice the limit is held.
    """

    __slots__ = ("receiving", "stats", "unsent")

    def __init__(self, stats: PortStats) -> None:
        self.stats = stats
        self.receiving = 0
        self.unsent = 0

    def receive(self, size: int) -> bool:
        """Hold ``size`` bytes more that came in (negative: fewer); False when that is too much."""
        self.receiving += size
        stats = self.stats
        stats.held += size
        return stats.held <= stats.limit or self._within()

    def queue(self, size: int) -> None:
        """Hold ``size`` bytes more that cannot go out yet (negative: fewer)."""
        self.unsent += size
        self.stats.held += size

    def refuses(self, size: int) -> bool:
        """Whether ``size`` bytes more to send would be too much."""
        return self.stats.held + size > self.stats.limit and not self._within(size)

    def _within(self, size: int = 0) -> bool:
        """Whether this connection keeps to its part."""
        return (self.receiving + self.unsent + size) * max(self.stats.connections, 1) <= self.stats.limit
