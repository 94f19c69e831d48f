"""Decoding of Envoy's access log entries."""

import pytest
from google.protobuf.wrappers_pb2 import UInt32Value
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry, decode_access_log
from kvist_epp.extproc.pb.accesslog_pb2 import (
    AccessLogCommon,
    HTTPAccessLogEntry,
    HTTPRequestProperties,
    HTTPResponseProperties,
    StreamAccessLogsMessage,
)
from kvist_epp.extproc.pb.base_pb2 import Address, SocketAddress

NOTHING = AccessLogEntry(None, None, None, 0)


def _message(*entries: HTTPAccessLogEntry | bytes) -> bytes:
    encoded = [entry if isinstance(entry, bytes) else entry.SerializeToString() for entry in entries]
    logs = StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=encoded)
    return StreamAccessLogsMessage(http_logs=logs).SerializeToString()


def _upstream(address: str, port: int) -> HTTPAccessLogEntry:
    socket = SocketAddress(address=address, port_value=port)
    return HTTPAccessLogEntry(
        common_properties=AccessLogCommon(upstream_remote_address=Address(socket_address=socket))
    )


def test_a_full_entry() -> None:
    """Session, request id, upstream and status are read."""
    headers = {"x-session-id": "r1.7"}
    entry = _upstream("10.0.0.2", 80)
    entry.request.CopyFrom(HTTPRequestProperties(request_id="id", request_headers=headers))
    entry.response.CopyFrom(HTTPResponseProperties(response_code=UInt32Value(value=200)))

    assert decode_access_log(_message(entry)) == [AccessLogEntry("r1.7", "id", "10.0.0.2:80", 200)]


def test_an_entry_of_a_client_that_left() -> None:
    """An absent field is ``None``; a status that was never sent is 0."""
    assert decode_access_log(_message(HTTPAccessLogEntry())) == [NOTHING]


@pytest.mark.parametrize(
    ("address", "wanted"), [("fd00::1", "[fd00::1]:80"), ("10.0.0.1", "10.0.0.1:80"), ("name", "name:80")]
)
def test_upstream_addresses(address: str, wanted: str) -> None:
    """IPv6 addresses come in brackets, as picks have them."""
    assert decode_access_log(_message(_upstream(address, 80)))[0].upstream == wanted


def _timed(sent: int | None, answered: int | None) -> HTTPAccessLogEntry:
    """An entry whose first byte was sent, and whose last byte was answered, so many milliseconds after its
    start."""
    entry = HTTPAccessLogEntry()
    if sent is not None:
        entry.common_properties.time_to_first_upstream_tx_byte.FromMilliseconds(sent)
    if answered is not None:
        entry.common_properties.time_to_last_downstream_tx_byte.FromMilliseconds(answered)
    return entry


def test_the_entry_in_the_middle_has_its_time() -> None:
    """The time at the endpoint is that from the first byte sent to the last byte answered."""
    entries = decode_access_log(_message(_timed(0, 100), _timed(900, 3250), _timed(0, 100)))

    assert [entry.seconds for entry in entries] == [None, pytest.approx(2.35), None]


@pytest.mark.parametrize(("sent", "answered"), [(None, 100), (100, None), (None, None)])
def test_entries_without_times_have_none(sent: int | None, answered: int | None) -> None:
    """A request that no endpoint got, a client that left, a gateway that measures nothing."""
    assert decode_access_log(_message(_timed(sent, answered)))[0].seconds is None


def test_running_requests_are_left_out() -> None:
    """Entries of requests that still run are no ends."""
    running = HTTPAccessLogEntry(common_properties=AccessLogCommon(intermediate_log_entry=True))

    assert decode_access_log(_message(running)) == []


def test_a_bad_entry_costs_only_itself() -> None:
    """Entries that are no protobuf are counted, the others read."""
    counted: list[int] = []

    assert decode_access_log(_message(b"\xff", HTTPAccessLogEntry(), b"\x0a"), counted.append) == [NOTHING]
    assert counted == [2]


def test_other_messages_have_no_requests() -> None:
    """A message without HTTP entries (an identifier, TCP entries) reports no requests."""
    assert decode_access_log(b"\x0a\x00\x1a\x00") == []


def test_an_undecodable_message() -> None:
    """Bytes that are no message raise ``ProtocolError``."""
    with pytest.raises(ProtocolError, match="3 bytes"):
        decode_access_log(b"\xff\xff\xff")


@given(st.binary())
def test_arbitrary_bytes_raise_nothing_else(data: bytes) -> None:
    """Whatever arrives, it is read or refused with ``ProtocolError``."""
    try:
        decode_access_log(data)
        decode_access_log(_message(data))
    except ProtocolError:
        return
