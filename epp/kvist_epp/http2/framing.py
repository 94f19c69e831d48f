"""Bytes to HTTP/2 frames: the preface, sizes, padding and header blocks; what a frame means is ``http2``'s.

The payload of DATA is passed on as it comes, whole or in pieces, without waiting for the frame's end: nothing
of it is buffered here. Any other frame waits until it is complete, at most ``frame_bytes`` long.
"""

from typing import Protocol

from kvist_epp.errors import ProtocolError
from kvist_epp.http2 import frames
from kvist_epp.http2.limits import Limits

_HEAD_BYTES = 9
_STREAM_MASK = frames.LARGEST_STREAM
_PREFACE_BYTES = len(frames.PREFACE)

_SIZES = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_OF_THE_CONNECTION = frozenset({frames.SETTINGS, frames.PING, frames.GOAWAY})
_OF_STREAMS = frozenset(
    {frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION}
)


class Receiver(Protocol):
    """Who gives the frames their meaning. Every method may raise ``ProtocolError``: the connection's end."""

    closing: bool

    def charge(self, number: int, size: int, empty: bool, ends: int) -> None:
        """A DATA frame begins: ``size`` counts for flow control; ``empty`` = no content in it."""

    def content(self, number: int, chunk: bytes, start: int, stop: int, ends: int) -> None:
        """``chunk[start:stop]`` of a DATA frame; ``ends`` with the last piece of a frame with END_STREAM."""

    def header_block(self, number: int, ends: int, block: bytes) -> None:
        """A whole header block."""

    def frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Any other frame, of the size and on the kind of stream RFC 9113 section 6 asks for."""


class FrameReader:
    """The receiving side of one connection, as far as syntax goes."""

    __slots__ = (
        "_block",
        "_block_ends",
        "_block_parts",
        "_block_stream",
        "_left",
        "_left_ends",
        "_left_stream",
        "_limits",
        "_need",
        "_receiver",
        "_rest",
        "greeted",
        "settled",
    )

    def __init__(self, receiver: Receiver, limits: Limits) -> None:
        self._receiver = receiver
        self._limits = limits
        self.greeted = False
        self.settled = False
        self._rest = bytearray()
        self._need = 0
        self._left = 0
        self._left_stream = 0
        self._left_ends = 0
        self._block: bytearray | None = None
        self._block_stream = 0
        self._block_ends = 0
        self._block_parts = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the connection; raises ``ProtocolError`` when it cannot go on."""
        position = 0
        if self._left:
            position = self._more_content(data)
        elif self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
            self._rest.clear()
        if not self.greeted:
            position = self._greet(data)
        if self.greeted:
            position = self._frames(data, position)
        if position < len(data):
            self._rest += data[position:]

    def _greet(self, data: bytes) -> int:
        """Returns where the first frame starts."""
        if not frames.PREFACE.startswith(data[:_PREFACE_BYTES]):
            raise ProtocolError("not an HTTP/2 client")
        self.greeted = len(data) >= _PREFACE_BYTES
        return _PREFACE_BYTES if self.greeted else 0

    def _frames(self, data: bytes, position: int) -> int:
        """Every frame in ``data[position:]``; returns where an incomplete one starts."""
        end = len(data)
        receiver = self._receiver
        while end - position >= _HEAD_BYTES and not receiver.closing:
            high, low, kind, flags, number = frames.frame_head(data, position)
            size = high << 16 | low
            if size > self._limits.frame_bytes:
                raise ProtocolError("frame too large", frames.FRAME_SIZE_ERROR)
            number &= _STREAM_MASK
            if kind == frames.DATA and not flags & frames.PADDED and self._block is None:
                ends = flags & frames.END_STREAM
                receiver.charge(number, size, not size, ends)
                position = self._content(number, size, ends, data, position + _HEAD_BYTES)
                continue
            stop = position + _HEAD_BYTES + size
            if stop > end:
                self._need = stop - position
                return position
            self._frame(kind, flags, number, data[position + _HEAD_BYTES : stop])
            position = stop
        self._need = _HEAD_BYTES
        return position

    # -- DATA

    def _content(self, number: int, size: int, ends: int, data: bytes, start: int) -> int:
        """As much of a DATA payload as is there; returns the position behind it."""
        stop = start + size
        end = len(data)
        if stop <= end:
            self._left = 0
            self._receiver.content(number, data, start, stop, ends)
            return stop
        self._left = stop - end
        self._left_stream = number
        self._left_ends = ends
        if start < end:
            self._receiver.content(number, data, start, end, 0)
        return end

    def _more_content(self, data: bytes) -> int:
        return self._content(self._left_stream, self._left, self._left_ends, data, 0)

    def _padded_data(self, flags: int, number: int, payload: bytes) -> None:
        content = _unpadded(flags, payload)
        ends = flags & frames.END_STREAM
        # Padding counts for flow control (RFC 9113 section 6.1).
        self._receiver.charge(number, len(payload), not content, ends)
        self._receiver.content(number, content, 0, len(content), ends)

    # -- all others

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise ProtocolError("a header block was interrupted")
        if not self.settled:
            self._first(kind, flags)
        _check_shape(kind, number, len(payload))
        if kind == frames.DATA:
            self._padded_data(flags, number, payload)
        elif kind == frames.HEADERS:
            self._headers(flags, number, payload)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, number, payload)
        elif kind == frames.PRIORITY:
            _check_priority(number, payload)
            self._receiver.frame(kind, flags, number, payload)
        else:
            self._receiver.frame(kind, flags, number, payload)

    def _first(self, kind: int, flags: int) -> None:
        """RFC 9113 section 3.4: the preface includes a SETTINGS frame."""
        if kind != frames.SETTINGS or flags & frames.ACK:
            raise ProtocolError("the first frame must be SETTINGS")
        self.settled = True

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        payload = _unpadded(flags, payload)
        if flags & frames.WITH_PRIORITY:
            _check_priority(number, payload)
            payload = payload[5:]
        self._check_block(len(payload))
        ends = flags & frames.END_STREAM
        if flags & frames.END_HEADERS:
            self._receiver.header_block(number, ends, payload)
            return
        self._block = bytearray(payload)
        self._block_stream = number
        self._block_ends = ends
        self._block_parts = 0

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        block = self._block
        if block is None or number != self._block_stream:
            raise ProtocolError("CONTINUATION without HEADERS")
        self._block_parts += 1
        self._check_block(len(block) + len(payload), self._block_parts)
        block += payload
        if flags & frames.END_HEADERS:
            self._block = None
            self._receiver.header_block(number, self._block_ends, bytes(block))

    def _check_block(self, size: int, continuations: int = 0) -> None:
        if size > self._limits.header_bytes or continuations > self._limits.continuations:
            raise ProtocolError("header block too large", frames.ENHANCE_YOUR_CALM, reason="header-bytes")


