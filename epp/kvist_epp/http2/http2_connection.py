"""HTTP/2 server connection (RFC 9113) for gRPC, without I/O: bytes in, calls driven, bytes out.

Everything that a peer can make it do is bounded (``limits.Limits``).
"""

import logging
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import frames
from kvist_epp.http2.call import Method
from kvist_epp.http2.frames import FrameReader
from kvist_epp.http2.grpc_stream import GrpcStream
from kvist_epp.http2.headers import HeaderReader, Malformed
from kvist_epp.http2.limits import Budget, Limits, MemoryShare, PortStats, reason_of
from kvist_epp.http2.stream_table import LARGEST_FRAME, Outbox, Output, StreamTable

log = logging.getLogger(__name__)

_DRAIN_PING: Final = b"kvistbye"
_ALIVE_PING: Final = b"kvist up"


_UNKNOWN: Final = (None, False)
_SMALL_DATA: Final = 1024


def _no_wake() -> None:
    pass


class Http2Connection:
    """One client's connection. Not thread-safe: everything happens on the event loop's thread."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: Limits,
        *,
        wake: Callable[[], None] = _no_wake,
        clock: Callable[[], float] = time.monotonic,
        lasting: Collection[str] = (),
        stats: PortStats | None = None,
    ) -> None:
        """``wake`` is called when a sink used outside `receive` leaves output to `take`.

        ``lasting`` names the methods whose calls never end by themselves: they do not delay `drain`.
        ``stats`` are the port's; without them the connection has its own.
        """
        self.limits = limits
        self.memory = MemoryShare(stats or PortStats(limits.held_bytes))
        self.outbox = Outbox(limits.connection_send_bytes, wake, self.memory)
        self.closing = False
        self._methods = {path.encode(): (method, path in lasting) for path, method in methods.items()}
        self._frames = FrameReader(self, limits)
        self._headers = HeaderReader(limits.header_bytes)
        self._credit = limits.connection_window
        self._draining = False
        self._resets = Budget(limits.resets, clock)
        self._streams = StreamTable(
            limits, self.outbox, self.memory, self._resets, fail=self._fail, done=self._on_streams_done
        )
        self._open = self._streams.open
        self._pings = Budget(limits.pings, clock, lambda: self.outbox.answered)
        self._changes = Budget(limits.settings, clock)
        self._empties = Budget(limits.empty_frames, clock)
        self._controls = Budget(limits.control_frames, clock, lambda: self.outbox.answered)
        announced = {
            frames.SETTING_MAX_CONCURRENT_STREAMS: limits.streams,
            frames.SETTING_INITIAL_WINDOW_SIZE: limits.stream_window,
            frames.SETTING_MAX_FRAME_SIZE: limits.frame_bytes,
            frames.SETTING_MAX_HEADER_LIST_SIZE: limits.header_bytes,
        }
        self.outbox.awake = True
        self.outbox.put(frames.settings(announced))
        self.outbox.put(
            frames.window_update(frames.CONNECTION, limits.connection_window - frames.DEFAULT_WINDOW)
        )

    def __repr__(self) -> str:
        state = "closing" if self.closing else "draining" if self._draining else "open"
        return f"<Http2Connection {state}, {len(self._open)} streams, {self.outbox.size} bytes to write>"

    # -- called by the transport

    def receive(self, data: bytes) -> None:
        """Process received bytes. Never raises: a broken rule sends GOAWAY and sets ``closing``."""
        if self.closing:
            return
        self.outbox.awake = True
        try:
            self._frames.feed(data)
        except ProtocolError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a bug must cost this connection only
            self._on_bug(error)

    def take(self, most: int = 1 << 62) -> list[Output]:
        """Return the bytes to write now, in order, up to the piece that reaches ``most`` bytes.

        When none are left and ``closing`` is set, close the transport.
        """
        return self.outbox.take(most)

    def park(self, beyond: int = 0) -> None:
        """Keep the output, because the socket is full and ``beyond`` bytes wait in front of it already."""
        self.outbox.park(beyond)

    def check_streams(self, now: float) -> None:
        """End stalled streams; to be called ``CHECKS_PER_STALL`` times in ``stall_seconds``."""
        if self.closing:
            return
        try:
            self._streams.check(now)
        except Exception as error:  # noqa: BLE001 - as in receive
            self._on_bug(error)

    def probe(self) -> None:
        """Send a PING, to which a live peer responds."""
        self.outbox.put(frames.frame(frames.PING, 0, frames.CONNECTION, _ALIVE_PING))

    def drain(self) -> None:
        """Ask the peer to leave.

        New streams are refused one round trip later; ``closing`` is set when the last call has ended.
        """
        if self._draining or self.closing:
            return
        self._draining = True
        # RFC 9113 section 6.8: first a GOAWAY that refuses nothing, so that requests under way are served.
        self.outbox.put(frames.goaway(frames.LARGEST_STREAM, frames.NO_ERROR))
        self.outbox.put(frames.frame(frames.PING, 0, frames.CONNECTION, _DRAIN_PING))

    def lost(self) -> None:
        """Cancel every open call and drop all output, because the transport is gone."""
        self.closing = True
        self._streams.cancel_all()
        self.outbox.clear()

    @property
    def established(self) -> bool:
        """Return whether the client's preface has arrived whole."""
        return self._frames.settled

    @property
    def streams(self) -> int:
        """Return the number of open streams."""
        return len(self._open)

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes that wait for the peer, or for the transport."""
        return self.outbox.size + self.outbox.waiting_bytes

    @property
    def last_stream(self) -> int:
        """Return the number of the newest stream, which only grows."""
        return self._streams.last

    # -- DATA

    def charge(self, number: int, size: int, empty: bool, ends: int) -> None:
        """Account for the begin of a DATA frame, with ``size`` bytes for flow control (RFC 9113 section 5.2).

        ``empty`` means that it has no content. Raises ``ProtocolError``, as every callback of the parser may:
        the connection then ends.
        """
        self._credit -= size
        if self._credit * 2 < self.limits.connection_window:
            self._widen()
        stream = self._open.get(number)
        if stream is None:
            self._stray(number, size)
        elif stream.half_closed:
            self._streams.reset(stream, frames.STREAM_CLOSED)
        elif not ends:
            if empty:
                self._spend(self._empties, "empty-frames")
            self._charge_stream(stream, size)

    def content(self, number: int, chunk: bytes, start: int, stop: int, ends: int) -> None:
        """Process ``chunk[start:stop]`` of DATA; ``ends`` with the last piece of a frame with END_STREAM."""
        stream = self._open.get(number)
        if stream is None:
            return
        if start < stop:
            stream.data(chunk, start, stop)
        if ends and number in self._open:
            stream.finish()

    def _charge_stream(self, stream: GrpcStream, size: int) -> None:
        stream.credit -= size
        if stream.sent:
            # Answered already: the rest of the request is of no use (RFC 9113 section 8.1).
            self._streams.reset(stream, frames.NO_ERROR)
        elif stream.credit < 0:
            raise ProtocolError("stream window exceeded", frames.FLOW_CONTROL_ERROR)
        elif stream.credit * 2 < self.limits.stream_window:
            self.outbox.control(frames.window_update(stream.id, self.limits.stream_window - stream.credit))
            stream.refilled += self.limits.stream_window - stream.credit
            stream.credit = self.limits.stream_window

    def _widen(self) -> None:
        full = self.limits.connection_window
        if self._credit < 0:
            raise ProtocolError("connection window exceeded", frames.FLOW_CONTROL_ERROR)
        self.outbox.control(frames.window_update(frames.CONNECTION, full - self._credit))
        self._credit = full

    def _stray(self, number: int, size: int) -> None:
        """Handle DATA for a stream that is not open; frames under way to one reset by us are no flood."""
        self._streams.check_opened(number)
        if self._streams.was_reset(number):
            if size < _SMALL_DATA:
                self._spend(self._controls, "control-frames")
        else:
            self._streams.refuse(number, frames.STREAM_CLOSED, "protocol")

    # -- header blocks

    def header_block(self, number: int, ends: int, block: bytes) -> None:
        """Process HEADERS with all its CONTINUATION: a request, its trailers, or too late."""
        stream = self._open.get(number)
        if stream is not None:
            self._trailers(stream, ends, block)
        elif number > self._streams.last and number & 1:
            self._streams.last = number
            self._request(number, ends, block)
        else:
            self._late_headers(number, block)

    def _request(self, number: int, ends: int, block: bytes) -> None:
        try:
            head = self._headers.request(block)
        except Malformed:
            self._streams.refuse(number, frames.PROTOCOL_ERROR, "protocol")
            return
        method, lasting = self._methods.get(head.path, _UNKNOWN) if head.grpc else _UNKNOWN
        stream = self._streams.begin(number, head, lasting=lasting)
        if stream is None:
            return
        if head.grpc:
            stream.begin(method)
        if ends:
            stream.finish()

    def _trailers(self, stream: GrpcStream, ends: int, block: bytes) -> None:
        code = frames.STREAM_CLOSED if stream.half_closed else frames.PROTOCOL_ERROR
        try:
            self._headers.trailers(block)
        except Malformed:
            self._streams.reset(stream, code)
            return
        if stream.half_closed or not ends:
            self._streams.reset(stream, code)
        else:
            stream.finish()

    def _late_headers(self, number: int, block: bytes) -> None:
        if self._streams.was_reset(number):
            self._spend(self._controls, "control-frames")
            self._headers.skip(block)
        elif self._streams.was_open(number):
            raise ProtocolError("HEADERS on a closed stream", frames.STREAM_CLOSED)
        else:
            raise ProtocolError("HEADERS on a stream that cannot be opened")

    # -- the other frames

    def frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Process any other frame; unknown types are ignored (RFC 9113 section 5.5) while they are few."""
        if kind < len(_HANDLERS):
            _HANDLERS[kind](self, flags, number, payload)
        else:
            self._idle(flags, number, payload)

    def _idle(self, _flags: int, _number: int, _payload: bytes) -> None:
        self._spend(self._controls, "control-frames")

    def _push_promise(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise ProtocolError("clients do not push")

    def _rst_stream(self, _flags: int, number: int, _payload: bytes) -> None:
        self._streams.check_opened(number)
        stream = self._open.get(number)
        if stream is None:
            self._spend(self._controls, "control-frames")
            return
        if not stream.sent:
            self._spend(self._resets, "resets")
        self._streams.remove(stream)

    def _settings(self, flags: int, _number: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & frames.ACK and payload):
            raise ProtocolError("SETTINGS of a wrong size", frames.FRAME_SIZE_ERROR)
        self._spend(self._changes, "settings")
        if flags & frames.ACK:
            return
        # First, so that what the new settings let through comes after it.
        self.outbox.control(frames.SETTINGS_ACK)
        # The last value of each wins; to apply only that bounds the work of a frame with thousands.
        for key, value in dict(frames.setting_pairs(payload)).items():
            self._setting(key, value)

    def _setting(self, key: int, value: int) -> None:
        if key == frames.SETTING_ENABLE_PUSH and value > 1:
            raise ProtocolError("ENABLE_PUSH is 0 or 1")
        if key == frames.SETTING_INITIAL_WINDOW_SIZE:
            self._streams.resize_windows(value)
        elif key == frames.SETTING_MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                raise ProtocolError("MAX_FRAME_SIZE out of range")
            self.outbox.max_frame = min(value, LARGEST_FRAME)

    def _ping(self, flags: int, _number: int, payload: bytes) -> None:
        self._spend(self._pings, "pings")
        if not flags & frames.ACK:
            self.outbox.control(frames.frame(frames.PING, frames.ACK, frames.CONNECTION, payload))
        elif payload == _DRAIN_PING and self._draining:
            self.outbox.put(frames.goaway(self._streams.last, frames.NO_ERROR))
            self._streams.close_when_idle()

    def _goaway(self, _flags: int, _number: int, payload: bytes) -> None:
        if len(payload) < 8:
            raise ProtocolError("GOAWAY of a wrong size", frames.FRAME_SIZE_ERROR)
        self._spend(self._changes, "settings")

    def _window_update(self, _flags: int, number: int, payload: bytes) -> None:
        self._spend(self._controls, "control-frames")
        increment = int.from_bytes(payload, "big") & frames.LARGEST_WINDOW
        if number == 0:
            if not increment:
                raise ProtocolError("WINDOW_UPDATE of nothing")
            self.outbox.widen(increment)
            return
        self._streams.check_opened(number)
        stream = self._open.get(number)
        if stream is not None:
            self._streams.widen(stream, increment)

    def _spend(self, budget: Budget, reason: str) -> None:
        if not budget.spend():
            raise ProtocolError(f"too many frames: {reason}", frames.ENHANCE_YOUR_CALM, reason=reason)

    # -- ends of the connection

    def _on_streams_done(self) -> None:
        self.closing = True

    def _fail(self, error: ProtocolError) -> None:
        """End the connection (RFC 9113 section 5.4.1); the texts are ours and quote no input."""
        if self.closing:
            return
        self.closing = True
        self.memory.stats.connections_ended[error.reason or reason_of(error.code)] += 1
        self.outbox.put(frames.goaway(self._streams.last, error.code, str(error)))
        self._streams.cancel_all()

    def _on_bug(self, error: Exception) -> None:
        """Log where it failed, without the exception's text, which may quote a prompt."""
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("an HTTP/2 connection failed with %s\n%s", type(error).__name__, where)
        self._fail(ProtocolError("internal error", frames.INTERNAL_ERROR))


_HANDLERS: tuple[Callable[[Http2Connection, int, int, bytes], None], ...] = (
    Http2Connection._idle,
    Http2Connection._idle,
    Http2Connection._idle,
    Http2Connection._rst_stream,
    Http2Connection._settings,
    Http2Connection._push_promise,
    Http2Connection._ping,
    Http2Connection._goaway,
    Http2Connection._window_update,
)
"""Handlers by frame type; DATA, HEADERS and CONTINUATION have other callbacks, PRIORITY is ignored."""
