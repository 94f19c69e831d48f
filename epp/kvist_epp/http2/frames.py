"""HTTP/2 frames: names, encoders, and the few header blocks this server ever sends.

Frame layout, types, flags and error codes: RFC 9113 sections 4.1, 6 and 7. Header blocks are literals
without indexing (RFC 7541 section 6.2.2): they are constants, and no encoder state exists to get wrong.
"""

import struct
from typing import Final

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

SETTING_HEADER_TABLE_SIZE: Final = 0x1
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


def message_prefix(size: int) -> bytes:
    """Return what precedes an uncompressed gRPC message of so many bytes ("Length-Prefixed-Message")."""
    return b"\0" + size.to_bytes(4, "big")


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
