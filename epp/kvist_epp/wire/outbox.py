"""What waits for the peer: finished frames for the socket, and messages held back by its flow control.

RFC 9113 section 5.2. A stream whose own window is shut is woken by its own WINDOW_UPDATE; only streams that
wait for the connection's window are listed here, so that a WINDOW_UPDATE costs what it lets through.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvist_epp.errors import ProtocolError
from kvist_epp.wire import frames

Chunk = bytes | memoryview


class Sender(Protocol):
    """The sending half of a stream, as the outbox sees it."""

    id: bytes
    window: int
    waiting: deque[memoryview]
    waiting_bytes: int

    def drained(self) -> None:
        """Nothing waits any more."""


class Outbox:
    """The sending half of a connection; ``wake`` is called when output appears while nobody is looking."""

    __slots__ = (
        "_blocked",
        "_chunks",
        "_wake",
        "awake",
        "limit",
        "max_frame",
        "size",
        "waiting_bytes",
        "window",
    )

    def __init__(self, limit: int, wake: Callable[[], None]) -> None:
        self.window = frames.DEFAULT_WINDOW
        self.max_frame = frames.DEFAULT_FRAME_BYTES
        self.limit = limit
        self.size = 0
        self.waiting_bytes = 0
        self.awake = False
        self._wake = wake
        self._chunks: list[Chunk] = []
        self._blocked: dict[bytes, Sender] = {}

    def put(self, chunk: Chunk) -> None:
        """Add to what goes to the socket next."""
        self._chunks.append(chunk)
        self.size += len(chunk)
        if not self.awake:
            self.awake = True
            self._wake()

    def control(self, frame: bytes) -> None:
        """Add an answer the peer asked for; a peer that asks and never reads is cut off."""
        if self.size > self.limit:
            raise ProtocolError("too many unread answers", frames.ENHANCE_YOUR_CALM)
        self.put(frame)

    def take(self) -> list[Chunk]:
        """Everything for the socket, in order; the outbox is empty afterwards."""
        chunks = self._chunks
        self._chunks = []
        self.size = 0
        self.awake = False
        return chunks

    def clear(self) -> None:
        """Drop everything: the connection is gone."""
        self._chunks.clear()
        self._blocked.clear()
        self.size = self.waiting_bytes = 0

    def hold(self, sender: Sender, data: Chunk) -> None:
        """Queue bytes of a stream behind its flow control, and send what may go."""
        if not data:
            return
        sender.waiting.append(memoryview(data))
        sender.waiting_bytes += len(data)
        self.waiting_bytes += len(data)
        self.pump(sender)

    def pump(self, sender: Sender) -> None:
        """Send what the windows allow of one stream."""
        waiting = sender.waiting
        while waiting:
            piece = waiting[0]
            room = min(len(piece), sender.window, self.window, self.max_frame)
            if room <= 0:
                self._block(sender)
                return
            self._emit(sender, piece[:room])
            if room == len(piece):
                waiting.popleft()
            else:
                waiting[0] = piece[room:]
        sender.drained()

    def widen(self, increment: int) -> None:
        """The peer opened the connection's window further."""
        self.window += increment
        if self.window > frames.LARGEST_WINDOW:
            raise ProtocolError("connection window overflow", frames.FLOW_CONTROL_ERROR)
        while self._blocked and self.window > 0:
            self.pump(self._blocked.pop(next(iter(self._blocked))))

    def forget(self, sender: Sender) -> None:
        """A stream is gone: what it still held back is dropped."""
        self._blocked.pop(sender.id, None)
        self.waiting_bytes -= sender.waiting_bytes
        sender.waiting_bytes = 0
        sender.waiting.clear()

    def _block(self, sender: Sender) -> None:
        if sender.window > 0:
            self._blocked[sender.id] = sender

    def _emit(self, sender: Sender, piece: memoryview) -> None:
        size = len(piece)
        sender.window -= size
        sender.waiting_bytes -= size
        self.window -= size
        self.waiting_bytes -= size
        self.put(frames.pack_head(size >> 16, size & 0xFFFF, frames.DATA, 0, sender.id))
        self.put(piece)
