"""Traces of picks: which requests are recorded, what is kept of them, and what the engine gets."""

import itertools
from typing import Any

import msgspec
import pytest
from tests.epp.parts import Parts, ask, chat, make
from tests.epp.tracing.picks import PARENT, TRACE

from kvist_epp.director.completion import CompletionHandler
from kvist_epp.errors import BadRequest, NoEndpoints
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.extproc.response import FirstToken, ObservedResponse, Usage
from kvist_epp.flowcontrol.flow_controller import FlowLimits, QueuedRequest
from kvist_epp.telemetry.counters import TimedStages, TraceStats
from kvist_epp.tracing.trace_context import PickTracer, RecordedEnd, RecordedPick, read_trace_context

SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


def traced(ratio: float = 1.0, count: int = 2, **more: Any) -> tuple[Parts, PickTracer]:
    """A director that records traces."""
    tracer = PickTracer(ratio, TraceStats())
    return make(count, tracer=tracer, **more), tracer


def only(tracer: PickTracer) -> RecordedPick:
    """The one recorded pick."""
    [found] = tracer.take(100)
    assert isinstance(found, RecordedPick)
    return found


def end_of(parts: Parts, tracer: PickTracer, session: str = "s", how: str = "access-log") -> RecordedEnd:
    """End a request; return what is recorded of that."""
    tracer.take(100)
    parts.end(session, how=how)
    [found] = tracer.take(100)
    assert isinstance(found, RecordedEnd)
    return found


def trace_of(parts: Parts, **headers: str) -> dict[str, str]:
    """The trace headers that a request is sent with."""
    picked = parts.decide(ask(chat("hello"), headers=headers))
    assert isinstance(picked, PickResult)
    return {name: value for name, value in picked.headers if name.startswith("trace")}


def test_a_sampled_request_is_recorded_with_its_figures() -> None:
    """The pick of a sampled request has the caller's span as parent, its stages, and the figures of its log
    line."""
    parts, tracer = traced(0.0)
    assert trace_of(parts, **SAMPLED) == {}
    found, line = only(tracer), parts.log.lines[0]

    assert (found.trace.trace_id, found.trace.parent_id) == (TRACE, PARENT)
    assert [stage for stage, _, _ in found.intervals()] == ["parse", "render", "match", "pick", "book"]
    assert found.line is line
    assert (line.trace_id, line.span_id) == (TRACE, found.trace.span_id)
    assert line.endpoint is not None
    assert found.prompt_tokens > 0


def test_stages_keep_their_times() -> None:
    """Stages of a recorded pick are in order, do not overlap, and lie within the pick."""
    parts, tracer = traced()
    trace_of(parts)
    found = only(tracer)
    times = [found.stages.started]
    for _, begin, end in found.intervals():
        times += [begin, end]
    times.append(found.ended)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(times))


def test_an_unsampled_request_is_only_logged() -> None:
    """A request whose caller does not sample is not recorded, and its log line has its trace."""
    parts, tracer = traced(1.0)
    assert trace_of(parts, **UNSAMPLED) == {}
    line = parts.log.lines[0]
    assert (len(tracer), line.trace_id, line.span_id) == (0, TRACE, PARENT)


def test_a_trace_that_begins_here_reaches_the_engine() -> None:
    """Without a context the picker begins a trace, and the engine's span becomes a child of the pick."""
    parts, tracer = traced(1.0)
    passed = read_trace_context(trace_of(parts))
    assert passed is not None
    line = parts.log.lines[0]
    assert (passed.trace_id, passed.parent_id) == (line.trace_id, line.span_id)
    assert (passed.sampled, len(tracer)) == (True, 1)


def test_a_request_that_is_not_sampled_here_has_no_trace() -> None:
    """Without a context and without a sample nothing is added to the request or to its log line."""
    parts, tracer = traced(0.0)
    assert trace_of(parts) == {}
    assert (len(tracer), parts.log.lines[0].trace_id) == (0, msgspec.UNSET)


def test_without_a_tracer_only_the_log_has_the_trace() -> None:
    """A request's own trace is logged where traces are off, and no request gets one."""
    parts = make()
    assert trace_of(parts, **SAMPLED) == {}
    assert trace_of(parts) == {}
    first, second = parts.log.lines
    assert (first.trace_id, first.span_id) == (TRACE, PARENT)
    assert second.trace_id is second.span_id is msgspec.UNSET
    assert b"trace_id" not in msgspec.json.encode(second)


def test_a_request_without_log_lines_is_recorded_all_the_same() -> None:
    """With --log-requests=false the figures of a recorded pick are the same."""
    parts, tracer = traced()
    parts.log.enabled = False
    trace_of(parts)
    assert only(tracer).line.endpoint in [endpoint.hostport for endpoint in parts.endpoints]


def test_refusals_are_recorded() -> None:
    """A refused request is recorded with its reason; only errors of the server make it fail."""
    parts, tracer = traced(count=0)
    with pytest.raises(NoEndpoints):
        parts.decide(ask(chat("hello"), headers=SAMPLED))
    found = only(tracer)
    assert (found.line.outcome, found.trace.failed) == ("rejected-no-endpoints", True)

    with pytest.raises(BadRequest):
        parts.decide(ask(b"{", headers=SAMPLED))
    found = only(tracer)
    assert (found.line.outcome, found.trace.failed) == ("bad-json", False)


