"""One ext_proc stream, message by message."""

from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.extproc import messages as m

from kvist_epp.errors import BadRequest, NoEndpoints, ProtocolError
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import HeaderMap, HeaderValue, Metadata
from kvist_epp.extproc.pick_request import PickResult, SessionStep
from kvist_epp.extproc.session import ExtProcSession
from kvist_epp.names import BODY_CHUNK_BYTES

DUPLEX = m.config(pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)
BUFFERED = m.config(pb.BUFFERED)
PICK = PickResult(("10.0.0.1:8000", "[fd00::2]:8000"), (("x-session-id", "r1.1"),))
LIST = "10.0.0.1:8000,[fd00::2]:8000"


def _duplex(observe: bool = False) -> ExtProcSession:
    exchange = ExtProcSession(observe_responses=observe)
    exchange.feed(m.request_headers(DUPLEX))
    return exchange


def test_the_question_has_method_path_headers_and_body() -> None:
    """The path comes without its query; headers that no part of the picker reads are left out."""
    sent = {"x-request-id": "7", "x-anything": "else"}
    ask = m.asked(ExtProcSession(), m.request_headers(DUPLEX, headers=sent), m.request_body(b"body"))

    assert (ask.method, ask.path) == ("POST", "/v1/completions")
    assert dict(ask.headers) == {"x-request-id": "7"}
    assert (ask.body, ask.subset, ask.partial) == (b"body", None, False)


def test_headers_are_read_from_value_and_raw_value() -> None:
    """Pseudo headers in ``value`` and others in ``raw_value`` are both read; repeated ones are joined."""
    headers = HeaderMap(
        headers=[
            HeaderValue(key=":path", value="/v1/models"),
            HeaderValue(key="X-Session-Id", raw_value=b"caf\xe9"),
            HeaderValue(key="x-kvist-priority", value="1"),
            HeaderValue(key="x-kvist-priority", raw_value=b"2"),
            HeaderValue(key="x-request-id", value="café"),
        ]
    )
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=headers, end_of_stream=True))

    ask = m.asked(ExtProcSession(), message.SerializeToString())

    assert ask.path == "/v1/models"
    assert dict(ask.headers) == {
        "x-session-id": "café",
        "x-kvist-priority": "1,2",
        "x-request-id": "cafÃ©",
    }


def test_full_duplex_answers_headers_body_and_ends() -> None:
    """Nothing is answered before the pick; then headers, then the body with its end, then the stream ends."""
    exchange = _duplex()
    assert exchange.feed(m.request_body(b"first ", end=False)) == SessionStep()
    ask = m.asked(exchange, m.request_body(b"second"))

    step = exchange.on_decision(PICK)

    assert ask.body == b"first second"
    assert m.kinds(step) == ["request_headers", "request_body"]
    assert [(chunk.body, chunk.end_of_stream) for chunk in m.chunks(step)] == [(b"first second", True)]
    assert step.end


def test_the_pick_is_in_header_and_metadata_alike() -> None:
    """Destination list and extra headers are set, overwriting; metadata has the same list."""
    exchange = _duplex()
    exchange.feed(m.request_body(b""))

    first = m.read(exchange.on_decision(PICK))[0]

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

    step = exchange.on_decision(PICK)

    assert m.kinds(step) == ["request_headers", "request_body", "request_trailers"]
    assert [chunk.end_of_stream for chunk in m.chunks(step)] == [False]


@pytest.mark.parametrize("protocol", [DUPLEX, BUFFERED, m.config(pb.NONE), m.config(pb.STREAMED), None])
def test_bodyless_requests_are_decided_at_once(protocol: pb.ProtocolConfiguration | None) -> None:
    """In every mode a request that ends with its headers gets its pick in the answer to them."""
    exchange = ExtProcSession()
    ask = m.asked(exchange, m.request_headers(protocol, end=True))

    step = exchange.on_decision(PICK)

    assert (ask.body, ask.partial) == (b"", False)
    assert (m.kinds(step), step.end) == (["request_headers"], True)


@pytest.mark.parametrize("end", [True, False], ids=["end", "trailers follow"])
def test_buffered_lets_headers_pass_and_answers_in_the_body(end: bool) -> None:
    """BUFFERED: an empty answer to the headers, the pick in the answer to the one body message."""
    exchange = ExtProcSession()
    first = exchange.feed(m.request_headers(BUFFERED))
    ask = m.asked(exchange, m.request_body(b"body", end=end))

    step = exchange.on_decision(PICK)

    assert (m.kinds(first), first.end) == (["request_headers"], False)
    assert (ask.body, ask.partial) == (b"body", False)
    reply = m.read(step)[0]
    assert (m.kinds(step), step.end) == (["request_body"], True)
    assert m.set_headers(reply.request_body.response)["x-gateway-destination-endpoint"] == LIST
    assert m.destination_metadata(reply) == LIST


