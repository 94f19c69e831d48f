"""Answers put together by hand are the bytes that protobuf makes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.extproc import messages as m

from kvist_epp.errors import BadRequest, NoEndpoints, PickError, Shed
from kvist_epp.extproc import gateway_messages as gateway
from kvist_epp.extproc import gateway_messages as reply
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import HeaderValue, HeaderValueOption
from kvist_epp.names import BODY_CHUNK_BYTES

TEXTS = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=300)


def _option(key: str, value: str) -> HeaderValueOption:
    header = HeaderValue(key=key, raw_value=value.encode("latin-1"))
    return HeaderValueOption(header=header, append_action="OVERWRITE_IF_EXISTS_OR_ADD")


@given(st.lists(st.tuples(st.sampled_from(["x-a", "x-b"]), TEXTS), max_size=4), TEXTS)
def test_a_pick_is_what_protobuf_makes(headers: list[tuple[str, str]], endpoint: str) -> None:
    """The hand-made pick decodes to the message built field by field, in headers and in body answers."""
    options = [_option(*pair) for pair in (("x-gateway-destination-endpoint", endpoint), *headers)]
    common = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=options), clear_route_cache=True)
    wanted = pb.ProcessingResponse()
    wanted.dynamic_metadata.update({"envoy.lb": {"x-gateway-destination-endpoint": endpoint}})

    wanted.request_headers.response.CopyFrom(common)
    made = reply.encode_pick(reply.REPLY_REQUEST_HEADERS, (endpoint,), tuple(headers))
    assert pb.ProcessingResponse.FromString(made) == wanted

    wanted.request_body.response.CopyFrom(common)
    made = reply.encode_pick(reply.REPLY_REQUEST_BODY, (endpoint,), tuple(headers))
    assert pb.ProcessingResponse.FromString(made) == wanted


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (reply.CONTINUE_REQUEST_HEADERS, pb.ProcessingResponse(request_headers=pb.HeadersResponse())),
        (reply.CONTINUE_RESPONSE_HEADERS, pb.ProcessingResponse(response_headers=pb.HeadersResponse())),
        (reply.CONTINUE_RESPONSE_BODY, pb.ProcessingResponse(response_body=pb.BodyResponse())),
        (reply.CONTINUE_REQUEST_TRAILERS, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())),
        (reply.CONTINUE_RESPONSE_TRAILERS, pb.ProcessingResponse(response_trailers=pb.TrailersResponse())),
    ],
)
def test_constants_are_what_protobuf_makes(made: bytes, wanted: pb.ProcessingResponse) -> None:
    """Each constant is the empty answer to its phase."""
    assert made == wanted.SerializeToString()


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (BadRequest("a"), 400, "invalid_request_error", {"x-kvist-dropped-reason": "bad-request"}),
        (
            NoEndpoints("b", reason="not-ready"),
            503,
            "service_unavailable",
            {"x-kvist-dropped-reason": "not-ready"},
        ),
        (Shed("c", retry_after=0), 429, "rate_limit_error", {"retry-after": "0"}),
    ],
)
def test_refusals(error: PickError, status: int, kind: str, headers: dict[str, str]) -> None:
    """A refusal has its status, an OpenAI error body, both reason headers, and says when to come back."""
    response = pb.ProcessingResponse.FromString(reply.encode_rejection(error)).immediate_response
    found = m.set_headers(pb.CommonResponse(header_mutation=response.headers))

    assert response.status.code == status
    assert json.loads(response.body) == {
        "error": {"message": error.message, "type": kind, "code": error.reason}
    }
    assert found["content-type"] == "application/json"
    assert found["x-llm-d-request-dropped-reason"] == found["x-kvist-dropped-reason"] == error.reason
    assert found | headers == found


@given(st.integers(0, 2**40))
def test_varints_and_lengths(number: int) -> None:
    """A varint is what protobuf writes for the same number."""
    status = pb.HttpStatus(code=number % 2**31).SerializeToString()
    assert reply.varint(number % 2**31) == (status[1:] or b"\x00")


@given(st.binary(max_size=200), st.booleans(), st.sampled_from([4, 5]), st.booleans())
def test_chunks_are_read_as_protobuf_reads_them(data: bytes, end: bool, number: int, more: bool) -> None:
    """A body message read by hand has the data and the end that protobuf finds."""
    chunk = pb.HttpBody(body=data, end_of_stream=end)
    name = "request_body" if number == gateway.REQUEST_BODY_FIELD else "response_body"
    message = pb.ProcessingRequest(**{name: chunk}, observability_mode=more)  # type: ignore[arg-type]

    found = gateway.read_chunk(message.SerializeToString(), number)

    assert found is not None
    assert (bytes(found.data), found.end_of_stream) == (data, end)
    assert gateway.read_chunk(message.SerializeToString(), 9 - number) is None


@given(st.binary(max_size=60))
def test_what_is_read_by_hand_is_what_protobuf_reads(tail: bytes) -> None:
    """On arbitrary bytes the hand-made reader gives up, or agrees with protobuf."""
    message = b"\x22" + tail
    if (found := gateway.read_chunk(message, gateway.REQUEST_BODY_FIELD)) is not None:
        wanted = pb.ProcessingRequest.FromString(message).request_body
        assert (bytes(found.data), found.end_of_stream) == (wanted.body, wanted.end_of_stream)


@given(st.integers(0, 2 * BODY_CHUNK_BYTES + 1), st.booleans())
def test_echoes_are_what_protobuf_makes(size: int, end: bool) -> None:
    """An echo joins to the chunk, ends where it ended, and no part is above the limit."""
    message = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x" * size, end_of_stream=end))
    chunk = gateway.read_chunk(message.SerializeToString(), gateway.RESPONSE_BODY_FIELD)
    assert chunk is not None

    echoed = [
        pb.ProcessingResponse.FromString(bytes(made)).response_body.response.body_mutation.streamed_response
        for made in reply.encode_echo(chunk)
    ]

    assert b"".join(part.body for part in echoed) == b"x" * size
    assert max(len(part.body) for part in echoed) <= BODY_CHUNK_BYTES
    assert [part.end_of_stream for part in echoed] == [False] * (len(echoed) - 1) + [end]


def test_long_bodies_are_not_copied_into_their_echo_unless_they_are_very_long() -> None:
    """An answer refers to the body; a body above a megabyte, which would be kept whole, is copied."""
    for size, copied in ((450_000, False), (2_000_000, True)):
        body = bytes(size)
        parts = gateway.encode_streamed(gateway.REPLY_REQUEST_BODY, body, end_of_stream=True)
        split = [part for part in parts if not isinstance(part, bytes)]
        assert len(split) == (0 if copied else len(parts) - 1)
        assert all(part.content.obj is body for part in split)
        bodies = [pb.ProcessingResponse.FromString(bytes(part)).request_body.response for part in parts]
        assert b"".join(one.body_mutation.streamed_response.body for one in bodies) == body
