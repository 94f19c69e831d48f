"""One ext_proc stream, message by message."""

from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.wire import messages as m

from kvist_epp.errors import BadRequest, NoEndpoints, ProtocolError
from kvist_epp.names import BODY_CHUNK_BYTES
from kvist_epp.wire.exchange import STREAMED_LOOKAHEAD_BYTES, Exchange, Picked, Step
from kvist_epp.wire.pb import ext_proc_pb2 as pb
from kvist_epp.wire.pb.base_pb2 import HeaderMap, HeaderValue, Metadata

DUPLEX = m.config(pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)
BUFFERED = m.config(pb.BUFFERED)
PICK = Picked(("10.0.0.1:8000", "[fd00::2]:8000"), (("x-session-id", "r1.1"),))
LIST = "10.0.0.1:8000,[fd00::2]:8000"


def _duplex(observe: bool = False) -> Exchange:
    exchange = Exchange(observe_responses=observe)
    exchange.feed(m.request_headers(DUPLEX))
    return exchange


def test_the_question_has_method_path_headers_and_body() -> None:
    """The path comes without its query, and pseudo headers are left out of the headers."""
    ask = m.asked(Exchange(), m.request_headers(DUPLEX), m.request_body(b"body"))

    assert (ask.method, ask.path, dict(ask.headers)) == ("POST", "/v1/completions", {"x-tenant": "blue"})
    assert (ask.body, ask.subset, ask.partial) == (b"body", None, False)


def test_headers_are_read_from_value_and_raw_value() -> None:
    """Pseudo headers in ``value`` and others in ``raw_value`` are both read; repeated ones are joined."""
    headers = HeaderMap(
        headers=[
            HeaderValue(key=":path", value="/v1/models"),
            HeaderValue(key="X-Raw", raw_value=b"caf\xe9"),
            HeaderValue(key="accept", value="a"),
            HeaderValue(key="accept", raw_value=b"b"),
        ]
    )
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=headers, end_of_stream=True))

    ask = m.asked(Exchange(), message.SerializeToString())

    assert (ask.path, dict(ask.headers)) == ("/v1/models", {"x-raw": "café", "accept": "a,b"})


def test_full_duplex_answers_headers_body_and_ends() -> None:
    """Nothing is answered before the pick; then headers, then the body with its end, then the stream ends."""
    exchange = _duplex()
    assert exchange.feed(m.request_body(b"first ", end=False)) == Step()
    ask = m.asked(exchange, m.request_body(b"second"))

    step = exchange.decided(PICK)

    assert ask.body == b"first second"
    assert m.kinds(step) == ["request_headers", "request_body"]
    assert [(chunk.body, chunk.end_of_stream) for chunk in m.chunks(step)] == [(b"first second", True)]
    assert step.end


def test_the_pick_is_in_header_and_metadata_alike() -> None:
    """Destination list and extra headers are set, overwriting; metadata has the same list."""
    exchange = _duplex()
    exchange.feed(m.request_body(b""))

    first = m.read(exchange.decided(PICK))[0]

    common = first.request_headers.response
    assert m.set_headers(common) == {"x-gateway-destination-endpoint": LIST, "x-session-id": "r1.1"}
    assert {option.append_action for option in common.header_mutation.set_headers} == {2}
    assert common.clear_route_cache
    assert m.destination_metadata(first) == LIST


def test_trailers_end_the_body_and_are_answered_last() -> None:
    """With trailers no body chunk ends the stream, and the trailers' answer comes last."""
    exchange = _duplex()
    exchange.feed(m.request_body(b"body", end=False))
    m.asked(exchange, m.request_trailers())

    step = exchange.decided(PICK)

    assert m.kinds(step) == ["request_headers", "request_body", "request_trailers"]
    assert [chunk.end_of_stream for chunk in m.chunks(step)] == [False]


@pytest.mark.parametrize("protocol", [DUPLEX, BUFFERED, m.config(pb.NONE), m.config(pb.STREAMED), None])
def test_bodyless_requests_are_asked_for_at_once(protocol: pb.ProtocolConfiguration | None) -> None:
    """In every mode a request that ends with its headers gets its pick in the answer to them."""
    exchange = Exchange()
    ask = m.asked(exchange, m.request_headers(protocol, end=True))

    step = exchange.decided(PICK)

    assert (ask.body, ask.partial) == (b"", False)
    assert (m.kinds(step), step.end) == (["request_headers"], True)


@pytest.mark.parametrize("end", [True, False], ids=["end", "trailers follow"])
def test_buffered_lets_headers_pass_and_answers_in_the_body(end: bool) -> None:
    """BUFFERED: an empty answer to the headers, the pick in the answer to the one body message."""
    exchange = Exchange()
    first = exchange.feed(m.request_headers(BUFFERED))
    ask = m.asked(exchange, m.request_body(b"body", end=end))

    step = exchange.decided(PICK)

    assert (m.kinds(first), first.end) == (["request_headers"], False)
    assert (ask.body, ask.partial) == (b"body", False)
    reply = m.read(step)[0]
    assert (m.kinds(step), step.end) == (["request_body"], True)
    assert m.set_headers(reply.request_body.response)["x-gateway-destination-endpoint"] == LIST
    assert m.destination_metadata(reply) == LIST


