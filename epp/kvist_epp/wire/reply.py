"""ext_proc answers as bytes. What is constant is serialised once; the pick is put together by hand.

Source: Envoy's ``envoy.service.ext_proc.v3.ProcessingResponse``; the Endpoint Picker Protocol (destination in
the header *and* in dynamic metadata, always the same string).
"""

import json
from functools import lru_cache
from typing import Final

from kvist_epp.errors import PickError
from kvist_epp.names import (
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    DROPPED_REASON_ALIAS,
    DROPPED_REASON_HEADER,
)
from kvist_epp.wire.body import field
from kvist_epp.wire.pb.base_pb2 import HeaderValue, HeaderValueOption
from kvist_epp.wire.pb.ext_proc_pb2 import (
    HeaderMutation,
    HttpStatus,
    ImmediateResponse,
    ProcessingResponse,
)

REQUEST_HEADERS: Final = 1
REQUEST_BODY: Final = 3
"""Fields of ``ProcessingResponse`` in which a pick can be answered."""

CONTINUE_REQUEST_HEADERS: Final = field(1, b"")
CONTINUE_RESPONSE_HEADERS: Final = field(2, b"")
CONTINUE_REQUEST_BODY: Final = field(3, b"")
CONTINUE_RESPONSE_BODY: Final = field(4, b"")
CONTINUE_REQUEST_TRAILERS: Final = field(5, b"")
CONTINUE_RESPONSE_TRAILERS: Final = field(6, b"")

_CLEAR_ROUTE_CACHE: Final = b"\x28\x01"
_OVERWRITE: Final = b"\x18\x02"


def picked(number: int, endpoints: tuple[str, ...], headers: tuple[tuple[str, str], ...]) -> bytes:
    """The answer in field ``number``: destination and ``headers`` set, metadata set, route cache cleared."""
    set_destination, metadata = _destination(endpoints)
    mutation = set_destination + b"".join(_set_header(key, value) for key, value in headers)
    common = field(2, mutation) + _CLEAR_ROUTE_CACHE
    return field(number, field(1, common)) + metadata


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
    """The same destination as a header to set and as ``dynamic_metadata``."""
    value = ",".join(endpoints)
    response = ProcessingResponse()
    response.dynamic_metadata.update({DESTINATION_NAMESPACE: {DESTINATION_HEADER: value}})
    return _set_header(DESTINATION_HEADER, value), response.SerializeToString()


def _set_header(key: str, value: str) -> bytes:
    """``HeaderMutation.set_headers(1)`` of ``HeaderValueOption``: the header (1), overwriting (3)."""
    header = field(1, key.encode()) + field(3, value.encode("latin-1", "replace"))
    return field(1, field(1, header) + _OVERWRITE)


def _option(key: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=key, raw_value=value.encode("latin-1", "replace")),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
