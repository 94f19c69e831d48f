"""Whose trace context a pick request has: the gateway's own span's, or the client's."""

import pytest
from tests.epp.extproc import messages as m

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.session import ExtProcSession

CLIENT = {"traceparent": "of the client", "tracestate": "client=1"}
OWN = {"traceparent": "of the gateway's span"}


@pytest.mark.parametrize("observe", [False, True])
def test_the_gateway_s_span_comes_before_the_client_s(observe: bool) -> None:
    """The trace context of the call replaces that of the request, its state included."""
    headers = m.request_headers(m.config(pb.BUFFERED), headers=CLIENT, end=True)
    with_own = ExtProcSession(trace_headers=OWN, observe_responses=observe).feed(headers).request
    without = ExtProcSession(observe_responses=observe).feed(headers).request

    assert with_own is not None
    assert without is not None
    assert (with_own.headers, without.headers) == (OWN, CLIENT)


def test_a_context_given_twice_is_malformed() -> None:
    """Two headers of a client are joined, which no reader takes for a context."""
    twice = pb.HttpHeaders(headers=m.header_map(CLIENT))
    twice.headers.headers.add(key="traceparent", raw_value=b"another")
    twice.end_of_stream = True
    message = pb.ProcessingRequest(request_headers=twice).SerializeToString()
    request = ExtProcSession().feed(message).request

    assert request is not None
    assert request.headers["traceparent"] == "of the client,another"
