"""One ext_proc stream in the mode STREAMED, in which the body comes in chunks and each is answered."""

import pytest
from tests.epp.extproc import messages as m
from tests.epp.extproc.test_session import PICK

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pick_request import SessionStep
from kvist_epp.extproc.session import STREAMED_LOOKAHEAD_BYTES, ExtProcSession


def test_early_streamed_bodies_are_collected() -> None:
    """STREAMED that does not wait: asked at the end of the body, answered in the headers."""
    exchange = ExtProcSession()
    ask = m.asked(
        exchange,
        m.request_headers(m.config(pb.STREAMED, early=True)),
        m.request_body(b"a", end=False),
        m.request_body(b"b"),
    )

    assert (ask.body, ask.partial) == (b"ab", False)
    step = exchange.on_decision(PICK)
    assert (m.kinds(step), step.end) == (["request_headers", "request_body", "request_body"], True)


def test_a_streamed_body_that_follows_the_pick_is_let_pass() -> None:
    """STREAMED that waits: a partial question at the headers, an answer to each chunk, and the end with the
    last: Envoy would send a chunk that waits for its answer twice."""
    exchange = ExtProcSession()
    ask = m.asked(exchange, m.request_headers(m.config(pb.STREAMED)))
    assert (ask.body, ask.partial) == (b"", True)

    steps = [exchange.on_decision(PICK)]
    steps += [exchange.feed(m.request_body(data, end=data == b"c")) for data in (b"a", b"b", b"c")]
    kinds = [["request_headers"], ["request_body"], ["request_body"], ["request_body"]]
    assert [m.kinds(step) for step in steps] == kinds
    assert [step.end for step in steps] == [False, False, False, True]
    assert exchange.feed(m.request_body(b"c")) == SessionStep()


@pytest.mark.parametrize("early", [False, True])
def test_trailers_end_a_streamed_body(early: bool) -> None:
    """Trailers are answered as chunks are, and the stream ends with them."""
    exchange = ExtProcSession()
    begin = [m.request_headers(m.config(pb.STREAMED, early=early))]
    m.asked(exchange, *begin, *[m.request_body(bytes(STREAMED_LOOKAHEAD_BYTES), end=False)] * early)
    assert not exchange.on_decision(PICK).end

    step = exchange.feed(m.request_trailers())
    assert (m.kinds(step), step.end) == (["request_trailers"], True)


def test_what_comes_while_the_picker_thinks_is_answered_with_the_pick() -> None:
    """A long STREAMED body of which the rest came meanwhile: an answer to each chunk, and the end."""
    exchange = ExtProcSession()
    half = bytes(STREAMED_LOOKAHEAD_BYTES)
    m.asked(exchange, m.request_headers(m.config(pb.STREAMED, early=True)), m.request_body(half, end=False))
    for last in (False, True):
        assert exchange.feed(m.request_body(b"more", end=last)) == SessionStep()

    step = exchange.on_decision(PICK)
    assert (m.kinds(step), step.end) == (["request_headers", *["request_body"] * 3], True)


def test_early_streamed_bodies_are_cut_at_the_lookahead() -> None:
    """STREAMED that does not wait: a long body is asked for by its beginning."""
    half = bytes(STREAMED_LOOKAHEAD_BYTES // 2)
    ask = m.asked(
        ExtProcSession(),
        m.request_headers(m.config(pb.STREAMED, early=True)),
        m.request_body(half, end=False),
        m.request_body(half, end=False),
    )

    assert (len(ask.body), ask.partial) == (STREAMED_LOOKAHEAD_BYTES, True)
