"""HTTP/2 server connection (RFC 9113) for gRPC, without I/O: bytes in, calls driven, bytes out.

Everything that a peer can make it do is bounded (``limits.Limits``).
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from kvist_epp.errors import ProtocolError, traceback_without_text
from kvist_epp.http2 import frames
from kvist_epp.http2.call import UNKNOWN_PEER, Method
from kvist_epp.http2.frame_reader import FrameReader
from kvist_epp.http2.grpc_stream import GrpcStream
from kvist_epp.http2.header_reader import HeaderReader, Malformed
from kvist_epp.http2.limits import Budget, Limits, MemoryShare, PortStats
from kvist_epp.http2.stream_table import LARGEST_FRAME, Outbox, StreamTable

log = logging.getLogger(__name__)

_DRAIN_PING: Final = b"kvistbye"
_ALIVE_PING: Final = b"kvist up"


_REASONS: Final = {
    frames.INTERNAL_ERROR: "internal",
    frames.FLOW_CONTROL_ERROR: "flow-control",
    frames.FRAME_SIZE_ERROR: "frame-size",
    frames.COMPRESSION_ERROR: "compression",
}
"""Reasons in the metrics for the error codes of a connection; all other codes are ``protocol``."""
_UNKNOWN: Final = (None, False)
_SMALL_DATA: Final = 1024


class Http2Connection:
    """One client's connection. Not thread-safe: everything happens on the event loop's thread."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: Limits,
        *,
        wake: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        lasting: Collection[str] = (),
        stats: PortStats | None = None,
        peer: Callable[[], str] = lambda: UNKNOWN_PEER,
    ) -> None:
        """``wake`` is called when a sink used outside `receive` leaves output in ``outbox``.

        ``lasting`` names the methods whose calls never end by themselves: they do not delay `drain`.
        ``stats`` are the port's; without them the connection has its own. ``peer`` returns the client's
        address.
        """
        self.limits = limits
        self.memory = MemoryShare(stats or PortStats(limits.held_bytes))
        self.outbox = Outbox(limits.connection_send_bytes, wake, self.memory)
        self.closing = False
        """True when the transport is to be closed, once `Outbox.take` returns nothing more."""
        self._methods = {path.encode(): (method, path in lasting) for path, method in methods.items()}
        self._frames = FrameReader(self, limits)
        self._headers = HeaderReader(limits.header_bytes)
        self._credit = limits.connection_window
        self._draining = False
        self._resets = Budget(limits.resets, clock)
        shared, done = (limits, self.outbox, self.memory, self._resets), self._on_streams_done
        self.stream_table = StreamTable(*shared, fail=self._fail, done=done, peer=peer)
        self._open = self.stream_table.open
        self._pings = Budget(limits.pings, clock, lambda: self.outbox.answered)
        self._changes = Budget(limits.settings, clock)
        self._empties = Budget(limits.empty_frames, clock)
        self._controls = Budget(limits.control_frames, clock, lambda: self.outbox.answered)
        announced = {
            # Blocks that refer to no dynamic table are the same bytes each time, and can be remembered.
            frames.SETTING_HEADER_TABLE_SIZE: 0,
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

    def check_streams(self, now: float) -> None:
        """End stalled streams; to be called ``CHECKS_PER_STALL`` times in ``stall_seconds``."""
        if self.closing:
            return
        try:
            self.stream_table.check(now)
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

    def on_lost(self) -> None:
        """Cancel every open call and drop all output, because the transport is gone."""
        self.closing = True
        self.stream_table.cancel_all()
        self.outbox.clear()

    @property
    def established(self) -> bool:
        """Return whether the client's preface has arrived whole."""
        return self._frames.settled

    @property
    def streams(self) -> int:
        """Return the number of open streams."""
        return len(self._open)

    # -- DATA

    def on_data_frame(self, number: int, chunk: bytes, start: int, stop: int, ends: int) -> None:
        """Process a whole DATA frame, ``chunk[start:stop]``: ``on_data_begin`` and ``on_data`` in one."""
        size = stop - start
        stream = self.on_data_begin(number, size, not size, ends)
        if stream is None:
            return
        if size:
            stream.on_data(chunk, start, stop)
        if ends and number in self._open:
            stream.on_end_stream()

    def on_data_begin(self, number: int, size: int, empty: bool, ends: int) -> GrpcStream | None:
        """Account for the begin of a DATA frame, with ``size`` bytes for flow control (RFC 9113 section 5.2).

        ``empty`` means that it has no content. Returns the stream that takes its content or its end, if one
        does. Raises ``ProtocolError``, as every callback of the parser may: the connection then ends.
        """
        self._credit -= size
        if self._credit * 2 < self.limits.connection_window:
            self._refill_window()
        stream = self._open.get(number)
        if stream is None or stream.half_closed or (empty and not ends):
            self._unusual_data(stream, number, size)
            return None
        if ends:
            return stream
        self._charge(stream, size)
        return None if stream.sent else stream  # an answered one was reset

    def on_data(self, number: int, chunk: bytes, start: int, stop: int, ends: int) -> None:
        """Process ``chunk[start:stop]`` of DATA; ``ends`` with the last piece of a frame with END_STREAM."""
        stream = self._open.get(number)
        if stream is None:
            return
        if start < stop:
            stream.on_data(chunk, start, stop)
        if ends and number in self._open:
            stream.on_end_stream()

    def awaited(self, number: int) -> int:
        """Return how many bytes are still to come of the message that has begun on a stream."""
        stream = self._open.get(number)
        return 0 if stream is None or stream.half_closed else stream.missing

    def on_data_frames(self, number: int, pieces: list[memoryview], size: int) -> None:
        """Process the content of DATA frames, ``size`` bytes and fewer than are `awaited`; none ends."""
        stream = self.on_data_begin(number, size, empty=False, ends=0)
        if stream is not None:
            stream.on_pieces(pieces, size)

    def _unusual_data(self, stream: GrpcStream | None, number: int, size: int) -> None:
        """Account for DATA on a stream that takes none, or for a frame without content."""
        if stream is None:
            self._on_stray_data(number, size)
        elif stream.half_closed:
            self.stream_table.reset(stream, frames.STREAM_CLOSED)
        else:
            self._spend(self._empties, "empty-frames")
            self._charge(stream, size)

    def _charge(self, stream: GrpcStream, size: int) -> None:
        stream.credit -= size
        if stream.sent:
            # Answered already: the rest of the request is of no use (RFC 9113 section 8.1).
            self.stream_table.reset(stream, frames.NO_ERROR)
        elif stream.credit < 0:
            raise ProtocolError("stream window exceeded", frames.FLOW_CONTROL_ERROR)
        elif stream.credit * 2 < self.limits.stream_window:
            stream.refill()

    def _refill_window(self) -> None:
        full = self.limits.connection_window
        if self._credit < 0:
            raise ProtocolError("connection window exceeded", frames.FLOW_CONTROL_ERROR)
        self.outbox.control(frames.window_update(frames.CONNECTION, full - self._credit))
        self._credit = full

    def _on_stray_data(self, number: int, size: int) -> None:
        """Handle DATA for a stream that is not open; frames under way to one reset by us are no flood."""
        self.stream_table.check_opened(number)
        if number in self.stream_table.reset_by_us:
            if size < _SMALL_DATA:
                self._spend(self._controls, "control-frames")
        else:
            self.stream_table.refuse(number, frames.STREAM_CLOSED, "protocol")

    # -- header blocks

    def on_header_block(self, number: int, ends: int, block: bytes) -> None:
        """Process HEADERS with all its CONTINUATION: a request, its trailers, or too late."""
        stream = self._open.get(number)
        if stream is not None:
            self._trailers(stream, ends, block)
        elif number > self.stream_table.last and number & 1:
            self.stream_table.last = number
            self._request(number, ends, block)
        else:
            self._late_headers(number, block)

    def _request(self, number: int, ends: int, block: bytes) -> None:
        try:
            head = self._headers.request(block)
        except Malformed:
            self.stream_table.refuse(number, frames.PROTOCOL_ERROR, "protocol")
            return
        method, lasting = self._methods.get(head.path, _UNKNOWN) if head.grpc else _UNKNOWN
        stream = self.stream_table.begin(number, head, lasting=lasting)
        if stream is None:
            return
        if head.grpc:
            stream.begin(method)
        if ends:
            stream.on_end_stream()

    def _trailers(self, stream: GrpcStream, ends: int, block: bytes) -> None:
        code = frames.STREAM_CLOSED if stream.half_closed else frames.PROTOCOL_ERROR
        try:
            self._headers.trailers(block)
        except Malformed:
            self.stream_table.reset(stream, code)
            return
        if stream.half_closed or not ends:
            self.stream_table.reset(stream, code)
        else:
            stream.on_end_stream()

    def _late_headers(self, number: int, block: bytes) -> None:
        if number in self.stream_table.reset_by_us:
            self._spend(self._controls, "control-frames")
            self._headers.decode(block)  # keeps the table in step
        elif number in self.stream_table.closed:
            raise ProtocolError("HEADERS on a closed stream", frames.STREAM_CLOSED)
        else:
            raise ProtocolError("HEADERS on a stream that cannot be opened")

    # -- the other frames

    def on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Process any other frame; unknown types are ignored (RFC 9113 section 5.5) while they are few."""
        if kind < len(_HANDLERS):
            _HANDLERS[kind](self, flags, number, payload)
        else:
            self._ignored(flags, number, payload)

    def _ignored(self, _flags: int, _number: int, _payload: bytes) -> None:
        self._spend(self._controls, "control-frames")

    def _push_promise(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise ProtocolError("a client must not send PUSH_PROMISE")

    def _rst_stream(self, _flags: int, number: int, _payload: bytes) -> None:
        self.stream_table.check_opened(number)
        stream = self._open.get(number)
        if stream is None:
            self._spend(self._controls, "control-frames")
            return
        if not stream.sent:
            self._spend(self._resets, "resets")
        self.stream_table.remove(stream)

    def _settings(self, flags: int, _number: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & frames.ACK and payload):
            raise ProtocolError("SETTINGS has an invalid size", frames.FRAME_SIZE_ERROR)
        self._spend(self._changes, "settings")
        if flags & frames.ACK:
            self._headers.on_settings_acknowledged()
            return
        # First, so that what the new settings let through comes after it.
        self.outbox.control(frames.SETTINGS_ACK)
        # The last value of each wins; to apply only that bounds the work of a frame with thousands.
        for key, value in dict(frames.setting_pairs(payload)).items():
            self._setting(key, value)

    def _setting(self, key: int, value: int) -> None:
        if key == frames.SETTING_ENABLE_PUSH and value > 1:
            raise ProtocolError("ENABLE_PUSH must be 0 or 1")
        if key == frames.SETTING_INITIAL_WINDOW_SIZE:
            self.stream_table.resize_windows(value)
        elif key == frames.SETTING_MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                raise ProtocolError("MAX_FRAME_SIZE out of range")
            self.outbox.max_frame = min(value, LARGEST_FRAME)

    def _ping(self, flags: int, _number: int, payload: bytes) -> None:
        self._spend(self._pings, "pings")
        if not flags & frames.ACK:
            self.outbox.control(frames.frame(frames.PING, frames.ACK, frames.CONNECTION, payload))
        elif payload == _DRAIN_PING and self._draining:
            self.outbox.put(frames.goaway(self.stream_table.last, frames.NO_ERROR))
            self.stream_table.close_when_idle()

    def _goaway(self, _flags: int, _number: int, payload: bytes) -> None:
        if len(payload) < 8:
            raise ProtocolError("GOAWAY has an invalid size", frames.FRAME_SIZE_ERROR)
        self._spend(self._changes, "settings")

    def _window_update(self, _flags: int, number: int, payload: bytes) -> None:
        self._spend(self._controls, "control-frames")
        increment = int.from_bytes(payload, "big") & frames.LARGEST_WINDOW
        if number == 0:
            if not increment:
                raise ProtocolError("WINDOW_UPDATE with an increment of 0")
            self.outbox.on_window_update(increment)
            return
        self.stream_table.check_opened(number)
        stream = self._open.get(number)
        if stream is not None:
            self.stream_table.on_window_update(stream, increment)

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
        self.memory.stats.connections_ended[error.reason or _REASONS.get(error.code, "protocol")] += 1
        self.outbox.put(frames.goaway(self.stream_table.last, error.code, str(error)))
        self.stream_table.cancel_all()

    def _on_bug(self, error: Exception) -> None:
        log.error("an HTTP/2 connection failed with %s", traceback_without_text(error))
        self._fail(ProtocolError("internal error", frames.INTERNAL_ERROR))


_HANDLERS: tuple[Callable[[Http2Connection, int, int, bytes], None], ...] = (
    Http2Connection._ignored,
    Http2Connection._ignored,
    Http2Connection._ignored,
    Http2Connection._rst_stream,
    Http2Connection._settings,
    Http2Connection._push_promise,
    Http2Connection._ping,
    Http2Connection._goaway,
    Http2Connection._window_update,
)
"""Handlers by frame type; DATA, HEADERS and CONTINUATION have other callbacks, PRIORITY is ignored."""
