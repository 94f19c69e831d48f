"""Gateways that are no Envoy: one endpoint, and a stream that stays open to the end of the response."""

import logging

import pytest
from tests.epp.extproc import messages as m
from tests.epp.extproc.test_service import Later, Recorder

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.extproc.response import ObservedResponse
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.extproc.session import ExtProcSession
from kvist_epp.http2.grpc_health import Health
from kvist_epp.names import DESTINATION_HEADER, PROCESS_METHOD

DUPLEX = m.config(pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED)
PICK = PickResult(("10.0.0.1:8000", "10.0.0.2:8000"), session="r1.1")
MODES = {
    "duplex": DUPLEX,
    "buffered": m.config(pb.BUFFERED),
    "none": m.config(pb.NONE),
    "absent": None,
}


def picked(mode: str) -> tuple[ExtProcSession, list[pb.ProcessingResponse]]:
    """An exchange after the pick, and all that it answered."""
    exchange = ExtProcSession(from_envoy=False)
    answered = []
    for message in (m.request_headers(MODES[mode]), m.request_body(b"{}")):
        step = exchange.feed(message)
        answered += m.read(step)
        if step.request:
            step = exchange.on_decision(PICK)
            answered += m.read(step)
            assert not step.end
            break
    return exchange, answered


def destinations(answers: list[pb.ProcessingResponse]) -> set[str]:
    """The endpoints in headers and metadata."""
    found = {m.destination_metadata(answer) for answer in answers}
    for answer in answers:
        common = getattr(answer, answer.WhichOneof("response") or "").response
        found.add(m.set_headers(common).get(DESTINATION_HEADER, ""))
    return found - {""}


@pytest.mark.parametrize("mode", MODES)
def test_one_endpoint_is_named(mode: str) -> None:
    """Header and metadata name the pick alone, and the stream goes on."""
    assert destinations(picked(mode)[1]) == {"10.0.0.1:8000"}


def test_the_response_is_observed() -> None:
    """The messages of a response are answered, and its end is reported and ends the stream."""
    exchange, _ = picked("duplex")
    head = exchange.feed(m.response_headers(headers={":status": "200"}))
    chunk = exchange.feed(m.response_body(b"data", end=True))

    assert (m.kinds(head), m.kinds(chunk)) == (["response_headers"], ["response_body"])
    assert chunk.end
    assert chunk.observed is not None
    assert (chunk.observed.session, chunk.observed.status, chunk.observed.complete) == ("r1.1", 200, True)


def test_a_response_that_is_cut_is_reported() -> None:
    """A stream that ends after the response began ends its request."""
    exchange, _ = picked("duplex")
    exchange.feed(m.response_headers(headers={":status": "200"}))
    report = exchange.on_closed()

    assert report is not None
    assert (report.session, report.complete) == ("r1.1", False)


def test_an_envoy_is_told_all_and_let_go() -> None:
    """An Envoy in the same exchange is named both endpoints, and its stream ends with the pick."""
    exchange = ExtProcSession()
    exchange.feed(m.request_headers(DUPLEX))
    assert exchange.feed(m.request_body(b"{}")).request
    step = exchange.on_decision(PICK)

    assert step.end
    assert destinations(m.read(step)) == {"10.0.0.1:8000,10.0.0.2:8000"}


class Asked:
    """A call of a gateway that has sent a whole request, what it was sent, and what was reported."""

    def __init__(self, config: pb.ProtocolConfiguration | None, *, late: bool) -> None:
        self.later, self.sink = Later(), Recorder(from_envoy=False)
        self.reports: list[ObservedResponse] = []
        table = ext_proc_methods(
            lambda _: self.later if late else PICK, lambda _: None, Health(), on_response=self.reports.append
        )
        self.call = table[PROCESS_METHOD](self.sink)
        self.call.on_message(m.request_headers(config))
        self.call.on_message(m.request_body(b"{}"))
        assert self.sink.closed == []

    def decided(self) -> None:
        """Make the decision, if it is due."""
        if self.later.callback is not None:
            self.later.callback(PICK)


@pytest.mark.parametrize("late", [False, True], ids=["decided at once", "decided later"])
@pytest.mark.parametrize("config", [None, m.config(pb.FULL_DUPLEX_STREAMED)], ids=["NGINX", "google_grpc"])
def test_a_gateway_that_only_asks_gets_pick_and_end(
    config: pb.ProtocolConfiguration | None, late: bool
) -> None:
    """NGINX ends its half of the stream with the request, and an Envoy that shows no responses after it: they
    get their pick, and no response is reported, because the request is only beginning."""
    asked = Asked(config, late=late)
    asked.call.on_half_closed()
    asked.decided()

    assert (len(asked.sink.sent), asked.sink.closed, asked.reports) == (2, [(0, "")], [])
    assert asked.later.cancelled == 0


def test_a_client_that_goes_while_its_request_waits() -> None:
    """agentgateway ends its half of the stream then: the decision is cancelled, and nothing is sent."""
    asked = Asked(DUPLEX, late=True)
    asked.call.on_half_closed()

    assert (asked.later.cancelled, asked.sink.closed) == (1, [(0, "")])
    assert (asked.sink.sent, asked.reports) == ([], [])


def test_a_client_that_goes_before_its_response() -> None:
    """agentgateway ends its half of the stream without any response: the request has ended."""
    asked = Asked(DUPLEX, late=False)
    asked.call.on_half_closed()

    assert [(one.session, one.status, one.complete) for one in asked.reports] == [("r1.1", 0, False)]
    assert asked.sink.closed == [(0, "")]


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log says what other gateways get, with the address of the first; of an Envoy it says nothing."""
    caplog.set_level(logging.INFO)
    table = ext_proc_methods(lambda _: PICK, lambda _: None, Health())
    for from_envoy in (True, False, False):
        table[PROCESS_METHOD](Recorder(from_envoy=from_envoy))

    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("a gateway other than Envoy calls from 192.0.2.7: ")
