"""The trace of a request, which are recorded, and what is recorded until its export: picks and ends. Pure.

Sources: W3C Trace Context (``traceparent``, ``tracestate``; level 2 for the random bits of ids), and
OpenTelemetry's sampler ``parentbased_traceidratio``: a request that comes with a context is recorded if its
sampled flag is set, one without begins a trace, of which a fraction is recorded.
"""

import random
import re
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final, NamedTuple

import msgspec

from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.names import TRACE_PARENT_HEADER, TRACE_STATE_HEADER
from kvist_epp.telemetry.counters import TimedStages, TraceStats
from kvist_epp.telemetry.request_log import RequestLine

MAX_STATE_BYTES: Final = 512
MAX_STATE_MEMBERS: Final = 32
"""A longer ``tracestate`` is dropped, as W3C Trace Context allows."""
MAX_PICKS: Final = 4096
"""Recorded picks and ends that wait for their export (about 3 KB each), and recorded requests that have not
ended; more are dropped and counted."""

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER: Final = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}", re.ASCII)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_SAMPLED: Final = 1
_RANDOM_BITS: Final = 56
"""The rightmost bits of a trace id, which are random by W3C Trace Context level 2."""
_RANDOM: Final = (1 << _RANDOM_BITS) - 1
_NOT_ZERO: Final = 1 << 127 | 1 << 63
"""First bit of a trace id and of a span id: ids of zeros are invalid."""
_QUEUE: Final = "queue"
_MATCH: Final = "match"

RandomBits = Callable[[int], int]


class TraceContext(msgspec.Struct, gc=False):
    """The trace of one request."""

    trace_id: str
    """32 lower-case hexadecimal digits."""
    parent_id: str
    """The caller's span; empty: the request came without a trace, and a sampled one begins here."""
    sampled: bool
    state: str = ""
    """``tracestate`` as received."""
    span_id: str = ""
    """Span of the pick; empty where none is recorded."""
    recorded: bool = False
    """Spans of the pick are exported."""
    failed: bool = False
    """The answer is an error of the server (5xx)."""

    def request_headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers to set on the request: a context that it had stays as it is."""
        if self.parent_id:
            return ()
        return ((TRACE_PARENT_HEADER, f"00-{self.trace_id}-{self.span_id}-01"),)


def read_trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the context of a request; None if it has none, or one that is malformed."""
    value = headers.get(TRACE_PARENT_HEADER)
    return None if value is None else _read(value, headers)


def _read(value: str, headers: Mapping[str, str]) -> TraceContext | None:
    if (found := _PARENT.fullmatch(value)) is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return None
    if more is not None and version == "00":  # only later versions may have more fields
        return None
    state = headers.get(TRACE_STATE_HEADER, "")
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & _SAMPLED), state)


def valid_state(state: str) -> str:
    """Return a ``tracestate`` that may be exported; empty if it is malformed or too long."""
    members = [member.strip(" \t") for member in state.split(",")]
    members = [member for member in members if member]
    if len(state) > MAX_STATE_BYTES or len(members) > MAX_STATE_MEMBERS:
        return ""
    return state if all(map(_MEMBER.fullmatch, members)) else ""


class RecordedPick(NamedTuple):
    """One answered request of which spans are exported."""

    trace: TraceContext
    line: RequestLine
    """Its figures; the prompt is not among them."""
    stages: TimedStages
    prompt_tokens: int
    ended: float
    """When its answer was ready, by ``perf_counter``."""

    def intervals(self) -> list[tuple[str, float, float]]:
        """Return (stage, begin, end) by ``perf_counter``: the marked stages, and the waits in the queue.

        A request that waits is matched again when it is dispatched, so that a wait ends where another match
        begins; one that left the queue without an endpoint waited until its end.
        """
        if not self.line.waited_ms:
            return self.stages.intervals
        found, matched, end = [], False, self.stages.started
        for stage, begin, until in self.stages.intervals:
            if stage == _MATCH and matched:
                found.append((_QUEUE, end, begin))
            matched, end = matched or stage == _MATCH, until
            found.append((stage, begin, until))
        if not self.line.endpoint:
            found.append((_QUEUE, end, self.ended))
        return found

    @property
    def span_count(self) -> int:
        """Return the number of its spans."""
        return 1 + len(self.intervals())


