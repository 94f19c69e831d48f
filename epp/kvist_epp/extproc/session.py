"""One ext_proc stream, free of gRPC and of I/O: messages in, a `Step` out.

The request's body is collected as the gateway's mode asks, the picker is asked once, its answer is written
and the stream ends with status OK: the response is not ours to touch, Envoy goes on alone, and a picker that
dies later cuts nothing. Only with ``observe_responses`` the stream goes on (``response.py``). Modes (first
message's ``protocol_config``; Envoy's ``BodySendMode``):

====================  ========================================================================
BUFFERED              headers let pass at once, answer to the one body message
BUFFERED_PARTIAL      the same; a body that was cut makes the `PickRequest` partial
FULL_DUPLEX_STREAMED  nothing until the body has ended; then headers, body echo, trailers
STREAMED              with ``send_body_without_waiting_for_header_response`` the body is collected up to
                      `STREAMED_LOOKAHEAD_BYTES`, since Envoy stops reading when its buffer is full;
                      without it headers must be answered first: the `PickRequest` is partial. The rest is let
                      pass chunk by chunk, and the stream ends with it
NONE, GRPC, unknown   no body is seen: the `PickRequest` is partial
absent                FULL_DUPLEX_STREAMED, the mode the Endpoint Picker Protocol demands of a gateway
====================  ========================================================================

A body that is seen whole can also be replaced: by the name of another model, which a header asks for
(``rewrite.py``), or by the picker.

Of a STREAMED body Envoy 1.40 sends the beginning twice, to the endpoint, if the stream ends while a chunk
that it had buffered waits for its answer: so each chunk is answered.

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

from kvist_epp.errors import PickError, ProtocolError
from kvist_epp.extproc import bodies, rewrite
from kvist_epp.extproc import gateway_message as gateway
from kvist_epp.extproc import replies as reply
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pick_request import Decision, PickRequest, PickResult
from kvist_epp.extproc.response import ObservedResponse, Response
from kvist_epp.names import (
    GATEWAY_OWNED,
    MODEL_REWRITE_ALIAS,
    MODEL_REWRITE_HEADER,
    REQUEST_ID_HEADER,
)

STREAMED_LOOKAHEAD_BYTES: Final = 512 * 1024
"""Half of Envoy's default buffer: beyond it a STREAMED request is routed by what was seen."""


class Step(msgspec.Struct, frozen=True):
    """What one transition asks the shell to do, in the order of the fields."""

    replies: tuple[bytes, ...] = ()
    """Serialised ``ProcessingResponse`` messages to send."""
    ask: PickRequest | None = None
    """Then: ask the picker and give its decision to `ExtProcSession.on_decision`."""
    end: bool = False
    """Then: end the stream with grpc-status 0."""
    seen: ObservedResponse | None = None
    """And: what was seen of the response, once."""


_TAKEN: Final = memoryview(b"")
"""Stands for a chunk that was taken into the body."""
_NOTHING: Final = Step()
_END: Final = Step(end=True)


class _Phase(Enum):
    REQUEST = auto()
    DECIDING = auto()
    PASSING = auto()
    """What is left of a STREAMED body."""
    RESPONSE = auto()
    ENDED = auto()


