"""State machine of one ext_proc stream, free of gRPC and of I/O: messages in, a `SessionStep` out.

The request's body is collected as the gateway's mode asks, the picker is asked once, its answer is written
and the stream ends with status OK: the response is not ours to touch, Envoy goes on alone, and a picker that
dies later interrupts nothing. With ``observe_responses``, and for gateways other than Envoy, the stream goes
on (``response``). Modes (first message's ``protocol_config``; Envoy's ``BodySendMode``):

====================  ========================================================================
BUFFERED              headers pass at once, the pick answers the one body message
BUFFERED_PARTIAL      as BUFFERED; a body that was cut makes the `PickRequest` partial
FULL_DUPLEX_STREAMED  no answer until the body has ended; then headers, body echo, trailers
STREAMED              with ``send_body_without_waiting_for_header_response`` the body is collected up to
                      `STREAMED_LOOKAHEAD_BYTES`, since Envoy stops reading when its buffer is full;
                      without it headers must be answered first: the `PickRequest` is partial. The rest
                      passes chunk by chunk, and the stream ends with it
NONE, GRPC, unknown   no body is seen: the `PickRequest` is partial
absent                FULL_DUPLEX_STREAMED, the mode the Endpoint Picker Protocol demands of a gateway
====================  ========================================================================

A body that is seen whole can also be replaced: with the name of another model, which a header asks for
(``rewrite``), or by the picker. A WebSocket's request has no body that ends: its headers are answered.

If the stream ends while a STREAMED chunk that Envoy 1.40 had buffered waits for its answer, Envoy sends the
first part of the body to the endpoint twice. Each chunk is therefore answered.

Envoy does not keep response bytes that it passed to a stream whose end it has not seen yet. The end of the
stream must therefore leave together with the last reply (both servers do that). One case remains, only in the
mode FULL_DUPLEX_STREAMED both ways: an engine that answers before it has the whole request (a 401, say),
while flow control still holds back the echo of a long body, loses its answer's body, not its status.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from time import monotonic
from typing import Final

from google.protobuf.message import DecodeError

from kvist_epp.errors import PickError, ProtocolError
from kvist_epp.extproc import gateway_messages as gateway
from kvist_epp.extproc import rewrite
from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pick_request import NOTHING, Decision, PickRequest, PickResult, SessionStep
from kvist_epp.extproc.plain_headers import read_request_headers
from kvist_epp.extproc.response import FirstToken, ObservedResponse, Response
from kvist_epp.http2.call import NO_TRACE_HEADERS, Message
from kvist_epp.names import (
    GATEWAY_OWNED,
    MODEL_REWRITE_ALIAS,
    MODEL_REWRITE_HEADER,
    REQUEST_HEADERS,
    TRACE_STATE_HEADER,
    UPGRADE_HEADER,
    WEBSOCKET,
)

STREAMED_LOOKAHEAD_BYTES: Final = 512 * 1024
"""Half of Envoy's default buffer: beyond it a STREAMED request is routed by the part seen so far."""


_PASS_HEADERS: Final = SessionStep((gateway.CONTINUE_REQUEST_HEADERS,))


class _Phase(Enum):
    REQUEST = auto()
    DECIDING = auto()
    PASSING = auto()
    """The rest of a STREAMED body passes."""
    RESPONSE = auto()
    ENDED = auto()


_REQUEST, _DECIDING, _PASSING, _RESPONSE, _ENDED = _Phase  # a look-up in an Enum takes five times as long


