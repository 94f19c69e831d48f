"""ext_proc answers as bytes. What is constant is serialised once; the pick is put together by hand.

Source: Envoy's ``envoy.service.ext_proc.v3.ProcessingResponse``; the Endpoint Picker Protocol (destination in
the header *and* in dynamic metadata, always the same string).
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from kvist_epp.errors import PickError
from kvist_epp.extproc.bodies import field
from kvist_epp.extproc.pb.base_pb2 import HeaderValue, HeaderValueOption
from kvist_epp.extproc.pb.ext_proc_pb2 import (
    HeaderMutation,
    HttpStatus,
    ImmediateResponse,
    ProcessingResponse,
)
from kvist_epp.names import (
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    DROPPED_REASON_ALIAS,
    DROPPED_REASON_HEADER,
)

REQUEST_HEADERS: Final = 1
REQUEST_BODY: Final = 3
REQUEST_TRAILERS: Final = 5
"""Fields of ``ProcessingResponse`` in which a pick can be answered."""

CONTINUE_REQUEST_HEADERS: Final = field(1, b"")
CONTINUE_RESPONSE_HEADERS: Final = field(2, b"")
CONTINUE_REQUEST_BODY: Final = field(3, b"")
CONTINUE_RESPONSE_BODY: Final = field(4, b"")
CONTINUE_REQUEST_TRAILERS: Final = field(5, b"")
CONTINUE_RESPONSE_TRAILERS: Final = field(6, b"")

_CLEAR_ROUTE_CACHE: Final = b"\x28\x01"
_CLEAR_BODY: Final = b"\x10\x01"
_OVERWRITE: Final = b"\x18\x02"
_LENGTH: Final = "content-length"
UNMEASURED_RESPONSE_HEADERS: Final = field(2, field(1, field(2, field(2, _LENGTH.encode()))))
"""Response headers go on without ``content-length``: the body's length will change."""


def picked(
    number: int,
    endpoints: tuple[str, ...],
    headers: tuple[tuple[str, str], ...],
    remove: tuple[str, ...] = (),
    body: bytes | None = None,
) -> bytes:
    """The answer in field ``number``: destination and ``headers`` set, metadata set, route cache cleared.

    ``remove``: request headers to take away. ``body``: replaces the whole body, where that is asked for in
    one message (field 3); its length is set with it, as Envoy demands in the mode BUFFERED.
    """
    set_destination, metadata = _destination(endpoints)
    mutation = set_destination + b"".join(_set_header(key, value) for key, value in headers)
    if remove:
        mutation += b"".join(field(2, key.encode()) for key in remove)
    common = field(2, mutation) + _CLEAR_ROUTE_CACHE
    if body is not None:
        common += _body_mutation(body)
    return field(number, field(1, common)) + metadata


def without(names: Iterable[str]) -> bytes:
    """Request headers go on, while the body is waited for, without these; the route is chosen anew."""
    mutation = b"".join(field(2, name.encode()) for name in names)
    return field(REQUEST_HEADERS, field(1, field(2, mutation) + _CLEAR_ROUTE_CACHE))


def picked_at_trailers(endpoints: tuple[str, ...]) -> bytes:
    """The answer to request trailers: headers cannot be set there any more, metadata can."""
    return CONTINUE_REQUEST_TRAILERS + _destination(endpoints)[1]


def request_body(body: bytes) -> bytes:
    """One chunk of a STREAMED request, replaced."""
    return field(REQUEST_BODY, field(1, _body_mutation(body)))


def response_body(body: bytes, *, measured: bool) -> bytes:
    """One chunk of a response, replaced; ``measured``: it is the whole body, and its length is set."""
    common = _body_mutation(body)
    if measured:
        common = field(2, _set_header(_LENGTH, str(len(body)))) + common
    return field(4, field(1, common))


def measured(body: bytes) -> tuple[str, str]:
    """The header that tells this body's length."""
    return _LENGTH, str(len(body))


def immediate(error: PickError) -> bytes:
    """The answer that ends the request with ``error``: OpenAI-style JSON, reason headers, ``Retry-After``."""
    headers = [
        ("content-type", "application/json"),
        (DROPPED_REASON_HEADER, error.reason),
        (DROPPED_REASON_ALIAS, error.reason),
    ]
    if error.retry_after is not None:
        headers.append(("retry-after", str(error.retry_after)))
    response = ImmediateResponse(
        status=HttpStatus(code=error.status),
        headers=HeaderMutation(set_headers=[_option(key, value) for key, value in headers]),
        body=error_body(error),
        details=f"kvist_{error.reason.replace('-', '_')}",
    )
    return ProcessingResponse(immediate_response=response).SerializeToString()


def error_body(error: PickError) -> bytes:
    """``{"error": {"message", "type", "code"}}`` as OpenAI's clients read it; ``code`` is the reason."""
    detail = {"message": error.message, "type": error.kind, "code": error.reason}
    return json.dumps({"error": detail}).encode()


@lru_cache(maxsize=4096)
def _destination(endpoints: tuple[str, ...]) -> tuple[bytes, bytes]:
    """The same destination as a header to set and as ``dynamic_metadata``; nothing without endpoints."""
    if not endpoints:
        return b"", b""
    value = ",".join(endpoints)
    response = ProcessingResponse()
    response.dynamic_metadata.update({DESTINATION_NAMESPACE: {DESTINATION_HEADER: value}})
    return _set_header(DESTINATION_HEADER, value), response.SerializeToString()


def _body_mutation(body: bytes) -> bytes:
    """``CommonResponse.body_mutation(3)``: the body (1), or that it is cleared (2)."""
    return field(3, field(1, body) if body else _CLEAR_BODY)


def _set_header(key: str, value: str) -> bytes:
    """``HeaderMutation.set_headers(1)`` of ``HeaderValueOption``: the header (1), overwriting (3)."""
    header = field(1, key.encode()) + field(3, value.encode("latin-1", "replace"))
    return field(1, field(1, header) + _OVERWRITE)


def _option(key: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=key, raw_value=value.encode("latin-1", "replace")),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
