"""Reading of the messages that a gateway sends on an ext_proc stream.

Body chunks are read by hand, because half a megabyte passes through them: protobuf's own parser copies a body
twice on its way to Python, this reader once. A message that is not a plain chunk is left to protobuf.
Sources: Envoy's ``ProcessingRequest`` and ``HttpBody`` (``protos/``); the Endpoint Picker Protocol's subset
hint.
"""

from functools import lru_cache
from typing import Final

import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import Metadata
from kvist_epp.names import DESTINATION_NAMESPACE, SERVED_KEY, SUBSET_KEY, SUBSET_NAMESPACE

REQUEST_BODY_FIELD: Final = 4
RESPONSE_BODY_FIELD: Final = 5
"""Field numbers of ``ProcessingRequest`` that hold an ``HttpBody``; the answer's number is one less."""

_NO_METADATA: Final = b"\x42\x00"
"""Bytes that Envoy puts after every message when it has no metadata to forward."""
_CACHED_TAIL_BYTES: Final = 1024
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
    return _is_cached_tail(rest) if len(rest) <= _CACHED_TAIL_BYTES else _decodes_as_tail(rest)


@lru_cache(maxsize=256)
def _is_cached_tail(rest: bytes) -> bool:
    return _decodes_as_tail(rest)


def _decodes_as_tail(rest: bytes) -> bool:
    try:
        return pb.ProcessingRequest.FromString(rest).WhichOneof("request") is None
    except DecodeError:
        return False


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


def header_values(message: pb.HttpHeaders) -> dict[str, str]:
    """Return all headers with lower-case names and latin-1 values; repeated headers are joined by a comma.

    Gateways fill ``raw_value`` or ``value``, some of them one for each kind of header.
    """
    headers: dict[str, str] = {}
    for header in message.headers.headers:
        key, raw = header.key.lower(), header.raw_value
        value = raw.decode("latin-1") if raw else _as_latin_1(header.value)
        headers[key] = f"{headers[key]},{value}" if key in headers else value
    return headers


def _as_latin_1(value: str) -> str:
    return value if value.isascii() else value.encode().decode("latin-1")


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
