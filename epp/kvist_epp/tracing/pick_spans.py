"""One recorded pick as spans of OTLP. Pure; imported only where traces are exported.

A pick is a span ``kvist.pick`` of kind SERVER, whose parent is the caller's span (Envoy's span of the
ext_proc call, or the client's), and one child ``kvist.stage.…`` for each stage. Attributes that
OpenTelemetry's semantic conventions define have those names (``gen_ai.…``, ``url.path``, ``error.type``), the
others begin with ``kvist.``. The endpoint is no ``server.address``, which on a span of kind SERVER is the
server's own.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from kvist_epp.telemetry.request_log import MAX_TEXT, RequestLine
from kvist_epp.tracing.trace_context import RecordedPick, valid_state

SCOPE: Final = "kvist_epp"
PICK: Final = "kvist.pick"
STAGE: Final = "kvist.stage."
OPERATIONS: Final[Mapping[str, str]] = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completion": "text_completion",
}
"""``gen_ai.operation.name`` by the kind of the request; other kinds have none."""

_FLAGS: Final = 0x101
"""``SpanFlags``: sampled, and it is known whether the parent is remote."""
_REMOTE: Final = 0x200
_NANOSECONDS: Final = 1_000_000_000

Value = str | int | float


def new_request(resource: Mapping[str, str], version: str) -> tuple[ExportTraceServiceRequest, ScopeSpans]:
    """Return an empty export, and the part of it that gets the spans."""
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add()
    spans.resource.attributes.extend(_attributes(resource.items()))
    scope = spans.scope_spans.add()
    scope.scope.name, scope.scope.version = SCOPE, version
    return request, scope


def add_spans(
    scope: ScopeSpans,
    pick: RecordedPick,
    epoch: float,
    random_bits: Callable[[int], int] = random.getrandbits,
) -> None:
    """Add the spans of one pick. ``epoch``: the Unix time at which ``perf_counter`` was 0, in seconds."""
    trace = pick.trace
    trace_id, span_id = bytes.fromhex(trace.trace_id), bytes.fromhex(trace.span_id)
    state = valid_state(trace.state) if trace.state else ""
    span = scope.spans.add(
        name=PICK,
        kind=Span.SPAN_KIND_SERVER,
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=bytes.fromhex(trace.parent_id),
        trace_state=state,
        flags=_FLAGS | _REMOTE if trace.parent_id else _FLAGS,
        start_time_unix_nano=_unix(pick.stages.started, epoch),
        end_time_unix_nano=_unix(pick.ended, epoch),
        attributes=_attributes(_figures(pick)),
    )
    if trace.failed:
        span.status.code, span.status.message = Status.STATUS_CODE_ERROR, pick.line.outcome
    for stage, begin, end in pick.intervals():
        scope.spans.add(
            name=STAGE + stage,
            kind=Span.SPAN_KIND_INTERNAL,
            trace_id=trace_id,
            span_id=(random_bits(64) | 1).to_bytes(8, "big"),
            parent_span_id=span_id,
            trace_state=state,
            flags=_FLAGS,
            start_time_unix_nano=_unix(begin, epoch),
            end_time_unix_nano=_unix(end, epoch),
        )


def _figures(pick: RecordedPick) -> Iterable[tuple[str, Value]]:
    line = pick.line
    yield from _request(line)
    yield "kvist.outcome", line.outcome
    if line.outcome != "picked":
        yield "error.type", line.outcome
    if line.waited_ms:
        yield "kvist.waited_seconds", line.waited_ms / 1000
    yield "kvist.prompt_tokens", pick.prompt_tokens
    if not line.endpoint:
        return
    yield "kvist.endpoint", line.endpoint
    yield "kvist.candidates", line.candidates
    yield "kvist.prompt_bytes", line.prompt_bytes
    yield "kvist.matched_tokens", line.matched_tokens
    if line.predicted_ttft_ms is not None:
        yield "kvist.predicted_ttft_seconds", line.predicted_ttft_ms / 1000
    for term, seconds in line.cost.items():
        if seconds:
            yield f"kvist.cost.{term}_seconds", seconds


def _request(line: RequestLine) -> Iterable[tuple[str, Value]]:
    yield "kvist.request_id", line.id
    yield "kvist.session", line.session
    yield "url.path", line.path
    yield "kvist.kind", line.kind
    if operation := OPERATIONS.get(line.kind):
        yield "gen_ai.operation.name", operation
    if line.model is not None:
        yield "gen_ai.request.model", line.model
    if line.mode:
        yield "kvist.mode", line.mode
    if line.priority:
        yield "kvist.priority", line.priority


def _attributes(items: Iterable[tuple[str, Value]]) -> list[KeyValue]:
    return [_attribute(key, value) for key, value in items]


def _attribute(key: str, value: Value) -> KeyValue:
    if isinstance(value, str):
        return _text(key, value) if key in _UNIQUE else _cached_text(key, value)
    if isinstance(value, float):
        return KeyValue(key=key, value=AnyValue(double_value=value))
    return KeyValue(key=key, value=AnyValue(int_value=value))


def _text(key: str, value: str) -> KeyValue:
    # a client's value may have any length, and lone surrogates where a header was not UTF-8
    return KeyValue(key=key, value=AnyValue(string_value=value[:MAX_TEXT].encode(errors="replace").decode()))


_UNIQUE: Final = frozenset(("kvist.request_id", "kvist.session"))
"""Attributes whose values do not recur."""
_cached_text: Final = lru_cache(maxsize=1024)(_text)


def _unix(at: float, epoch: float) -> int:
    return int((at + epoch) * _NANOSECONDS)