class ExtProcSession:
    """One stream: takes every message in `feed`, and the answer to each `SessionStep.request`."""

    # A stream sets few of these: defaults of the class cost nothing to set.
    _phase = _REQUEST
    _config: pb.ProtocolConfiguration | None = None
    _mode: int = pb.FULL_DUPLEX_STREAMED
    _headers: dict[str, str]
    _subset: tuple[str, ...] | None = None
    _chunk_count = 0
    _size = 0
    _late_chunks = 0
    _late_end = False
    _body = b""
    _whole = False
    _replaced = False
    _websocket = False
    _remove: tuple[str, ...] = ()
    _names: tuple[str, str] | None = None
    _response: Response | None = None
    _session = ""
    _path = ""
    _arrived = 0.0
    _trailers = False
    _answer_in = gateway.REPLY_REQUEST_HEADERS

    def __init__(
        self,
        *,
        observe_responses: bool = False,
        from_envoy: bool = True,
        labels: tuple[str, ...] = (),
        trace_headers: Mapping[str, str] = NO_TRACE_HEADERS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``labels`` are headers that only the decision may set; with them rewrite headers are ignored.

        ``from_envoy``: another gateway gets one endpoint and ends its stream itself (decision 60).
        ``trace_headers``: the trace context of the call, of the gateway's own span, which takes precedence
        over the client's. ``clock`` times observed responses, in seconds.
        """
        self._clock = clock
        self.from_envoy, self._observe = from_envoy, observe_responses or not from_envoy
        self._trace_headers, self._labels = trace_headers, labels
        self._headers = {}
        self._chunks: list[memoryview] = []

    def feed(self, message: bytes) -> SessionStep:
        """Process one serialised ``ProcessingRequest``; raises `ProtocolError` if it cannot be decoded."""
        phase = self._phase
        if phase is _DECIDING or phase is _ENDED:
            if self._mode == pb.STREAMED:
                self._count_late(message)
            return NOTHING  # Envoy was seen to repeat the last chunk (GAIE issue 2988)
        if self._config is not None:
            if (step := self._read_chunk(message)) is not None:
                return step
        elif (plain := read_request_headers(message)) is not None:
            self._config, self._mode = plain.rest.config, plain.rest.config.request_body_mode
            if plain.rest.observability_mode:
                self._phase = _ENDED
                return NOTHING
            return self._begin(plain.values, plain.rest.subset, end_of_stream=plain.end_of_stream)
        try:
            request = pb.ProcessingRequest.FromString(message)
        except DecodeError as error:
            raise ProtocolError(f"ext_proc message of {len(message)} bytes cannot be decoded") from error
        if self._config is None:
            self._config = gateway.configuration(request)
            self._mode = self._config.request_body_mode
        if request.observability_mode:
            self._phase = _ENDED
            return NOTHING
        handle = _HANDLERS.get(request.WhichOneof("request") or "")
        return handle(self, request) if handle else NOTHING

    def on_decision(self, decision: Decision) -> SessionStep:
        """Answer with the picker's decision; ignored when none is due."""
        if self._phase is not _DECIDING:
            return NOTHING
        if isinstance(decision, PickError):
            self._phase = _ENDED
            return SessionStep((gateway.encode_rejection(decision),), end=True)
        if decision.body is not None and self._whole and self._chunk_count:
            self._body, self._replaced = decision.body, True
        answers = self._answers(decision)
        self._body = b""
        if not self._observe or (self._websocket and self.from_envoy):
            passes = self._mode == pb.STREAMED and not (self._whole or self._late_end or self._trailers)
            self._phase = _PASSING if passes else _ENDED
            return SessionStep(answers, end=not passes)
        self._phase, self._session = _RESPONSE, decision.session
        config = self._config or gateway.DEFAULT_CONFIG
        mode = config.response_body_mode
        self._response = Response(mode, self._names, self._path, self._arrived, self._clock)
        return SessionStep(answers)

    @property
    def asks_only(self) -> bool:
        """Return whether the gateway shows no responses: it sends no ``protocol_config``, or no such mode."""
        config = self._config or gateway.DEFAULT_CONFIG
        silent = config is gateway.DEFAULT_CONFIG or config.response_body_mode == pb.NONE
        return silent and not self.from_envoy

    def on_closed(self) -> ObservedResponse | None:
        """End the session, because its stream ended; return a report on a response not yet reported."""
        observing, self._phase = self._phase is _RESPONSE and not self.asks_only, _ENDED
        return self._report(complete=False) if observing else None

    # -- the request

    def _request_headers(self, request: pb.ProcessingRequest) -> SessionStep:
        sent, subset = request.request_headers, gateway.subset(request.metadata_context)
        headers = gateway.header_values(sent, REQUEST_HEADERS)
        return self._begin(headers, subset, end_of_stream=sent.end_of_stream)

    def _begin(
        self, headers: dict[str, str], subset: tuple[str, ...] | None, *, end_of_stream: bool
    ) -> SessionStep:
        if self._observe:
            self._arrived = self._clock()
        self._headers, self._subset = headers, subset
        upgrade, method = headers.get(UPGRADE_HEADER, ""), headers.get(":method")
        self._websocket = upgrade.lower() == WEBSOCKET and method == "GET"
        if end_of_stream or (self._websocket and self.from_envoy):
            return self._pick()
        if self._mode in _WHOLE_MESSAGE:
            forged = [name for name in self._labels if name in self._headers]
            return SessionStep((gateway.remove_request_headers(forged),)) if forged else _PASS_HEADERS
        collects = self._mode == pb.FULL_DUPLEX_STREAMED
        if self._mode == pb.STREAMED and self._config:
            collects = self._config.send_body_without_waiting_for_header_response
        return NOTHING if collects else self._pick(partial=True)

    def _read_chunk(self, message: bytes) -> SessionStep | None:
        """Process a body chunk without protobuf (the hot path); return ``None`` for any other message."""
        phase = self._phase
        if phase is _REQUEST or phase is _PASSING:
            chunk = gateway.read_chunk(message, gateway.REQUEST_BODY_FIELD)
            return self._request_chunk(chunk.data, end_of_stream=chunk.end_of_stream) if chunk else None
        chunk = gateway.read_chunk(message, gateway.RESPONSE_BODY_FIELD)
        return self._response_chunk(chunk) if chunk else None

    def _request_body(self, request: pb.ProcessingRequest) -> SessionStep:
        chunk = request.request_body
        return self._request_chunk(memoryview(chunk.body), end_of_stream=chunk.end_of_stream)

    def _request_chunk(self, data: memoryview, *, end_of_stream: bool) -> SessionStep:
        if self._phase is not _REQUEST:
            if self._mode != pb.STREAMED:
                return NOTHING
            return self._pass(gateway.CONTINUE_REQUEST_BODY, last=end_of_stream)
        self._chunks.append(data)
        self._size += len(data)
        if self._mode in _WHOLE_MESSAGE:
            self._answer_in = gateway.REPLY_REQUEST_BODY
            return self._pick(partial=self._mode == pb.BUFFERED_PARTIAL and not end_of_stream)
        if end_of_stream:
            return self._pick()
        if self._mode == pb.STREAMED and self._size >= STREAMED_LOOKAHEAD_BYTES:
            return self._pick(partial=True)
        return NOTHING

    def _pass(self, answer: bytes, *, last: bool) -> SessionStep:
        """Let the rest of a body pass that was picked for by its first part."""
        ends = last and self._phase is _PASSING
        if ends:
            self._phase = _ENDED
        return SessionStep((answer,), end=ends)

    def _count_late(self, message: bytes) -> None:
        """Count STREAMED messages that arrive while the pick is being made; each needs its own answer."""
        kind = message[:1]
        self._trailers |= kind == _REQUEST_TRAILERS
        if kind == _REQUEST_BODY:
            chunk = gateway.read_chunk(message, gateway.REQUEST_BODY_FIELD)
            self._late_chunks += 1
            self._late_end |= chunk is not None and chunk.end_of_stream

    def _request_trailers(self, _: pb.ProcessingRequest) -> SessionStep:
        if self._phase is not _REQUEST:
            return self._pass(gateway.CONTINUE_REQUEST_TRAILERS, last=True)
        if self._mode in _WHOLE_MESSAGE:  # no body came: the headers have been answered
            self._answer_in = gateway.REPLY_REQUEST_TRAILERS
        self._trailers = True
        return self._pick()

    def _pick(self, *, partial: bool = False) -> SessionStep:
        self._phase = _DECIDING
        body = b"".join(self._chunks)
        self._chunk_count, self._chunks = len(self._chunks), []
        self._whole = not partial
        headers = self._headers
        if not self._labels and not _NOT_SENT_ON.isdisjoint(headers):
            body = self._rewrite(body)
        # A request may be queued for long, among thousands: only the parts that the answer needs are kept.
        if self._replaced or self._mode == pb.FULL_DUPLEX_STREAMED:
            self._body = body
        if not self._observe:
            self._headers = {}
        if self._trace_headers:
            headers.pop(TRACE_STATE_HEADER, None)
            headers.update(self._trace_headers)
        self._path = headers.pop(":path", "").partition("?")[0]
        method = headers.pop(":method", "")
        request = PickRequest(
            method=method,
            path=self._path,
            headers=headers,
            body=body,
            subset=self._subset,
            partial=partial,
            websocket=self._websocket,
        )
        return SessionStep(request=request)

    def _rewrite(self, body: bytes) -> bytes:
        """Apply the rewrite headers to the body; note the headers to remove that clients may not set."""
        self._remove = tuple([name for name in GATEWAY_OWNED if name in self._headers])
        name = rewrite.requested_model(self._headers)
        renamed = rewrite.rename_model(body, name) if name and self._whole else None
        if renamed is None:
            return body
        self._replaced = True
        self._remove += (MODEL_REWRITE_HEADER, MODEL_REWRITE_ALIAS)
        if renamed.client is not None and renamed.client != name:
            self._names = (name, renamed.client)
        return renamed.body

    def _answers(self, result: PickResult) -> tuple[Message, ...]:
        endpoints = result.endpoints if self.from_envoy else result.endpoints[:1]
        if self._answer_in == gateway.REPLY_REQUEST_TRAILERS:
            return (gateway.encode_pick(self._answer_in, endpoints),)
        headers, body = result.headers, None
        if self._replaced:
            headers = (*headers, gateway.content_length(self._body))
            body = self._body if self._answer_in == gateway.REPLY_REQUEST_BODY else None
        remove = self._remove + result.remove
        first = gateway.encode_pick(self._answer_in, endpoints, headers, remove, body)
        if self._mode == pb.FULL_DUPLEX_STREAMED:
            return (first, *self._echoed_body())
        return (first, *self._chunk_answers()) if self._mode == pb.STREAMED else (first,)

    def _echoed_body(self) -> list[Message]:
        answers: list[Message] = []
        if self._chunk_count:
            answers += gateway.encode_streamed(
                gateway.REPLY_REQUEST_BODY, self._body, end_of_stream=not self._trailers
            )
        if self._trailers:
            answers.append(gateway.CONTINUE_REQUEST_TRAILERS)
        return answers

    def _chunk_answers(self) -> list[bytes]:
        """Answer each STREAMED chunk so far; a new body goes with the first, the others become empty."""
        answers = [gateway.CONTINUE_REQUEST_BODY] * self._chunk_count
        if self._replaced:
            answers = [gateway.replace_request_chunk(b"")] * self._chunk_count
            answers[0] = gateway.replace_request_chunk(self._body)
        answers += [gateway.CONTINUE_REQUEST_BODY] * self._late_chunks
        return answers + [gateway.CONTINUE_REQUEST_TRAILERS] * self._trailers

    # -- the response

    def _response_headers(self, request: pb.ProcessingRequest) -> SessionStep:
        if self._response is None:
            return self._finish()
        sent, metadata = request.response_headers, request.metadata_context
        return self._respond([self._response.headers(sent, metadata)], last=sent.end_of_stream)

    def _response_chunk(self, chunk: gateway.BodyChunk) -> SessionStep:
        if self._response is None:
            return self._finish()
        answers = self._response.chunk(chunk)
        first = self._response.first_token(self._session, self._headers)
        return self._respond(answers, last=chunk.end_of_stream, first=first)

    def _response_body(self, request: pb.ProcessingRequest) -> SessionStep:
        body = request.response_body
        encoded = memoryview(body.SerializeToString())
        return self._response_chunk(gateway.BodyChunk(memoryview(body.body), body.end_of_stream, encoded))

    def _response_trailers(self, _: pb.ProcessingRequest) -> SessionStep:
        if self._response is None:
            return self._finish()
        return self._respond(self._response.trailers(), last=True)

    def _respond(
        self, answers: Sequence[Message], *, last: bool, first: FirstToken | None = None
    ) -> SessionStep:
        if not last:
            return SessionStep(tuple(answers), first_token=first)
        self._phase = _ENDED
        report = self._report(complete=True)
        return SessionStep(tuple(answers), end=True, observed=report, first_token=first)

    def _finish(self) -> SessionStep:
        self._phase = _ENDED
        return SessionStep(end=True)

    def _report(self, *, complete: bool) -> ObservedResponse | None:
        response = self._response
        return response.report(self._session, self._headers, complete=complete) if response else None


_NOT_SENT_ON: Final = frozenset((*GATEWAY_OWNED, MODEL_REWRITE_HEADER, MODEL_REWRITE_ALIAS))
_REQUEST_BODY: Final = b"\x22"
_REQUEST_TRAILERS: Final = b"\x32"
"""First bytes of the messages whose fields are 4 and 6."""
_WHOLE_MESSAGE: Final = frozenset((pb.BUFFERED, pb.BUFFERED_PARTIAL))
_HANDLERS: Final[Mapping[str, Callable[[ExtProcSession, pb.ProcessingRequest], SessionStep]]] = {
    "request_headers": ExtProcSession._request_headers,
    "request_body": ExtProcSession._request_body,
    "request_trailers": ExtProcSession._request_trailers,
    "response_headers": ExtProcSession._response_headers,
    "response_body": ExtProcSession._response_body,
    "response_trailers": ExtProcSession._response_trailers,
}