@pytest.mark.parametrize("end", [True, False])
def test_a_cut_body_makes_a_partial_question(end: bool) -> None:
    """BUFFERED_PARTIAL: a body message that does not end the stream is only a beginning."""
    exchange = Exchange()
    ask = m.asked(
        exchange, m.request_headers(m.config(pb.BUFFERED_PARTIAL)), m.request_body(b"body", end=end)
    )

    assert ask.partial is not end


@pytest.mark.parametrize("mode", [pb.NONE, pb.STREAMED, pb.GRPC])
def test_modes_without_a_body_ask_at_the_headers(mode: int) -> None:
    """NONE, STREAMED that waits, and modes we do not speak: a partial question at the headers."""
    exchange = Exchange()
    ask = m.asked(exchange, m.request_headers(m.config(mode)))

    assert (ask.body, ask.partial) == (b"", True)
    assert exchange.decided(PICK).end


def test_early_streamed_bodies_are_collected() -> None:
    """STREAMED that does not wait: asked at the end of the body, answered in the headers."""
    exchange = Exchange()
    ask = m.asked(
        exchange,
        m.request_headers(m.config(pb.STREAMED, early=True)),
        m.request_body(b"a", end=False),
        m.request_body(b"b"),
    )

    assert (ask.body, ask.partial) == (b"ab", False)
    assert m.kinds(exchange.decided(PICK)) == ["request_headers"]


