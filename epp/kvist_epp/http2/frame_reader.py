"""The parser of what a client sends: frames, header blocks by HPACK, and the rules for requests.

Sources: RFC 9113 sections 3.4, 4, 6 and 8; RFC 7541 (by the ``hpack`` library). A gateway opens thousands of
streams a second whose header blocks are the same bytes. A block that did not change the dynamic table means
the same until something else does, so its result is remembered until then.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpack import Decoder, HPACKError, OversizedHeaderListError

from kvist_epp.errors import ProtocolError
from kvist_epp.http2.frames import (
    ACK,
    COMPRESSION_ERROR,
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
        receiver = self._receiver
        while end - position >= _HEAD_BYTES and not receiver.closing:
            high, low, kind, flags, number = frame_head(data, position)
            size = high << 16 | low
            if size > self._limits.frame_bytes:
                raise ProtocolError("frame too large", FRAME_SIZE_ERROR)
            number &= LARGEST_STREAM
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


_NAME_BYTES = bytes(byte for byte in range(0x21, 0x7F) if not 0x41 <= byte <= 0x5A and byte != 0x3A)
"""Bytes allowed in a field name (RFC 9113 section 8.2.1): visible ASCII, no capitals, no colon."""
_CONNECTION_SPECIFIC = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_REMEMBERED_BLOCKS = 32
_REMEMBERED_BYTES = 1024

Fields = list[tuple[bytes, bytes]]


class Malformed(Exception):
    """A header list that HPACK can read and HTTP/2 forbids; an error of its stream only."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The parts of a request's header section that this server uses."""

    path: bytes
    """``:path`` as sent; empty for CONNECT."""
    grpc: bool
    """True for a POST with gRPC's content type."""
    bodyless: bool
    """True for a HEAD request, whose response has no content."""
    content_length: int | None
    """Bytes of content announced; ``None`` if not announced."""


class HeaderReader:
    """The receiving side of HPACK for one connection."""

    __slots__ = ("_decoder", "_known")

    def __init__(self, header_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=header_bytes)
        self._known: dict[bytes, RequestHead] = {}

    def request(self, block: bytes) -> RequestHead:
        """Read a whole header block that opens a stream.

        :raises Malformed: the stream is to be reset with PROTOCOL_ERROR.
        :raises ProtocolError: the table is out of step, the connection is lost.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        fields, steady = self.decode(block)
        head = _head(fields)
        if steady and len(block) <= _REMEMBERED_BYTES:
            if len(self._known) >= _REMEMBERED_BLOCKS:
                self._known.clear()
            self._known[block] = head
        return head

    def trailers(self, block: bytes) -> None:
        """Read a header block that ends a stream; raises as ``request`` does."""
        for name, value in self.decode(block)[0]:
            _check_field(name, value)

    def decode(self, block: bytes) -> tuple[Fields, bool]:
        """Return the fields, and whether the dynamic table is unchanged. Raises ProtocolError.

        Header blocks of streams that are gone must be decoded too, to keep the table in step.
        """
        newest, count, size = self._table()
        try:
            decoded = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            # The rest is not decoded, so the table is out of step.
            raise ProtocolError("header list too large", ENHANCE_YOUR_CALM, reason="header-bytes") from error
        except (HPACKError, ValueError, LookupError) as error:
            # The library's own errors, and what its slicing may let through on garbage.
            raise ProtocolError("header block cannot be decoded", COMPRESSION_ERROR) from error
        newest_after, count_after, size_after = self._table()
        steady = newest is newest_after and count == count_after and size == size_after
        if not steady:
            self._known.clear()
        return [(bytes(name), bytes(value)) for name, value in decoded], steady

    def _table(self) -> tuple[object, int, int]:
        """Return a key that differs after any change of the dynamic table.

        Entries are added in front and removed behind only.
        """
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return entries[0] if entries else None, len(entries), table.maxsize


def _check_field(name: bytes, value: bytes) -> None:
    if not name or name.translate(None, _NAME_BYTES):
        raise Malformed("field name")
    _check_value(value)
    if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        raise Malformed("connection-specific field")


def _check_value(value: bytes) -> None:
    if b"\0" in value or b"\r" in value or b"\n" in value or value.strip(b" \t") != value:
        raise Malformed("field value")


def _head(fields: Fields) -> RequestHead:
    pseudo, regular = _split(fields)
    method, path = pseudo.get(b":method"), pseudo.get(b":path", b"")
    _check_target(method, path, pseudo)
    authority, host = pseudo.get(b":authority"), regular.get(b"host")
    if authority is not None and host is not None and authority.lower() != host.lower():
        raise Malformed("host differs from :authority")
    content_type = regular.get(b"content-type", b"")
    # ``application/grpc`` alone, with ``+format`` or with parameters; grpc-web is another protocol.
    is_grpc = content_type.startswith(b"application/grpc") and content_type[16:17] in (b"", b"+", b";")
    return RequestHead(
        path=path,
        grpc=method == b"POST" and is_grpc,
        bodyless=method == b"HEAD",
        content_length=_content_length(fields),
    )


def _split(fields: Fields) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Split pseudo-header fields, known, once each, and in front (RFC 9113 section 8.3), from the others."""
    pseudo: dict[bytes, bytes] = {}
    regular: dict[bytes, bytes] = {}
    for name, value in fields:
        if not name.startswith(b":"):
            _check_field(name, value)
            regular[name] = value
            continue
        if regular or name not in _PSEUDO or name in pseudo:
            raise Malformed("pseudo-header field")
        _check_value(value)
        pseudo[name] = value
    return pseudo, regular


def _check_target(method: bytes | None, path: bytes, pseudo: dict[bytes, bytes]) -> None:
    # RFC 9113 sections 8.3.1 and 8.5 (CONNECT).
    if not method:
        raise Malformed(":method")
    if method == b"CONNECT":
        if b":path" in pseudo or b":scheme" in pseudo or not pseudo.get(b":authority"):
            raise Malformed("CONNECT")
        return
    if not pseudo.get(b":scheme"):
        raise Malformed(":scheme")
    if not path.startswith(b"/") and not (path == b"*" and method == b"OPTIONS"):
        raise Malformed(":path")


def _content_length(fields: Fields) -> int | None:
    values = {value for name, value in fields if name == b"content-length"}
    if not values:
        return None
    value = values.pop()
    if values or not value.isdigit() or len(value) > 18:
        raise Malformed("content-length")
    return int(value)