@pytest.mark.parametrize("end", [True, False])
def test_a_cut_body_makes_a_partial_question(end: bool) -> None:
    """BUFFERED_PARTIAL: a body message that does not end the stream is only a beginning."""
    exchange = ExtProcSession()
    ask = m.asked(
        exchange, m.request_headers(m.config(pb.BUFFERED_PARTIAL)), m.request_body(b"body", end=end)
    )

    assert ask.partial is not end


@pytest.mark.parametrize("mode", [pb.NONE, pb.GRPC])
def test_modes_without_a_body_ask_at_the_headers(mode: int) -> None:
    """NONE, and modes we do not speak: a partial question at the headers, and that is all."""
    exchange = ExtProcSession()
    ask = m.asked(exchange, m.request_headers(m.config(mode)))

    assert (ask.body, ask.partial) == (b"", True)
    assert exchange.on_decision(PICK).end


def test_without_a_configuration_full_duplex_is_meant() -> None:
    """A gateway that says nothing is treated as the protocol demands of gateways."""
    exchange = ExtProcSession()
    assert exchange.feed(m.request_headers()) == SessionStep()
    m.asked(exchange, m.request_body(b"body"))

    assert m.kinds(exchange.on_decision(PICK)) == ["request_headers", "request_body"]


def test_a_repeated_last_chunk_is_ignored() -> None:
    """A second end of stream, before or after the pick, changes nothing."""
    exchange = _duplex()
    m.asked(exchange, m.request_body(b"body"))

    assert exchange.feed(m.request_body(b"body")) == SessionStep()
    assert [chunk.body for chunk in m.chunks(exchange.on_decision(PICK))] == [b"body"]
    assert exchange.feed(m.request_body(b"body")) == SessionStep()


def test_a_second_decision_is_ignored() -> None:
    """A decision counts only if it is the first one after the question."""
    exchange = _duplex()
    assert exchange.on_decision(PICK) == SessionStep()
    exchange.feed(m.request_body(b""))
    exchange.on_decision(PICK)

    assert exchange.on_decision(NoEndpoints("none")) == SessionStep()


@pytest.mark.parametrize("protocol", [DUPLEX, BUFFERED])
def test_a_refusal_is_the_only_answer(protocol: pb.ProtocolConfiguration) -> None:
    """A refused request gets one immediate response, and the stream ends."""
    exchange = ExtProcSession()
    exchange.feed(m.request_headers(protocol))
    exchange.feed(m.request_body(b"{"))

    step = exchange.on_decision(BadRequest("no JSON"))

    assert (m.kinds(step), step.end) == (["immediate_response"], True)
    assert exchange.feed(m.response_headers()) == SessionStep()


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

    ask = m.asked(ExtProcSession(), m.request_headers(DUPLEX, end=True, metadata_context=metadata))

    assert ask.subset == subset


def test_other_metadata_is_no_hint() -> None:
    """The namespace without the key, and other namespaces, leave the choice free."""
    metadata = Metadata(filter_metadata={"envoy.lb.subset_hint": Struct(), "envoy.lb": Struct()})

    ask = m.asked(ExtProcSession(), m.request_headers(DUPLEX, end=True, metadata_context=metadata))

    assert ask.subset is None


def test_observability_mode_asks_nothing() -> None:
    """A stream in observability mode gets no answer and makes no request to the picker."""
    exchange = ExtProcSession()

    assert exchange.feed(m.request_headers(DUPLEX, end=True, observability_mode=True)) == SessionStep()
    assert exchange.feed(m.response_headers()) == SessionStep()


@pytest.mark.parametrize("message", [m.response_headers(), m.response_body(b"x"), m.response_trailers()])
def test_a_response_before_the_pick_ends_the_stream(message: bytes) -> None:
    """A response that the gateway makes before the body has ended ends the stream."""
    assert _duplex().feed(message) == SessionStep(end=True)


@pytest.mark.parametrize("mode", [pb.BUFFERED, pb.BUFFERED_PARTIAL])
def test_trailers_without_a_body_are_picked_for_by_metadata(mode: int) -> None:
    """BUFFERED with trailers and no body: the headers were answered before, metadata can still tell."""
    exchange = ExtProcSession()
    exchange.feed(m.request_headers(m.config(mode)))
    ask = m.asked(exchange, m.request_trailers())

    step = exchange.on_decision(PICK)

    assert (ask.body, ask.partial) == (b"", False)
    assert (m.kinds(step), step.end) == (["request_trailers"], True)
    assert m.destination_metadata(m.read(step)[0]) == LIST


