"""HTTP/2 frames: names, encoders, the few header blocks this server ever sends, and the parser of frames.

Frame layout, types, flags and error codes: RFC 9113 sections 4.1, 6 and 7. Header blocks are literals
without indexing (RFC 7541 section 6.2.2): they are constants, and no encoder state exists to get wrong.
"""

import struct
from typing import TYPE_CHECKING, Final

from kvist_epp.errors import ProtocolError

if TYPE_CHECKING:
    from kvist_epp.http2.http2_connection import Http2Connection
    from kvist_epp.http2.limits import Limits

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

SETTING_ENABLE_PUSH: Final = 0x2
SETTING_MAX_CONCURRENT_STREAMS: Final = 0x3
SETTING_INITIAL_WINDOW_SIZE: Final = 0x4
SETTING_MAX_FRAME_SIZE: Final = 0x5
SETTING_MAX_HEADER_LIST_SIZE: Final = 0x6

DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
LARGEST_FRAME_BYTES: Final = (1 << 24) - 1
LARGEST_WINDOW: Final = (1 << 31) - 1
LARGEST_STREAM: Final = (1 << 31) - 1

OK: Final = 0
UNKNOWN: Final = 2
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

frame_head = struct.Struct(">BHBBI").unpack_from
"""Reads (length >> 16, length & 0xffff, type, flags, stream) from the nine bytes at an offset."""
pack_head = struct.Struct(">BHBB4s").pack
pack_message_head = struct.Struct(">BHBB4sBI").pack
"""Packs a frame head and a gRPC message prefix: compressed flag and length ("Length-Prefixed-Message")."""
setting_pairs = struct.Struct(">HI").iter_unpack
_setting = struct.Struct(">HI").pack


