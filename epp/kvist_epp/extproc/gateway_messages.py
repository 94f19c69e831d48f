"""Messages between a gateway and the picker on an ext_proc stream: reading and encoding.

Body chunks are read and encoded by hand, because half a megabyte passes through them: protobuf's own parser
copies a body twice on its way to Python, this reader once. A message that is not a plain chunk is left to
protobuf. Answers that do not vary are serialised once.

Sources: Envoy's ``ProcessingRequest``, ``ProcessingResponse``, ``HttpBody`` and ``BodyResponse`` …
``StreamedBodyResponse`` (``protos/``); the Endpoint Picker Protocol (subset hint; destination in the header
*and* in dynamic metadata, always the same string). ``HttpBody`` and ``StreamedBodyResponse`` have the same
encoding, so that an echo needs no parsing at all.
"""

import json
from collections.abc import Container, Iterable
from functools import lru_cache
from typing import Final

import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from kvist_epp.errors import PickError
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import HeaderValue, HeaderValueOption, Metadata
from kvist_epp.extproc.pb.ext_proc_pb2 import (
    HeaderMutation,
    HttpStatus,
    ImmediateResponse,
    ProcessingResponse,
)
from kvist_epp.http2.call import Message, SplitMessage
from kvist_epp.names import (
    BODY_CHUNK_BYTES,
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    DROPPED_REASON_ALIAS,
    DROPPED_REASON_HEADER,
    SERVED_KEY,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)

REQUEST_BODY_FIELD: Final = 4
RESPONSE_BODY_FIELD: Final = 5
"""Field numbers of ``ProcessingRequest`` that hold an ``HttpBody``; the answer's number is one less."""

_NO_METADATA: Final = b"\x42\x00"
"""Bytes that Envoy puts after every message when it has no metadata to forward."""
_CACHED_TAIL_BYTES: Final = 1024
_SPLIT_BYTES: Final = 1024 * 1024
"""Largest body that is not copied into its answers: while a slow reader is sent its end, it is kept whole."""
_BODY_TAG: Final = 0x0A
_END_TAG: Final = 0x10

DEFAULT_CONFIG: Final = pb.ProtocolConfiguration(
    request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
)
"""Configuration assumed when a gateway sends none: the mode the Endpoint Picker Protocol demands."""


class BodyChunk(msgspec.Struct, frozen=True):
    """One ``HttpBody``, as views into the message it arrived in."""

    data: memoryview
    end_of_stream: bool
    encoded: memoryview
    """The whole serialised ``HttpBody``, as received."""


def read_chunk(message: bytes, number: int) -> BodyChunk | None:
    """Return the body chunk in field ``number`` (4 or 5) of a serialised ``ProcessingRequest``.

    Return ``None`` if the message is of another kind or not plainly encoded; protobuf must then parse it.
    """
    if len(message) <= _LAST_CHUNK_BYTES and (last := _LAST_CHUNKS[number].get(message)) is not None:
        return last
    if message[:1] != _TAGS[number]:
        return None
    try:
        size, start = _read_varint(message, 1)
        stop = start + size
        if stop > len(message) or not _is_tail(message[stop:]):
            return None
        return _read_http_body(memoryview(message)[start:stop])
    except IndexError:
        return None


_TAGS: Final = {REQUEST_BODY_FIELD: b"\x22", RESPONSE_BODY_FIELD: b"\x2a"}
_LAST_CHUNK: Final = BodyChunk(memoryview(b""), end_of_stream=True, encoded=memoryview(b"\x10\x01"))
"""The chunk with which gateways end a body after its last byte, which is every time."""
_LAST_CHUNKS: Final = {
    number: {tag + b"\x02\x10\x01" + tail: _LAST_CHUNK for tail in (b"", _NO_METADATA)}
    for number, tag in _TAGS.items()
}
_LAST_CHUNK_BYTES: Final = 6


def _read_http_body(encoded: memoryview) -> BodyChunk | None:
    at, data, end_of_stream = 0, encoded[:0], False
    if len(encoded) and encoded[0] == _BODY_TAG:
        size, start = _read_varint(encoded, 1)
        at = start + size
        data = encoded[start:at]
    if at + 2 == len(encoded) and encoded[at] == _END_TAG and encoded[at + 1] <= 1:
        end_of_stream = encoded[at + 1] == 1
        at += 2
    return BodyChunk(data, end_of_stream, encoded) if at == len(encoded) else None


def _read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while data[at] > 0x7F:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return number | data[at] << shift, at + 1


