"""Recorded picks and ends of requests as spans of OTLP, in protobuf's encoding. Pure.

A pick is a span ``kvist.pick`` of kind SERVER, whose parent is the caller's span (Envoy's span of the
ext_proc call, or the client's), and one child ``kvist.stage.…`` for each stage. Another child,
``kvist.request_end``, lasts from the answer to the moment when the request's end became known. Attributes
that OpenTelemetry's semantic conventions define have those names (``gen_ai.…``, ``url.path``,
``error.type``), the others begin with ``kvist.``. The endpoint is no ``server.address``, which on a span of
kind SERVER is the server's own.

The bytes are put together here, without an object for each span and attribute: what recurs is encoded once,
and a span without attributes is one call of ``struct``. Sources: the field numbers of
``opentelemetry/proto/trace/v1/trace.proto`` and ``common.proto`` (release 1.7), and protobuf's encoding.
``tests/epp/tracing`` reads them with the generated code.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from kvist_epp.extproc.gateway_messages import varint
from kvist_epp.telemetry.request_log import MAX_TEXT, RequestLine
from kvist_epp.tracing.trace_context import Recorded, RecordedEnd, RecordedPick, valid_state

SCOPE: Final = "kvist_epp"
PICK: Final = "kvist.pick"
STAGE: Final = "kvist.stage."
END: Final = "kvist.request_end"
OPERATIONS: Final[Mapping[str, str]] = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completion": "text_completion",
}
"""``gen_ai.operation.name`` by the kind of the request; other kinds have none."""

_INTERNAL, _SERVER = 1, 2
"""``SpanKind``."""
_FLAGS: Final = 0x101
"""``SpanFlags``: sampled, and it is known whether the parent is remote."""
_REMOTE: Final = 0x200
_NANOSECONDS: Final = 1_000_000_000
_FIRST_BIT: Final = 1 << 63

# Tags of the fields of Span: the number, and the kind of the value in the last three bits.
_TRACE_ID: Final = b"\x0a\x10"
_SPAN_ID: Final = b"\x12\x08"
_STATE: Final = b"\x1a"
_PARENT_ID: Final = b"\x22\x08"
_NAME: Final = b"\x2a"
_KIND: Final = b"\x30"
_START: Final = b"\x39"
_END_TIME: Final = b"\x41"
_ATTRIBUTE: Final = b"\x4a"
_STATUS: Final = b"\x7a"
_FLAGS_TAG: Final = b"\x85\x01"
_SPAN: Final = b"\x12"
"""A span in ``ScopeSpans``."""
_STATUS_ERROR: Final = b"\x18\x02"

_HEAD: Final = Struct("<2s16s2s8s2s8s").pack
"""Ids of a span: trace, span and parent."""
_CHILD: Final = Struct("<2s16s2sQ2s8s").pack
"""The same, of a child whose id is a number."""
_TIMES: Final = Struct("<sQsQ2sI").pack
"""Start, end and flags."""
_DOUBLE: Final = Struct("<d").pack

RandomBits = Callable[[int], int]


class SpanEncoder:
    """Makes exports of one picker."""

    def __init__(
        self, resource: Mapping[str, str], version: str, random_bits: RandomBits = random.getrandbits
    ) -> None:
        """``resource``: attributes of the picker."""
        self._random_bits = random_bits
        attributes = b"".join(
            _field(b"\x0a", _key_value(key, _string_value(value))) for key, value in resource.items()
        )
        self._resource = _field(b"\x0a", attributes)
        name = _field(b"\x0a", SCOPE.encode()) + _field(b"\x12", version.encode())
        self._scope = _field(b"\x0a", name)

    def export(self, spans: Sequence[bytes]) -> bytes:
        """Return an ``ExportTraceServiceRequest`` with what ``spans`` returned."""
        size = len(self._scope) + sum(map(len, spans))
        scope = b"\x12" + varint(size)
        resource = b"\x0a" + varint(len(self._resource) + len(scope) + size)
        return b"".join((resource, self._resource, scope, self._scope, *spans))

    def spans(self, recorded: Recorded, epoch: float) -> bytes:
        """Return the spans of a pick or of an end.

        ``epoch``: the Unix time at which ``perf_counter`` was 0, in seconds.
        """
        trace = recorded.trace
        ids = bytes.fromhex(trace.trace_id), bytes.fromhex(trace.span_id)
        state = _field(_STATE, text.encode()) if (text := valid_state(trace.state)) else b""
        if isinstance(recorded, RecordedEnd):
            first = self._random_bits(64) | _FIRST_BIT
            return _child(ids, first, state, _END_NAME, recorded.began, recorded.ended, epoch, _end(recorded))
        return self._pick(recorded, ids, state, epoch)

    def _pick(self, pick: RecordedPick, ids: tuple[bytes, bytes], state: bytes, epoch: float) -> bytes:
        trace, line = pick.trace, pick.line
        if trace.parent_id:
            head = _HEAD(_TRACE_ID, ids[0], _SPAN_ID, ids[1], _PARENT_ID, bytes.fromhex(trace.parent_id))
            flags = _FLAGS | _REMOTE
        else:
            head, flags = b"".join((_TRACE_ID, ids[0], _SPAN_ID, ids[1])), _FLAGS
        parts = [
            head,
            state,
            _PICK_NAME,
            _times(pick.stages.started, pick.ended, epoch, flags),
            _recurring(
                line.path,
                line.kind,
                line.model,
                line.mode,
                line.priority,
                line.outcome,
                line.endpoint,
                line.candidates,
            ),
            _text("kvist.request_id", line.id),
            _text("kvist.session", line.session),
            *_figures(pick),
        ]
        if trace.failed:
            parts.append(_field(_STATUS, _field(b"\x12", line.outcome.encode()) + _STATUS_ERROR))
        spans = [_SPAN + varint(sum(map(len, parts))), *parts]
        first = self._random_bits(64) | _FIRST_BIT  # the children count on from there
        for number, (stage, begin, end) in enumerate(pick.intervals()):
            spans.append(_child(ids, first ^ number, state, _stage_name(stage), begin, end, epoch))
        return b"".join(spans)


def _figures(pick: RecordedPick) -> Iterator[bytes]:
    """Yield the attributes whose values hardly recur."""
    line = pick.line
    yield _integer("kvist.prompt_tokens", pick.prompt_tokens)
    if line.waited_ms:
        yield _double("kvist.waited_seconds", line.waited_ms / 1000)
    if not line.endpoint:
        return
    yield _integer("kvist.prompt_bytes", line.prompt_bytes)
    yield _integer("kvist.matched_tokens", line.matched_tokens)
    if line.predicted_ttft_ms is not None:
        yield _double("kvist.predicted_ttft_seconds", line.predicted_ttft_ms / 1000)
    for term, seconds in line.cost.items():
        if seconds:
            yield _double(f"kvist.cost.{term}_seconds", seconds)


@lru_cache(maxsize=4096)
def _recurring(
    path: str,
    kind: str,
    model: str | None,
    mode: str,
    priority: int,
    outcome: str,
    endpoint: str | None,
    candidates: int,
) -> bytes:
    """Return the attributes that many picks have alike."""
    found: dict[str, str | int | None] = {
        "url.path": path,
        "kvist.kind": kind,
        "gen_ai.operation.name": OPERATIONS.get(kind),
        "gen_ai.request.model": model,
        "kvist.mode": mode or None,
        "kvist.priority": priority or None,
        "kvist.outcome": outcome,
        "error.type": None if outcome == "picked" else outcome,
        "kvist.endpoint": endpoint or None,
        "kvist.candidates": candidates if endpoint else None,
    }
    return b"".join(_attribute(key, value) for key, value in found.items() if value is not None)


def _end(end: RecordedEnd) -> bytes:
    found = [_ended(end.endpoint, end.how, end.status)]
    found.append(_integer("kvist.predicted_cached_tokens", end.predicted_tokens))
    if end.cached_tokens is not None:
        found.append(_integer("kvist.cached_tokens", end.cached_tokens))
    if end.first_token_seconds is not None:
        found.append(_double("kvist.ttft_seconds", end.first_token_seconds))
    return b"".join(found)


@lru_cache(maxsize=4096)
def _ended(endpoint: str, how: str, status: int) -> bytes:
    found = _attribute("kvist.endpoint", endpoint) + _attribute("kvist.end", how)
    return found + _attribute("http.response.status_code", status) if status else found


def _child(
    ids: tuple[bytes, bytes],
    number: int,
    state: bytes,
    name: bytes,
    begin: float,
    end: float,
    epoch: float,
    attributes: bytes = b"",
) -> bytes:
    """Return a span in the pick's."""
    head = _CHILD(_TRACE_ID, ids[0], _SPAN_ID, number, _PARENT_ID, ids[1])
    body = b"".join((head, state, name, _times(begin, end, epoch, _FLAGS), attributes))
    return _SPAN + varint(len(body)) + body


