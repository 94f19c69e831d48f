"""Encoding of ext_proc answers: constants are serialised once, picks and body chunks are encoded by hand.

Sources: Envoy's ``ProcessingResponse``, ``BodyResponse`` … ``StreamedBodyResponse`` (``protos/``); the
Endpoint Picker Protocol (destination in the header *and* in dynamic metadata, always the same string).
``HttpBody`` and ``StreamedBodyResponse`` have the same encoding, so an echo needs no parsing at all.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from kvist_epp.errors import PickError
from kvist_epp.extproc.gateway_messages import BodyChunk
from kvist_epp.extproc.pb.base_pb2 import HeaderValue, HeaderValueOption
from kvist_epp.extproc.pb.ext_proc_pb2 import (
    HeaderMutation,
    HttpStatus,
    ImmediateResponse,
    ProcessingResponse,
)
from kvist_epp.names import (
    BODY_CHUNK_BYTES,
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    DROPPED_REASON_ALIAS,
    DROPPED_REASON_HEADER,
)


def varint(number: int) -> bytes:
    """Return a non-negative integer as protobuf's base-128 varint."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited protobuf field; ``number`` is below 16."""
    if len(payload) <= 0x7F:
        return bytes((number << 3 | 2, len(payload))) + payload
    return varint(number << 3 | 2) + varint(len(payload)) + payload


REQUEST_HEADERS: Final = 1
REQUEST_BODY: Final = 3
RESPONSE_BODY: Final = 4
REQUEST_TRAILERS: Final = 5
"""Field numbers of ``ProcessingResponse``."""

CONTINUE_REQUEST_HEADERS: Final = field(1, b"")
CONTINUE_RESPONSE_HEADERS: Final = field(2, b"")
CONTINUE_REQUEST_BODY: Final = field(3, b"")
CONTINUE_RESPONSE_BODY: Final = field(4, b"")
CONTINUE_REQUEST_TRAILERS: Final = field(5, b"")
CONTINUE_RESPONSE_TRAILERS: Final = field(6, b"")

_CLEAR_ROUTE_CACHE: Final = b"\x28\x01"
_CLEAR_BODY: Final = b"\x10\x01"
_OVERWRITE: Final = b"\x18\x02"
_END_OF_STREAM: Final = b"\x10\x01"
_LENGTH: Final = "content-length"
RESPONSE_HEADERS_WITHOUT_LENGTH: Final = field(2, field(1, field(2, field(2, _LENGTH.encode()))))
"""Answer to response headers that removes ``content-length``, because the body's length will change."""


def pick(
    number: int,
    endpoints: tuple[str, ...],
    headers: tuple[tuple[str, str], ...],
    remove: tuple[str, ...] = (),
    body: bytes | None = None,
) -> bytes:
    """Return the pick as an answer in field ``number``: destination set, metadata set, route cache cleared.

    ``headers`` are request headers to set, ``remove`` those to remove. ``body`` replaces the whole body where
    it is sent in one message (field 3); its length is set with it, as Envoy demands in the mode BUFFERED.
    """
    set_destination, metadata = _destination(endpoints)
    mutation = set_destination + b"".join(_set_header(key, value) for key, value in headers)
    if remove:
        mutation += b"".join(field(2, key.encode()) for key in remove)
    common = field(2, mutation) + _CLEAR_ROUTE_CACHE
    if body is not None:
        common += _body_mutation(body)
    return field(number, field(1, common)) + metadata


def pick_at_trailers(endpoints: tuple[str, ...]) -> bytes:
    """Return the pick as an answer to request trailers: metadata can still be set there, headers cannot."""
    return CONTINUE_REQUEST_TRAILERS + _destination(endpoints)[1]


def remove_request_headers(names: Iterable[str]) -> bytes:
    """Return an answer to request headers that removes ``names`` and has the route chosen anew."""
    mutation = b"".join(field(2, name.encode()) for name in names)
    return field(REQUEST_HEADERS, field(1, field(2, mutation) + _CLEAR_ROUTE_CACHE))


def replace_request_chunk(body: bytes) -> bytes:
    """Return an answer that replaces one chunk of a STREAMED request."""
    return field(REQUEST_BODY, field(1, _body_mutation(body)))


