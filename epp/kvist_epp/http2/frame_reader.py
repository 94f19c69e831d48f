"""The parser of the frames that a client sends. Source: RFC 9113 sections 3.4, 4 and 6."""

from typing import TYPE_CHECKING

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    LARGEST_STREAM,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    frame_head,
)

if TYPE_CHECKING:
    from kvist_epp.http2.http2_connection import Http2Connection
    from kvist_epp.http2.limits import Limits

_HEAD_BYTES = 9
_LARGE_FRAME = 4096
"""Bytes of a DATA frame from which on the frames behind it are looked at together."""
_PREFACE_BYTES = len(PREFACE)
_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_CONNECTION_FRAMES = frozenset({SETTINGS, PING, GOAWAY})
_STREAM_FRAMES = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})


class FrameReader:
    """Parses the bytes of one connection: preface, sizes, padding and header blocks.

    The connection gives the frames their meaning. The payload of DATA is passed on as it comes, whole or in
    pieces, without waiting for the frame's end: none of it is buffered here. Any other frame waits until it
    is complete, at most ``frame_bytes`` long.
    """

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

    def __init__(self, receiver: "Http2Connection", limits: "Limits") -> None:
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
        """Parse the next bytes of the connection; raises ``ProtocolError`` if a rule is broken."""
        position = 0
        if self._left:
            position = self._content(self._left_stream, self._left, self._left_ends, data, 0)
        elif self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data = bytes(self._rest)
            self._rest.clear()
        if not self.greeted:
            if not PREFACE.startswith(data[:_PREFACE_BYTES]):
                raise ProtocolError("the client does not speak HTTP/2")
            self.greeted = len(data) >= _PREFACE_BYTES
            position = _PREFACE_BYTES if self.greeted else 0
        if self.greeted:
            position = self._frames(data, position)
        if position < len(data):
            self._rest += data[position:]

    def _frames(self, data: bytes, position: int) -> int:
        """Parse every frame in ``data[position:]``; return the position of an incomplete one."""
        end = len(data)
        receiver, limits = self._receiver, self._limits
        while end - position >= _HEAD_BYTES and not receiver.closing:
            high, low, kind, flags, number = frame_head(data, position)
            size = high << 16 | low
            if size > limits.frame_bytes:
                raise ProtocolError("frame too large", FRAME_SIZE_ERROR)
            number &= LARGEST_STREAM
            start = position + _HEAD_BYTES
            stop = start + size
            if kind == DATA and not flags & PADDED and self._block is None:
                if size < _LARGE_FRAME and stop <= end:
                    receiver.on_data_frame(number, data, start, stop, flags & END_STREAM)
                    position = stop
                    continue
                if size >= _LARGE_FRAME and not flags and (awaited := receiver.awaited(number)) > size:
                    behind = self._whole_frames(number, awaited, data, position)
                    if behind > position:
                        position = behind
                        continue
                ends = flags & END_STREAM
                receiver.on_data_begin(number, size, not size, ends)
                position = self._content(number, size, ends, data, start)
                continue
            if stop > end:
                self._need = stop - position
                return position
            whole_block = kind == HEADERS and flags == END_HEADERS and number and size <= limits.header_bytes
            if whole_block and self.settled and self._block is None:  # nearly all of them
                receiver.on_header_block(number, 0, data[start:stop])
            else:
                self._frame(kind, flags, number, data[start:stop])
            position = stop
        self._need = _HEAD_BYTES
        return position

    # -- DATA

    def _whole_frames(self, number: int, awaited: int, data: bytes, position: int) -> int:
        """Pass on the whole DATA frames at ``position`` that continue a message; return where they end.

        A body comes in dozens of frames of 16 KB. Those that do not complete its message, of which
        ``awaited`` bytes are still to come, cause nothing but to be kept: they are accounted for at once.
        """
        end, most = len(data), self._limits.frame_bytes
        alike = data[position + 3 : position + _HEAD_BYTES]  # type, flags and stream
        view = memoryview(data)
        pieces: list[memoryview] = []
        total = 0
        while data[position + 3 : position + _HEAD_BYTES] == alike:
            start = position + _HEAD_BYTES
            size = int.from_bytes(data[position : position + 3], "big")
            stop = start + size
            if stop > end or not _LARGE_FRAME <= size <= most or total + size >= awaited:
                break
            pieces.append(view[start:stop])
            total += size
            position = stop
        if pieces:
            if total * 2 < end:  # what is kept must not be much more than what is counted
                pieces = [memoryview(bytes(piece)) for piece in pieces]
            self._receiver.on_data_frames(number, pieces, total)
        return position

    def _content(self, number: int, size: int, ends: int, data: bytes, start: int) -> int:
        """Pass on as much of a DATA payload as is there; return the position behind it."""
        stop, end = start + size, len(data)
        if stop <= end:
            self._left = 0
            self._receiver.on_data(number, data, start, stop, ends)
            return stop
        self._left, self._left_stream, self._left_ends = stop - end, number, ends
        if start < end:
            self._receiver.on_data(number, data, start, end, 0)
        return end

    # -- all others

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ProtocolError("a header block was interrupted")
        if not self.settled:
            # RFC 9113 section 3.4: the preface includes a SETTINGS frame.
            if kind != SETTINGS or flags & ACK:
                raise ProtocolError("the first frame must be SETTINGS")
            self.settled = True
        _check_shape(kind, number, len(payload))
        if kind == DATA:
            content = _unpadded(flags, payload)
            ends = flags & END_STREAM
            # Padding counts for flow control (RFC 9113 section 6.1).
            self._receiver.on_data_begin(number, len(payload), not content, ends)
            self._receiver.on_data(number, content, 0, len(content), ends)
        elif kind == HEADERS:
            self._headers(flags, number, payload)
        elif kind == CONTINUATION:
            self._continuation(flags, number, payload)
        else:
            if kind == PRIORITY:
                _check_priority(number, payload)
            self._receiver.on_frame(kind, flags, number, payload)

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        payload = _unpadded(flags, payload)
        if flags & WITH_PRIORITY:
            _check_priority(number, payload)
            payload = payload[5:]
        self._check_block(len(payload))
        ends = flags & END_STREAM
        if flags & END_HEADERS:
            self._receiver.on_header_block(number, ends, payload)
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
        if flags & END_HEADERS:
            self._block = None
            self._receiver.on_header_block(number, self._block_ends, bytes(block))

    def _check_block(self, size: int, continuations: int = 0) -> None:
        if size > self._limits.header_bytes or continuations > self._limits.continuations:
            raise ProtocolError("header block too large", ENHANCE_YOUR_CALM, reason="header-bytes")