def _check_shape(kind: int, number: int, size: int) -> None:
    """RFC 9113 section 6. A wrong PRIORITY size is a stream's error; ending the connection is allowed too."""
    if _SIZES.get(kind, size) != size:
        raise ProtocolError("a frame of a wrong size", frames.FRAME_SIZE_ERROR)
    if number and kind in _OF_THE_CONNECTION:
        raise ProtocolError("a frame of the connection on a stream")
    if not number and kind in _OF_STREAMS:
        raise ProtocolError("a frame of a stream on stream 0")


def _unpadded(flags: int, payload: bytes) -> bytes:
    """RFC 9113 section 6.1: one byte of length, content, that many bytes of padding."""
    if not flags & frames.PADDED:
        return payload
    if not payload:
        raise ProtocolError("a padded frame without its length", frames.FRAME_SIZE_ERROR)
    stop = len(payload) - payload[0]
    if stop < 1:
        raise ProtocolError("padding exceeds the frame")
    return payload[1:stop]


def _check_priority(number: int, payload: bytes) -> None:
    """Priorities are ignored (RFC 9113 section 5.3.2), but for what RFC 7540 section 5.3.1 never allowed."""
    if len(payload) < 5:
        raise ProtocolError("priority fields of a wrong size", frames.FRAME_SIZE_ERROR)
    if int.from_bytes(payload[:4], "big") & _STREAM_MASK == number:
        raise ProtocolError("a stream depends on itself")
