"""Envoy's gRPC access log, which reports how requests ended.

Source: ``envoy.service.accesslog.v3.StreamAccessLogsMessage``. Envoy batches entries; each is decoded on its
own, so that an unreadable entry costs only itself.
"""

from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.pb.accesslog_pb2 import (
    AccessLogCommon,
    HTTPAccessLogEntry,
    StreamAccessLogsMessage,
)
from kvist_epp.extproc.pb.base_pb2 import SocketAddress
from kvist_epp.extproc.protocol_errors import ErrorCounter
from kvist_epp.http2.call import Sink
from kvist_epp.names import REQUEST_ID_HEADER, SESSION_HEADER

_FIRST_SENT: Final = "time_to_first_upstream_tx_byte"
_LAST_ANSWERED: Final = "time_to_last_downstream_tx_byte"


class AccessLogEntry(msgspec.Struct, frozen=True):
    """One request that ended at the gateway."""

    session: str | None
    request_id: str | None
    upstream: str | None
    """The address that answered, "ip:port" or "[v6]:port"; ``None`` when no upstream was reached."""
    status: int
    """HTTP status that the client received; 0 when the client left before one was sent."""
    seconds: float | None = None
    """Time from being sent to the endpoint to the last byte for the client; None: not measured. One entry
    of a message has it."""


def decode_access_log(
    message: bytes, on_unreadable: Callable[[int], None] = lambda _: None
) -> list[AccessLogEntry]:
    """Return the ended requests of one serialised ``StreamAccessLogsMessage``.

    ``on_unreadable`` gets the number of entries that could not be decoded. Entries of requests that still run
    are left out. Only the entry in the middle has its time: the gateway held it back for as long as the
    others on average, and reading the times of an entry takes as long as parsing it. Raises `ProtocolError`
    when the message itself cannot be decoded.
    """
    try:
        entries = StreamAccessLogsMessage.FromString(message).http_logs.log_entry
    except DecodeError as error:
        raise ProtocolError(f"access log message of {len(message)} bytes cannot be decoded") from error
    ended: list[AccessLogEntry] = []
    unreadable = 0
    middle = len(entries) // 2
    for number, encoded in enumerate(entries):
        try:
            entry = HTTPAccessLogEntry.FromString(encoded)
        except DecodeError:
            unreadable += 1
            continue
        common = entry.common_properties
        if not common.intermediate_log_entry:
            seconds = _seconds(common) if number == middle else None
            ended.append(_entry(entry, common.upstream_remote_address.socket_address, seconds))
    if unreadable:
        on_unreadable(unreadable)
    return ended


def _seconds(times: AccessLogCommon) -> float | None:
    """Return the time from the first byte to the endpoint to the last one for the client; None: unknown."""
    if not (times.HasField(_FIRST_SENT) and times.HasField(_LAST_ANSWERED)):
        return None
    sent, answered = times.time_to_first_upstream_tx_byte, times.time_to_last_downstream_tx_byte
    return answered.seconds - sent.seconds + (answered.nanos - sent.nanos) / 1e9


def _entry(entry: HTTPAccessLogEntry, address: SocketAddress, seconds: float | None) -> AccessLogEntry:
    request = entry.request
    headers = request.request_headers
    return AccessLogEntry(
        session=headers.get(SESSION_HEADER) or None,
        request_id=request.request_id or headers.get(REQUEST_ID_HEADER) or None,
        upstream=_hostport(address.address, address.port_value),
        status=entry.response.response_code.value,
        seconds=seconds,
    )


@lru_cache(maxsize=4096)
def _hostport(host: str, port: int) -> str | None:
    if not host:
        return None
    try:
        is_v6 = ip_address(host).version == 6
    except ValueError:
        is_v6 = False
    return f"[{host}]:{port}" if is_v6 else f"{host}:{port}"


class AccessLogCall:
    """The gRPC call of one access log stream, which is not answered before the gateway ends it.

    Unreadable messages and entries are counted and skipped.
    """

    __slots__ = ("_on_entries", "_on_error", "_sink")

    def __init__(
        self,
        sink: Sink,
        on_entries: Callable[[list[AccessLogEntry]], None],
        on_error: ErrorCounter,
    ) -> None:
        self._sink = sink
        self._on_entries = on_entries
        self._on_error = on_error

    def on_message(self, data: bytes) -> None:
        try:
            entries = decode_access_log(data, self._on_unreadable)
        except ProtocolError as error:
            self._on_error("access-log-message", 1, f"from {self._sink.peer}: {error}")
            return
        if entries:
            self._on_entries(entries)

    def _on_unreadable(self, count: int) -> None:
        problem = f"from {self._sink.peer}: access log entries cannot be decoded: {count}"
        self._on_error("access-log-entry", count, problem)

    def on_half_closed(self) -> None:
        self._sink.send(b"")
        self._sink.close()

    def on_cancelled(self) -> None:
        pass
