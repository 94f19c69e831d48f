"""Tests of the judgement of soak and queue runs, and of their reports."""

import io
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvist_sim.bench.harness.proof import placed
from kvist_sim.bench.queue import report as queue_report
from kvist_sim.bench.queue.command import BODY_BYTES, MIX, body, queued_requests
from kvist_sim.bench.queue.judge import Relieved, WantedRequest, late, out_of_order, shares
from kvist_sim.bench.soak import report as soak_report
from kvist_sim.bench.soak.judge import Memory, SoakFigures, left

EMPTY = {"tasks": {"run": 3}, "streams": {"grpc": 0}, "ledger": 0, "flights": 0}
FLAT = Memory([(at, 100_000_000) for at in range(600)], 600.0)
FIGURES = SoakFigures(
    part="direct",
    picker="picker",
    seconds=600.0,
    requests=600_000,
    failed=0,
    p50=0.001,
    p99=0.01,
    memory=FLAT,
    left=(),
    cpu_per_second=0.4,
)


def test_growth_is_last_minute_over_second() -> None:
    """Growth is counted from the second minute to the last, so warm-up does not count and late growth
    does."""
    warm = [(at, 50 if at < 60 else 100) for at in range(540)]
    samples = [*warm, *((at, 107) for at in range(540, 600))]

    assert Memory(samples, 600.0).growth == pytest.approx(0.07)
    assert Memory(warm[60:], 600.0).growth == float("inf")
    assert Memory([], 600.0).growth == float("inf")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ledger": 2}, ["ledger: 2"]),
        ({"streams": {"grpc": 1}}, ["streams of grpc: 1"]),
        ({"tasks": {"run": 4, "wait": 1}}, ["tasks of run: 1", "tasks of wait: 1"]),
        ({"tasks": {"run": 2}}, []),
        ({}, []),
    ],
)
def test_what_is_left_is_named(changed: dict[str, object], words: list[str]) -> None:
    """Every count but those of tasks must be zero; tasks are held against those of before."""
    assert left(EMPTY, EMPTY | changed) == words
    assert left(EMPTY, EMPTY | {"notes": 3}, kept=("notes",)) == []


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (FIGURES, 0),
        (replace(FIGURES, failed=1), 1),
        (replace(FIGURES, requests=0), 1),
        (replace(FIGURES, left=("ledger: 2", "flights: 1")), 2),
        (replace(FIGURES, memory=Memory([(at, 100 + at // 50) for at in range(600)], 600.0)), 1),
    ],
)
def test_a_soak_fails_for_each_reason(figures: SoakFigures, words: int) -> None:
    """Failed requests, growth, and each thing that is left."""
    assert len(figures.broken()) == words


def test_the_soak_s_table_fits_a_terminal() -> None:
    """110 columns, nothing cut off."""
    setting = {"seconds": 600.0, "picks": 1000.0, "rate": 200.0, "blocks": 2000, "engines": 4, "full": True}
    report = soak_report.SoakReport([FIGURES, replace(FIGURES, part="stack", left=("ledger: 2",))], setting)
    text = _shown(soak_report.table(report))

    assert "nothing" in text
    assert text.count("BROKEN") == 1
    assert json.loads(json.dumps(soak_report.document(report)))["parts"][0]["growth"] == 0.0


LEVELS = st.sampled_from([-1, 0, 10])
ORDERS = st.lists(
    st.builds(WantedRequest, st.uuids().map(str), LEVELS, st.sampled_from("abc"), st.just(2_000))
)


@given(ORDERS)
def test_out_of_order_is_a_request_dispatched_before_a_higher_one(order: list[WantedRequest]) -> None:
    """Counted backwards in one pass, it is what the definition says."""
    slow = sum(
        any(later.priority > wanted.priority for later in order[at + 1 :]) for at, wanted in enumerate(order)
    )
    assert out_of_order(order) == slow
    assert out_of_order(sorted(order, key=lambda wanted: -wanted.priority)) == 0


def test_shares_are_of_the_time_in_which_all_wait() -> None:
    """Turn by turn is fair, however much more one tenant has; first come first served is not."""
    turns = [WantedRequest(f"{at}", 0, tenant, 2_000) for at in range(100) for tenant in "abc"]
    rest = [WantedRequest(f"rest-{at}", 0, "a", 2_000) for at in range(500)]
    fair = shares([*turns, *rest], 0)
    unfair = shares([*rest, *turns], 0)

    assert [(share.tenant, share.sent) for share in fair] == [("a", 600), ("b", 100), ("c", 100)]
    assert all(abs(share.of_fair - 1) < 0.02 for share in fair)
    assert unfair[0].of_fair > 2


def test_shares_are_counted_in_size_not_in_requests() -> None:
    """A tenant with bodies of twice the size gets half as many requests."""
    order = [
        WantedRequest(f"{at}", 0, "b" if at % 3 == 2 else "a", 4_000 if at % 3 == 2 else 2_000)
        for at in range(90)
    ]

    assert [share.of_fair for share in shares(order, 0)] == pytest.approx([1.0, 1.0], abs=0.05)


def test_late_counts_those_without_an_answer_too() -> None:
    """The limit has some slack for two clocks; a request without an answer is always late."""
    assert late([0.1, 15.0, 15.9, 16.1, float("inf")], 15.0) == 2


def test_the_load_is_as_large_as_requested_and_floods_first() -> None:
    """Shares of the mix, tenant by tenant, with bodies of exactly the size."""
    found = queued_requests(1_000)
    counts = Counter(wanted.tenant for wanted in found)

    assert counts == {tenant: round(1_000 * share) for share, _, tenant in MIX}
    assert [wanted.tenant for wanted in found[100:650]] == ["a"] * 550
    one, other = (body(random.Random(seed), BODY_BYTES) for seed in (1, 2))
    assert (len(one), len(other)) == (BODY_BYTES, BODY_BYTES)
    assert one != other
    assert json.loads(one)["messages"][0]["content"]


def test_the_queue_s_tables_fit_a_terminal_and_name_broken_bounds() -> None:
    """Memory, drain and shares; each bound that does not hold is a line."""
    drained = queue_report.Drained(
        requests=50_000,
        queued=50_000,
        queued_bytes=200_000_000,
        resident_before=80_000_000,
        resident_full=380_000_000,
        seconds=20.0,
        picked=50_000,
        logged=50_000,
        shares=shares([WantedRequest(f"{at}", 0, "abc"[at % 3], 2_000) for at in range(300)], 0),
        out_of_order=0,
        left=(),
    )
    bounded = queue_report.Bounded(
        requests=45_000,
        bound_bytes=32 << 20,
        bound_seconds=15.0,
        queued=8_000,
        queued_bytes=33_000_000,
        refused=37_000,
        resident_before=80_000_000,
        resident_full=130_000_000,
        statuses={429: 44_999, 200: 1},
        longest=float("inf"),
        longest_seen=16.0,
        late=1,
        left=("waiting: 1",),
    )
    soon = Relieved(2_000, [0.001] * 98 + [0.012] * 2, absorbed=3)
    setting = {"requests": 50_000, "body_bytes": 2_000, "full": True}
    report = queue_report.QueueReport(drained, bounded, soon, setting)
    text = _shown(queue_report.table(report))

    assert drained.broken() == []
    assert drained.each == 6_000
    assert len(report.broken()) == 4
    assert "p50 1.0, p99 12.0 of 10" in text
    assert "without end" in text
    assert (
        json.loads(json.dumps(queue_report.document(report), allow_nan=False))["bounded"]["longest"] is None
    )


def test_a_section_of_a_document_is_replaced_and_nothing_else() -> None:
    """The marks stay, so that it can be replaced again; a document without them is refused."""
    page = "head\n<!-- soak -->\nold\n<!-- /soak -->\ntail\n"
    once = placed(page, "soak", "new\n")

    assert once == "head\n<!-- soak -->\nnew\n<!-- /soak -->\ntail\n"
    assert placed(once, "soak", "new\n") == once
    with pytest.raises(SystemExit, match="no place"):
        placed(page, "chaos", "new\n")


def _shown(renderable: object) -> str:
    """Return the text on a terminal of 110 columns; nothing may be cut."""
    console = Console(file=io.StringIO(), width=110)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "…" not in text
    return text