def _times(begin: float, end: float, epoch: float, flags: int) -> bytes:
    start, stop = int((begin + epoch) * _NANOSECONDS), int((end + epoch) * _NANOSECONDS)
    return _TIMES(_START, start, _END_TIME, stop, _FLAGS_TAG, flags)


def _name(name: str, kind: int) -> bytes:
    return _field(_NAME, name.encode()) + _KIND + varint(kind)


@lru_cache(maxsize=64)
def _stage_name(stage: str) -> bytes:
    return _name(STAGE + stage, _INTERNAL)


# Attributes: KeyValue has a key (1) and a value (2); AnyValue a string (1), an integer (3) or a double (4).


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + varint(len(content)) + content


def _key_value(key: str, value: bytes) -> bytes:
    return _field(b"\x0a", key.encode()) + _field(b"\x12", value)


def _string_value(value: str) -> bytes:
    # a client's value may have any length, and lone surrogates where a header was not UTF-8
    return _field(b"\x0a", value[:MAX_TEXT].encode(errors="replace"))


def _attribute(key: str, value: str | int) -> bytes:
    if isinstance(value, int):
        return _integer(key, value)
    return _field(_ATTRIBUTE, _key_value(key, _string_value(value)))


def _text(key: str, value: str) -> bytes:
    """Return an attribute whose value does not recur."""
    raw = value[:MAX_TEXT].encode(errors="replace")
    return _text_head(key, len(raw)) + raw


def _integer(key: str, value: int) -> bytes:
    raw = varint(value if value >= 0 else value + (1 << 64))
    return _integer_head(key, len(raw)) + raw


def _double(key: str, value: float) -> bytes:
    return _double_head(key) + _DOUBLE(value)


@lru_cache(maxsize=1024)
def _text_head(key: str, size: int) -> bytes:
    return _before(key, b"\x0a" + varint(size), size)


@lru_cache(maxsize=1024)
def _integer_head(key: str, size: int) -> bytes:
    return _before(key, b"\x18", size)


@lru_cache(maxsize=1024)
def _double_head(key: str) -> bytes:
    return _before(key, b"\x21", 8)


def _before(key: str, tag: bytes, size: int) -> bytes:
    """Return an attribute up to its value of this size, which ``tag`` announces."""
    name = _field(b"\x0a", key.encode()) + b"\x12" + varint(len(tag) + size) + tag
    return _ATTRIBUTE + varint(len(name) + size) + name


_PICK_NAME: Final = _name(PICK, _SERVER)
_END_NAME: Final = _name(END, _INTERNAL)