class ExtProcSession:
    """Feed it every message of one stream; answer each `Step.ask` with `on_decision`."""

    __slots__ = (
        "_answer_in",
        "_body",
        "_chunk_count",
        "_chunks",
        "_config",
        "_headers",
        "_labels",
        "_late_chunks",
        "_late_end",
        "_mode",
        "_names",
        "_observe",
        "_phase",
        "_remove",
        "_replaced",
        "_response",
        "_session",
        "_size",
        "_subset",
        "_trailers",
        "_whole",
    )

    def __init__(self, *, observe_responses: bool = False, labels: tuple[str, ...] = ()) -> None:
        """``labels``: headers that the decision alone may set; with them nothing else is obeyed."""
        self._observe = observe_responses
        self._labels = labels
        self._phase = _Phase.REQUEST
        self._config: pb.ProtocolConfiguration | None = None
        self._mode: int = pb.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._subset: tuple[str, ...] | None = None
        self._chunks: list[memoryview] = []
        self._chunk_count = 0
        self._size = 0
        self._late_chunks = 0
        self._late_end = False
        self._body = b""
        self._whole = False
        self._replaced = False
        self._remove: tuple[str, ...] = ()
        self._names: tuple[str, str] | None = None
        self._response: Response | None = None
        self._session = ""
        self._trailers = False
        self._answer_in = reply.REQUEST_HEADERS

    def feed(self, message: bytes) -> Step:
        """One serialised ``ProcessingRequest``; raises `ProtocolError` when it cannot be decoded."""
        if self._phase in (_Phase.DECIDING, _Phase.ENDED):
            if self._mode == pb.STREAMED:
                self._late(message)
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

    def on_decision(self, decision: Decision) -> Step:
        """The picker's answer to the `PickRequest`; ignored when none is due."""
        if self._phase is not _Phase.DECIDING:
            return _NOTHING
        if isinstance(decision, PickError):
            self._phase = _Phase.ENDED
            return Step((reply.immediate(decision),), end=True)
        if decision.body is not None and self._whole and self._chunk_count:
            self._body, self._replaced = decision.body, True
        replies = self._answers(decision)
        self._body = b""
        if not self._observe:
            passes = self._mode == pb.STREAMED and not (self._whole or self._late_end or self._trailers)
            self._phase = _Phase.PASSING if passes else _Phase.ENDED
            return Step(replies, end=not passes)
        self._phase, self._session = _Phase.RESPONSE, decision.session
        config = self._config or gateway.DEFAULT_CONFIG
        self._response = Response(config.response_body_mode, self._names)
        return Step(replies)

    def on_closed(self) -> ObservedResponse | None:
        """The gateway ended the stream; what was seen of a response that was not told yet."""
        waited, self._phase = self._phase is _Phase.RESPONSE, _Phase.ENDED
        return self._told(whole=False) if waited else None

    def _configure(self, request: pb.ProcessingRequest) -> None:
        self._config = gateway.configuration(request)
        self._mode = self._config.request_body_mode

    def _finish(self) -> Step:
        self._phase = _Phase.ENDED
        return _END

    # -- the request

    def _request_headers(self, request: pb.ProcessingRequest) -> Step:
        self._headers = gateway.header_values(request.request_headers)
        self._subset = gateway.subset(request.metadata_context)
        if request.request_headers.end_of_stream:
            return self._ask()
        if self._mode in _WHOLE_MESSAGE:
            forged = [name for name in self._labels if name in self._headers]
            return Step((reply.without(forged) if forged else reply.CONTINUE_REQUEST_HEADERS,))
        return _NOTHING if self._collects() else self._ask(partial=True)

    def _collects(self) -> bool:
        """Whether body chunks arrive before the headers are answered."""
        if self._mode == pb.STREAMED and self._config:
            return self._config.send_body_without_waiting_for_header_response
        return self._mode == pb.FULL_DUPLEX_STREAMED

    def _chunk(self, message: bytes) -> Step | None:
        """The hot path: body chunks read without protobuf; ``None`` for any other message."""
        if self._phase in (_Phase.REQUEST, _Phase.PASSING):
            chunk = bodies.read_chunk(message, bodies.REQUEST_BODY)
            return self._take(chunk.data, end_of_stream=chunk.end_of_stream) if chunk else None
        chunk = bodies.read_chunk(message, bodies.RESPONSE_BODY)
        return self._respond_chunk(chunk) if chunk else None

    def _request_body(self, request: pb.ProcessingRequest) -> Step:
        chunk = request.request_body
        return self._take(memoryview(chunk.body), end_of_stream=chunk.end_of_stream)

    def _take(self, data: memoryview, *, end_of_stream: bool) -> Step:
        if self._phase is _Phase.REQUEST:
            return self._collect(data, end_of_stream=end_of_stream)
        if self._mode != pb.STREAMED:
            return _NOTHING
        return self._pass(reply.CONTINUE_REQUEST_BODY, last=end_of_stream)

    def _pass(self, answer: bytes, *, last: bool) -> Step:
        """The rest of a body that was picked for by its beginning."""
        ends = last and self._phase is _Phase.PASSING
        if ends:
            self._phase = _Phase.ENDED
        return Step((answer,), end=ends)

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

    def _late(self, message: bytes) -> None:
        """STREAMED: what comes while the picker thinks wants its answer too."""
        kind = message[:1]
        self._trailers |= kind == _REQUEST_TRAILERS
        if kind == _REQUEST_BODY:
            chunk = bodies.read_chunk(message, bodies.REQUEST_BODY)
            self._late_chunks += 1
            self._late_end |= chunk is not None and chunk.end_of_stream

    def _request_trailers(self, _: pb.ProcessingRequest) -> Step:
        if self._phase is not _Phase.REQUEST:
            return self._pass(reply.CONTINUE_REQUEST_TRAILERS, last=True)
        if self._mode in _WHOLE_MESSAGE:  # no body came: the headers have been answered
            self._answer_in = reply.REQUEST_TRAILERS
        self._trailers = True
        return self._ask()

    def _ask(self, *, partial: bool = False) -> Step:
        self._phase = _Phase.DECIDING
        body = b"".join(self._chunks)
        self._chunk_count, self._chunks = len(self._chunks), []
        self._whole = not partial
        headers = self._headers
        if not self._labels and not _NOT_SENT_ON.isdisjoint(headers):
            body = self._obeyed(body)
        if self._replaced or self._mode == pb.FULL_DUPLEX_STREAMED:
            self._body = body  # a request may wait long: what will not be sent is not kept
        ask = PickRequest(
            method=headers.get(":method", ""),
            path=headers.get(":path", "").partition("?")[0],
            headers={key: value for key, value in headers.items() if not key.startswith(":")},
            body=body,
            subset=self._subset,
            partial=partial,
        )
        self._lighten()
        return Step(ask=ask)

    def _lighten(self) -> None:
        """The answer may be long in coming, for thousands at once: keep what it will need and no more."""
        self._chunks = [_TAKEN] * len(self._chunks)
        if not (self._replaced or self._mode == pb.FULL_DUPLEX_STREAMED):
            self._body = b""
        if not self._observe:
            self._headers = {}

    def _obeyed(self, body: bytes) -> bytes:
        """The body from now on: headers are obeyed, and those that clients may not use are taken away."""
        self._remove = tuple([name for name in GATEWAY_OWNED if name in self._headers])
        name = rewrite.wanted(self._headers)
        renamed = rewrite.renamed(body, name) if name and self._whole else None
        if renamed is None:
            return body
        self._replaced = True
        self._remove += (MODEL_REWRITE_HEADER, MODEL_REWRITE_ALIAS)
        if renamed.client is not None and renamed.client != name:
            self._names = (name, renamed.client)
        return renamed.body

    def _answers(self, picked: PickResult) -> tuple[bytes, ...]:
        if self._answer_in == reply.REQUEST_TRAILERS:
            return (reply.picked_at_trailers(picked.endpoints),)
        headers, body = picked.headers, None
        if self._replaced:
            headers = (*headers, reply.measured(self._body))
            body = self._body if self._answer_in == reply.REQUEST_BODY else None
        remove = self._remove + picked.remove
        first = reply.picked(self._answer_in, picked.endpoints, headers, remove, body)
        if self._mode == pb.FULL_DUPLEX_STREAMED:
            return (first, *self._echoes())
        return (first, *self._one_each()) if self._mode == pb.STREAMED else (first,)

    def _echoes(self) -> list[bytes]:
        replies = []
        if self._chunk_count:
            replies += bodies.streamed(reply.REQUEST_BODY, self._body, end_of_stream=not self._trailers)
        if self._trailers:
            replies.append(reply.CONTINUE_REQUEST_TRAILERS)
        return replies

    def _one_each(self) -> list[bytes]:
        """STREAMED: an answer to each chunk so far. A new body goes with the first, the others get empty."""
        replies = [reply.CONTINUE_REQUEST_BODY] * self._chunk_count
        if self._replaced:
            replies = [reply.request_body(b"")] * self._chunk_count
            replies[0] = reply.request_body(self._body)
        replies += [reply.CONTINUE_REQUEST_BODY] * self._late_chunks
        return replies + [reply.CONTINUE_REQUEST_TRAILERS] * self._trailers

    # -- the response

    def _respond(self, replies: list[bytes], *, last: bool) -> Step:
        if not last:
            return Step(tuple(replies))
        self._phase = _Phase.ENDED
        return Step(tuple(replies), end=True, seen=self._told(whole=True))

    def _respond_headers(self, request: pb.ProcessingRequest) -> Step:
        if self._response is None:
            return self._finish()
        headers = request.response_headers
        answer = self._response.headers(headers, request.metadata_context)
        return self._respond([answer], last=headers.end_of_stream)

    def _respond_chunk(self, chunk: bodies.Chunk) -> Step:
        if self._response is None:
            return self._finish()
        return self._respond(self._response.chunk(chunk), last=chunk.end_of_stream)

    def _respond_body(self, request: pb.ProcessingRequest) -> Step:
        http_body = request.response_body
        encoded = memoryview(http_body.SerializeToString())
        return self._respond_chunk(bodies.Chunk(memoryview(http_body.body), http_body.end_of_stream, encoded))

    def _respond_trailers(self, _: pb.ProcessingRequest) -> Step:
        if self._response is None:
            return self._finish()
        return self._respond(self._response.trailers(), last=True)

    def _told(self, *, whole: bool) -> ObservedResponse | None:
        response = self._response
        if response is None:
            return None
        request_id = self._headers.get(REQUEST_ID_HEADER, "")
        return ObservedResponse(
            self._session, request_id, response.served, response.status, response.usage, whole
        )


_NOT_SENT_ON: Final = frozenset((*GATEWAY_OWNED, MODEL_REWRITE_HEADER, MODEL_REWRITE_ALIAS))
_REQUEST_BODY: Final = b"\x22"
_REQUEST_TRAILERS: Final = b"\x32"
"""First bytes of the messages whose fields are 4 and 6."""
_WHOLE_MESSAGE: Final = frozenset((pb.BUFFERED, pb.BUFFERED_PARTIAL))
_Handler = Callable[[ExtProcSession, pb.ProcessingRequest], Step]
_HANDLERS: Final[Mapping[str, _Handler]] = {
    "request_headers": ExtProcSession._request_headers,
    "request_body": ExtProcSession._request_body,
    "request_trailers": ExtProcSession._request_trailers,
    "response_headers": ExtProcSession._respond_headers,
    "response_body": ExtProcSession._respond_body,
    "response_trailers": ExtProcSession._respond_trailers,
}
