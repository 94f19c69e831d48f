"""Observed responses: echoed, read, names restored, and reported once."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.extproc import messages as m

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import Metadata
from kvist_epp.extproc.pick_request import PickResult, SessionStep
from kvist_epp.extproc.response import FirstToken, ObservedResponse, Usage
from kvist_epp.extproc.session import ExtProcSession
from kvist_epp.names import BODY_CHUNK_BYTES

PICK = PickResult(("10.0.0.1:8000",), session="r1.1")
JSON = {":status": "200", "content-type": "application/json", "content-length": "99"}
SSE = {":status": "200", "content-type": "text/event-stream; charset=utf-8"}
ANSWER = b'{"model":"engine-name","usage":{"prompt_tokens":7,"completion_tokens":2}}'
RESTORED = b'{"model":"m","usage":{"prompt_tokens":7,"completion_tokens":2}}'
MODES = [pb.FULL_DUPLEX_STREAMED, pb.STREAMED, pb.BUFFERED]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _stopped() -> float:
    return 0.0


def _observing(
    mode: int,
    *,
    rename: bool = False,
    clock: Callable[[], float] = _stopped,
    path: str = "/v1/chat/completions",
) -> ExtProcSession:
    """A stream that waits for its response."""
    exchange = ExtProcSession(observe_responses=True, clock=clock)
    headers = {"x-request-id": "id", ":path": path}
    if rename:
        headers["x-gateway-model-name-rewrite"] = "engine-name"
    exchange.feed(m.request_headers(m.config(pb.BUFFERED, mode), headers=headers))
    m.asked(exchange, m.request_body(b'{"model":"m"}'))
    assert not exchange.on_decision(PICK).end
    return exchange


def _bodies(step: SessionStep) -> list[pb.BodyMutation]:
    return [answer.response_body.response.body_mutation for answer in m.read(step)]


def test_observed_responses_are_echoed_until_they_end() -> None:
    """The stream stays open after the pick, and each chunk goes back as it came."""
    exchange = _observing(pb.FULL_DUPLEX_STREAMED)
    sent = (m.response_headers(headers=SSE), m.response_body(b"data: 1"), m.response_body(b"", end=True))
    steps = [exchange.feed(message) for message in sent]

    assert [step.end for step in steps] == [False, False, True]
    assert [kind for step in steps for kind in m.kinds(step)] == [
        "response_headers",
        "response_body",
        "response_body",
    ]
    echoed = [body.streamed_response for step in steps[1:] for body in _bodies(step)]
    assert [(chunk.body, chunk.end_of_stream) for chunk in echoed] == [(b"data: 1", False), (b"", True)]


@pytest.mark.parametrize("mode", [pb.STREAMED, pb.BUFFERED, pb.GRPC])
def test_responses_of_other_modes_are_let_pass(mode: int) -> None:
    """Each body message gets one empty answer, trailers theirs, which end the stream."""
    exchange = _observing(mode)

    steps = [exchange.feed(message) for message in (m.response_body(b"x"), m.response_trailers())]

    assert [step.replies for step in steps] == [(b"\x22\x00",), (b"\x32\x00",)]
    assert [step.end for step in steps] == [False, True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("headers", [JSON, SSE], ids=["json", "sse"])
def test_what_was_seen_is_reported_once(mode: int, headers: dict[str, str]) -> None:
    """At the end: session, request id, status, usage, and that it was whole; afterwards nothing more."""
    exchange = _observing(mode)
    exchange.feed(m.response_headers(headers=headers))
    first = exchange.feed(m.response_body(ANSWER[:40]))
    last = exchange.feed(m.response_body(ANSWER[40:], end=True))

    first_token = 0.0 if headers is SSE and mode != pb.BUFFERED else None
    assert first.observed is None
    assert last.observed == ObservedResponse(
        "r1.1", "id", None, 200, Usage(7, 2), complete=True, first_token_seconds=first_token
    )
    assert exchange.feed(m.response_body(b"", end=True)) == SessionStep()
    assert exchange.on_closed() is None


@pytest.mark.parametrize(
    ("metadata", "served"),
    [
        ({"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.2:8000"}}, "10.0.0.2:8000"),
        ({"envoy.lb": {"x-gateway-destination-endpoint-served": ""}}, None),
        ({"envoy.lb": {"x-gateway-destination-endpoint-served": ["10.0.0.2:8000"]}}, None),
        ({"envoy.lb": {}}, None),
        ({"other": {"x-gateway-destination-endpoint-served": "10.0.0.2:8000"}}, None),
    ],
)
def test_the_served_endpoint_is_read(metadata: dict[str, dict[str, Any]], served: str | None) -> None:
    """The endpoint that answered is taken from the response's metadata, when it is there as text."""
    structs = {name: Struct() for name in metadata}
    for name, values in metadata.items():
        structs[name].update(values)
    exchange = _observing(pb.NONE)

    step = exchange.feed(
        m.response_headers(end=True, headers=JSON, metadata_context=Metadata(filter_metadata=structs))
    )

    assert step.observed == ObservedResponse("r1.1", "id", served, 200, Usage(), complete=True)