def test_early_streamed_bodies_are_cut_at_the_lookahead() -> None:
    """STREAMED that does not wait: a long body is asked for by its beginning."""
    half = bytes(STREAMED_LOOKAHEAD_BYTES // 2)
    ask = m.asked(
        Exchange(),
        m.request_headers(m.config(pb.STREAMED, early=True)),
        m.request_body(half, end=False),
        m.request_body(half, end=False),
    )

    assert (len(ask.body), ask.partial) == (STREAMED_LOOKAHEAD_BYTES, True)


def test_without_a_configuration_full_duplex_is_meant() -> None:
    """A gateway that says nothing is treated as the protocol demands of gateways."""
    exchange = Exchange()
    assert exchange.feed(m.request_headers()) == Step()
    m.asked(exchange, m.request_body(b"body"))

    assert m.kinds(exchange.decided(PICK)) == ["request_headers", "request_body"]


def test_a_repeated_last_chunk_is_ignored() -> None:
    """A second end of stream, before or after the pick, changes nothing."""
    exchange = _duplex()
    m.asked(exchange, m.request_body(b"body"))

    assert exchange.feed(m.request_body(b"body")) == Step()
    assert [chunk.body for chunk in m.chunks(exchange.decided(PICK))] == [b"body"]
    assert exchange.feed(m.request_body(b"body")) == Step()


def test_a_second_decision_is_ignored() -> None:
    """Only the first answer to a question counts, and none is taken before the question."""
    exchange = _duplex()
    assert exchange.decided(PICK) == Step()
    exchange.feed(m.request_body(b""))
    exchange.decided(PICK)

    assert exchange.decided(NoEndpoints("none")) == Step()


@pytest.mark.parametrize("protocol", [DUPLEX, BUFFERED])
def test_a_refusal_is_the_only_answer(protocol: pb.ProtocolConfiguration) -> None:
    """A refused request gets one immediate response, and the stream ends."""
    exchange = Exchange()
    exchange.feed(m.request_headers(protocol))
    exchange.feed(m.request_body(b"{"))

    step = exchange.decided(BadRequest("no JSON"))

    assert (m.kinds(step), step.end) == (["immediate_response"], True)
    assert exchange.feed(m.response_headers()) == Step()


@pytest.mark.parametrize(
    ("value", "subset"),
    [
        (["10.0.0.1:80", " 10.0.0.2 "], ("10.0.0.1:80", "10.0.0.2")),
        ("10.0.0.1:80, 10.0.0.2,", ("10.0.0.1:80", "10.0.0.2")),
        ([], ()),
        ("", ()),
        (7, ()),
        (["10.0.0.1", 7, None], ("10.0.0.1",)),
    ],
)
def test_the_subset_hint(value: Any, subset: tuple[str, ...]) -> None:
    """A list or a comma string is read; empty and unreadable hints allow nothing."""
    hint = Struct()
    hint.update({"x-gateway-destination-endpoint-subset": value})
    metadata = Metadata(filter_metadata={"envoy.lb.subset_hint": hint})

    ask = m.asked(Exchange(), m.request_headers(DUPLEX, end=True, metadata_context=metadata))

    assert ask.subset == subset


def test_other_metadata_is_no_hint() -> None:
    """The namespace without the key, and other namespaces, leave the choice free."""
    metadata = Metadata(filter_metadata={"envoy.lb.subset_hint": Struct(), "envoy.lb": Struct()})

    ask = m.asked(Exchange(), m.request_headers(DUPLEX, end=True, metadata_context=metadata))

    assert ask.subset is None


def test_observability_mode_asks_nothing() -> None:
    """Where answers are ignored, none is made, and the gateway ends the stream."""
    exchange = Exchange()

    assert exchange.feed(m.request_headers(DUPLEX, end=True, observability_mode=True)) == Step()
    assert exchange.feed(m.response_headers()) == Step()


@pytest.mark.parametrize("message", [m.response_headers(), m.response_body(b"x"), m.response_trailers()])
def test_a_response_before_the_pick_ends_the_stream(message: bytes) -> None:
    """When the gateway answers by itself before the body has ended, there is nothing left to do."""
    assert _duplex().feed(message) == Step(end=True)


def test_trailers_without_a_body_end_a_buffered_stream() -> None:
    """BUFFERED with trailers and no body: the headers have gone, so the gateway goes on alone."""
    exchange = Exchange()
    exchange.feed(m.request_headers(BUFFERED))

    assert exchange.feed(m.request_trailers()) == Step(end=True)


def test_observed_responses_are_echoed_until_they_end() -> None:
    """With responses observed the stream stays open after the pick, and each chunk goes back as it came."""
    exchange = _duplex(observe=True)
    exchange.feed(m.request_body(b""))
    picked = exchange.decided(PICK)
    steps = [
        exchange.feed(message)
        for message in (
            m.response_headers(),
            m.response_body(b"data: 1"),
            m.response_body(b"", end=True),
        )
    ]

    assert [picked.end, *(step.end for step in steps)] == [False, False, False, True]
    assert [kind for step in steps for kind in m.kinds(step)] == [
        "response_headers",
        "response_body",
        "response_body",
    ]
    echoed = [m.read(step)[0].response_body.response.body_mutation.streamed_response for step in steps[1:]]
    assert [(chunk.body, chunk.end_of_stream) for chunk in echoed] == [(b"data: 1", False), (b"", True)]


def test_observed_responses_that_are_not_full_duplex_are_let_pass() -> None:
    """Buffered or streamed response bodies get an empty answer, trailers theirs."""
    exchange = Exchange(observe_responses=True)
    exchange.feed(m.request_headers(m.config(pb.BUFFERED, pb.STREAMED), end=True))
    exchange.decided(PICK)

    steps = [exchange.feed(message) for message in (m.response_body(b"x"), m.response_trailers())]

    assert [step.replies for step in steps] == [(b"\x22\x00",), (b"\x32\x00",)]
    assert [step.end for step in steps] == [False, True]


def test_undecodable_messages_are_protocol_errors() -> None:
    """Bytes that are no ``ProcessingRequest`` raise, at any point of the stream."""
    exchange = Exchange()
    with pytest.raises(ProtocolError, match="3 bytes"):
        exchange.feed(b"\xff\xff\xff")
    exchange.feed(m.request_headers(DUPLEX))
    with pytest.raises(ProtocolError):
        exchange.feed(m.request_body(b"body")[:-1])


def test_messages_of_unknown_kinds_are_let_pass() -> None:
    """A message without anything we know does nothing."""
    assert Exchange().feed(b"") == Step()


@given(st.binary(), st.binary(), st.integers(0, 40))
def test_arbitrary_bytes_raise_nothing_else(first: bytes, second: bytes, cut: int) -> None:
    """Whatever arrives, mid-stream or cut, an exchange answers or raises ``ProtocolError``."""
    exchange = Exchange(observe_responses=True)
    for message in (first, m.request_headers(DUPLEX), m.request_body(second)[:-cut], second):
        try:
            if exchange.feed(message).ask:
                exchange.decided(PICK)
        except ProtocolError:
            continue


@given(
    st.lists(st.integers(0, 3 * BODY_CHUNK_BYTES), max_size=6),
    st.booleans(),
)
def test_chunks_rejoin_to_the_body(sizes: list[int], trailers: bool) -> None:
    """However a body arrives, its echo joins to it, no chunk is too long, and only the last one ends it."""
    sent = [bytes((i,)) * size for i, size in enumerate(sizes, 1)]
    exchange = _duplex()
    for chunk in sent:
        exchange.feed(m.request_body(chunk, end=False))
    ask = m.asked(exchange, m.request_trailers() if trailers else m.request_body(b"."))

    echoed = m.chunks(exchange.decided(PICK))

    assert ask.body == b"".join(sent) + (b"" if trailers else b".")
    assert b"".join(chunk.body for chunk in echoed) == ask.body
    assert max((len(chunk.body) for chunk in echoed), default=0) <= BODY_CHUNK_BYTES
    ends = [chunk.end_of_stream for chunk in echoed]
    assert all(not before for before, _ in pairwise(ends))
    assert ends[-1:] == ([not trailers] if echoed else [])
