"""One pick as spans: names, parents, times, attributes."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.epp.tracing.picks import LAPS, PARENT, SPAN, TRACE, end, pick

from kvist_epp.tracing.pick_spans import SpanEncoder
from kvist_epp.tracing.trace_context import Recorded

EPOCH = 1_700_000_000.0


def spans(*recorded: Recorded) -> list[Span]:
    """The spans of picks and ends, as a collector reads them."""
    encoder = SpanEncoder({"service.name": "kvist-epp"}, "1")
    export = ExportTraceServiceRequest.FromString(encoder.export([encoder.spans(r, EPOCH) for r in recorded]))
    [found] = export.resource_spans
    [scope] = found.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("kvist_epp", "1")
    assert [(each.key, each.value.string_value) for each in found.resource.attributes] == [
        ("service.name", "kvist-epp")
    ]
    return list(scope.spans)


def attributes(span: Span) -> dict[str, Any]:
    """The attributes of a span."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in span.attributes}


def test_a_pick_and_its_stages_are_spans_of_one_trace() -> None:
    """The pick is a child of the caller's span, and each stage one of the pick, in order and without gaps."""
    [top, *stages] = spans(pick())

    assert (top.name, top.kind) == ("kvist.pick", Span.SPAN_KIND_SERVER)
    assert (top.trace_id.hex(), top.span_id.hex(), top.parent_span_id.hex()) == (TRACE, SPAN, PARENT)
    assert top.trace_state == "vendor=1"
    assert [span.name for span in stages] == [f"kvist.stage.{stage}" for stage, _ in LAPS]
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in stages} == {(TRACE, SPAN)}
    assert len({span.span_id for span in (top, *stages)}) == 1 + len(LAPS)
    assert top.start_time_unix_nano == int((EPOCH + 100) * 1e9)
    assert [round((s.end_time_unix_nano - s.start_time_unix_nano) / 1e6) for s in stages] == [1, 2, 3, 1, 1]
    assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in itertools.pairwise(stages))
    assert top.end_time_unix_nano > stages[-1].end_time_unix_nano


def test_the_attributes_say_where_and_why() -> None:
    """Figures of the log line are attributes: by OpenTelemetry's names where there are some."""
    [top, *_] = spans(pick(priority=3, waited_ms=12.0))
    assert attributes(top) == {
        "kvist.request_id": "r1",
        "kvist.session": "s1",
        "url.path": "/v1/chat/completions",
        "kvist.kind": "chat",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "kvist.mode": "precise",
        "kvist.priority": 3,
        "kvist.outcome": "picked",
        "kvist.waited_seconds": 0.012,
        "kvist.prompt_tokens": 250,
        "kvist.endpoint": "10.0.0.1:8000",
        "kvist.candidates": 4,
        "kvist.prompt_bytes": 1000,
        "kvist.matched_tokens": 160,
        "kvist.predicted_ttft_seconds": 0.0355,
        "kvist.cost.wait_seconds": 0.25,
        "kvist.cost.work_seconds": 0.5,
    }
    assert top.status.code == Status.STATUS_CODE_UNSET


def test_prompt_text_is_never_exported() -> None:
    """The text that --debug-text adds to the log line is in no span."""
    recorded = pick(text="a secret prompt")
    assert b"secret" not in b"".join(span.SerializeToString() for span in spans(recorded))


@pytest.mark.parametrize("failed", [False, True])
def test_a_refused_request_names_its_reason(failed: bool) -> None:
    """A refusal has error.type; it is an error of the span only if the server is at fault."""
    [top, *_] = spans(pick(("parse", 0.1), outcome="rejected-saturated", endpoint=None, failed=failed))
    found = attributes(top)
    assert (found["kvist.outcome"], found["error.type"]) == ("rejected-saturated", "rejected-saturated")
    assert "kvist.endpoint" not in found
    assert (top.status.code == Status.STATUS_CODE_ERROR) is failed


def test_waits_in_the_queue_are_spans() -> None:
    """Between a match and the one at dispatch a request waited; the spans have no other gap."""
    first, again = ("parse", 0.001), ("match", 0.002)
    recorded = pick(first, again, ("match", 0.001), ("pick", 0.001), waited_ms=5.0)
    timed = recorded.stages.intervals
    timed[2:] = [(stage, begin + 5, until + 5) for stage, begin, until in timed[2:]]
    names = [span.name.rpartition(".")[2] for span in spans(recorded)[1:]]
    assert names == ["parse", "match", "queue", "match", "pick"]
    queue = spans(recorded)[3]
    assert round((queue.end_time_unix_nano - queue.start_time_unix_nano) / 1e9, 3) == 5.0