def test_a_wait_in_the_queue_is_a_stage() -> None:
    """A request that waits for an endpoint has its wait between the match and the match at dispatch."""
    parts, tracer = traced(count=1, limits=FlowLimits())
    everything = parts.candidates()
    parts.director.set_endpoints((), parts.clock())
    queued = parts.decide(ask(chat("hello"), headers=SAMPLED))
    assert isinstance(queued, QueuedRequest)
    assert len(tracer) == 0
    parts.clock.now += 2.0
    parts.director.set_endpoints(everything, parts.clock())
    flow = parts.director.flow
    assert flow is not None
    answered = flow.poll(parts.clock()).step(parts.clock())
    assert answered is not None
    assert isinstance(answered[1], PickResult)

    found = only(tracer)
    stages = [stage for stage, _, _ in found.intervals()]
    assert stages == ["parse", "render", "match", "queue", "match", "pick", "book"]
    assert found.line.waited_ms == 2000.0


def test_the_end_of_a_recorded_request_is_recorded() -> None:
    """The record has the pick's trace, the endpoint, the true hit and the time to the first token."""
    parts, tracer = traced(0.0)
    trace_of(parts, **SAMPLED, **{"x-session-id": "s", "x-request-id": "r"})
    request = parts.director.table.find("s")
    assert request is not None
    parts.director.tracker.on_cache_truth(request, 48, parts.clock())
    parts.director.tracker.on_cache_truth(request, 99, parts.clock())  # only the first report counts
    CompletionHandler(parts.director, parts.clock).on_first_token(FirstToken("s", "r", None, 200, 0.5))
    pick = only(tracer)

    end = end_of(parts, tracer)
    assert end.trace is pick.trace
    assert (end.endpoint, end.how) == (pick.line.endpoint, "access-log")
    assert (end.cached_tokens, end.first_token_seconds) == (48, 0.5)
    assert pick.stages.started <= end.began <= end.ended


def test_an_end_without_reports_says_so() -> None:
    """An end that is only estimated has neither true hit nor first token."""
    parts, tracer = traced(0.0)
    trace_of(parts, **SAMPLED, **{"x-session-id": "s"})
    end = end_of(parts, tracer, how="expired")
    assert (end.how, end.status, end.cached_tokens, end.first_token_seconds) == ("expired", 0, None, None)


@pytest.mark.parametrize("headers", [UNSAMPLED, {}])
def test_ends_of_other_requests_are_not_recorded(headers: dict[str, str]) -> None:
    """Nothing is kept of a request that is not sampled, at its pick or at its end."""
    parts, tracer = traced(0.0)
    trace_of(parts, **headers, **{"x-session-id": "s"})
    parts.end("s")
    assert len(tracer) == 0


def test_recorded_requests_that_do_not_end_are_bounded() -> None:
    """Beyond the limit the span of the end is lost and counted, and the pick is recorded all the same."""
    stats = TraceStats()
    tracer = PickTracer(0.0, stats, limit=2)
    parts = make(1, tracer=tracer)
    for number in range(4):
        trace_of(parts, **SAMPLED, **{"x-session-id": str(number)})
        assert len(tracer.take(100)) == 1
    for number in range(4):
        parts.end(str(number))
    assert (len(tracer.take(100)), stats.dropped["queue-full"]) == (2, 2)


def test_recorded_picks_do_not_keep_prompts() -> None:
    """A pick that waits for the exporter has no prompt in it."""
    parts, tracer = traced()
    parts.decide(ask(chat("a secret prompt of some length")))
    found = only(tracer)
    assert isinstance(found.stages, TimedStages)
    assert "secret" not in repr((found.trace, found.line, found.stages.laps))
    assert set(RecordedPick._fields) == {"trace", "line", "stages", "prompt_tokens", "ended"}


@pytest.mark.parametrize(("headers", "trace"), [(SAMPLED, TRACE), (UNSAMPLED, ""), ({}, "")])
def test_exemplars_name_the_traces_that_are_kept(headers: dict[str, str], trace: str) -> None:
    """The metrics of a sampled request have the id of its trace beside its own; other traces could not be
    found."""
    limits = FlowLimits(capacity_seconds=60.0, empty_seconds=60.0)
    parts, _ = traced(0.0, 1, limits=limits)
    director, ids = parts.director, {"x-request-id": "id", "x-session-id": "s"}
    parts.decide(ask(chat("hello"), headers=headers | ids))
    completion = CompletionHandler(director, parts.clock)
    completion.on_first_token(FirstToken("s", "id", None, 200, 0.5))
    completion.on_response(ObservedResponse("s", "id", None, 200, Usage(9, 9), True, 0.5, 0.9))
    director.set_endpoints((), parts.clock())
    queued = parts.decide(ask(chat("hello"), headers=headers | ids))
    assert isinstance(queued, QueuedRequest)
    assert director.flow is not None
    director.flow.cancel(queued, parts.clock())

    metrics = director.metrics
    for histogram in (
        *(metrics.pick, metrics.predicted_first_token, metrics.first_token, metrics.first_token_ratio),
        *(metrics.output_token, metrics.queue_waits["rejected-context-cancelled"]),
    ):
        assert {found[:2] for found in histogram.exemplars().values()} == {("id", trace)}


def test_the_trace_of_a_websocket_ends_with_its_pick() -> None:
    """A socket is not followed, so its trace is complete at once, and takes no place from others."""
    parts, tracer = traced()
    parts.decide(ask(b"", "/v1/realtime", websocket=True))

    kinds = [type(each) for each in tracer.take(100)]
    assert sorted(kinds, key=str) == sorted([RecordedPick, RecordedEnd], key=str)
    assert not tracer._sent
