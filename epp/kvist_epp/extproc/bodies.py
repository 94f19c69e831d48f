"""Body chunks of ext_proc read and written by hand, because half a megabyte passes through them.

Protobuf's own parser copies a body twice on its way to Python and its serialiser twice on the way back; here
it is one copy each way. Whatever is not a plain chunk is left to protobuf. Field numbers: Envoy's
``ProcessingRequest``, ``HttpBody``, ``BodyResponse`` … ``StreamedBodyResponse`` (``protos/``); the last two
have the same encoding, so an echo needs no parsing at all.
"""

from functools import lru_cache
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from kvist_epp.extproc.pb.ext_proc_pb2 import ProcessingRequest
from kvist_epp.names import BODY_CHUNK_BYTES

REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
"""Field numbers of ``ProcessingRequest`` that hold an ``HttpBody``; the answer's number is one less."""

_NO_METADATA: Final = b"\x42\x00"
"""What Envoy puts after every message when it has no metadata to forward."""
_KNOWN_TAIL_BYTES: Final = 1024
_BODY_TAG: Final = 0x0A
_END_TAG: Final = 0x10
_END_OF_STREAM: Final = b"\x10\x01"


class Chunk(msgspec.Struct, frozen=True):
    """One ``HttpBody`` where it lies in its message."""

    data: memoryview
    end_of_stream: bool
    encoded: memoryview
    """The whole ``HttpBody``, as received."""


def varint(number: int) -> bytes:
    """A non-negative integer as protobuf's base-128 varint."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field; ``number`` is below 16."""
    if len(payload) <= 0x7F:
        return bytes((number << 3 | 2, len(payload))) + payload
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def read_chunk(message: bytes, number: int) -> Chunk | None:
    """The body chunk that is field ``number`` (4 or 5) of a serialised ``ProcessingRequest``.

    ``None`` when the message is anything else, or is not plainly encoded: protobuf then has the word.
    """
    if message[:1] != bytes((number << 3 | 2,)):
        return None
    try:
        size, start = _read_varint(message, 1)
        stop = start + size
        if stop > len(message) or not _is_tail(message[stop:]):
            return None
        return _read_http_body(memoryview(message)[start:stop])
    except IndexError:
        return None


def echo(chunk: Chunk) -> list[bytes]:
    """Answers that pass a response chunk on unchanged, cut where it is too long."""
    if len(chunk.data) <= BODY_CHUNK_BYTES:
        return [_wrap(RESPONSE_BODY - 1, (chunk.encoded,))]
    return streamed(RESPONSE_BODY - 1, chunk.data, end_of_stream=chunk.end_of_stream)


def streamed(number: int, body: bytes | memoryview, *, end_of_stream: bool) -> list[bytes]:
    """``ProcessingResponse`` messages of field ``number`` (3 or 4) whose chunks join to ``body``.

    At least one, none above ``BODY_CHUNK_BYTES``; the last one ends the stream when ``end_of_stream``.
    """
    view = memoryview(body)
    last = max(len(body) - 1, 0) // BODY_CHUNK_BYTES
    replies = []
    for i in range(last + 1):
        data = view[i * BODY_CHUNK_BYTES : (i + 1) * BODY_CHUNK_BYTES]
        head = b"\x0a" + varint(len(data))
        replies.append(_wrap(number, (head, data, _END_OF_STREAM if end_of_stream and i == last else b"")))
    return replies


def _wrap(number: int, parts: tuple[bytes | memoryview, ...]) -> bytes:
    """``ProcessingResponse.<number>.response(1).body_mutation(3).streamed_response(3)`` around ``parts``."""
    return b"".join((_head(number, sum(map(len, parts))), *parts))


@lru_cache(maxsize=4096)
def _head(number: int, size: int) -> bytes:
    """What stands before ``size`` bytes of a chunk: the events of a stream have few different sizes."""
    head = b""
    for tag in (0x1A, 0x1A, 0x0A, number << 3 | 2):
        head = bytes((tag,)) + varint(size + len(head)) + head
    return head


def _read_http_body(encoded: memoryview) -> Chunk | None:
    at, data, end_of_stream = 0, encoded[:0], False
    if len(encoded) and encoded[0] == _BODY_TAG:
        size, start = _read_varint(encoded, 1)
        at = start + size
        data = encoded[start:at]
    if at + 2 == len(encoded) and encoded[at] == _END_TAG and encoded[at + 1] <= 1:
        end_of_stream = encoded[at + 1] == 1
        at += 2
    return Chunk(data, end_of_stream, encoded) if at == len(encoded) else None


def _read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while data[at] > 0x7F:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return number | data[at] << shift, at + 1


def _is_tail(rest: bytes) -> bool:
    """Whether ``rest`` holds only what may follow the body: metadata, attributes, configuration."""
    if not rest or rest == _NO_METADATA:
        return True
    return _is_known_tail(rest) if len(rest) <= _KNOWN_TAIL_BYTES else _decodes_as_tail(rest)


@lru_cache(maxsize=256)
def _is_known_tail(rest: bytes) -> bool:
    """Forwarded metadata is the same in every message of a stream: it is parsed once."""
    return _decodes_as_tail(rest)


def _decodes_as_tail(rest: bytes) -> bool:
    try:
        return ProcessingRequest.FromString(rest).WhichOneof("request") is None
    except DecodeError:
        return False