def _check_shape(kind: int, number: int, size: int) -> None:
    """Check size and kind of stream (RFC 9113 section 6).

    A wrong PRIORITY size is a stream's error; ending the connection is allowed too.
    """
    if _SIZES.get(kind, size) != size:
        raise ProtocolError("a frame has an invalid size", FRAME_SIZE_ERROR)
    if number and kind in _CONNECTION_FRAMES:
        raise ProtocolError("a connection frame was sent on a stream")
    if not number and kind in _STREAM_FRAMES:
        raise ProtocolError("a stream frame was sent on stream 0")


def _unpadded(flags: int, payload: bytes) -> bytes:
    """Remove padding (RFC 9113 section 6.1): one byte of length, content, that many bytes of padding."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ProtocolError("a padded frame has no padding length", FRAME_SIZE_ERROR)
    stop = len(payload) - payload[0]
    if stop < 1:
        raise ProtocolError("padding exceeds the frame")
    return payload[1:stop]


def _check_priority(number: int, payload: bytes) -> None:
    """Check priority fields, which are otherwise ignored (RFC 9113 section 5.3.2, RFC 7540 section 5.3.1)."""
    if len(payload) < 5:
        raise ProtocolError("priority fields have an invalid size", FRAME_SIZE_ERROR)
    if int.from_bytes(payload[:4], "big") & LARGEST_STREAM == number:
        raise ProtocolError("a stream depends on itself")