def _is_tail(rest: bytes) -> bool:
    """Return whether ``rest`` holds only fields that may follow the body.

    These are metadata, attributes and configuration. Forwarded metadata is the same in every message of a
    stream, so short tails are parsed once.
    """
    if not rest or rest == _NO_METADATA:
        return True
    return _cached_decodes_as_tail(rest) if len(rest) <= _CACHED_TAIL_BYTES else _decodes_as_tail(rest)


def _decodes_as_tail(rest: bytes) -> bool:
    try:
        return pb.ProcessingRequest.FromString(rest).WhichOneof("request") is None
    except DecodeError:
        return False


_cached_decodes_as_tail: Final = lru_cache(maxsize=256)(_decodes_as_tail)


def configuration(request: pb.ProcessingRequest) -> pb.ProtocolConfiguration:
    """Return the body modes in which the gateway sends, `DEFAULT_CONFIG` if the message has none."""
    if not request.HasField("protocol_config"):
        return DEFAULT_CONFIG
    config = request.protocol_config
    early = config.send_body_without_waiting_for_header_response
    return _configuration(config.request_body_mode, config.response_body_mode, early)


@lru_cache(maxsize=64)
def _configuration(request: int, response: int, early: bool) -> pb.ProtocolConfiguration:
    """Return one object for all streams: a part of a message keeps the memory of the whole message."""
    return pb.ProtocolConfiguration(
        request_body_mode=request,  # type: ignore[arg-type]
        response_body_mode=response,  # type: ignore[arg-type]
        send_body_without_waiting_for_header_response=early,
    )


def header_values(message: pb.HttpHeaders, names: Container[str]) -> dict[str, str]:
    """Return the headers with these lower-case names, as latin-1; repeated headers are joined by a comma.

    Gateways fill ``raw_value`` or ``value``, some of them one for each kind of header.
    """
    headers: dict[str, str] = {}
    for header in message.headers.headers:
        key = header.key.lower()
        if key not in names:
            continue
        value = str(header.raw_value or header.value.encode(), "latin-1")
        headers[key] = f"{headers[key]},{value}" if key in headers else value
    return headers


def subset(metadata: Metadata) -> tuple[str, ...] | None:
    """Return the subset hint: a list in the Endpoint Picker Protocol, a comma-separated string in LWEPP.

    Return ``None`` without a hint. A hint of any other type allows no endpoint: failing open would leave the
    subset.
    """
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    return _strings(fields[SUBSET_KEY]) if SUBSET_KEY in fields else None


def _strings(value: Value) -> tuple[str, ...]:
    if value.WhichOneof("kind") == "list_value":
        found = [item.string_value for item in value.list_value.values]
    else:
        found = value.string_value.split(",")
    return tuple(text for item in found if (text := item.strip()))


def served_endpoint(metadata: Metadata) -> str | None:
    """Return the endpoint that answered, as the Endpoint Picker Protocol has gateways report it."""
    if DESTINATION_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[DESTINATION_NAMESPACE].fields
    return fields[SERVED_KEY].string_value.strip() or None if SERVED_KEY in fields else None


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


REPLY_REQUEST_HEADERS: Final = 1
REPLY_REQUEST_BODY: Final = 3
REPLY_RESPONSE_BODY: Final = 4
REPLY_REQUEST_TRAILERS: Final = 5
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


def encode_pick(
    number: int,
    endpoints: tuple[str, ...],
    headers: tuple[tuple[str, str], ...] = (),
    remove: tuple[str, ...] = (),
    body: bytes | None = None,
) -> bytes:
    """Return the pick as an answer in field ``number``: destination set, metadata set, route cache cleared.

    ``headers`` are request headers to set, ``remove`` those to remove. ``body`` replaces the whole body where
    it is sent in one message (field 3); its length is set with it, as Envoy demands in the mode BUFFERED. In
    an answer to request trailers only the metadata can still be set.
    """
    set_destination, metadata = _destination(endpoints)
    if number == REPLY_REQUEST_TRAILERS:
        return CONTINUE_REQUEST_TRAILERS + metadata
    mutation = [set_destination]
    mutation += [_set_header(key, value) for key, value in headers]
    mutation += [field(2, key.encode()) for key in remove]
    tail = _CLEAR_ROUTE_CACHE if body is None else _CLEAR_ROUTE_CACHE + _body_mutation(body)
    size = sum(map(len, mutation))
    return b"".join((_pick_head(number, size, len(tail)), *mutation, tail, metadata))


