"""Every bound of the HTTP/2 server, the rates of harmless frames, and the detector of stalled streams.

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
    stream_idle_seconds: float = 600.0
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
    """Finds the stalled streams of one connection: slow bodies, shut windows, calls that are forgotten.

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
