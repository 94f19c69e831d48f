"""Bounds of the HTTP/2 server, and what is measured against them: rates, stalls, memory, ends by reason.

``docs/protocol.md`` lists the bounds with their flags, their metrics and their effect on the peer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvist_epp.settings.settings import Settings

if TYPE_CHECKING:
    from kvist_epp.http2.grpc_stream import GrpcStream

_BURST_SECONDS: Final = 10
"""Seconds that a peer may be ahead of a rate: clients restart, and give up requests, all at once."""
_PER_ANSWERED_BYTE: Final = 1 / 32
"""Clients send a few frames for each answer: WINDOW_UPDATE, and PING to measure the connection."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Rate at which a connection may send frames that are harmless once and harmful in masses."""

    burst: int
    """Frames allowed at once."""
    per_second: float
    """Frames given back each second."""
    per_answered_byte: float = 0.0
    """Frames given back for each byte of answers, so that a busy connection may send more of them."""


def _rate(per_second: float, per_answered_byte: float = 0.0) -> Rate:
    return Rate(int(per_second * _BURST_SECONDS), per_second, per_answered_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds per connection unless a field says otherwise; sizes are bytes, times seconds."""

    connections: int = 512
    """Open connections of one port."""
    streams: int = 4096
    """Open streams; one more is refused (REFUSED_STREAM), which clients may retry."""
    held_bytes: int = 1 << 30
    """Bytes that all connections of a port hold: incomplete messages, requests not answered yet, answers not
    read. Beyond it a connection keeps its share, ``held_bytes`` divided by the number of connections."""
    header_bytes: int = 16 * 1024
    """One header block: encoded, CONTINUATION frames included, and decoded, counted as RFC 9113 section
    6.5.2 does (32 bytes on top of each field)."""
    continuations: int = 16
    """CONTINUATION frames of one header block."""
    frame_bytes: int = 16 * 1024
    """SETTINGS_MAX_FRAME_SIZE that is advertised. Larger is of no use: Envoy sends 16 KiB frames anyway."""
    message_bytes: int = 16 * 1024 * 1024
    """One gRPC message received, or one body of a request that is not gRPC; more is RESOURCE_EXHAUSTED."""
    stream_window: int = 16 * 1024 * 1024
    """Receive window of a stream; a large one spares WINDOW_UPDATE, ``held_bytes`` bounds memory."""
    connection_window: int = 1 << 30
    """Receive window of the connection."""
    stream_send_bytes: int = 32 * 1024 * 1024
    """Bytes that wait for a stream's send window; a slower reader is reset."""
    connection_send_bytes: int = 128 * 1024 * 1024
    """Bytes that wait for the peer in all; the stream that passes it is reset, control frames close."""
    resets: Rate = Rate(10_000, 1000.0)
    """Streams reset before they ended, by either side ("rapid reset", "made you reset")."""
    pings: Rate = Rate(500, 50.0, _PER_ANSWERED_BYTE)
    """PING frames to be answered."""
    settings: Rate = Rate(100, 10.0)
    """SETTINGS frames to be answered, and GOAWAY."""
    empty_frames: Rate = Rate(1000, 100.0)
    """DATA frames that carry nothing and end nothing."""
    control_frames: Rate = Rate(10_000, 1000.0, _PER_ANSWERED_BYTE)
    """PRIORITY, WINDOW_UPDATE, unknown frames and frames of closed streams."""
    handshake_seconds: float = 10.0
    """Time from accept to the end of TLS and the client's connection preface."""
    stall_seconds: float = 30.0
    """Time after which a peer that reads nothing from a full socket is cut off, and a stalled stream ended: a
    message half received, an answer whose window stays shut, an answered request that is never ended."""
    bytes_per_second: int = 1024
    """A stream slower than this over ``stall_seconds`` is stalled."""
    stream_idle_seconds: float = 3600.0
    """Time after which a call is ended that is not answered and whose client sends nothing."""
    linger_seconds: float = 2.0
    """Time from our last byte to the peer's own end of the connection."""
    sweep_seconds: float = 1.0
    """Interval at which these times are checked; those of streams four times in ``stall_seconds``."""
    idle_seconds: float = 3600.0
    """Time after which a connection without open streams is asked to go away."""
    keepalive_seconds: float = 60.0
    """Time after which a connection that sends nothing gets a PING."""
    keepalive_timeout_seconds: float = 20.0
    """Time after that PING without a byte until the connection is cut."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the limits that the flags set; the others keep their defaults."""
        return cls(
            connections=settings.max_connections,
            streams=settings.max_streams,
            held_bytes=settings.max_held_bytes,
            header_bytes=settings.max_header_bytes,
            message_bytes=settings.max_message_bytes,
            # A body that is echoed in chunks may wait whole.
            stream_send_bytes=settings.max_message_bytes + (1 << 20),
            connection_send_bytes=4 * settings.max_message_bytes,
            resets=_rate(settings.max_resets_per_second),
            pings=_rate(settings.max_pings_per_second, _PER_ANSWERED_BYTE),
            settings=_rate(settings.max_settings_per_second),
            empty_frames=_rate(settings.max_empty_frames_per_second),
            control_frames=_rate(settings.max_control_frames_per_second, _PER_ANSWERED_BYTE),
            handshake_seconds=settings.handshake_timeout,
            stall_seconds=settings.stall_timeout,
            stream_idle_seconds=settings.stream_idle_timeout,
            idle_seconds=settings.idle_timeout,
            keepalive_seconds=settings.keepalive_time,
            keepalive_timeout_seconds=settings.keepalive_timeout,
        )


class Budget:
    """A token bucket for one `Rate`; both sources are read only when the burst runs low."""

    __slots__ = ("_answered", "_clock", "_filled", "_left", "_rate", "_seen")

    def __init__(self, rate: Rate, clock: Callable[[], float], answered: Callable[[], int] = int) -> None:
        """``clock`` returns seconds, ``answered`` the bytes of answers so far."""
        self._rate = rate
        self._clock = clock
        self._answered = answered
        self._left = float(rate.burst)
        self._filled = clock()
        self._seen = 0

    def spend(self) -> bool:
        """Take one token; return False when none is left."""
        if self._left < 1.0:
            self._refill()
        self._left -= 1.0
        return self._left >= 0.0

    def _refill(self) -> None:
        now, answered = self._clock(), self._answered()
        gained = (now - self._filled) * self._rate.per_second
        gained += (answered - self._seen) * self._rate.per_answered_byte
        self._left = min(self._rate.burst, max(self._left, 0.0) + gained)
        self._filled, self._seen = now, answered


ENDING: Final = "stalled-ending"
SENDING: Final = "stalled-sending"
RECEIVING: Final = "stalled-receiving"
SILENT: Final = "silent"

CHECKS_PER_STALL: Final = 4
"""Number of checks of the streams in ``stall_seconds``."""


class _Mark(NamedTuple):
    """State of a stream when it last made progress."""

    state: str
    since: float
    received: int
    emitted: int
    window: int


class StallDetector:
    """Finds the stalled streams of one connection: slow bodies, closed windows, idle calls.

    Streams are checked a few times in ``stall_seconds`` and keep no times, so that the hot path pays nothing.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._marks: dict[int, _Mark] = {}

    def check(self, streams: Iterable["GrpcStream"], now: float) -> list[tuple["GrpcStream", str]]:
        """Return the streams whose time is up, each with one of ``STREAM_ENDS``; ``now`` in seconds."""
        marks: dict[int, _Mark] = {}
        late = []
        for stream in streams:
            state = _state(stream)
            if not state:
                continue
            mark = self._marks.get(stream.number)
            if mark is None or mark.state != state or self._progresses(stream, mark, now):
                mark = _Mark(state, now, stream.received, stream.emitted, stream.window)
            else:
                limits = self._limits
                seconds = limits.stream_idle_seconds if state == SILENT else limits.stall_seconds
                if now - mark.since > seconds:
                    late.append((stream, state))
            marks[stream.number] = mark
        self._marks = marks
        return late

    def _progresses(self, stream: "GrpcStream", mark: _Mark, now: float) -> bool:
        if mark.state == SILENT:
            return (stream.received, stream.window) != (mark.received, mark.window)
        moved = {
            SENDING: stream.emitted - mark.emitted,
            RECEIVING: stream.received - mark.received,
        }.get(mark.state, -1)
        return moved >= self._limits.bytes_per_second * (now - mark.since)


def _state(stream: "GrpcStream") -> str:
    """Return the state in which the stream waits for its client; empty if it may wait for ever."""
    if stream.sent:
        return ENDING
    if stream.waiting_bytes:
        return SENDING
    if stream.incomplete:
        return RECEIVING
    return "" if stream.lasting else SILENT


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
