"""Which streams of a connection are open, and how each of them ends (RFC 9113 sections 5.1, 5.4.2, 6.8)."""

from collections import deque
from collections.abc import Callable

from kvist_epp.errors import ProtocolError
from kvist_epp.wire import frames
from kvist_epp.wire.headers import Head
from kvist_epp.wire.limits import Budget, Limits
from kvist_epp.wire.outbox import Outbox
from kvist_epp.wire.stream import Stream

_REMEMBERED = 512
"""Closed streams whose manner of ending is remembered: frames under way to a stream we reset are no error."""


class Streams:
    """The streams of one connection; ``fail`` ends the connection, ``done`` says that it may end."""

    def __init__(
        self,
        limits: Limits,
        outbox: Outbox,
        resets: Budget,
        *,
        fail: Callable[[ProtocolError], None],
        done: Callable[[], None],
    ) -> None:
        self.limits = limits
        self.outbox = outbox
        self.receiving = 0
        self.open: dict[int, Stream] = {}
        self.last = 0
        self._window = frames.DEFAULT_WINDOW
        self._leaving = False
        self._resets = resets
        self._fail = fail
        self._done = done
        self._reset_by_us: deque[int] = deque(maxlen=_REMEMBERED)
        self._closed: deque[int] = deque(maxlen=_REMEMBERED)

    # -- beginnings

    def begin(self, number: int, head: Head) -> Stream | None:
        """Open a stream; None = refused."""
        if len(self.open) >= self.limits.streams:
            self._drop_answered()
        if self._leaving or len(self.open) >= self.limits.streams:
            self.refuse(number, frames.REFUSED_STREAM)
            return None
        stream = self.open[number] = Stream(self, number, head, self._window)
        return stream

    def refuse(self, number: int, code: int) -> None:
        """RST_STREAM; the client's frames already under way will be ignored."""
        self._reset_by_us.append(number)
        self.outbox.put(frames.rst_stream(number.to_bytes(4, "big"), code))
        if code != frames.NO_ERROR and not self._resets.spend():
            self._fail(ProtocolError("too many streams reset", frames.ENHANCE_YOUR_CALM))

    # -- streams that are not open

    def check_opened(self, number: int) -> None:
        """Raises ``ProtocolError`` for a stream that is still idle, or that no client can open."""
        if number > self.last or not number & 1:
            raise ProtocolError("a frame on an idle stream")

    def was_reset(self, number: int) -> bool:
        """Whether we reset it, not long ago."""
        return number in self._reset_by_us

    def was_open(self, number: int) -> bool:
        """Whether it was open, not long ago; others were skipped by the client."""
        return number in self._closed

    # -- windows

    def resize_windows(self, value: int) -> None:
        """RFC 9113 section 6.9.2: the change applies to every open stream and may make a window negative."""
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

    def widen(self, stream: Stream, increment: int) -> None:
        """The client opened a stream's window further."""
        stream.window += increment
        if not increment:
            self.reset(stream, frames.PROTOCOL_ERROR)
        elif stream.window > frames.LARGEST_WINDOW:
            self.reset(stream, frames.FLOW_CONTROL_ERROR)
        elif stream.waiting:
            self.outbox.pump(stream)

    # -- ends

    def reset(self, stream: Stream, code: int) -> None:
        """End a stream with RST_STREAM and tell its call."""
        self.drop(stream)
        self.refuse(stream.number, code)

    def drop(self, stream: Stream) -> None:
        """A stream is gone, however it ended; a call still open is cancelled."""
        if self.open.pop(stream.number, None) is None:
            return
        self._closed.append(stream.number)
        stream.cancel()
        if self._leaving:
            self._leave_when_done()

    def finished(self, stream: Stream) -> None:
        """A stream's END_STREAM is out; it stays until the client has ended it too."""
        if stream.half_closed:
            self.drop(stream)
        elif self._leaving:
            self._leave_when_done()

    def leave(self) -> None:
        """Open no more; ``done`` is called when the last call has ended."""
        self._leaving = True
        self._leave_when_done()

    def cancel_all(self) -> None:
        """The connection is gone."""
        streams = list(self.open.values())
        self.open.clear()
        for stream in streams:
            stream.cancel()

    def _drop_answered(self) -> None:
        """Make room: streams we have answered and the client has not ended."""
        for stream in [stream for stream in self.open.values() if stream.sent]:
            self.reset(stream, frames.NO_ERROR)

    def _leave_when_done(self) -> None:
        # Until the client has ended its side too: gRPC's own client was seen to lose the status of a call
        # when the connection's end came right behind it.
        if all(stream.sent or stream.lasting for stream in self.open.values()):
            self._leaving = False  # or each stream that ends here would come back here
            for stream in list(self.open.values()):
                stream.leave()
            self._leaving = True
        if not self.open:
            self._done()