def test_a_cut_response_is_reported_too() -> None:
    """A response whose stream the gateway ends early is reported once, with the part seen so far."""
    exchange = _observing(pb.STREAMED)
    exchange.feed(m.response_headers(headers=SSE))
    exchange.feed(m.response_body(ANSWER))

    assert exchange.on_closed() == ObservedResponse(
        "r1.1", "id", None, 200, Usage(7, 2), complete=False, first_token_seconds=0.0
    )
    assert exchange.on_closed() is None


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, pb.STREAMED])
def test_the_first_token_is_timed_when_it_passes(mode: int) -> None:
    """The first bytes of a streamed body are reported once, at once, with the time since the headers came."""
    clock = Clock()
    clock.now = 5.0
    exchange = _observing(mode, clock=clock)
    clock.now = 6.0
    steps = [exchange.feed(m.response_headers(headers=SSE)), exchange.feed(m.response_body(b""))]
    clock.now = 7.5
    steps.append(exchange.feed(m.response_body(b"data: 1")))
    clock.now = 9.0
    steps += [exchange.feed(m.response_body(b"data: 2")), exchange.feed(m.response_body(b"", end=True))]

    assert [step.first_token for step in steps] == [
        None,
        None,
        FirstToken("r1.1", "id", None, 200, 2.5),
        None,
        None,
    ]
    observed = steps[-1].observed
    assert observed is not None
    assert (observed.first_token_seconds, observed.seconds) == (2.5, 4.0)


@pytest.mark.parametrize(
    ("mode", "headers"), [(pb.STREAMED, JSON), (pb.BUFFERED, SSE), (pb.FULL_DUPLEX_STREAMED, JSON)]
)
def test_a_response_that_does_not_stream_has_no_first_token(mode: int, headers: dict[str, str]) -> None:
    """A document, and a body that the gateway holds back to its end, show no token on its way."""
    exchange = _observing(mode)
    exchange.feed(m.response_headers(headers=headers))
    last = exchange.feed(m.response_body(ANSWER, end=True))

    assert last.first_token is None
    assert last.observed is not None
    assert last.observed.first_token_seconds is None


@given(st.data())
def test_events_before_the_output_are_no_token(data: st.DataObject) -> None:
    """In the Responses API, the first two events come before the engine has a token, however they are
    split."""
    before = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    before += b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n'
    text = before + b"event: response.output_item.added\ndata: {}\n\n"
    ends = len(before) + len(b"event: response.output_item.added")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    exchange = _observing(pb.STREAMED, path="/v1/responses")
    exchange.feed(m.response_headers(headers=SSE))
    seen = 0
    for start, end in itertools.pairwise((0, *cuts, len(text))):
        step = exchange.feed(m.response_body(text[start:end]))
        assert (step.first_token is not None) == (start < ends <= end)
        seen += step.first_token is not None
    assert seen == 1


def test_a_stream_without_a_pick_reports_nothing() -> None:
    """Before the pick, and if responses are not observed, the end of a stream reports nothing."""
    early, left = ExtProcSession(observe_responses=True), ExtProcSession()
    early.feed(m.request_headers(m.config(pb.BUFFERED)))
    m.asked(left, m.request_headers(m.config(pb.BUFFERED), end=True))
    left.on_decision(PICK)

    assert (early.on_closed(), left.on_closed()) == (None, None)


def test_compressed_responses_are_not_read() -> None:
    """A compressed body, and one that is neither JSON nor SSE, passes unchanged and gives no usage."""
    for headers in (JSON | {"content-encoding": "gzip"}, {"content-type": "audio/wav"}):
        exchange = _observing(pb.FULL_DUPLEX_STREAMED, rename=True)
        exchange.feed(m.response_headers(headers=headers))
        step = exchange.feed(m.response_body(ANSWER, end=True))

        assert [body.streamed_response.body for body in _bodies(step)] == [ANSWER]
        assert step.observed is not None
        assert not step.observed.usage.known


