"""Request headers of a serialised ``ProcessingRequest``, read without protobuf (the hot path).

Protobuf makes an object for each header and looks up each field by its name. A message that is encoded as
Envoy does it, with all headers in ``raw_value``, is read here; any other is left to protobuf. Source: Envoy's
``ext_proc.proto`` (``HttpHeaders``), ``base.proto`` (``HeaderMap``, ``HeaderValue``).
"""

from functools import lru_cache
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from kvist_epp.extproc import gateway_messages as gateway
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.names import REQUEST_HEADERS

_NAMES: Final = {name.encode(): name for name in REQUEST_HEADERS}
_MAP, _KEY, _RAW_VALUE = 0x0A, 0x0A, 0x1A
"""Tags of the fields ``headers`` (of both messages), ``key`` and ``raw_value``."""
_END_OF_STREAM: Final = b"\x18\x01"
_MOST_REST_BYTES: Final = 1024
"""Longer metadata is left to protobuf, and not remembered."""


class MessageRest(msgspec.Struct, frozen=True):
    """The fields after the headers in the first message of a stream."""

    config: pb.ProtocolConfiguration
    subset: tuple[str, ...] | None
    observability_mode: bool


class PlainHeaders(msgspec.Struct, frozen=True):
    """The first message of a stream."""

    values: dict[str, str]
    """As ``gateway_messages.header_values`` returns them."""
    end_of_stream: bool
    rest: MessageRest


def read_request_headers(message: bytes) -> PlainHeaders | None:
    """Return the headers in ``REQUEST_HEADERS``; None: protobuf must parse the message."""
    if message[:1] != b"\x12":
        return None
    try:
        size, at = _varint(message, 1)
        stop = at + size
        if stop > len(message) or message[at] != _MAP:
            return None
        size, at = _varint(message, at + 1)
        end = at + size
        values = _values(message, at, end)
        rest = message[stop:]
        if values is None or len(rest) > _MOST_REST_BYTES or (further := _rest(rest)) is None:
            return None
    except IndexError:
        return None
    ends = message[end:stop]
    if end > stop or (ends and ends != _END_OF_STREAM):
        return None
    return PlainHeaders(values, bool(ends), further)


def _values(message: bytes, at: int, end: int) -> dict[str, str] | None:
    """Return the values of the headers in ``message[at:end]``; None if they are not plainly encoded."""
    values: dict[str, str] = {}
    while at < end:
        # inlined: one-byte sizes are the rule, and each header would cost three calls
        if message[at] != _MAP:
            return None
        size, at = message[at + 1], at + 2
        if size > 0x7F:
            size, at = _varint(message, at - 1)
        start, at = at, at + size
        if size < 2 or message[start] != _KEY or (size := message[start + 1]) > 0x7F:
            return None
        start += 2
        stop = start + size
        key = message[start:stop]
        if stop < at:
            if message[stop] != _RAW_VALUE:
                return None
            size, start = message[stop + 1], stop + 2
            if size > 0x7F:
                size, start = _varint(message, stop + 1)
            if start + size != at:
                return None
        elif stop > at:
            return None
        else:  # an empty value is not sent
            start = at
        if not key.isascii():  # protobuf tells whether it is UTF-8
            return None
        name = _NAMES.get(key.lower())
        if name is not None:
            value = str(message[start:at], "latin-1")
            values[name] = f"{values[name]},{value}" if name in values else value
    return values if at == end else None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises IndexError where it does not end, or is too long."""
    number = shift = 0
    while message[at] > 0x7F:
        number |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 28:
            raise IndexError
    return number | message[at] << shift, at + 1


@lru_cache(maxsize=256)
def _rest(rest: bytes) -> MessageRest | None:
    """Parse the bytes behind the headers, which are the same in nearly all streams of a gateway."""
    try:
        request = pb.ProcessingRequest.FromString(rest)
    except DecodeError:
        return None
    if request.WhichOneof("request") is not None:
        return None
    found = gateway.subset(request.metadata_context)
    return MessageRest(gateway.configuration(request), found, request.observability_mode)
