"""The sending half of a connection: finished frames for the socket, and messages held back by flow control.

RFC 9113 section 5.2. A stream whose own window is shut is woken by its own WINDOW_UPDATE; only streams that
wait for the connection's window are listed here, so that a WINDOW_UPDATE costs what it lets through.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import frames
from kvist_epp.http2.port_stats import MemoryShare

if TYPE_CHECKING:
    from kvist_epp.http2.grpc_stream import GrpcStream

Output = bytes | memoryview

LARGEST_FRAME: Final = 64 * 1024
"""Longest DATA frame that is sent, even if a peer allows more: streams take turns between frames."""


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

    def __init__(self, limit: int, wake: Callable[[], None], memory: MemoryShare) -> None:
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

    def control(self, frame: bytes) -> None:
        """Append an answer that the peer requested; raises ``ProtocolError`` if the peer does not read."""
        if self.size > self.limit:
            raise ProtocolError("too many unread answers", frames.ENHANCE_YOUR_CALM, reason="unread")
        self.answered -= len(frame)
        self.put(frame)

    def take(self, most: int) -> list[Output]:
        """Return bytes for the socket, in order, up to the piece that reaches ``most`` bytes."""
        self.awake = False
        if self.parked:
            self._memory.queue(-self.parked)
            self.parked = 0
        if self.size > most or self._rest:
            return self._part(most)
        chunks = self._chunks
        self._chunks = []
        self.answered += self.size
        self.size = 0
        return chunks

    def park(self, beyond: int) -> None:
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

    def hold(self, stream: "GrpcStream", data: Output) -> None:
        """Queue bytes of a stream behind its flow control, and send as much as the windows allow."""
        if not data:
            return
        if stream.waiting is None:
            stream.waiting = deque()
        stream.waiting.append(memoryview(data))
        self._add_waiting(stream, len(data))
        self.pump(stream)

    def pump(self, stream: "GrpcStream") -> None:
        """Send as much of one stream as the windows allow."""
        waiting = stream.waiting
        while waiting:
            piece = waiting[0]
            room = min(len(piece), stream.window, self.window, self.max_frame)
            if room <= 0:
                if stream.window > 0:
                    self._blocked[stream.id] = stream
                return
            self._emit(stream, piece[:room])
            if room == len(piece):
                waiting.popleft()
            else:
                waiting[0] = piece[room:]
        stream.on_drained()

    def widen(self, increment: int) -> None:
        """Enlarge the connection's window, and send from the streams that waited for it."""
        self.window += increment
        if self.window > frames.LARGEST_WINDOW:
            raise ProtocolError("connection window overflow", frames.FLOW_CONTROL_ERROR)
        while self._blocked and self.window > 0:
            self.pump(self._blocked.popitem(last=False)[1])

    def drop(self, stream: "GrpcStream") -> None:
        """Drop the queued bytes of a stream that is gone."""
        self._blocked.pop(stream.id, None)
        self._add_waiting(stream, -stream.waiting_bytes)
        stream.waiting = None

    def _part(self, most: int) -> list[Output]:
        self._rest.extend(self._chunks)
        self._chunks = []
        chunks, size = [], 0
        while self._rest and size < most:
            chunk = self._rest.popleft()
            size += len(chunk)
            chunks.append(chunk)
        self.answered += size
        self.size -= size
        return chunks

    def _emit(self, stream: "GrpcStream", piece: memoryview) -> None:
        size = len(piece)
        stream.window -= size
        stream.emitted += size
        self._add_waiting(stream, -size)
        self.window -= size
        self.put(frames.pack_head(size >> 16, size & 0xFFFF, frames.DATA, 0, stream.id))
        self.put(piece)

    def _add_waiting(self, stream: "GrpcStream", size: int) -> None:
        stream.waiting_bytes += size
        self.waiting_bytes += size
        self._memory.queue(size)