def test_names_of_gateways_are_taken_from_clients() -> None:
    """A client's subset, served and dropped-reason headers do not reach the engine; others do."""
    headers = {
        "x-gateway-destination-endpoint-subset": "10.9.9.9:1",
        "x-kvist-dropped-reason": "x",
        "x-a": "b",
    }
    exchange = ExtProcSession()
    ask = m.asked(exchange, m.request_headers(DUPLEX, end=True, headers=headers))

    [answer] = m.read(exchange.on_decision(PICK))

    removed = answer.request_headers.response.header_mutation.remove_headers
    assert sorted(removed) == ["x-gateway-destination-endpoint-subset", "x-kvist-dropped-reason"]
    assert ask.subset is None


REWRITE = {"x-llm-d-model-name-rewrite": "engine-name"}
SENT = b'{"model":"m","messages":[]}'
RENAMED = b'{"model":"engine-name","messages":[]}'


def _renamed(
    protocol: pb.ProtocolConfiguration, *messages: bytes, picked: PickResult = PICK
) -> tuple[Any, SessionStep]:
    exchange = ExtProcSession()
    first, *between = [m.request_headers(protocol, headers=REWRITE), *messages[:-1]]
    for message in (first, *between):
        assert exchange.feed(message).request is None
    return m.asked(exchange, messages[-1]), exchange.on_decision(picked)


def test_a_rewrite_in_a_full_duplex_body() -> None:
    """FULL_DUPLEX_STREAMED: the question and the echo have the new name, the length follows."""
    ask, step = _renamed(DUPLEX, m.request_body(SENT[:9], end=False), m.request_body(SENT[9:]))

    common = m.read(step)[0].request_headers.response
    assert ask.body == b"".join(chunk.body for chunk in m.chunks(step)) == RENAMED
    assert m.set_headers(common)["content-length"] == str(len(RENAMED))
    assert "x-llm-d-model-name-rewrite" in common.header_mutation.remove_headers


@pytest.mark.parametrize("mode", [pb.BUFFERED, pb.BUFFERED_PARTIAL])
def test_a_rewrite_in_a_buffered_body(mode: int) -> None:
    """BUFFERED, and a whole BUFFERED_PARTIAL body: the answer replaces the body and its length."""
    ask, step = _renamed(m.config(mode), m.request_body(SENT))

    common = m.read(step)[0].request_body.response
    assert ask.body == common.body_mutation.body == RENAMED
    assert m.set_headers(common)["content-length"] == str(len(RENAMED))


def test_a_rewrite_in_an_early_streamed_body() -> None:
    """STREAMED that does not wait: the first chunk becomes the new body, the others become empty."""
    chunks = (m.request_body(SENT[:9], end=False), m.request_body(SENT[9:], end=False), m.request_body(b""))
    ask, step = _renamed(m.config(pb.STREAMED, early=True), *chunks)

    first, *mutations = m.read(step)
    assert ask.body == RENAMED
    assert m.set_headers(first.request_headers.response)["content-length"] == str(len(RENAMED))
    bodies = [answer.request_body.response.body_mutation for answer in mutations]
    assert [(body.body, body.clear_body) for body in bodies] == [(RENAMED, False), (b"", True), (b"", True)]


@pytest.mark.parametrize(
    ("protocol", "messages"),
    [
        (m.config(pb.NONE), ()),
        (m.config(pb.STREAMED), ()),
        (m.config(pb.BUFFERED_PARTIAL), (m.request_body(SENT, end=False),)),
    ],
    ids=["none", "streamed", "cut"],
)
def test_no_rewrite_where_the_body_is_not_seen(
    protocol: pb.ProtocolConfiguration, messages: tuple[bytes, ...]
) -> None:
    """Without the whole body nothing is changed, and the rewrite header is passed on."""
    exchange = ExtProcSession()
    *_, step = [exchange.feed(x) for x in (m.request_headers(protocol, headers=REWRITE), *messages)]
    assert step.request is not None

    [answer] = m.read(exchange.on_decision(PICK))

    common = answer.request_headers.response if not messages else answer.request_body.response
    assert not common.HasField("body_mutation")
    assert "content-length" not in m.set_headers(common)
    assert not common.header_mutation.remove_headers