@pytest.mark.parametrize("mode", MODES)
def test_the_name_is_written_back(mode: int) -> None:
    """A renamed request's response has the client's name again, and a length that is right or absent."""
    exchange = _observing(mode, rename=True)
    [headers] = m.read(exchange.feed(m.response_headers(headers=JSON)))
    step = exchange.feed(m.response_body(ANSWER, end=True))

    removed = headers.response_headers.response.header_mutation.remove_headers
    [answer] = m.read(step)
    body = answer.response_body.response.body_mutation
    assert (body.streamed_response.body or body.body) == RESTORED
    if mode == pb.BUFFERED:
        assert m.set_headers(answer.response_body.response) == {"content-length": str(len(RESTORED))}
        assert list(removed) == []
    else:
        assert list(removed) == ["content-length"]


@given(st.lists(st.integers(0, 4 * len(ANSWER)), max_size=6), st.sampled_from(MODES[:2]), st.booleans())
def test_a_name_cut_anywhere_is_written_back(cuts: list[int], mode: int, trailers: bool) -> None:
    """However a response is cut into chunks, the client gets all of it with its own name in it."""
    text, wanted = ANSWER * 4, RESTORED * 4
    exchange = _observing(mode, rename=True)
    exchange.feed(m.response_headers(headers=SSE))
    edges = [0, *sorted(cuts), len(text)]
    sent = [text[a:b] for a, b in itertools.pairwise(edges)]
    steps = [
        exchange.feed(m.response_body(chunk, end=not trailers and number == len(sent)))
        for number, chunk in enumerate(sent, 1)
    ]
    if trailers:
        steps.append(exchange.feed(m.response_trailers()))

    answers = [answer for step in steps for answer in m.read(step) if answer.HasField("response_body")]
    bodies = [answer.response_body.response.body_mutation for answer in answers]
    assert b"".join(body.streamed_response.body or body.body for body in bodies) == wanted
    assert steps[-1].end
    if mode == pb.STREAMED:
        assert len(bodies) == len(sent)
    else:
        ends = [body.streamed_response.end_of_stream for body in bodies]
        assert ends == [False] * (len(ends) - 1) + [not trailers]


def test_what_was_kept_back_leaves_before_the_trailers() -> None:
    """A full-duplex body that ends inside the key, and then trailers: nothing of it is lost."""
    exchange = _observing(pb.FULL_DUPLEX_STREAMED, rename=True)
    exchange.feed(m.response_headers(headers=JSON))
    held = exchange.feed(m.response_body(b'{"mod'))
    step = exchange.feed(m.response_trailers())

    assert [body.streamed_response.body for body in _bodies(held)] == [b"{"]
    assert m.kinds(step) == ["response_body", "response_trailers"]
    assert _bodies(step)[0].streamed_response.body == b'"mod'


def test_a_long_response_with_a_name_is_cut_to_chunks() -> None:
    """A large JSON answer is written back in chunks that gateways take."""
    text = json.dumps({"model": "engine-name", "text": "x" * 200_000}).encode()
    exchange = _observing(pb.FULL_DUPLEX_STREAMED, rename=True)
    exchange.feed(m.response_headers(headers=JSON))
    step = exchange.feed(m.response_body(text, end=True))

    chunks = [body.streamed_response.body for body in _bodies(step)]
    assert b"".join(chunks) == text.replace(b"engine-name", b"m")
    assert max(map(len, chunks)) <= BODY_CHUNK_BYTES


def test_a_streamed_request_is_answered_chunk_by_chunk() -> None:
    """Each STREAMED chunk of a stream that stays open gets its answer: before, during and after the pick."""
    exchange = ExtProcSession(observe_responses=True)
    exchange.feed(m.request_headers(m.config(pb.STREAMED, pb.NONE, early=True)))
    assert exchange.feed(m.request_body(b"a", end=False)) == SessionStep()
    m.asked(exchange, m.request_body(bytes(600_000), end=False))
    exchange.feed(m.request_body(b"late", end=False))

    step = exchange.on_decision(PICK)
    after = [exchange.feed(m.request_body(b"z", end=False)), exchange.feed(m.request_trailers())]

    assert m.kinds(step) == ["request_headers", "request_body", "request_body", "request_body"]
    assert [kind for later in after for kind in m.kinds(later)] == ["request_body", "request_trailers"]


def test_trailers_that_come_while_the_picker_thinks_are_answered() -> None:
    """STREAMED trailers behind a body that was picked for by its beginning get their answer with the rest."""
    exchange = ExtProcSession(observe_responses=True)
    exchange.feed(m.request_headers(m.config(pb.STREAMED, pb.NONE, early=True)))
    m.asked(exchange, m.request_body(bytes(600_000), end=False))
    exchange.feed(m.request_trailers())

    assert m.kinds(exchange.on_decision(PICK)) == ["request_headers", "request_body", "request_trailers"]
