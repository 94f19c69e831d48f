"""One ext_proc stream, free of gRPC and of I/O: messages in, a `Step` out.

The request's body is collected as the gateway's mode asks, the picker is asked once, its answer is written
and the stream ends with status OK: the response is not ours to touch, Envoy goes on alone, and a picker that
dies later cuts nothing. Modes (first message's ``protocol_config``; Envoy's ``BodySendMode``):

====================  ========================================================================
BUFFERED              headers let pass at once, answer to the one body message
BUFFERED_PARTIAL      the same; a body that was cut makes the `Ask` partial
FULL_DUPLEX_STREAMED  nothing until the body has ended; then headers, body echo, trailers
STREAMED              with ``send_body_without_waiting_for_header_response`` the body is collected up to
                      `STREAMED_LOOKAHEAD_BYTES`, since Envoy stops reading when its buffer is full;
                      without it headers must be answered first: the `Ask` is partial
NONE, GRPC, unknown   no body is seen: the `Ask` is partial
absent                FULL_DUPLEX_STREAMED, the mode the Endpoint Picker Protocol demands of a gateway
====================  ========================================================================

Envoy does not keep response bytes that it passed to a stream whose end it has not seen yet. So the end of
the stream must leave together with the last reply (both servers see to it). What is left, in the mode
FULL_DUPLEX_STREAMED both ways only: an engine that answers before it got the whole request (a 401, say)
while flow control still holds back the echo of a long body loses its answer's body, not its status.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final

import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from kvist_epp.errors import PickError, ProtocolError
from kvist_epp.names import SUBSET_KEY, SUBSET_NAMESPACE
from kvist_epp.wire import body as bodies
from kvist_epp.wire import reply
from kvist_epp.wire.pb import ext_proc_pb2 as pb
from kvist_epp.wire.pb.base_pb2 import Metadata

STREAMED_LOOKAHEAD_BYTES: Final = 512 * 1024
"""Half of Envoy's default buffer: beyond it a STREAMED request is routed by what was seen."""


class Ask(msgspec.Struct, frozen=True):
    """What the picker is asked."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """Lower-case names without pseudo headers; latin-1; repeated ones joined by a comma."""
    body: bytes
    subset: tuple[str, ...] | None
    """The gateway's hint: "ip" or "ip:port" each; ``None`` = no hint, empty = nothing is allowed."""
    partial: bool = False
    """The request has more body than ``body`` shows: its shape must not be judged."""


class Picked(msgspec.Struct, frozen=True):
    """Where the request goes."""

    endpoints: tuple[str, ...]
    """In order of preference, "ip:port" or "[v6]:port"; at least one."""
    headers: tuple[tuple[str, str], ...] = ()
    """Request headers to set besides the destination."""


Decision = Picked | PickError


class Step(msgspec.Struct, frozen=True):
    """What one transition asks the shell to do, in the order of the fields."""

    replies: tuple[bytes, ...] = ()
    """Serialised ``ProcessingResponse`` messages to send."""
    ask: Ask | None = None
    """Then: ask the picker and give its decision to `Exchange.decided`."""
    end: bool = False
    """Then: end the stream with grpc-status 0."""


_NOTHING: Final = Step()
_END: Final = Step(end=True)


class _Phase(Enum):
    REQUEST = auto()
    DECIDING = auto()
    RESPONSE = auto()
    ENDED = auto()