def test_a_request_that_leaves_the_queue_waited_until_its_end() -> None:
    """A request that was never dispatched has a wait at the end."""
    recorded = pick(("match", 0.002), waited_ms=500.0, endpoint=None, outcome="rejected-saturated")
    [top, _, queue] = spans(recorded)
    assert queue.name == "kvist.stage.queue"
    assert queue.end_time_unix_nano == top.end_time_unix_nano
    assert recorded.span_count == 3


def test_a_root_has_no_parent() -> None:
    """A trace that begins in the picker has the pick as its root."""
    [top, *_] = spans(pick(parent=""))
    assert top.parent_span_id == b""
    assert (top.flags & 0x300, spans(pick())[0].flags & 0x300) == (0x100, 0x300)


def test_the_end_of_a_request_is_a_child_of_its_pick() -> None:
    """The span lasts from the answer to the report of the end, and says what really was cached."""
    [found] = spans(end())
    assert (found.name, found.kind) == ("kvist.request_end", Span.SPAN_KIND_INTERNAL)
    assert (found.trace_id.hex(), found.parent_span_id.hex()) == (TRACE, SPAN)
    assert found.span_id not in {b"", bytes(8), bytes.fromhex(SPAN)}
    assert found.end_time_unix_nano - found.start_time_unix_nano == 2_500_000_000
    assert attributes(found) == {
        "kvist.endpoint": "10.0.0.2:8000",
        "kvist.end": "response",
        "http.response.status_code": 200,
        "kvist.predicted_cached_tokens": 160,
        "kvist.cached_tokens": 144,
        "kvist.ttft_seconds": 0.25,
    }


def test_what_an_end_does_not_know_is_left_out() -> None:
    """Without reports there are no figures of the engine and no status."""
    [found] = spans(end(cached_tokens=None, first_token_seconds=None, status=0, how="expired"))
    assert set(attributes(found)) == {"kvist.endpoint", "kvist.end", "kvist.predicted_cached_tokens"}


@given(
    prompt_bytes=st.integers(0, 2**63 - 1),
    matched_tokens=st.integers(0, 2**31),
    ttft=st.none() | st.floats(0, 1e9),
    cost=st.dictionaries(st.sampled_from(["wait", "work", "copy"]), st.floats(-1e9, 1e9)),
    state=st.sampled_from(["", "a=b", "not a state"]),
    name=st.text(st.characters(codec="utf-8"), max_size=300),
    laps=st.lists(st.sampled_from(["parse", "render", "match", "pick", "book"]), max_size=9),
)
def test_every_figure_is_encoded_as_the_generated_code_reads_it(
    prompt_bytes: int,
    matched_tokens: int,
    ttft: float | None,
    cost: dict[str, float],
    state: str,
    name: str,
    laps: list[str],
) -> None:
    """Any number, text and tracestate is read back as it was, in each of several picks."""
    recorded = pick(
        *[(lap, 0.001) for lap in laps],
        prompt_bytes=prompt_bytes,
        matched_tokens=matched_tokens,
        predicted_ttft_ms=ttft,
        cost=cost,
        id=name,
    )
    recorded.trace.state = state
    found = spans(recorded, end(), recorded)
    size = recorded.span_count
    assert len(found) == 2 * size + 1
    assert [span.name for span in found[:size]] == [span.name for span in found[size + 1 :]]
    seen = attributes(found[0])
    assert (seen["kvist.prompt_bytes"], seen["kvist.matched_tokens"]) == (prompt_bytes, matched_tokens)
    assert seen.get("kvist.predicted_ttft_seconds") == (None if ttft is None else ttft / 1000)
    assert {k: v for k, v in seen.items() if k.startswith("kvist.cost.")} == {
        f"kvist.cost.{term}_seconds": value for term, value in cost.items() if value
    }
    assert seen["kvist.request_id"] == name[:200]
    assert {span.trace_state for span in found[:size]} == {"a=b" if state == "a=b" else ""}
    assert len({span.span_id for span in found}) == 2 * (size - 1) + 2


@given(st.text(st.characters(codec=None), max_size=300))
def test_values_of_clients_are_bounded_and_valid(value: str) -> None:
    """Any name of a model, however long and whatever it has in it, is exported as text of 200 characters."""
    [top, *_] = spans(pick(model=value))
    assert attributes(top)["gen_ai.request.model"] == value[:200].encode(errors="replace").decode()
