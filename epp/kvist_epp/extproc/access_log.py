"""How requests ended, read from Envoy's gRPC access log: pure.

Source: ``envoy.service.accesslog.v3.StreamAccessLogsMessage``. Envoy batches entries; each is decoded on its
own, so that one that cannot be read costs only itself.
"""

from collections.abc import Callable
from ipaddress import ip_address

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.pb.accesslog_pb2 import (
    AccessLogCommon,
    HTTPAccessLogEntry,
    StreamAccessLogsMessage,
)
from kvist_epp.extproc.pb.base_pb2 import SocketAddress
from kvist_epp.names import DESTINATION_HEADER, REQUEST_ID_HEADER, SESSION_HEADER


class AccessLogEntry(msgspec.Struct, frozen=True):
    """One request that ended at the gateway."""

    session: str | None
    request_id: str | None
    upstream: str | None
    """The address that answered, "ip:port" or "[v6]:port"; ``None`` when no upstream was reached."""
    destination: str | None
    """What the picker had answered: one endpoint or several, comma separated."""
    status: int
    """HTTP status the client got; 0 when it left before one."""
    ttfb_seconds: float | None
    """From the request's start to the first byte of the upstream's response."""
    duration_seconds: float | None
    """From the request's start to the last byte sent to the client."""


def decode(message: bytes, garbage: Callable[[int], None] = lambda _: None) -> list[AccessLogEntry]:
    """The requests that ended, of one serialised ``StreamAccessLogsMessage``.

    ``garbage`` is told how many entries could not be read. Entries of requests that still run are left out.
    Raises `ProtocolError` when the message itself cannot be decoded.
    """
    try:
        entries = StreamAccessLogsMessage.FromString(message).http_logs.log_entry
    except DecodeError as error:
        raise ProtocolError(f"access log message of {len(message)} bytes cannot be decoded") from error
    parsed = [_parse(entry) for entry in entries]
    if broken := parsed.count(None):
        garbage(broken)
    return [_ended(entry) for entry in parsed if entry and not entry.common_properties.intermediate_log_entry]


def _parse(entry: bytes) -> HTTPAccessLogEntry | None:
    try:
        return HTTPAccessLogEntry.FromString(entry)
    except DecodeError:
        return None


def _ended(entry: HTTPAccessLogEntry) -> AccessLogEntry:
    common, headers = entry.common_properties, entry.request.request_headers
    return AccessLogEntry(
        session=headers.get(SESSION_HEADER) or None,
        request_id=entry.request.request_id or headers.get(REQUEST_ID_HEADER) or None,
        upstream=_hostport(common.upstream_remote_address.socket_address),
        destination=headers.get(DESTINATION_HEADER) or None,
        status=entry.response.response_code.value,
        ttfb_seconds=_seconds(common, "time_to_first_upstream_rx_byte"),
        duration_seconds=_seconds(common, "duration", "time_to_last_downstream_tx_byte"),
    )


def _hostport(address: SocketAddress) -> str | None:
    if not address.address:
        return None
    return f"{_bracketed(address.address)}:{address.port_value}"


def _bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ip_address(host).version == 6 else host
    except ValueError:
        return host


def _seconds(common: AccessLogCommon, *names: str) -> float | None:
    """The first of the named durations that is present."""
    for name in names:
        if common.HasField(name):
            duration: Duration = getattr(common, name)
            return duration.seconds + duration.nanos / 1e9
    return None
