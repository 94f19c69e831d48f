"""Statistics shared by the connections of a port: memory, connections and streams ended, TLS failures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvist_epp.http2 import frames

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
"""Reasons for which a connection is ended; the values of a metric's label."""

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
"""Reasons for which a stream is ended before its call ends it; the values of a metric's label."""

_BY_CODE: Final = {
    frames.INTERNAL_ERROR: "internal",
    frames.FLOW_CONTROL_ERROR: "flow-control",
    frames.FRAME_SIZE_ERROR: "frame-size",
    frames.COMPRESSION_ERROR: "compression",
}


def reason_of(code: int) -> str:
    """Return the reason that belongs to an HTTP/2 error code of ours."""
    return _BY_CODE.get(code, "protocol")


WARN_SECONDS: Final = 60.0
MAX_REASONS: Final = 32
"""Number of reasons counted separately. They are OpenSSL's, a few hundred, and peers choose among them."""
OTHER: Final = "other"

HUNG_UP: Final = "the client hung up"

_PLAINTEXT: Final = "the client speaks plaintext; use TLS in the gateway, or --secure-serving=false here"
_DISTRUST: Final = (
    "the client does not trust our certificate; give it /ca.crt of the metrics port, or set --cert-path"
)
REMEDIES: Final = {
    "http request": _PLAINTEXT,
    "wrong version number": _PLAINTEXT,
    "packet length too long": _PLAINTEXT,
    "tlsv1 alert unknown ca": _DISTRUST,
    "sslv3 alert bad certificate": _DISTRUST,
    "sslv3 alert certificate unknown": _DISTRUST,
    HUNG_UP: _DISTRUST.replace("the client does", "perhaps the client does"),
    "peer did not return a certificate": "the client has no certificate, and --client-ca-path is set",
    "certificate verify failed": "the client's certificate is not signed by --client-ca-path, or has expired",
    "unsupported protocol": "the client's TLS is older than --tls-min-version",
    "the client did not offer h2 by alpn": "HTTP/2 must be negotiated; gRPC clients and Envoy do so",
}


class HandshakeFailures:
    """TLS handshakes of one port that failed: all are counted, one warning a minute is made per reason."""

    __slots__ = ("_muted", "_warned_at", "counts")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Number of failures by reason."""
        self._warned_at: dict[str, float] = {}
        self._muted: dict[str, int] = {}

    def add(self, reason: str, address: str, now: float) -> str:
        """Count a failure; return a warning, empty if this reason had one less than a minute ago."""
        reason = reason if reason in self.counts or len(self.counts) < MAX_REASONS else OTHER
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if now - self._warned_at.get(reason, -WARN_SECONDS) < WARN_SECONDS:
            self._muted[reason] = self._muted.get(reason, 0) + 1
            return ""
        self._warned_at[reason] = now
        muted = self._muted.pop(reason, 0)
        more = f", as {muted} others before" if muted else ""
        remedy = REMEDIES.get(reason.lower(), "")
        return f"TLS handshake with {address} failed{more}: {reason}" + (f" ({remedy})" if remedy else "")


@dataclass(frozen=True, slots=True)
class PortLoad:
    """Load of one port at present."""

    connections: int
    streams: int
    receiving_bytes: int
    """Bytes of messages not complete yet, and of requests not answered yet."""
    unsent_bytes: int
    """Bytes of answers that wait for the peer."""


class PortStats:
    """Sums of one port, to which its connections add."""

    __slots__ = (
        "connections",
        "connections_ended",
        "handshake_failures",
        "held",
        "limit",
        "load",
        "streams_ended",
    )

    def __init__(self, limit: int, load: Callable[[], PortLoad] = lambda: PortLoad(0, 0, 0, 0)) -> None:
        """``limit`` is the number of bytes that the connections may hold together.

        ``load`` returns the present load of the port.
        """
        self.limit = limit
        self.load = load
        self.held = 0
        self.connections = 0
        self.connections_ended = dict.fromkeys(CONNECTION_ENDS, 0)
        self.streams_ended = dict.fromkeys(STREAM_ENDS, 0)
        self.handshake_failures = HandshakeFailures()

    def __repr__(self) -> str:
        return f"<PortStats {self.held} of {self.limit} bytes, {self.connections} connections>"


class MemoryShare:
    """Memory that one connection holds of its port's.

    A port that is full takes from the connections above their share: a connection that keeps to
    ``limit / connections`` loses no stream, whatever others do. At most twice the limit is therefore held.
    """

    __slots__ = ("receiving", "stats", "unsent")

    def __init__(self, stats: PortStats) -> None:
        self.stats = stats
        self.receiving = 0
        self.unsent = 0

    def receive(self, size: int) -> bool:
        """Add ``size`` bytes that were received (negative: released); return False if that is too much."""
        self.receiving += size
        stats = self.stats
        stats.held += size
        return stats.held <= stats.limit or self._within()

    def queue(self, size: int) -> None:
        """Add ``size`` bytes that cannot be sent yet (negative: released)."""
        self.unsent += size
        self.stats.held += size

    def refuses(self, size: int) -> bool:
        """Return whether ``size`` bytes more to send would be too much."""
        return self.stats.held + size > self.stats.limit and not self._within(size)

    def _within(self, size: int = 0) -> bool:
        return (self.receiving + self.unsent + size) * max(self.stats.connections, 1) <= self.stats.limit
