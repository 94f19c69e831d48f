"""What a gateway says in the first message of an ext_proc stream: headers, subset hint, configuration. Pure.

Sources: Envoy's ``ProcessingRequest``; the Endpoint Picker Protocol's subset hint.
"""

from functools import lru_cache
from typing import Final

from google.protobuf.struct_pb2 import Value

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import Metadata
from kvist_epp.names import SUBSET_KEY, SUBSET_NAMESPACE

DEFAULT_CONFIG: Final = pb.ProtocolConfiguration(
    request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
)
"""Of a gateway that says nothing: the mode the protocol demands of gateways."""


def configuration(request: pb.ProcessingRequest) -> pb.ProtocolConfiguration:
    """How the gateway sends bodies."""
    if not request.HasField("protocol_config"):
        return DEFAULT_CONFIG
    said = request.protocol_config
    early = said.send_body_without_waiting_for_header_response
    return _configuration(said.request_body_mode, said.response_body_mode, early)


@lru_cache(maxsize=64)
def _configuration(request: int, response: int, early: bool) -> pb.ProtocolConfiguration:
    """One for all streams: a part of a message keeps the memory of the whole message."""
    return pb.ProtocolConfiguration(
        request_body_mode=request,  # type: ignore[arg-type]
        response_body_mode=response,  # type: ignore[arg-type]
        send_body_without_waiting_for_header_response=early,
    )


def header_values(message: pb.HttpHeaders) -> dict[str, str]:
    """All headers, lower-case names, latin-1, repeated ones joined by a comma.

    Gateways fill ``raw_value`` or ``value``, some one for each kind of header.
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
    """The subset hint as the Endpoint Picker Protocol (list) and LWEPP (comma string) have it.

    A hint of any other type allows nothing: failing open would leave the subset.
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