@lru_cache(maxsize=4096)
def _pick_head(number: int, mutation: int, tail: int) -> bytes:
    """Return the bytes in front of a header mutation of this size, which so many bytes follow."""
    head = b"\x12" + varint(mutation)  # CommonResponse.header_mutation(2)
    head = b"\x0a" + varint(len(head) + mutation + tail) + head  # HeadersResponse.response(1)
    return bytes((number << 3 | 2,)) + varint(len(head) + mutation + tail) + head


def remove_request_headers(names: Iterable[str]) -> bytes:
    """Return an answer to request headers that removes ``names`` and has the route chosen anew."""
    mutation = b"".join(field(2, name.encode()) for name in names)
    return field(REPLY_REQUEST_HEADERS, field(1, field(2, mutation) + _CLEAR_ROUTE_CACHE))


def replace_request_chunk(body: bytes) -> bytes:
    """Return an answer that replaces one chunk of a STREAMED request."""
    return field(REPLY_REQUEST_BODY, field(1, _body_mutation(body)))


def replace_response_chunk(body: bytes, *, set_length: bool) -> bytes:
    """Return an answer that replaces one chunk of a response; with ``set_length`` it is the whole body."""
    common = _body_mutation(body)
    if set_length:
        common = field(2, _set_header(_LENGTH, str(len(body)))) + common
    return field(REPLY_RESPONSE_BODY, field(1, common))


def content_length(body: bytes) -> tuple[str, str]:
    """Return the header that states the length of ``body``."""
    return _LENGTH, str(len(body))


def encode_rejection(error: PickError) -> bytes:
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


def encode_echo(chunk: BodyChunk) -> list[Message]:
    """Return answers that pass a response chunk on unchanged, split where it is too long for one message."""
    if len(chunk.data) <= BODY_CHUNK_BYTES:
        head = _streamed_head(REPLY_RESPONSE_BODY, len(chunk.encoded))
        return [b"".join((head, chunk.encoded))]
    return encode_streamed(REPLY_RESPONSE_BODY, chunk.data, end_of_stream=chunk.end_of_stream)


def encode_streamed(number: int, body: bytes | memoryview, *, end_of_stream: bool) -> list[Message]:
    """Return ``ProcessingResponse`` messages of field ``number`` (3 or 4) whose chunks join to ``body``.

    There is at least one, and none has more than ``BODY_CHUNK_BYTES``; with ``end_of_stream`` the last one
    ends the body.
    """
    if len(body) <= BODY_CHUNK_BYTES:
        return [_streamed_chunk(number, body, end_of_stream=end_of_stream)]
    view = memoryview(body)
    *whole, last = range(0, len(body), BODY_CHUNK_BYTES)
    parts = [(_data_head(number, BODY_CHUNK_BYTES, 0), view[at : at + BODY_CHUNK_BYTES]) for at in whole]
    replies: list[Message] = list(map(SplitMessage._make if len(body) <= _SPLIT_BYTES else b"".join, parts))
    replies.append(_streamed_chunk(number, view[last:], end_of_stream=end_of_stream))
    return replies


def _streamed_chunk(number: int, data: bytes | memoryview, *, end_of_stream: bool) -> bytes:
    end = _END_OF_STREAM if end_of_stream else b""
    return b"".join((_data_head(number, len(data), len(end)), data, end))


@lru_cache(maxsize=4096)
def _data_head(number: int, size: int, end: int) -> bytes:
    """Return the bytes in front of so many bytes of a body, which ``end`` bytes follow."""
    head = b"\x0a" + varint(size)
    return _streamed_head(number, len(head) + size + end) + head


@lru_cache(maxsize=4096)
def _streamed_head(number: int, size: int) -> bytes:
    """Return the bytes in front of an encoded chunk: ``response(1).body_mutation(3).streamed_response(3)`` of
    field ``number``. The events of a stream have few sizes."""
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
    raw = value.encode("latin-1", "replace")
    return _set_header_head(key, len(raw)) + raw + _OVERWRITE


@lru_cache(maxsize=4096)
def _set_header_head(key: str, size: int) -> bytes:
    """Return the bytes in front of a header's value of this size."""
    head = field(1, key.encode()) + b"\x1a" + varint(size)
    head = b"\x0a" + varint(len(head) + size) + head
    return b"\x0a" + varint(len(head) + size + len(_OVERWRITE)) + head


def _option(key: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=key, raw_value=value.encode("latin-1", "replace")),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