def frame(kind: int, flags: int, stream: bytes, payload: bytes = b"") -> bytes:
    """Return one whole frame; ``stream`` is the four-byte identifier."""
    size = len(payload)
    return pack_head(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


CONNECTION: Final = b"\0\0\0\0"
"""The stream identifier of frames about the connection."""

SETTINGS_ACK: Final = frame(SETTINGS, ACK, CONNECTION)


def settings(pairs: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, CONNECTION, b"".join(_setting(key, value) for key, value in pairs.items()))


def window_update(stream: bytes, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; ``increment`` in bytes, 1 to 2**31 - 1."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def rst_stream(stream: bytes, code: int) -> bytes:
    """Return a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def goaway(last: int, code: int, reason: str = "") -> bytes:
    """Return a GOAWAY frame; ``reason`` is for people and must not quote bytes of the peer."""
    head = last.to_bytes(4, "big") + code.to_bytes(4, "big")
    return frame(GOAWAY, 0, CONNECTION, head + reason.encode())


def _length(value: bytes) -> bytes:
    """Return an HPACK string of at most 16,510 bytes, not Huffman coded (RFC 7541 sections 5.1, 5.2)."""
    size = len(value)
    if size < 127:
        return bytes((size,)) + value
    size -= 127
    return bytes((127, size & 127 | 128, size >> 7)) + value


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field as a literal without indexing; name and value of at most 16,510 bytes."""
    return b"\0" + _length(name) + _length(value)


_FORGET_TABLE: Final = b"\x20"
"""Dynamic table size update to 0 (RFC 7541 section 6.3). In front of each response it complies with every
SETTINGS_HEADER_TABLE_SIZE of the peer, without a state to remember."""
_STATUS_200: Final = b"\x88"
_STATUS_404: Final = b"\x8d"

RESPONSE: Final = _FORGET_TABLE + _STATUS_200 + literal(b"content-type", b"application/grpc")
"""Header block that begins a gRPC response."""

NOT_FOUND_BODY: Final = b"not found\n"
NOT_FOUND: Final = (
    _FORGET_TABLE
    + _STATUS_404
    + literal(b"content-type", b"text/plain; charset=utf-8")
    + literal(b"content-length", b"%d" % len(NOT_FOUND_BODY))
)
"""Header block of the answer to requests that are not gRPC."""

TRAILERS_OK: Final = literal(b"grpc-status", b"0")

_MESSAGE_CHARS: Final = 1024
_PLAIN: Final = frozenset(range(0x20, 0x7F)) - {ord("%")}


def _percent_encoded(text: str) -> bytes:
    """Return a grpc-message: printable ASCII as is, ``%`` and other bytes as ``%XX`` ("Status-Message")."""
    raw = text[:_MESSAGE_CHARS].encode("utf-8", "replace")
    return b"".join(b"%c" % byte if byte in _PLAIN else b"%%%02X" % byte for byte in raw)


def trailers(status: int, message: str = "") -> bytes:
    """Return the header block that ends a gRPC response; ``message`` is cut after 1,024 characters."""
    if status == OK and not message:
        return TRAILERS_OK
    block = literal(b"grpc-status", b"%d" % status)
    return block + literal(b"grpc-message", _percent_encoded(message)) if message else block


_HEAD_BYTES = 9
_STREAM_MASK = LARGEST_STREAM
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
            position = self._check_preface(data)
        if self.greeted:
            position = self._frames(data, position)
        if position < len(data):
            self._rest += data[position:]

    def _check_preface(self, data: bytes) -> int:
        """Check the preface; return the position of the first frame."""
        if not PREFACE.startswith(data[:_PREFACE_BYTES]):
            raise ProtocolError("not an HTTP/2 client")
        self.greeted = len(data) >= _PREFACE_BYTES
        return _PREFACE_BYTES if self.greeted else 0

    def _frames(self, data: bytes, position: int) -> int:
        """Parse every frame in ``data[position:]``; return the position of an incomplete one."""
        end = len(data)
        receiver = self._receiver
        while end - position >= _HEAD_BYTES and not receiver.closing:
            high, low, kind, flags, number = frame_head(data, position)
            size = high << 16 | low
            if size > self._limits.frame_bytes:
                raise ProtocolError("frame too large", FRAME_SIZE_ERROR)
            number &= _STREAM_MASK
            if kind == DATA and not flags & PADDED and self._block is None:
                ends = flags & END_STREAM
                receiver.on_data_begin(number, size, not size, ends)
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
        """Pass on as much of a DATA payload as is there; return the position behind it."""
        stop = start + size
        end = len(data)
        if stop <= end:
            self._left = 0
            self._receiver.on_data(number, data, start, stop, ends)
            return stop
        self._left = stop - end
        self._left_stream = number
        self._left_ends = ends
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
        elif kind == PRIORITY:
            _check_priority(number, payload)
            self._receiver.on_frame(kind, flags, number, payload)
        else:
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
        raise ProtocolError("a frame of a wrong size", FRAME_SIZE_ERROR)
    if number and kind in _CONNECTION_FRAMES:
        raise ProtocolError("a frame of the connection on a stream")
    if not number and kind in _STREAM_FRAMES:
        raise ProtocolError("a frame of a stream on stream 0")


def _unpadded(flags: int, payload: bytes) -> bytes:
    """Remove padding (RFC 9113 section 6.1): one byte of length, content, that many bytes of padding."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ProtocolError("a padded frame without its length", FRAME_SIZE_ERROR)
    stop = len(payload) - payload[0]
    if stop < 1:
        raise ProtocolError("padding exceeds the frame")
    return payload[1:stop]


def _check_priority(number: int, payload: bytes) -> None:
    """Check priority fields, which are otherwise ignored (RFC 9113 section 5.3.2, RFC 7540 section 5.3.1)."""
    if len(payload) < 5:
        raise ProtocolError("priority fields of a wrong size", FRAME_SIZE_ERROR)
    if int.from_bytes(payload[:4], "big") & _STREAM_MASK == number:
        raise ProtocolError("a stream depends on itself")