class Exchange:
    """Feed it every message of one stream; answer each `Step.ask` with `decided`."""

    __slots__ = (
        "_answer_in",
        "_body",
        "_chunks",
        "_config",
        "_headers",
        "_mode",
        "_observe",
        "_phase",
        "_size",
        "_subset",
        "_trailers",
    )

    def __init__(self, *, observe_responses: bool = False) -> None:
        self._observe = observe_responses
        self._phase = _Phase.REQUEST
        self._config: pb.ProtocolConfiguration | None = None
        self._mode: int = pb.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._subset: tuple[str, ...] | None = None
        self._chunks: list[memoryview] = []
        self._size = 0
        self._body = b""
        self._trailers = False
        self._answer_in = reply.REQUEST_HEADERS

    def feed(self, message: bytes) -> Step:
        """One serialised ``ProcessingRequest``; raises `ProtocolError` when it cannot be decoded."""
        if self._phase in (_Phase.DECIDING, _Phase.ENDED):
            return _NOTHING  # Envoy was seen to repeat the last chunk (GAIE issue 2988)
        if self._config is not None and (step := self._chunk(message)) is not None:
            return step
        try:
            request = pb.ProcessingRequest.FromString(message)
        except DecodeError as error:
            raise ProtocolError(f"ext_proc message of {len(message)} bytes cannot be decoded") from error
        if self._config is None:
            self._configure(request)
        if request.observability_mode:
            self._phase = _Phase.ENDED
            return _NOTHING
        handle = _HANDLERS.get(request.WhichOneof("request") or "")
        return handle(self, request) if handle else _NOTHING

    def decided(self, decision: Decision) -> Step:
        """The picker's answer to the `Ask`; ignored when none is due."""
        if self._phase is not _Phase.DECIDING:
            return _NOTHING
        if isinstance(decision, PickError):
            self._phase = _Phase.ENDED
            return Step((reply.immediate(decision),), end=True)
        replies = self._answers(decision)
        self._chunks, self._body = [], b""
        self._phase = _Phase.RESPONSE if self._observe else _Phase.ENDED
        return Step(replies, end=not self._observe)

    def _configure(self, request: pb.ProcessingRequest) -> None:
        self._config = request.protocol_config if request.HasField("protocol_config") else _DEFAULT_CONFIG
        self._mode = self._config.request_body_mode

    def _finish(self) -> Step:
        self._phase = _Phase.ENDED
        return _END

    # -- the request

    def _request_headers(self, request: pb.ProcessingRequest) -> Step:
        self._headers = _headers(request.request_headers)
        self._subset = _subset(request.metadata_context)
        if request.request_headers.end_of_stream:
            return self._ask()
        if self._mode in _WHOLE_MESSAGE:
            return Step((reply.CONTINUE_REQUEST_HEADERS,))
        return _NOTHING if self._collects() else self._ask(partial=True)

    def _collects(self) -> bool:
        """Whether body chunks arrive before the headers are answered."""
        if self._mode == pb.STREAMED and self._config:
            return self._config.send_body_without_waiting_for_header_response
        return self._mode == pb.FULL_DUPLEX_STREAMED

    def _chunk(self, message: bytes) -> Step | None:
        """The hot path: body chunks read without protobuf; ``None`` for any other message."""
        if self._phase is _Phase.REQUEST:
            chunk = bodies.read_chunk(message, bodies.REQUEST_BODY)
            return self._collect(chunk.data, end_of_stream=chunk.end_of_stream) if chunk else None
        chunk = bodies.read_chunk(message, bodies.RESPONSE_BODY)
        return self._respond_chunk(chunk) if chunk else None

    def _request_body(self, request: pb.ProcessingRequest) -> Step:
        if self._phase is not _Phase.REQUEST:
            return _NOTHING
        chunk = request.request_body
        return self._collect(memoryview(chunk.body), end_of_stream=chunk.end_of_stream)

    def _collect(self, data: memoryview, *, end_of_stream: bool) -> Step:
        self._chunks.append(data)
        self._size += len(data)
        if self._mode in _WHOLE_MESSAGE:
            self._answer_in = reply.REQUEST_BODY
            return self._ask(partial=self._mode == pb.BUFFERED_PARTIAL and not end_of_stream)
        if end_of_stream:
            return self._ask()
        if self._mode == pb.STREAMED and self._size >= STREAMED_LOOKAHEAD_BYTES:
            return self._ask(partial=True)
        return _NOTHING

    def _request_trailers(self, _: pb.ProcessingRequest) -> Step:
        if self._phase is _Phase.RESPONSE:
            return Step((reply.CONTINUE_REQUEST_TRAILERS,))
        if self._mode in _WHOLE_MESSAGE:  # trailers without any body, headers let pass: nothing left to set
            return self._finish()
        self._trailers = True
        return self._ask()

    def _ask(self, *, partial: bool = False) -> Step:
        self._phase = _Phase.DECIDING
        self._body = b"".join(self._chunks)
        headers = self._headers
        ask = Ask(
            method=headers.get(":method", ""),
            path=headers.get(":path", "").partition("?")[0],
            headers={key: value for key, value in headers.items() if not key.startswith(":")},
            body=self._body,
            subset=self._subset,
            partial=partial,
        )
        return Step(ask=ask)

    def _answers(self, picked: Picked) -> tuple[bytes, ...]:
        first = reply.picked(self._answer_in, picked.endpoints, picked.headers)
        if self._mode != pb.FULL_DUPLEX_STREAMED:
            return (first,)  # what is still unanswered Envoy passes on when the stream ends
        replies = [first]
        if self._chunks:
            replies += bodies.streamed(reply.REQUEST_BODY, self._body, end_of_stream=not self._trailers)
        if self._trailers:
            replies.append(reply.CONTINUE_REQUEST_TRAILERS)
        return tuple(replies)

    # -- the response

    def _respond(self, answer: bytes, *, last: bool) -> Step:
        if self._phase is not _Phase.RESPONSE:
            return self._finish()
        return self._observed((answer,), last=last)

    def _observed(self, replies: tuple[bytes, ...], *, last: bool) -> Step:
        if last:
            self._phase = _Phase.ENDED
        return Step(replies, end=last)

    def _respond_headers(self, request: pb.ProcessingRequest) -> Step:
        return self._respond(reply.CONTINUE_RESPONSE_HEADERS, last=request.response_headers.end_of_stream)

    def _respond_chunk(self, chunk: bodies.Chunk) -> Step:
        if self._config and self._config.response_body_mode == pb.FULL_DUPLEX_STREAMED:
            return self._observed(tuple(bodies.echo(chunk)), last=chunk.end_of_stream)
        return self._observed((reply.CONTINUE_RESPONSE_BODY,), last=chunk.end_of_stream)

    def _respond_body(self, request: pb.ProcessingRequest) -> Step:
        if self._phase is not _Phase.RESPONSE:
            return self._finish()
        http_body = request.response_body
        encoded = memoryview(http_body.SerializeToString())
        return self._respond_chunk(bodies.Chunk(memoryview(http_body.body), http_body.end_of_stream, encoded))

    def _respond_trailers(self, _: pb.ProcessingRequest) -> Step:
        return self._respond(reply.CONTINUE_RESPONSE_TRAILERS, last=True)


