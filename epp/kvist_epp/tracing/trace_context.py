"""The trace of a request, which picks are recorded, and the picks that wait for their export. Pure.

Sources: W3C Trace Context (``traceparent``, ``tracestate``; level 2 for the random bits of ids), and
OpenTelemetry's sampler ``parentbased_traceidratio``: a request that comes with a context is recorded if its
sampled flag is set, one without begins a trace, of which a fraction is recorded.
"""

import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from kvist_epp.names import TRACE_PARENT_HEADER, TRACE_STATE_HEADER
from kvist_epp.telemetry.counters import TimedStages, TraceStats
from kvist_epp.telemetry.request_log import RequestLine

MAX_STATE_BYTES: Final = 512
MAX_STATE_MEMBERS: Final = 32
"""A longer ``tracestate`` is dropped, as W3C Trace Context allows."""
MAX_PICKS: Final = 4096
"""Recorded picks that wait for their export (about 3 KB each); more are dropped and counted."""

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER: Final = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}", re.ASCII)
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_SAMPLED: Final = 1
_RANDOM_BITS: Final = 56
"""The rightmost bits of a trace id, which are random by W3C Trace Context level 2."""
_NOT_ZERO: Final = 1 << 191 | 1 << 63
"""First bit of a trace id and of a span id: ids of zeros are invalid."""
_QUEUE: Final = "queue"
_MATCH: Final = "match"

RandomBits = Callable[[int], int]


class TraceContext(msgspec.Struct):
    """The trace of one request."""

    trace_id: str
    """32 lower-case hexadecimal digits."""
    parent_id: str
    """The caller's span; empty: the request came without a trace, and the picker begins it."""
    sampled: bool
    state: str = ""
    """``tracestate`` as received."""
    span_id: str = ""
    """Span of the pick; empty where none is recorded and none is passed on."""
    failed: bool = False
    """The answer is an error of the server (5xx)."""

    @property
    def recorded(self) -> bool:
        """Return whether spans of the pick are exported."""
        return self.sampled and bool(self.span_id)

    @property
    def request_headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers to set on the request: a context that it had stays as it is."""
        if self.parent_id or not self.span_id:
            return ()
        return ((TRACE_PARENT_HEADER, f"00-{self.trace_id}-{self.span_id}-0{self.sampled:d}"),)


def read_trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the context of a request; None if it has none, or one that is malformed."""
    value = headers.get(TRACE_PARENT_HEADER)
    if value is None or (found := _PARENT.fullmatch(value)) is None:
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

    def intervals(self) -> Iterator[tuple[str, float, float]]:
        """Yield (stage, begin, end) by ``perf_counter``: the marked stages, and the waits in the queue.

        A request that waits is matched again when it is dispatched, so that a wait ends where another match
        begins; one that left the queue without an endpoint waited until its end.
        """
        matched, end = False, self.stages.started
        for (stage, seconds), until in zip(self.stages.laps, self.stages.ends, strict=True):
            if stage == _MATCH and matched:
                yield _QUEUE, end, until - seconds
            matched = matched or stage == _MATCH
            yield stage, until - seconds, until
            end = until
        if self.line.waited_ms and not self.line.endpoint:
            yield _QUEUE, end, self.ended

    @property
    def span_count(self) -> int:
        """Return the number of its spans."""
        return 1 + sum(1 for _ in self.intervals())


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
        self._picks: deque[RecordedPick] = deque()

    def __len__(self) -> int:
        return len(self._picks)

    def begin(self, headers: Mapping[str, str]) -> TraceContext:
        """Return the context of a request: its own, or that of a trace that begins with it."""
        trace = read_trace_context(headers)
        if trace is None:
            bits = self._random_bits(192) | _NOT_ZERO
            ids = f"{bits:048x}"
            sampled = (bits >> 64) & ((1 << _RANDOM_BITS) - 1) < self._bound
            return TraceContext(ids[:32], "", sampled, "", ids[32:])
        if trace.sampled:
            trace.span_id = f"{self._random_bits(64) | 1:016x}"
        return trace

    def add(self, pick: RecordedPick) -> None:
        """Keep a pick for the exporter."""
        if len(self._picks) < self._limit:
            self._picks.append(pick)
        else:
            self._stats.dropped["queue-full"] += pick.span_count

    def take(self, most: int) -> list[RecordedPick]:
        """Return up to ``most`` picks, oldest first, and forget them."""
        picks = self._picks
        return [picks.popleft() for _ in range(min(most, len(picks)))]
