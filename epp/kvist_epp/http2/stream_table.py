"""The open streams of a connection, and how each of them ends (RFC 9113 sections 5.1, 5.4.2, 6.8)."""

from collections import deque
from collections.abc import Callable
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import frames
from kvist_epp.http2.grpc_stream import GrpcStream
from kvist_epp.http2.headers import RequestHead
from kvist_epp.http2.limits import ENDING, SENDING, Budget, Limits, StallDetector
from kvist_epp.http2.outbox import Outbox
from kvist_epp.http2.port_stats import MemoryShare

STREAM_BYTES: Final = 1024
"""Bytes that an open stream and its call count for in ``held_bytes`` (measured: 0.8 KB)."""
_REMEMBERED: Final = 512
"""Number of closed streams that are remembered: frames under way to a stream that was reset are no error."""


class _RecentNumbers:
    """The last numbers that were added."""

    __slots__ = ("_known", "_order")

    def __init__(self, size: int) -> None:
        self._order: deque[int] = deque(maxlen=size)
        self._known: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def add(self, number: int) -> None:
        if len(self._order) == self._order.maxlen:
            self._known.discard(self._order[0])
        self._order.append(number)
        self._known.add(number)


class StreamTable:
    """The streams of one connection; ``fail`` ends the connection, ``done`` is called when it may end."""

    def __init__(
        self,
        limits: Limits,
        outbox: Outbox,
        memory: MemoryShare,
        resets: Budget,
        *,
        fail: Callable[[ProtocolError], None],
        done: Callable[[], None],
    ) -> None:
        self.limits = limits
        self.outbox = outbox
        self.memory = memory
        self.open: dict[int, GrpcStream] = {}
        self.last = 0
        self._answered: dict[int, GrpcStream] = {}
        self._running = 0
        self._stalls = StallDetector(limits)
        self._window = frames.DEFAULT_WINDOW
        self._closing = False
        self._resets = resets
        self._fail = fail
        self._done = done
        self._reset_by_us = _RecentNumbers(_REMEMBERED)
        self._closed: deque[int] = deque(maxlen=_REMEMBERED)

    # -- beginnings

    def begin(self, number: int, head: RequestHead, *, lasting: bool) -> GrpcStream | None:
        """Open a stream; return ``None`` if it was refused."""
        if self._closing:
            self.refuse(number, frames.REFUSED_STREAM, "draining")
            return None
        if len(self.open) >= self.limits.streams and not self._make_room():
            self.refuse(number, frames.REFUSED_STREAM, "too-many")
            return None
        if not self.memory.receive(STREAM_BYTES):
            self.memory.receive(-STREAM_BYTES)
            self.refuse(number, frames.REFUSED_STREAM, "held-bytes")
            return None
        stream = self.open[number] = GrpcStream(self, number, head, self._window, lasting=lasting)
        self._running += not lasting
        return stream

    def refuse(self, number: int, code: int, reason: str) -> None:
        """Send RST_STREAM; the client's frames already under way will be ignored."""
        self._reset_by_us.add(number)
        self.outbox.put(frames.rst_stream(number.to_bytes(4, "big"), code))
        if code == frames.NO_ERROR:
            return
        self.count_end(reason)
        if not self._resets.spend():
            self._fail(ProtocolError("too many streams reset", frames.ENHANCE_YOUR_CALM, reason="resets"))

    def count_end(self, reason: str) -> None:
        """Count a stream that was ended by us; ``reason`` is one of ``STREAM_ENDS``."""
        self.memory.stats.streams_ended[reason] += 1

    # -- streams that are not open

    def check_opened(self, number: int) -> None:
        """Raise ``ProtocolError`` for a stream that is still idle, or that no client can open."""
        if number > self.last or not number & 1:
            raise ProtocolError("a frame on an idle stream")

    def was_reset(self, number: int) -> bool:
        """Return whether the stream was reset by us, not long ago."""
        return number in self._reset_by_us

    def was_open(self, number: int) -> bool:
        """Return whether the stream was open, not long ago; others were skipped by the client."""
        return number in self._closed

    # -- windows

    def resize_windows(self, value: int) -> None:
        """Apply INITIAL_WINDOW_SIZE to every open stream; a window may become negative (section 6.9.2)."""
        if value > frames.LARGEST_WINDOW:
            raise ProtocolError("INITIAL_WINDOW_SIZE out of range", frames.FLOW_CONTROL_ERROR)
        change = value - self._window
        self._window = value
        for stream in list(self.open.values()):
            stream.window += change
            if stream.window > frames.LARGEST_WINDOW:
                raise ProtocolError("stream window overflow", frames.FLOW_CONTROL_ERROR)
            if stream.waiting:
                self.outbox.pump(stream)

    def widen(self, stream: GrpcStream, increment: int) -> None:
        """Enlarge the window of a stream."""
        stream.window += increment
        if not increment:
            self.reset(stream, frames.PROTOCOL_ERROR)
        elif stream.window > frames.LARGEST_WINDOW:
            self.reset(stream, frames.FLOW_CONTROL_ERROR, "flow-control")
        elif stream.waiting:
            self.outbox.pump(stream)

    # -- ends

    def reset(self, stream: GrpcStream, code: int, reason: str = "protocol") -> None:
        """End a stream with RST_STREAM, and cancel its call."""
        self.remove(stream)
        self.refuse(stream.number, code, reason)

    def remove(self, stream: GrpcStream) -> None:
        """Remove a stream, however it ended; a call still open is cancelled."""
        if self.open.pop(stream.number, None) is None:
            return
        self._closed.append(stream.number)
        self.memory.receive(-STREAM_BYTES)
        if stream.sent:
            self._answered.pop(stream.number, None)
        else:
            self._running -= not stream.lasting
        stream.cancel()
        if self._closing:
            self._close_if_idle()

    def on_answered(self, stream: GrpcStream) -> None:
        """Note that END_STREAM was sent; the stream stays until the client has ended it too."""
        self._running -= not stream.lasting
        if stream.half_closed:
            self.remove(stream)
            return
        self._answered[stream.number] = stream
        if self._closing:
            self._close_if_idle()

    def check(self, now: float) -> None:
        """End the stalled streams; ``now`` in seconds."""
        for stream, reason in self._stalls.check(self.open.values(), now):
            if stream.number not in self.open:
                continue
            if reason == ENDING:
                self.reset(stream, frames.NO_ERROR)
                self.count_end(reason)
            elif reason == SENDING:
                self.reset(stream, frames.CANCEL, reason)
            else:
                self.count_end(reason)
                stream.abort_as_stalled()

    def close_when_idle(self) -> None:
        """Open no more streams; ``done`` is called when the last call has ended."""
        self._closing = True
        self._close_if_idle()

    def cancel_all(self) -> None:
        """Cancel every call, because the connection is gone."""
        streams = list(self.open.values())
        self.memory.receive(-STREAM_BYTES * len(streams))
        self.open.clear()
        self._answered.clear()
        for stream in streams:
            stream.cancel()

    def _make_room(self) -> bool:
        """Reset the stream that was answered first and that the client has not ended, if there is one."""
        for stream in self._answered.values():
            self.reset(stream, frames.NO_ERROR)
            return True
        return False

    def _close_if_idle(self) -> None:
        # Until the client has ended its side too: gRPC's own client was seen to lose the status of a call
        # when the connection's end came right behind it.
        if not self._running:
            self._closing = False  # or each stream that ends here would come back here
            for stream in [stream for stream in self.open.values() if not stream.sent]:
                stream.abort_for_shutdown()
            self._closing = True
        if not self.open:
            self._done()