def test_the_picker_may_replace_a_body_too() -> None:
    """A body in the decision takes the place of what was sent, where that was seen whole."""
    _, step = _renamed(DUPLEX, m.request_body(SENT), picked=PickResult(("10.0.0.1:1",), body=b"other"))

    assert [chunk.body for chunk in m.chunks(step)] == [b"other"]
    assert m.set_headers(m.read(step)[0].request_headers.response)["content-length"] == "5"


def test_undecodable_messages_are_protocol_errors() -> None:
    """Bytes that are no ``ProcessingRequest`` raise, at any point of the stream."""
    exchange = ExtProcSession()
    with pytest.raises(ProtocolError, match="3 bytes"):
        exchange.feed(b"\xff\xff\xff")
    exchange.feed(m.request_headers(DUPLEX))
    with pytest.raises(ProtocolError):
        exchange.feed(m.request_body(b"body")[:-1])


def test_messages_of_unknown_kinds_are_let_pass() -> None:
    """A message without anything we know does nothing."""
    assert ExtProcSession().feed(b"") == SessionStep()


@given(st.binary(), st.binary(), st.integers(0, 40))
def test_arbitrary_bytes_raise_nothing_else(first: bytes, second: bytes, cut: int) -> None:
    """Whatever arrives, mid-stream or cut, an exchange answers or raises ``ProtocolError``."""
    exchange = ExtProcSession(observe_responses=True)
    for message in (first, m.request_headers(DUPLEX), m.request_body(second)[:-cut], second):
        try:
            if exchange.feed(message).request:
                exchange.on_decision(PICK)
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

    echoed = m.chunks(exchange.on_decision(PICK))

    assert ask.body == b"".join(sent) + (b"" if trailers else b".")
    assert b"".join(chunk.body for chunk in echoed) == ask.body
    assert max((len(chunk.body) for chunk in echoed), default=0) <= BODY_CHUNK_BYTES
    ends = [chunk.end_of_stream for chunk in echoed]
    assert all(not before for before, _ in pairwise(ends))
    assert ends[-1:] == ([not trailers] if echoed else [])


MODES = pb.BodySendMode.keys()


def websocket(mode: str, value: str = "websocket", *, end: bool = False, method: str = "GET") -> bytes:
    """Return the headers of a request for a WebSocket."""
    begin = m.config(pb.BodySendMode.Value(mode), pb.FULL_DUPLEX_STREAMED)
    return m.request_headers(begin, headers={":method": method, "upgrade": value}, end=end)


@pytest.mark.parametrize("value", ["websocket", "WebSocket"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("observed", [False, True])
def test_a_websocket_is_answered_by_its_headers(mode: str, value: str, observed: bool) -> None:
    """The pick answers the headers, since no body ends, and the stream ends, even where responses are
    observed."""
    exchange = ExtProcSession(observe_responses=observed)
    ask = m.asked(exchange, websocket(mode, value))

    assert (ask.method, ask.body, ask.partial, ask.websocket) == ("GET", b"", False, True)
    step = exchange.on_decision(PICK)
    assert (m.kinds(step), step.end) == (["request_headers"], True)
    assert exchange.feed(m.request_body(b"frame", end=False)) == SessionStep()


@pytest.mark.parametrize("end", [False, True])
def test_the_stream_of_a_websocket_is_kept_for_a_gateway_that_needs_it(end: bool) -> None:
    """A gateway other than Envoy ends the stream itself, after it has had an answer to the response."""
    exchange = ExtProcSession(from_envoy=False)
    rest = [] if end else [m.request_body(b"")]
    assert m.asked(exchange, websocket("FULL_DUPLEX_STREAMED", end=end), *rest).websocket

    step = exchange.on_decision(PICK)
    assert (m.kinds(step), step.end) == (["request_headers", *["request_body"] * len(rest)], False)
    step = exchange.feed(m.response_headers(headers={":status": "101"}))
    assert (m.kinds(step), step.end) == (["response_headers"], False)


def test_other_upgrades_wait_for_the_body() -> None:
    """A client that offers HTTP/2 on its connection sends an ordinary request, whose body is awaited; so does
    one that names WebSockets in a request that is no GET."""
    offer = m.request_headers(m.config(pb.BUFFERED), headers={"upgrade": "h2c"})
    for first in (offer, websocket("BUFFERED", method="POST")):
        exchange = ExtProcSession()
        assert m.kinds(exchange.feed(first)) == ["request_headers"]
        ask = m.asked(exchange, m.request_body(b"whole"))
        assert (ask.body, ask.websocket) == (b"whole", False)
