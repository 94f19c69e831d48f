"""Request headers that are read without protobuf are those that protobuf reads."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.extproc import messages as m

from kvist_epp.extproc import gateway_messages as gateway
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.plain_headers import read_request_headers
from kvist_epp.names import REQUEST_HEADERS

NAMES = st.sampled_from(
    [":path", ":method", "x-request-id", "X-Request-ID", "x-session-id", "cookie", "", "é"]
)
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=300)), max_size=8)


def message(headers: list[tuple[str, bytes]], *, end: bool, plain: bool = True) -> bytes:
    """Return the first message of a stream; ``plain``: values are in ``raw_value``."""
    request = pb.ProcessingRequest(protocol_config=m.config(pb.BUFFERED))
    request.metadata_context.SetInParent()
    request.request_headers.end_of_stream = end
    for key, value in headers:
        if plain:
            request.request_headers.headers.headers.add(key=key, raw_value=value)
        else:
            request.request_headers.headers.headers.add(key=key, value=value.hex())
    return request.SerializeToString()


def check(encoded: bytes) -> bool:
    """Compare with protobuf; return whether protobuf was not needed."""
    found = read_request_headers(encoded)
    if found is None:
        return False
    request = pb.ProcessingRequest.FromString(encoded)
    assert request.WhichOneof("request") == "request_headers"
    assert found.values == gateway.header_values(request.request_headers, REQUEST_HEADERS)
    assert found.end_of_stream is request.request_headers.end_of_stream
    assert found.rest.config == gateway.configuration(request)
    assert found.rest.subset == gateway.subset(request.metadata_context)
    assert found.rest.observability_mode is request.observability_mode
    return True


@given(HEADERS, st.booleans())
def test_envoys_headers_need_no_protobuf(headers: list[tuple[str, bytes]], end: bool) -> None:
    """Headers in ``raw_value`` with ASCII names are read, repeated and empty ones, too."""
    usual = bool(headers) and all(name and name.isascii() for name, _ in headers)
    assert check(message(headers, end=end)) or not usual


@given(HEADERS, st.booleans())
def test_other_headers_are_left_to_protobuf(headers: list[tuple[str, bytes]], end: bool) -> None:
    """Values in ``value`` are not read here, unless they are empty."""
    encoded = message(headers, end=end, plain=False)
    assert not (check(encoded) and any(value for _, value in headers))


@settings(max_examples=500)
@given(
    HEADERS, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3), st.integers(0, 500)
)
def test_a_damaged_message_is_read_as_protobuf_reads_it(
    headers: list[tuple[str, bytes]], changes: list[tuple[int, int]], length: int
) -> None:
    """Whatever bytes are changed or missing: what is read is what protobuf reads."""
    encoded = bytearray(message(headers, end=False))
    for at, byte in changes:
        encoded[at % len(encoded)] = byte
    check(bytes(encoded))
    check(bytes(encoded[:length]))