def replace_response_chunk(body: bytes, *, set_length: bool) -> bytes:
    """Return an answer that replaces one chunk of a response; with ``set_length`` it is the whole body."""
    common = _body_mutation(body)
    if set_length:
        common = field(2, _set_header(_LENGTH, str(len(body)))) + common
    return field(RESPONSE_BODY, field(1, common))


def content_length(body: bytes) -> tuple[str, str]:
    """Return the header that states the length of ``body``."""
    return _LENGTH, str(len(body))


def immediate(error: PickError) -> bytes:
    """Return the answer that rejects the request: OpenAI-style JSON, reason headers, ``Retry-After``."""
    headers = [
        ("content-type", "application/json"),
        (DROPPED_REASON_HEADER, error.reason),
        (DROPPED_REASON_ALIAS, error.reason),
    ]
    if error.retry_after is not None:
        headers.append(("retry-after", str(error.retry_after)))
    detail = {"message": error.message, "type": error.kind, "code": error.reason}
    response = ImmediateResponse(
        status=HttpStatus(code=error.status),
        headers=HeaderMutation(set_headers=[_option(key, value) for key, value in headers]),
        body=json.dumps({"error": detail}).encode(),
        details=f"kvist_{error.reason.replace('-', '_')}",
    )
    return ProcessingResponse(immediate_response=response).SerializeToString()


def echo(chunk: BodyChunk) -> list[bytes]:
    """Return answers that pass a response chunk on unchanged, split where it is too long for one message."""
    if len(chunk.data) <= BODY_CHUNK_BYTES:
        return [_streamed_chunk(RESPONSE_BODY, (chunk.encoded,))]
    return streamed(RESPONSE_BODY, chunk.data, end_of_stream=chunk.end_of_stream)


def streamed(number: int, body: bytes | memoryview, *, end_of_stream: bool) -> list[bytes]:
    """Return ``ProcessingResponse`` messages of field ``number`` (3 or 4) whose chunks join to ``body``.

    There is at least one, and none has more than ``BODY_CHUNK_BYTES``; with ``end_of_stream`` the last one
    ends the body.
    """
    view = memoryview(body)
    last = max(len(body) - 1, 0) // BODY_CHUNK_BYTES
    replies = []
    for i in range(last + 1):
        data = view[i * BODY_CHUNK_BYTES : (i + 1) * BODY_CHUNK_BYTES]
        head = b"\x0a" + varint(len(data))
        end = _END_OF_STREAM if end_of_stream and i == last else b""
        replies.append(_streamed_chunk(number, (head, data, end)))
    return replies


def _streamed_chunk(number: int, parts: tuple[bytes | memoryview, ...]) -> bytes:
    """Encode field ``number`` of an answer: ``response(1).body_mutation(3).streamed_response(3)``."""
    return b"".join((_streamed_head(number, sum(map(len, parts))), *parts))


@lru_cache(maxsize=4096)
def _streamed_head(number: int, size: int) -> bytes:
    """Return the bytes in front of a chunk of ``size`` bytes; the events of a stream have few sizes."""
    head = b""
    for tag in (0x1A, 0x1A, 0x0A, number << 3 | 2):
        head = bytes((tag,)) + varint(size + len(head)) + head
    return head


@lru_cache(maxsize=4096)
def _destination(endpoints: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Return the destination as a header to set and as ``dynamic_metadata``; both empty without endpoints."""
    if not endpoints:
        return b"", b""
    value = ",".join(endpoints)
    response = ProcessingResponse()
    response.dynamic_metadata.update({DESTINATION_NAMESPACE: {DESTINATION_HEADER: value}})
    return _set_header(DESTINATION_HEADER, value), response.SerializeToString()


def _body_mutation(body: bytes) -> bytes:
    """Encode ``CommonResponse.body_mutation(3)``: the body (1), or that it is cleared (2)."""
    return field(3, field(1, body) if body else _CLEAR_BODY)


def _set_header(key: str, value: str) -> bytes:
    """Encode ``HeaderMutation.set_headers(1)`` of ``HeaderValueOption``: the header (1), overwriting (3)."""
    header = field(1, key.encode()) + field(3, value.encode("latin-1", "replace"))
    return field(1, field(1, header) + _OVERWRITE)


def _option(key: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=key, raw_value=value.encode("latin-1", "replace")),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
