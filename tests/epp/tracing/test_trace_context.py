"""Trace contexts: what is read of a request, which picks are recorded, and how many of them wait."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.tracing.picks import LAPS, PARENT, TRACE, pick

from kvist_epp.telemetry.counters import TraceStats
from kvist_epp.tracing.trace_context import PickTracer, TraceContext, read_trace_context, valid_state

HEX = "0123456789abcdef"
GOOD = f"00-{TRACE}-{PARENT}-01"
MALFORMED = (
    "",
    "00",
    f"00-{TRACE}-{PARENT}",
    f"00-{TRACE}-{PARENT}-1",
    f"00-{TRACE}-{PARENT}-01-",
    f"00-{TRACE}-{PARENT}-01-what-the-future-will-be",
    f"ff-{TRACE}-{PARENT}-01",
    f"0-{TRACE}-{PARENT}-01",
    f"00-{TRACE.upper()}-{PARENT}-01",
    f"00-{TRACE[:-1]}-{PARENT}-01",
    f"00-{TRACE}0-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{PARENT[:-1]}g-01",
    f"00-{TRACE}-{PARENT}-0x",
    f"00_{TRACE}_{PARENT}_01",
    f"{GOOD},{GOOD}",
    f" {GOOD}",
    GOOD + "\n",
    GOOD.replace("4", "٤", 1),
)
"""Cases of the W3C test suite of Trace Context, and some more."""
STATES = {
    "": True,
    "foo=1": True,
    "foo=1,bar=2": True,
    "foo=1 \t , \tbar=2, \t baz=3": True,
    "foo=1,,bar=2": True,
    "fw529a3039@dt=FfffffeD": True,
    "foo=a b": True,
    ",".join(f"k{number}=1" for number in range(32)): True,
    ",".join(f"k{number}=1" for number in range(33)): False,
    "foo =1": False,
    "FOO=1": False,
    "foo": False,
    "foo=bar=baz": False,
    "foo=1;bar=2": False,
    "foo=é": False,
    f"{'z' * 257}=1": False,
    f"a={'x' * 600}": False,
}


def test_a_context_is_read() -> None:
    """Trace, parent, sampled flag and state of a valid request are read."""
    found = read_trace_context({"traceparent": GOOD, "tracestate": "a=b"})
    assert found == TraceContext(TRACE, PARENT, sampled=True, state="a=b")


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_only_the_lowest_flag_says_sampled(flags: str, sampled: bool) -> None:
    """The other flags have no meaning here."""
    found = read_trace_context({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
    assert found is not None
    assert found.sampled is sampled


@pytest.mark.parametrize("value", [f"cc-{TRACE}-{PARENT}-01", f"cc-{TRACE}-{PARENT}-01-what-the-future"])
def test_later_versions_are_read_as_far_as_they_are_known(value: str) -> None:
    """A version that is not known yet has the fields of this one, and perhaps more."""
    found = read_trace_context({"traceparent": value})
    assert found is not None
    assert (found.trace_id, found.parent_id, found.sampled) == (TRACE, PARENT, True)


@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_context_counts_as_none(value: str) -> None:
    """A request whose traceparent breaks a rule of the standard begins a trace of its own."""
    assert read_trace_context({"traceparent": value, "tracestate": "a=b"}) is None
    begun = PickTracer(1.0, TraceStats()).begin({"traceparent": value})
    assert begun is not None
    assert (begun.parent_id, begun.sampled) == ("", True)


def test_a_request_without_a_context_has_none() -> None:
    """A tracestate alone is nothing."""
    assert read_trace_context({"tracestate": "a=b"}) is None


@given(st.text(max_size=80))
def test_no_text_breaks_the_reader(value: str) -> None:
    """Whatever a client sends is read as a valid context or as none."""
    found = read_trace_context({"traceparent": value})
    if found is not None:
        assert value.startswith(f"{value[:2]}-{found.trace_id}-{found.parent_id}-")
        assert set(found.trace_id + found.parent_id) <= set(HEX)


@given(
    trace=st.text(HEX, min_size=32, max_size=32).filter(lambda text: text.strip("0")),
    parent=st.text(HEX, min_size=16, max_size=16).filter(lambda text: text.strip("0")),
    flags=st.integers(0, 255),
)
def test_every_valid_context_is_read(trace: str, parent: str, flags: int) -> None:
    """All ids but zero, with all flags, are read as they are."""
    found = read_trace_context({"traceparent": f"00-{trace}-{parent}-{flags:02x}"})
    assert found == TraceContext(trace, parent, sampled=bool(flags & 1))


@pytest.mark.parametrize(("state", "valid"), STATES.items())
def test_a_malformed_state_is_dropped(state: str, valid: bool) -> None:
    """A tracestate that breaks a rule of the standard is not exported."""
    assert valid_state(state) == (state if valid else "")


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (0.1, 850, 1150), (1.0, 10_000, 10_000)])
def test_a_fraction_of_the_traces_that_begin_here_is_sampled(ratio: float, low: int, high: int) -> None:
    """The sampled share of 10,000 requests without a context is the ratio, by the random bits of the id."""
    tracer = PickTracer(ratio, TraceStats(), random_bits=random.Random(1).getrandbits)
    sampled = [trace for _ in range(10_000) if (trace := tracer.begin({})) is not None]

    assert low <= len(sampled) <= high
    assert all(trace.sampled and int(trace.trace_id[18:], 16) < ratio * 2**56 for trace in sampled)
    assert len({trace.trace_id for trace in sampled} | {trace.span_id for trace in sampled}) == 2 * len(
        sampled
    )


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_caller_decides_for_its_traces(ratio: float, sampled: bool) -> None:
    """A request with a context is recorded if it is sampled, whatever the ratio, and keeps its header."""
    trace = PickTracer(ratio, TraceStats()).begin({"traceparent": f"00-{TRACE}-{PARENT}-0{sampled:d}"})
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.recorded) == (TRACE, PARENT, sampled)
    assert trace.request_headers() == ()


def test_a_trace_that_begins_here_is_passed_on() -> None:
    """The engine gets the context with the decision, so that its spans belong to the trace."""
    trace = PickTracer(1.0, TraceStats()).begin({})
    assert trace is not None
    [(name, value)] = trace.request_headers()
    assert (name, value) == ("traceparent", f"00-{trace.trace_id}-{trace.span_id}-01")
    assert read_trace_context({name: value}) is not None


def test_ids_are_never_zero() -> None:
    """Even a source of zeros gives valid ids."""
    trace = PickTracer(1.0, TraceStats(), random_bits=lambda _: 0).begin({})
    assert trace is not None
    assert read_trace_context(dict(trace.request_headers())) is not None


def test_picks_beyond_the_limit_are_dropped_and_counted() -> None:
    """The queue is bounded; what does not fit is lost, counted in spans, and the oldest come out first."""
    stats = TraceStats()
    tracer = PickTracer(1.0, stats, limit=2)
    for number in range(4):
        tracer.add(pick(id=str(number)))

    assert stats.dropped["queue-full"] == 2 * (1 + len(LAPS))
    first, second = pick(id="0"), pick(id="1")
    assert [found[1] for found in tracer.take(1)] == [first.line]
    assert [found[1] for found in tracer.take(10)] == [second.line]
    assert len(tracer) == 0
