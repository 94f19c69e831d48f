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
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from kvist_epp.extproc.gateway_messages import varint
from kvist_epp.telemetry.request_log import MAX_TEXT
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
_NANOSECONDS: Final = 1e9

# Tags of the fields of Span: the number, and the kind of the value in the last three bits.
_TRACE_ID: Final = b"\x0a\x10"
_SPAN_ID: Final = b"\x12\x08"
_STATE: Final = b"\x1a"
_PARENT_ID: Final = b"\x22\x08"
_NAME: Final = b"\x2a"
_KIND: Final = b"\x30"
_START: Final = b"\x39"
_STOP: Final = b"\x41"
_ATTRIBUTE: Final = b"\x4a"
_STATUS: Final = b"\x7a"
_FLAGS_TAG: Final = b"\x85\x01"
_SPAN: Final = b"\x12"
"""A span in ``ScopeSpans``."""
_STATUS_ERROR: Final = b"\x18\x02"

_REQUEST_ID, _SESSION = "kvist.request_id", "kvist.session"
_PROMPT_TOKENS, _PROMPT_BYTES = "kvist.prompt_tokens", "kvist.prompt_bytes"
_MATCHED, _PREDICTED = "kvist.matched_tokens", "kvist.predicted_ttft_seconds"
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
        state = b"" if not trace.state else _state(trace.state)
        ids = bytes.fromhex(trace.trace_id + trace.span_id + trace.parent_id)
        trace_id, span_id = ids[:16], ids[16:24]
        number = self._random_bits(63) | 1  # of the first child; the others count on from there
        if isinstance(recorded, RecordedEnd):
            children = [(END, recorded.began, recorded.ended)]
            more, spans = state + _end_attributes(recorded), []
        else:
            children, more = recorded.intervals(), state
            spans = _pick(recorded, trace_id, span_id, ids[24:], state, epoch)
        size, last, stop = len(more), 0.0, 0
        for name, begin, end in children:
            pack, head, middle = _child(name, size)
            start = stop if begin == last else int((begin + epoch) * _NANOSECONDS)
            last, stop = end, int((end + epoch) * _NANOSECONDS)
            spans.append(
                pack(head, trace_id, _SPAN_ID, number, _PARENT_ID, span_id, middle, start, _STOP, stop)
            )
            if more:
                spans.append(more)
            number += 1
        return b"".join(spans)


def _pick(
    pick: RecordedPick, trace_id: bytes, span_id: bytes, parent_id: bytes, state: bytes, epoch: float
) -> list[bytes]:
    """Return the span of a pick, in parts."""
    trace, line, stages = pick.trace, pick.line, pick.stages
    start, stop = int((stages.started + epoch) * _NANOSECONDS), int((pick.ended + epoch) * _NANOSECONDS)
    parts = [
        b"",  # its length
        _PICK_TIMES(_TRACE_ID, trace_id, _SPAN_ID, span_id, _PICK_NAME, start, _STOP, stop),
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
    ]
    if parent_id:
        parts += (_REMOTE_PARENT, parent_id, state)
    else:
        parts.append(_LOCAL)
    for key, text in (_REQUEST_ID, line.id), (_SESSION, line.session):
        raw = _raw(text)
        parts += (_text_head(key, len(raw)), raw)
    parts += _integer(_PROMPT_TOKENS, pick.prompt_tokens)
    if line.waited_ms:
        parts += (_double_head("kvist.waited_seconds"), _DOUBLE(line.waited_ms / 1000))
    if line.endpoint:
        parts += _integer(_PROMPT_BYTES, line.prompt_bytes)
        parts += _integer(_MATCHED, line.matched_tokens)
        if line.predicted_ttft_ms is not None:
            parts += (_double_head(_PREDICTED), _DOUBLE(line.predicted_ttft_ms / 1000))
        for term, seconds in line.cost.items():
            if seconds:
                parts += (_cost_head(term), _DOUBLE(seconds))
    if trace.failed:
        parts.append(_field(_STATUS, _field(b"\x12", line.outcome.encode()) + _STATUS_ERROR))
    parts[0] = _SPAN + _varint(sum(map(len, parts)))
    return parts


@lru_cache(maxsize=1024)
def _child(name: str, more: int) -> tuple[Callable[..., bytes], bytes, bytes]:
    """Return what encodes a child of a pick that has so many bytes behind its times; and its first bytes, and
    those between the ids and the times."""
    middle = _LOCAL + _name(name if name == END else STAGE + name, _INTERNAL) + _START
    size = len(_TRACE_ID + _SPAN_ID + _PARENT_ID) + 16 + 8 + 8 + len(middle) + 8 + len(_STOP) + 8 + more
    head = _SPAN + varint(size) + _TRACE_ID
    return Struct(f"<{len(head)}s16s2sQ2s8s{len(middle)}sQsQ").pack, head, middle


@lru_cache(maxsize=1024)
def _state(state: str) -> bytes:
    return _field(_STATE, text.encode()) if (text := valid_state(state)) else b""


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


def _end_attributes(end: RecordedEnd) -> bytes:
    parts = [_ended(end.endpoint, end.how, end.status)]
    parts += _integer("kvist.predicted_cached_tokens", end.predicted_tokens)
    if end.cached_tokens is not None:
        parts += _integer("kvist.cached_tokens", end.cached_tokens)
    if end.first_token_seconds is not None:
        parts += (_double_head("kvist.ttft_seconds"), _DOUBLE(end.first_token_seconds))
    return b"".join(parts)


@lru_cache(maxsize=4096)
def _ended(endpoint: str, how: str, status: int) -> bytes:
    found = _attribute("kvist.endpoint", endpoint) + _attribute("kvist.end", how)
    return found + _attribute("http.response.status_code", status) if status else found


def _name(name: str, kind: int) -> bytes:
    return _field(_NAME, name.encode()) + _KIND + varint(kind)


# Attributes: KeyValue has a key (1) and a value (2); AnyValue a string (1), an integer (3) or a double (4).


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + varint(len(content)) + content


def _key_value(key: str, value: bytes) -> bytes:
    return _field(b"\x0a", key.encode()) + _field(b"\x12", value)


def _string_value(value: str) -> bytes:
    return _field(b"\x0a", _raw(value))


def _raw(text: str) -> bytes:
    """Encode a client's value: of any length, with lone surrogates where a header was not UTF-8."""
    try:
        return text[:MAX_TEXT].encode()
    except UnicodeEncodeError:
        return text[:MAX_TEXT].encode(errors="replace")


def _attribute(key: str, value: str | int) -> bytes:
    if isinstance(value, int):
        return b"".join(_integer(key, value))
    return _field(_ATTRIBUTE, _key_value(key, _string_value(value)))


def _integer(key: str, value: int) -> tuple[bytes, bytes]:
    """Return an attribute in two parts."""
    raw = _varint(value if value >= 0 else value + (1 << 64))
    return _integer_head(key, len(raw)), raw


@lru_cache(maxsize=64)
def _cost_head(term: str) -> bytes:
    return _double_head(f"kvist.cost.{term}_seconds")


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


_varint: Final = lru_cache(maxsize=16_384)(varint)
_REMOTE_PARENT: Final = _FLAGS_TAG + (_FLAGS | _REMOTE).to_bytes(4, "little") + _PARENT_ID
_LOCAL: Final = _FLAGS_TAG + _FLAGS.to_bytes(4, "little")
_PICK_NAME: Final = _name(PICK, _SERVER) + _START
_PICK_TIMES: Final = Struct(f"<2s16s2s8s{len(_PICK_NAME)}sQsQ").pack