def _headers(message: pb.HttpHeaders) -> dict[str, str]:
    """All headers; gateways fill ``raw_value`` or ``value``, some one for each kind of header."""
    headers: dict[str, str] = {}
    for header in message.headers.headers:
        key, raw = header.key.lower(), header.raw_value
        value = raw.decode("latin-1") if raw else header.value
        headers[key] = f"{headers[key]},{value}" if key in headers else value
    return headers


def _subset(metadata: Metadata) -> tuple[str, ...] | None:
    """The subset hint as the Endpoint Picker Protocol (list) and LWEPP (comma string) have it.

    A hint of any other type allows nothing: failing open would leave the subset.
    """
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET_KEY not in fields:
        return None
    return _strings(fields[SUBSET_KEY])


def _strings(value: Value) -> tuple[str, ...]:
    if value.WhichOneof("kind") == "list_value":
        found = [item.string_value for item in value.list_value.values]
    else:
        found = value.string_value.split(",")
    return tuple(text for item in found if (text := item.strip()))


_WHOLE_MESSAGE: Final = frozenset((pb.BUFFERED, pb.BUFFERED_PARTIAL))
_DEFAULT_CONFIG: Final = pb.ProtocolConfiguration(
    request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
)
_Handler = Callable[[Exchange, pb.ProcessingRequest], Step]
_HANDLERS: Final[Mapping[str, _Handler]] = {
    "request_headers": Exchange._request_headers,
    "request_body": Exchange._request_body,
    "request_trailers": Exchange._request_trailers,
    "response_headers": Exchange._respond_headers,
    "response_body": Exchange._respond_body,
    "response_trailers": Exchange._respond_trailers,
}
