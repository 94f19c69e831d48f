"""Messages as a gateway sends them, and answers as it reads them."""

from typing import Any

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import HeaderMap, HeaderValue
from kvist_epp.extproc.pick_request import PickRequest, SessionStep
from kvist_epp.extproc.session import ExtProcSession

HEADERS = {":method": "POST", ":path": "/v1/completions?x=1", ":authority": "pool", "x-tenant": "blue"}


def config(request: int, response: int = pb.NONE, *, early: bool = False) -> pb.ProtocolConfiguration:
    """The ``protocol_config`` of a stream's first message."""
    return pb.ProtocolConfiguration(
        request_body_mode=pb.BodySendMode.Name(request),
        response_body_mode=pb.BodySendMode.Name(response),
        send_body_without_waiting_for_header_response=early,
    )


def header_map(values: dict[str, str]) -> HeaderMap:
    """Headers as Envoy sends them: in ``raw_value``."""
    return HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in values.items()])


def request_headers(
    protocol: pb.ProtocolConfiguration | None = None,
    *,
    end: bool = False,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> bytes:
    """The first message; ``headers`` besides the usual ones, ``fields`` are more of ``ProcessingRequest``."""
    sent = pb.HttpHeaders(headers=header_map(HEADERS | (headers or {})), end_of_stream=end)
    return pb.ProcessingRequest(request_headers=sent, protocol_config=protocol, **fields).SerializeToString()


def request_body(data: bytes, *, end: bool = True) -> bytes:
    """One chunk of the request."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end)).SerializeToString()


def request_trailers() -> bytes:
    """The request's end, when it has trailers."""
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()


def response_headers(*, end: bool = False, headers: dict[str, str] | None = None, **fields: Any) -> bytes:
    """The response's beginning; ``fields`` are more of ``ProcessingRequest``."""
    sent = pb.HttpHeaders(headers=header_map(headers or {}), end_of_stream=end)
    return pb.ProcessingRequest(response_headers=sent, **fields).SerializeToString()


def response_body(data: bytes, *, end: bool = False) -> bytes:
    """One chunk of the response."""
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end)).SerializeToString()


def response_trailers() -> bytes:
    """The response's end, when it has trailers."""
    return pb.ProcessingRequest(response_trailers=pb.HttpTrailers()).SerializeToString()


def read(step: SessionStep) -> list[pb.ProcessingResponse]:
    """The replies of a step, decoded."""
    return [pb.ProcessingResponse.FromString(bytes(reply)) for reply in step.replies]


def kinds(step: SessionStep) -> list[str | None]:
    """Which field each reply of a step is."""
    return [reply.WhichOneof("response") for reply in read(step)]


def chunks(step: SessionStep) -> list[pb.StreamedBodyResponse]:
    """The echoed request chunks of a step."""
    return [
        reply.request_body.response.body_mutation.streamed_response
        for reply in read(step)
        if reply.HasField("request_body")
    ]


def set_headers(common: pb.CommonResponse) -> dict[str, str]:
    """Return the headers that a mutation sets."""
    return {
        option.header.key: option.header.raw_value.decode() for option in common.header_mutation.set_headers
    }


def destination_metadata(reply: pb.ProcessingResponse) -> str:
    """The destination in a reply's dynamic metadata."""
    fields = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    return fields["x-gateway-destination-endpoint"].string_value


def asked(exchange: ExtProcSession, *messages: bytes) -> PickRequest:
    """The question that the last of ``messages`` leads to; none before it does."""
    *before, last = [exchange.feed(message) for message in messages]
    assert [step.request for step in before] == [None] * len(before)
    assert last.request is not None
    return last.request
