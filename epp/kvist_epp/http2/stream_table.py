"""The open streams of a connection, how each of them ends, and the bytes that wait to be sent.

Sources: RFC 9113 sections 5.1, 5.2, 5.4.2 and 6.8.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import frames
from kvist_epp.http2.grpc_stream import GrpcStream
from kvist_epp.http2.header_reader import RequestHead
from kvist_epp.http2.limits import ENDING, SENDING, Budget, Limits, MemoryShare, StallDetector

Output = bytes | memoryview

LARGEST_FRAME: Final = 64 * 1024
"""Longest DATA frame that is sent, even if a peer allows more: streams take turns between frames."""
_JOINED_BYTES: Final = 1024
"""Pieces that wait behind flow control are joined up to this length."""


class Outbox:
    """Output of one connection.

    ``wake`` is called when output appears after the last `take` or `park`.
    """

    __slots__ = (
        "_blocked",
        "_chunks",
        "_memory",
        "_rest",
        "_wake",
        "answered",
        "awake",
        "limit",
        "max_frame",
        "parked",
        "size",
        "waiting_bytes",
        "window",
    )

    def __init__(self, limit: int, wake: Callable[[], object], memory: MemoryShare) -> None:
        self.window = frames.DEFAULT_WINDOW
        self.max_frame = frames.DEFAULT_FRAME_BYTES
        self.limit = limit
        self.size = 0
        """Bytes of finished frames."""
        self.waiting_bytes = 0
        """Bytes of messages behind the peer's windows."""
        self.answered = 0
        """Bytes of finished frames so far, without those that the peer can request at will."""
        self.awake = False
        self._wake = wake
        self._memory = memory
        self.parked = 0
        """Bytes of finished frames, and in the event loop's buffer, that a full socket did not take."""
        self._chunks: list[Output] = []
        self._rest: deque[Output] = deque()
        self._blocked: OrderedDict[bytes, GrpcStream] = OrderedDict()

    def put(self, chunk: Output) -> None:
        """Append bytes for the socket."""
        self._chunks.append(chunk)
        self.size += len(chunk)
        if not self.awake:
            self.awake = True
            self._wake()

    def put_frames(self, stream: bytes, prefix: bytes, content: bytes | memoryview) -> None:
        """Append ``prefix`` and ``content``, longer than one frame, as DATA within the peer's windows.

        ``prefix`` is shorter than a frame.
        """
        view, most = memoryview(content), self.max_frame
        head = frames.pack_head(most >> 16, most & 0xFFFF, frames.DATA, 0, stream)
        at = most - len(prefix)
        chunks: list[Output] = [head + prefix, view[:at]]
        while at + most <= len(view):
            chunks += (head, view[at : at + most])
            at += most
        if rest := len(view) - at:
            chunks += (frames.pack_head(rest >> 16, rest & 0xFFFF, frames.DATA, 0, stream), view[at:])
        last = chunks.pop()
        self._chunks += chunks
        self.size += sum(map(len, chunks))
        self.put(last)

    def control(self, frame: bytes) -> None:
        """Append an answer that the peer requested; raises ``ProtocolError`` if the peer does not read."""
        if self.size > self.limit:
            raise ProtocolError("too many unread answers", frames.ENHANCE_YOUR_CALM, reason="unread")
        self.answered -= len(frame)
        self.put(frame)

    def take(self, most: int = 1 << 62) -> list[Output]:
        """Return bytes for the socket, in order, up to the piece that reaches ``most`` bytes."""
        self.awake = False
        if self.parked:
            self._memory.queue(-self.parked)
            self.parked = 0
        if self.size <= most and not self._rest:
            chunks, size = self._chunks, self.size
        else:
            self._rest.extend(self._chunks)
            chunks, size = [], 0
            while self._rest and size < most:
                chunk = self._rest.popleft()
                size += len(chunk)
                chunks.append(chunk)
        self._chunks = []
        self.answered += size
        self.size -= size
        return chunks

    def park(self, beyond: int = 0) -> None:
        """Keep the output, because the socket is full; it counts as held, with ``beyond`` bytes elsewhere."""
        self.awake = False
        self._memory.queue(self.size + beyond - self.parked)
        self.parked = self.size + beyond

    def clear(self) -> None:
        """Drop all output, because the connection is gone."""
        self._chunks.clear()
        self._rest.clear()
        self._blocked.clear()
        self._memory.queue(-self.parked)
        self.size = self.parked = 0

    def enqueue(self, stream: GrpcStream, data: Output) -> None:
        """Queue bytes of a stream behind its flow control, and send as much as the windows allow."""
        if not data:
            return
        if stream.waiting is None:
            stream.waiting = deque()
        waiting = stream.waiting
        if waiting and len(waiting[-1]) + len(data) <= _JOINED_BYTES:
            # Each piece is an object and later a frame of its own: many of 5 bytes would cost far more than
            # the bytes that the limits count.
            waiting[-1] = memoryview(b"".join((waiting[-1], data)))
        else:
            waiting.append(memoryview(data))
        self._add_waiting(stream, len(data))
        self.pump(stream)

    def pump(self, stream: GrpcStream) -> None:
        """Send as much of one stream as the windows allow."""
        waiting = stream.waiting
        while waiting:
            piece = waiting[0]
            room = min(len(piece), stream.window, self.window, self.max_frame)
            if room <= 0:
                if stream.window > 0:
                    self._blocked[stream.id] = stream
                return
            stream.window -= room
            stream.emitted += room
            self.window -= room
            self._add_waiting(stream, -room)
            self.put(frames.pack_head(room >> 16, room & 0xFFFF, frames.DATA, 0, stream.id))
            self.put(piece[:room])
            if room == len(piece):
                waiting.popleft()
            else:
                waiting[0] = piece[room:]
        stream.on_drained()

    def on_window_update(self, increment: int) -> None:
        """Enlarge the connection's window, and send from the streams that waited for it."""
        self.window += increment
        if self.window > frames.LARGEST_WINDOW:
            raise ProtocolError("connection window overflow", frames.FLOW_CONTROL_ERROR)
        while self._blocked and self.window > 0:
            self.pump(self._blocked.popitem(last=False)[1])

    def discard(self, stream: GrpcStream) -> None:
        """Drop the queued bytes of a stream that is gone."""
        self._blocked.pop(stream.id, None)
        self._add_waiting(stream, -stream.waiting_bytes)
        stream.waiting = None

    def _add_waiting(self, stream: GrpcStream, size: int) -> None:
        stream.waiting_bytes += size
        self.waiting_bytes += size
        self._memory.queue(size)


STREAM_BYTES: Final = 1024
"""Bytes that an open stream and its call count for in ``held_bytes`` (measured: 0.8 KB)."""
_REMEMBERED: Final = 512
"""Number of closed streams that are remembered: frames under way to a stream that was reset are no error."""


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
        peer: Callable[[], str],
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
        self.peer = peer
        """Returns the client's address."""
        self._fail = fail
        self._done = done
        self.reset_by_us: OrderedDict[int, None] = OrderedDict()
        """Numbers of the streams that this side reset last."""
        self.closed: deque[int] = deque(maxlen=_REMEMBERED)
        """Numbers of the streams that ended last; other numbers were skipped by the client."""

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
        self.reset_by_us[number] = None
        if len(self.reset_by_us) > _REMEMBERED:
            self.reset_by_us.popitem(last=False)
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

    def on_window_update(self, stream: GrpcStream, increment: int) -> None:
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
        self.closed.append(stream.number)
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
                stream.abort(frames.DEADLINE_EXCEEDED, "the client sent nothing, or too slowly")

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
                stream.abort(frames.UNAVAILABLE, "the server is going away")
            self._closing = True
        if not self.open:
            self._done()
