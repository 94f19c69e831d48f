"""Every bound of the HTTP/2 server in one place: what a peer may cost us before it is refused."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """How much of something harmless once and harmful in masses a connection may send."""

    burst: int
    """Frames allowed at once."""
    per_second: float
    """Frames given back each second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds per connection unless a field says otherwise; sizes are bytes, times seconds."""

    connections: int = 512
    """Open connections of one server; one more is closed at once."""
    streams: int = 4096
    """Open streams; one more is refused (REFUSED_STREAM), which clients may retry."""
    header_list_bytes: int = 32 * 1024
    """Decoded header list, counted as RFC 9113 section 6.5.2 does (32 bytes on top of each field)."""
    header_block_bytes: int = 32 * 1024
    """Encoded header block, CONTINUATION frames included."""
    continuations: int = 16
    """CONTINUATION frames of one header block."""
    frame_bytes: int = 16 * 1024
    """SETTINGS_MAX_FRAME_SIZE we advertise. Larger is of no use: Envoy sends 16 KiB frames all the same."""
    message_bytes: int = 16 * 1024 * 1024
    """One gRPC message received, or one body of a request that is not gRPC; more is RESOURCE_EXHAUSTED."""
    receiving_bytes: int = 256 * 1024 * 1024
    """Incomplete messages of all streams together; the stream that passes it is reset."""
    stream_window: int = 16 * 1024 * 1024
    """Receive window of a stream; a large one spares WINDOW_UPDATE, ``receiving_bytes`` bounds memory."""
    connection_window: int = 1 << 30
    """Receive window of the connection."""
    stream_send_bytes: int = 32 * 1024 * 1024
    """Bytes that wait for a stream's send window; a slower reader is reset."""
    connection_send_bytes: int = 128 * 1024 * 1024
    """Bytes that wait for the peer in all; the stream that passes it is reset, control frames close."""
    resets: Rate = Rate(10_000, 1000.0)
    """Streams reset before they ended, by either side ("rapid reset", "made you reset")."""
    pings: Rate = Rate(1000, 50.0)
    """PING frames to be answered."""
    settings: Rate = Rate(100, 10.0)
    """SETTINGS frames to be answered."""
    empty_frames: Rate = Rate(1000, 100.0)
    """DATA frames that carry nothing and end nothing."""
    idle_frames: Rate = Rate(100_000, 50_000.0)
    """PRIORITY, WINDOW_UPDATE, unknown frames and frames of closed streams: each costs little, all a core."""
    handshake_seconds: float = 10.0
    """From accept to the end of the client's connection preface."""
    stall_seconds: float = 30.0
    """A peer that takes nothing from a full socket for this long is cut off."""
    linger_seconds: float = 2.0
    """From our last byte to the peer's own end of the connection."""
    sweep_seconds: float = 1.0
    """How often these times are looked at."""
    idle_seconds: float = 3600.0
    """A connection without open streams that sends nothing is told to go away."""


class Budget:
    """A token bucket for one ``Rate``; ``clock`` gives seconds and is read only when the burst runs low."""

    __slots__ = ("_clock", "_filled", "_left", "_rate")

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._left = float(rate.burst)
        self._filled = clock()

    def spend(self) -> bool:
        """Take one; False when nothing is left."""
        if self._left < 1.0:
            self._refill()
        self._left -= 1.0
        return self._left >= 0.0

    def _refill(self) -> None:
        now = self._clock()
        gained = (now - self._filled) * self._rate.per_second
        self._left = min(self._rate.burst, max(self._left, 0.0) + gained)
        self._filled = now
