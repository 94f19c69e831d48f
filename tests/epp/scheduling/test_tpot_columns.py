"""The cost under a TPOT target over columns is the cost of one endpoint after the other."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.tpot_admission import FRESH_SECONDS, LIGHT_TOKENS, STEP_SECONDS, TpotAdmission
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.scheduling.cost import DEFAULT, TERMS, EndpointCost, Match, PoolCost, terms
from kvist_epp.scheduling.held_columns import HeldColumns, TierColumns
from kvist_epp.scheduling.pick import Candidate, Demand, cost_rows
from kvist_epp.scheduling.tpot_columns import TpotColumns

NOW = 100.0
ELSEWHERE = ("slot", "load", "decode")
"""Terms that columns of any pool have."""
TOKENS = (0, 1, LIGHT_TOKENS, LIGHT_TOKENS + 1, 400, 2_000)
FIGURES = st.fixed_dictionaries(
    {
        "share": st.sampled_from([0.1, 0.3, 0.9, 1.0]),
        "allowance": st.sampled_from([-1.5, 0.0, 0.2, 0.3, STEP_SECONDS]),
        "age": st.sampled_from([0.0, 0.1, 1.0, 10.0]),
        "free": st.none() | st.sampled_from([-10.0, 300.0, 1_000.0, 5_000.0]),
        "most": st.sampled_from([0.0, 500.0, 3_000.0]),
        "running": st.integers(0, 20),
        "queued": st.lists(
            st.sampled_from([NOW - 5.0, NOW - FRESH_SECONDS - 0.01, NOW - FRESH_SECONDS, NOW]), max_size=6
        ),
        "backlog": st.sampled_from([0.0, 100.0, 500.0, 501.0, 5_000.0]),
        "rate": st.sampled_from([1_000.0, 4_000.0]),
        "held": st.sampled_from([0, 16, 2_000]),
    }
)


def load_of(figures: dict[str, Any]) -> EndpointLoad:
    """Return a load with these figures, whose queue is not drained by time."""
    tpot = TpotAdmission(0.05)
    tpot.prefill_share = figures["share"]
    tpot._allowance, tpot._at = figures["allowance"], NOW - figures["age"]
    tpot._free, tpot._most = figures["free"], figures["most"]
    for number, since in enumerate(figures["queued"]):
        tpot.add_queued(number, 100 * number, since)
    load = EndpointLoad("", rate=figures["rate"], untracked_requests=figures["running"], tpot=tpot, at=NOW)
    load.backlog_tokens = figures["backlog"]
    return load


@settings(max_examples=400)
@given(
    drawn=st.lists(FIGURES, min_size=1, max_size=6),
    tokens=st.sampled_from(TOKENS),
    uses=st.sampled_from([0.0, 7.0]),
)
def test_costs_are_those_of_one_endpoint_after_the_other(
    drawn: list[dict[str, Any]], tokens: int, uses: float
) -> None:
    """Prompts are deferred, and work is longer where an endpoint is tight, exactly as its own schedule
    says."""
    loads = [load_of(figures) for figures in drawn]
    candidates = [
        Candidate(Endpoint(f"p{number}", "ns", "10.0.0.1", number), load) for number, load in enumerate(loads)
    ]
    held = [min(figures["held"], tokens) for figures in drawn]
    hits = {f"ns/p{at}": Match(each) for at, each in enumerate(held) if each}
    columns = TpotColumns(len(loads))
    for at, load in enumerate(loads):
        columns.refresh(at, load)

    rows = cost_rows(candidates, Demand(tokens, hits), NOW, DEFAULT)
    named = dict(zip(TERMS, terms(rows, tokens, uses), strict=True))
    expected = [sum(named[name][at] for name in TERMS if name not in ELSEWHERE) for at in range(len(rows))]
    pool, part = _pool(rows, named)
    waits = np.array([load.backlog_tokens / load.rate for load in loads])
    seconds = np.array([1.0 / load.rate for load in loads])
    place = {one.endpoint.key: at for at, one in enumerate(candidates)}
    holders = HeldColumns.of(hits, place, TierColumns(loads), seconds, DEFAULT, NOW)
    uncached = holders.uncached(len(rows), tokens)
    assert uncached.tolist() == [row.uncached for row in rows]
    found = columns.costs(uncached, seconds, waits, NOW, pool, part, DEFAULT)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def _pool(rows: list[EndpointCost], named: dict[str, list[float]]) -> tuple[PoolCost, float]:
    """Return what ``terms`` computed of the pool, from what it set and returned."""
    least = min(row.uncached for row in rows)
    other = next((row for row in rows if row.uncached != least), None)
    part = 1.0 if other is None else (other.own - least) / (other.uncached - least)
    mean_rate = sum(row.load.rate for row in rows) / len(rows)
    price = 1.0 + DEFAULT.price_running * sum(row.running for row in rows) / len(rows)
    copying = 0.0 if other is None else named["copy"][rows.index(other)] / (other.uncached - least)
    return PoolCost(price, mean_rate, least, copying), part


@pytest.mark.parametrize("looks", [0, 5])
def test_what_a_scrape_shows_holds_from_then_on(looks: int) -> None:
    """The allowance grows by the share that held until the scrape, whether picks asked meanwhile or not."""
    tracker = LoadTracker(tpot_seconds=0.05, default_rate=1_000.0)
    load = tracker.load("a")
    assert load.tpot is not None
    load.tpot.prefill_share, load.tpot._allowance, load.tpot._at = 0.1, -1.5, NOW
    for at in range(looks):
        load.tpot.admits(load, 5_000, NOW + at)
    sample = EngineSample(running=0)
    load.tpot.on_scrape(sample, 0.0, 1_000.0, NOW + 5, helping=1)  # its sequences have left

    assert load.tpot.prefill_share == 1.0
    assert load.tpot.figures(load).allowance == pytest.approx(-1.5 + 5 * 0.1)


def test_time_that_computes_a_part_of_a_prompt_marks_no_load() -> None:
    """Columns know when the prompt will be done, so only its end makes them read the load again."""
    tracker = LoadTracker(tpot_seconds=0.05, default_rate=1_000.0)
    for size in (500, 700):
        tracker.add(InFlightRequest("", size), "a", size, NOW)
    load = tracker.load("a")
    tracker.changed.clear()

    load.drain(NOW + 0.25)
    assert (tracker.changed, load.backlog_tokens) == (set(), 950)
    load.drain(NOW + 0.75)
    assert (tracker.changed, load.backlog_tokens, len(load.prefill_queue)) == ({load}, 450, 1)


def test_a_load_is_freed_when_its_endpoint_has_left() -> None:
    """No cycle of references keeps it: the collector does not look at what existed when it was frozen."""
    tracker = LoadTracker(tpot_seconds=0.05)
    tpot = tracker.load("a").tpot
    assert tpot is not None
    waiting = LoadTracker()  # anything to which there can be a weak reference
    tpot.add_queued(waiting, 10, NOW)
    gone = weakref.ref(waiting)
    del tpot, waiting
    gc.disable()
    try:
        tracker.remove_endpoint("a")
        tracker.changed.clear()
        assert gone() is None
    finally:
        gc.enable()


def test_what_changes_a_schedule_marks_its_load() -> None:
    """Columns copy the figures of a load again after each call that changes them by something else than
    time."""
    tracker = LoadTracker(tpot_seconds=0.05)
    load = tracker.load("a")
    tpot = load.tpot
    assert tpot is not None
    tpot._free = 1_000.0
    calls: dict[str, Callable[[], object]] = {
        "add_queued": lambda: tpot.add_queued("one", 10, NOW),
        "remove_queued": lambda: tpot.remove_queued("one"),
        "debit": lambda: tpot.debit(10, 1_000.0, NOW),
        "refund": lambda: tpot.refund(10),
        "reserve": lambda: tpot.reserve(10),
        "on_scrape": lambda: tpot.on_scrape(EngineSample(block_size=16, blocks=99), 0.0, 1_000.0, NOW),
    }
    for name, call in calls.items():
        before = tpot.figures(load)
        tracker.changed.clear()
        call()
        assert tracker.changed == {load}, name
        assert tpot.figures(load) != before, name