class RecordedEnd(NamedTuple):
    """The end of a request whose pick was recorded."""

    trace: TraceContext
    endpoint: str
    """The endpoint that served it, ``ip:port``."""
    predicted_tokens: int
    """Tokens that were predicted to be cached there."""
    cached_tokens: int | None
    """Tokens that its engine reported as cached; None: not reported."""
    first_token_seconds: float | None
    """Time to the first token, where the response is observed."""
    how: str
    """How its end became known (``RequestProgress.on_ended``)."""
    status: int
    """Of the response; 0: not known."""
    began: float
    """When it was answered, by ``perf_counter``."""
    ended: float
    """When its end became known, by ``perf_counter``."""

    @property
    def span_count(self) -> int:
        """Return the number of its spans."""
        return 1


Recorded = RecordedPick | RecordedEnd


class PickTracer:
    """Decides which picks are recorded, and keeps those until the exporter takes them."""

    def __init__(
        self,
        ratio: float,
        stats: TraceStats,
        *,
        random_bits: RandomBits = random.getrandbits,
        limit: int = MAX_PICKS,
    ) -> None:
        """``ratio``: fraction of the traces that begin here which is recorded."""
        self._bound = round(ratio * (1 << _RANDOM_BITS))
        self._stats = stats
        self._random_bits = random_bits
        self._limit = limit
        self._waiting: deque[Recorded] = deque()
        self._sent: dict[InFlightRequest, tuple[TraceContext, float]] = {}
        """Recorded requests that have not ended, with the time of their answer."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, headers: Mapping[str, str]) -> TraceContext | None:
        """Return the context of a request: its own, or that of a trace that begins with it; None if the
        latter is not sampled, since nothing is known of such a trace anywhere."""
        value = headers.get(TRACE_PARENT_HEADER)
        trace = None if value is None else _read(value, headers)
        if trace is None:
            bits = self._random_bits(64)
            if bits & _RANDOM >= self._bound:
                return None
            ids = f"{self._random_bits(128) | _NOT_ZERO:032x}"
            return TraceContext(f"{ids[:16]}{bits:016x}", "", True, "", ids[16:], True)
        if trace.sampled:
            trace.span_id, trace.recorded = f"{self._random_bits(64) | 1:016x}", True
        return trace

    def add(self, recorded: Recorded) -> None:
        """Keep a pick, or an end, for the exporter."""
        if len(self._waiting) < self._limit:
            self._waiting.append(recorded)
        else:
            self._stats.dropped["queue-full"] += recorded.span_count

    def on_sent(self, request: InFlightRequest, trace: TraceContext) -> None:
        """Keep the trace of a recorded request until it ends; the span of its end is lost beyond the
        limit."""
        if len(self._sent) < self._limit:
            self._sent[request] = trace, perf_counter()
        else:
            self._stats.dropped["queue-full"] += 1

    def on_request_ended(self, request: InFlightRequest, how: str, status: int) -> None:
        """Record the end of a request, if its pick was; ``status``: 0 if it is not known."""
        if (sent := self._sent.pop(request, None)) is not None:
            figures = request.predicted_tokens, request.cached_tokens, request.first_token_seconds
            endpoint, (trace, since) = request.attempt.hostport, sent
            self.add(RecordedEnd(trace, endpoint, *figures, how, status, since, perf_counter()))

    def take(self, most: int) -> list[Recorded]:
        """Return up to ``most`` picks and ends, oldest first, and forget them."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]
