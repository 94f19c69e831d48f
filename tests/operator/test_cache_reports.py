"""Merging the answers of several pickers, and figures from them."""

from contextlib import suppress
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.fleets import page, row

from kvist_operator.errors import FleetError
from kvist_operator.reconcile.cache_reports import (
    MOST_COST,
    MergedReport,
    deletion_costs,
    figures,
    kv_tokens,
    merge_reports,
    parse_report,
)

PODS = ("p0", "p1", "p2", "p3")
worths = st.integers(0, 1 << 40)


def of(*pages: bytes) -> MergedReport:
    """Merge all answers."""
    return merge_reports(map(parse_report, pages))


def test_saved_tokens_add_up_and_blocks_do_not() -> None:
    """Saved tokens are added up over pickers; figures of engines come from the longest window, in any
    order."""
    old = {"seconds": 600.0, "requests": 90.0, "preemptions": 3.0, "queries": 1000.0, "hits": 400.0}
    young = {"seconds": 20.0, "requests": 2.0, "preemptions": 0.0, "queries": 50.0, "hits": 0.0}
    pages = [
        page(row("p0", worth=5, exclusive_blocks=7, kv_tokens=800, running=4, counted=old)),
        page(row("p0", worth=6, exclusive_blocks=6, kv_tokens=800, running=3, counted=young)),
        page(row("p1", worth=1, kv_tokens=700, kv_usage=0.5, waiting=2)),
    ]
    found = of(*pages)
    assert deletion_costs(found, PODS[:2]) == {"p0": 11, "p1": 1}
    assert (found.pickers, found.engines["p0:8000"].exclusive_blocks) == (3, 7)
    seen = figures(found)
    assert (seen.requests, seen.preemptions, seen.prompt_tokens, seen.cached_tokens) == (90, 3, 1000, 400)
    assert (seen.running, seen.waiting, seen.kv_usage, seen.kv_tokens) == (2.0, 1.0, 0.25, 700)
    for order in permutations(pages):
        assert of(*order) == found


def test_picks_add_up_and_are_known_only_from_all_pickers() -> None:
    """Picks and refused handshakes are sums; picks are unknown while a picker is silent, is older than the
    field, or has counted for less than two minutes or than the engines' counters reach back."""

    def gateway(seconds: float, picked: int, refused: int = 0, counted: float = 130.0) -> bytes:
        engine = row("p", counted={"seconds": counted})
        return page(engine, gateway={"seconds": seconds, "picked": picked, "tls_refusals": refused})

    pages = [gateway(600.0, 5, 2), gateway(130.0, 7, 1)]
    seen = figures(of(*pages))
    assert (seen.picked, seen.tls_refusals) == (12, 3)
    assert figures(of(*pages, gateway(20.0, 0, counted=10.0))).picked is None
    assert figures(of(*pages, gateway(600.0, 0, counted=590.0))).picked is None
    assert figures(of(gateway(600.0, 0, counted=590.0))).picked == 0
    assert figures(of(*pages, page(row("p")))).picked is None
    assert figures(merge_reports(map(parse_report, pages), silent=1)).picked is None
    assert figures(of()).picked is None


@given(st.lists(st.lists(worths, min_size=4, max_size=4), min_size=1, max_size=4))
def test_costs_keep_the_order_of_saved_tokens(replicas: list[list[int]]) -> None:
    """Costs fit an int32 and keep their order; every given pod has one."""
    pages = [page(*(row(pod, worth=w) for pod, w in zip(PODS, each, strict=True))) for each in replicas]
    costs = deletion_costs(of(*pages), PODS)
    worth = {pod: sum(each[n] for each in replicas) for n, pod in enumerate(PODS)}
    assert set(costs) == set(PODS)
    assert all(0 <= cost <= MOST_COST for cost in costs.values())
    for one in PODS:
        for other in PODS:
            assert worth[one] < worth[other] or costs[one] >= costs[other]
    if max(worth.values()) <= MOST_COST:
        assert costs == worth


def test_unknown_pods_cost_nothing() -> None:
    """A pod that no picker knows has cost 0; pods that are not given have none."""
    found = of(page(row("p0", worth=9), row("gone", worth=9)))
    assert deletion_costs(found, ["p0", "p1"]) == {"p0": 9, "p1": 0}


def test_without_an_answer_there_are_no_costs() -> None:
    """Without an answer there are no costs."""
    assert deletion_costs(MergedReport(), PODS) == {}
    assert deletion_costs(of(page()), ["p0"]) == {"p0": 0}
    assert kv_tokens(MergedReport()) is None


def test_blocks_decide_where_nothing_was_saved_yet() -> None:
    """While no cache has saved tokens, the number of exclusive blocks is the cost."""
    rows = (row("p0", exclusive_blocks=3), row("p1", exclusive_blocks=8))
    assert deletion_costs(of(page(*rows)), ["p0", "p1"]) == {"p0": 3, "p1": 8}
    assert deletion_costs(of(page(*rows, row("p2", worth=1))), PODS[:3]) == {"p0": 0, "p1": 0, "p2": 1}


def test_ports_of_a_pod_are_one_replica() -> None:
    """Tokens and cache sizes of a pod's endpoints are added up; the smallest ready replica is reported."""
    found = of(
        page(
            row("p0", worth=1, kv_tokens=300),
            row("p0", port=8001, worth=2, kv_tokens=300),
            row("p1", kv_tokens=500),
            row("p2", kv_tokens=100, ready=False, running=50),
            row("p3"),
        )
    )
    assert deletion_costs(found, ["p0", "p1"]) == {"p0": 3, "p1": 0}
    assert (kv_tokens(found), figures(found).running) == (500, 0.0)


BAD = {
    "json": b"{",
    "nested": b"[" * 100_000,
    "list": b"[]",
    "version": page(version=2),
    "replica": page(replica=7),  # type: ignore[arg-type]
    "endpoints": b'{"version": 1, "replica": "r", "endpoints": {}}',
    "row": b'{"version": 1, "replica": "r", "endpoints": [7]}',
    "pod": page({**row("p"), "pod": None}),
    "negative": page(row("p", worth=-1)),
    "fraction": page(row("p", exclusive_blocks=1.5)),
    "flag": page(row("p", running=True)),
    "endless": page(row("p", waiting=float("inf"))),
    "number": page(row("p", kv_usage=float("nan"))),
    "size": page(row("p", kv_tokens="many")),
    "counted": page({**row("p"), "counted": {"seconds": 1}}),
    "gateway": page(gateway=7),
    "picked": page(gateway={"seconds": 1.0, "picked": 0.5, "tls_refusals": 0}),
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_nonsense_is_refused(body: bytes) -> None:
    """An invalid answer raises FleetError and nothing else."""
    with pytest.raises(FleetError):
        parse_report(body)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_any_field_may_be_anything(value: Any) -> None:
    """Any value of any field is read or raises FleetError."""
    for name in row("p"):
        with suppress(FleetError):
            parse_report(page({**row("p"), name: value}))
