"""What waits for the peer: finished frames for the socket, and messages held back by its flow control.

RFC 9113 section 5.2. A stream whose own window is shut is woken by its own WINDOW_UPDATE; only streams that
wait for the connection's window are listed here, so that a WINDOW_UPDATE costs what it lets through.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import frames
from kvist_epp.http2.port_stats import MemoryShare

Chunk = bytes | memoryview

LARGEST_FRAME: Final = 64 * 1024
"""DATA frames we send are not longer, whatever a peer allows: streams take turns between frames."""


class Sender(Protocol):
    """The sending half of a stream, as the outbox sees it."""

    id: bytes
    window: int
    waiting: deque[memoryview] | None
    waiting_bytes: int
    emitted: int

    def drained(self) -> None:
        """Nothing waits any more."""


class Outbox:
    """The sending half of a connection; ``wake`` is called when output appears while nobody is looking."""

    __slots__ = (
        "_blocked",
        "_chunks",
        "_rest",
        "_share",
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

    def __init__(self, limit: int, wake: Callable[[], None], share: MemoryShare) -> None:
        self.window = frames.DEFAULT_WINDOW
        self.max_frame = frames.DEFAULT_FRAME_BYTES
        self.limit = limit
        self.size = 0
        """Bytes of finished frames."""
        self.waiting_bytes = 0
        """Bytes of messages behind the peer's windows."""
        self.answered = 0
        """Bytes of finished frames so far, those not counted that the peer can ask for at will."""
        self.awake = False
        self._wake = wake
        self._share = share
        self.parked = 0
        """Bytes of finished frames, and of the event loop, that a full socket left behind."""
        self._chunks: list[Chunk] = []
        self._rest: deque[Chunk] = deque()
        self._blocked: OrderedDict[bytes, Sender] = OrderedDict()

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
            raise ProtocolError("too many unread answers", frames.ENHANCE_YOUR_CALM, reason="unread")
        self.answered -= len(frame)
        self.put(frame)

    def take(self, most: int) -> list[Chunk]:
        """What is for the socket, in order, up to the chunk that reaches ``most`` bytes; the rest stays."""
        self.awake = False
        if self.parked:
            self._share.queue(-self.parked)
            self.parked = 0
        if self.size > most or self._rest:
            return self._part(most)
        chunks = self._chunks
        self._chunks = []
        self.answered += self.size
        self.size = 0
        return chunks

    def park(self, beyond: int) -> None:
        """The socket is full: what is for it stays here, and counts as held with ``beyond`` it."""
        self.awake = False
        self._share.queue(self.size + beyond - self.parked)
        self.parked = self.size + beyond

    def clear(self) -> None:
        """Drop everything: the connection is gone."""
        self._chunks.clear()
        self._rest.clear()
        self._blocked.clear()
        self._share.queue(-self.parked)
        self.size = self.parked = 0

    def hold(self, sender: Sender, data: Chunk) -> None:
        """Queue bytes of a stream behind its flow control, and send what may go."""
        if not data:
            return
        if sender.waiting is None:
            sender.waiting = deque()
        sender.waiting.append(memoryview(data))
        self._waits(sender, len(data))
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
            self.pump(self._blocked.popitem(last=False)[1])

    def forget(self, sender: Sender) -> None:
        """A stream is gone: what it still held back is dropped."""
        self._blocked.pop(sender.id, None)
        self._waits(sender, -sender.waiting_bytes)
        sender.waiting = None

    def _part(self, most: int) -> list[Chunk]:
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

    def _block(self, sender: Sender) -> None:
        if sender.window > 0:
            self._blocked[sender.id] = sender

    def _emit(self, sender: Sender, piece: memoryview) -> None:
        size = len(piece)
        sender.window -= size
        sender.emitted += size
        self._waits(sender, -size)
        self.window -= size
        self.put(frames.pack_head(size >> 16, size & 0xFFFF, frames.DATA, 0, sender.id))
        self.put(piece)

    def _waits(self, sender: Sender, size: int) -> None:
        sender.waiting_bytes += size
        self.waiting_bytes += size
        self._share.queue(size)
