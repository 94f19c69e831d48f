"""Every bound of the HTTP/2 server in one place: what a peer may cost us before it is refused.

``docs/protocol.md`` lists them with their flags, their metrics and what the peer sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from kvist_epp.settings.settings import Settings

_BURST_SECONDS: Final = 10
"""How long a peer may be ahead of a rate: clients are restarted, and requests given up, all at once."""
_PER_ANSWERED_BYTE: Final = 1 / 32
"""Clients answer what we send by WINDOW_UPDATE, and measure the line by PING; a few for each answer."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How much of something harmless once and harmful in masses a connection may send."""

    burst: int
    """Frames allowed at once."""
    per_second: float
    """Frames given back each second."""
    per_answered_byte: float = 0.0
    """Frames given back for each byte of answers, so that a busy connection may be lively."""


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
    """What all connections of a port hold: incomplete messages, requests nobody has answered yet, answers
    nobody reads. Beyond it a connection keeps its share, ``held_bytes`` divided by the connections."""
    header_bytes: int = 16 * 1024
    """One header block: encoded, CONTINUATION frames included, and decoded, counted as RFC 9113 section
    6.5.2 does (32 bytes on top of each field)."""
    continuations: int = 16
    """CONTINUATION frames of one header block."""
    frame_bytes: int = 16 * 1024
    """SETTINGS_MAX_FRAME_SIZE we advertise. Larger is of no use: Envoy sends 16 KiB frames all the same."""
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
    """From accept to the end of TLS and the client's connection preface."""
    stall_seconds: float = 30.0
    """A peer that takes nothing from a full socket, and a stream that stands still: a message half received,
    an answer whose window stays shut, an answered request that is never ended."""
    bytes_per_second: int = 1024
    """Slower than this over ``stall_seconds`` is standing still."""
    stream_idle_seconds: float = 600.0
    """A call nobody has answered, and whose client says nothing."""
    linger_seconds: float = 2.0
    """From our last byte to the peer's own end of the connection."""
    sweep_seconds: float = 1.0
    """How often these times are looked at; those of streams four times in ``stall_seconds``."""
    idle_seconds: float = 3600.0
    """A connection without open streams for so long is told to go away."""
    keepalive_seconds: float = 60.0
    """A connection that says nothing for so long is asked (PING) whether it is still there."""
    keepalive_timeout_seconds: float = 20.0
    """No byte for so long after that question: nobody is there."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What the flags ask for; the rest stays as it is here."""
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


def _nothing_answered() -> int:
    return 0


class Budget:
    """A token bucket for one ``Rate``; both sources are read only when the burst runs low."""

    __slots__ = ("_answered", "_clock", "_filled", "_left", "_rate", "_seen")

    def __init__(
        self, rate: Rate, clock: Callable[[], float], answered: Callable[[], int] = _nothing_answered
    ) -> None:
        """``clock`` gives seconds, ``answered`` the bytes of answers so far."""
        self._rate = rate
        self._clock = clock
        self._answered = answered
        self._left = float(rate.burst)
        self._filled = clock()
        self._seen = 0

    def spend(self) -> bool:
        """Take one; False when nothing is left."""
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
