"""The costs of legs over columns are those of one endpoint after the other, and lead to the same decision."""

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.tpot_admission import TpotAdmission
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.scheduling import split_decision
from kvist_epp.scheduling.cost import DEFAULT, Match
from kvist_epp.scheduling.leg_columns import LegColumns
from kvist_epp.scheduling.leg_costs import RULES
from kvist_epp.scheduling.leg_table import LegTable, WarmPairs
from kvist_epp.scheduling.pick import Candidate, Demand, choose, settle_roles
from kvist_epp.scheduling.split_decision import SplitDecision, Undecided, weigh

NOW = 100.0
NAMES = [f"p{number}" for number in range(9)]
LOADS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["prefill", "decode", "both", "both"]),
        "kv": st.sampled_from(["", "", "x"]),
        "ready": st.sampled_from([True, True, True, False]),
        "backlog": st.sampled_from([0.0, 300.0, 3_000.0, 90_000.0]),
        "running": st.integers(0, 90),
        "reserved": st.integers(0, 3),
        "slots": st.sampled_from([None, 8, 64]),
        "kv_full_at": st.sampled_from([None, None, 40]),
        "decode_seconds": st.sampled_from([None, 2.0, 30.0]),
        "rate": st.sampled_from([1_000.0, 10_000.0]),
        "share": st.floats(0, 2),
        "transfer_rate": st.sampled_from([None, 9_000.0]),
        "promised": st.sampled_from([0.0, 5_000.0]),
        "receives": st.sampled_from([-inf, NOW - 1, NOW + 2]),
        "allowed": st.sampled_from([0.1, 0.2, 0.6, 1.0]),
        "allowance": st.sampled_from([-1.0, 0.1, 0.5]),
        "free": st.none() | st.sampled_from([100.0, 9_000.0]),
        "queued": st.lists(st.sampled_from([NOW - 9, NOW - 1]), max_size=3),
        "token": st.sampled_from([0.0, 0.02, 0.06]),
        "least": st.sampled_from([0.0, 0.01]),
        "held": st.sampled_from([0, 0, 16, 700, 20_000]),
        "lower": st.sampled_from(["", "", "CPU"]),
    }
)


def candidate(name: str, drawn: dict[str, Any], *, tpot: bool) -> Candidate:
    """Return an endpoint with these figures."""
    labels = {"kvist.dev/role": drawn["role"], "kvist.dev/kv-compatibility": drawn["kv"]}
    load = EndpointLoad(
        f"ns/{name}",
        rate=drawn["rate"],
        backlog_tokens=drawn["backlog"],
        untracked_requests=drawn["running"],
        reserved=drawn["reserved"],
        slots=drawn["slots"],
        kv_full_at=drawn["kv_full_at"],
        decode_seconds=drawn["decode_seconds"],
        transfer_rate=drawn["transfer_rate"],
        promised_tokens=drawn["promised"],
        receives_until=drawn["receives"],
        at=NOW,
    )
    load.prefill_share.add(10 * drawn["share"], NOW)
    if tpot:
        load.tpot = TpotAdmission(0.05)
        load.tpot.prefill_share = drawn["allowed"]
        load.tpot._allowance, load.tpot._at = drawn["allowance"], NOW - 0.2
        load.tpot._free, load.tpot._most = drawn["free"], 50_000.0
        load.tpot.token_time.seconds, load.tpot.token_time.least = drawn["token"], drawn["least"]
        load.tpot.token_time.sequences = drawn["running"] / 2
        for number, since in enumerate(drawn["queued"]):
            load.tpot.add_queued(number, 900, since)
    return Candidate(Endpoint(name, "ns", "10.0.0.1", int(name[1:]), labels), load, drawn["ready"])


def columns_of(
    candidates: list[Candidate], demand: Demand, now: float, max_backlog: float = inf
) -> LegColumns:
    """Return the columns of these endpoints, however few they are."""
    table = LegTable(candidates, 0)
    table.drain(now)
    assert table.figures is not None
    return LegColumns(table, table.figures, demand, now, DEFAULT, RULES, max_backlog)


@settings(max_examples=400)
@given(
    drawn=st.lists(LOADS, min_size=1, max_size=len(NAMES)),
    tokens=st.sampled_from([0, 1, 600, 8_000]),
    uses=st.sampled_from([0.0, 5.0]),
    tpot=st.booleans(),
    max_backlog=st.sampled_from([0.5, inf]),
    pairs=st.none() | st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=9),
)
def test_columns_cost_what_each_endpoint_costs(
    drawn: list[dict[str, Any]],
    tokens: int,
    uses: float,
    tpot: bool,
    max_backlog: float,
    pairs: list[tuple[str, str]] | None,
) -> None:
    """Each cost is the same at each endpoint, and so is the decision, with pairs that have met or without."""
    pods = [candidate(name, each, tpot=tpot) for name, each in zip(NAMES, drawn, strict=False)]
    settle_roles(pods)
    hits = {}
    for pod, each in zip(pods, drawn, strict=True):
        if held := min(each["held"], tokens):
            hits[pod.endpoint.key] = Match(held, held, {each["lower"]: held // 2} if each["lower"] else {})
    demand, warm = Demand(tokens, hits, uses), None
    if pairs is not None:
        warm = WarmPairs()
        for prefill, decode in pairs:
            warm.add(f"ns/{prefill}", f"ns/{decode}")

    able = [pod for pod in pods if pod.ready]
    if able:
        columns = columns_of(able, demand, NOW, max_backlog)
        for at, one in enumerate(split_decision._legs_of_all(able, demand, NOW, DEFAULT, RULES, max_backlog)):
            expected = one.whole_cost(), one.prefill_cost, one.decode_cost
            found = tuple(
                each[at] for each in (columns.whole_cost, columns.prefill_cost, columns.decode_cost)
            )
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
            assert bool(columns.closed[at]) == (one.full or one.no_room)
            assert bool(columns.deferred[at]) == one.row.deferred
            [alone] = columns.legs([at])
            expected = alone.whole_cost(), alone.prefill_cost, alone.decode_cost
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)

    if all(pod.refusal for pod in pods):
        return
    best = choose(pods, demand, now=NOW, max_backlog=max_backlog)[0]
    some, all_ = (
        weigh(LegTable(pods, few), demand, best, now=NOW, warm=warm, max_backlog=max_backlog)
        for few in (0, len(pods))
    )
    # by their costs, since costs that are equal but for rounding may be ordered either way
    if isinstance(some, Undecided) or isinstance(all_, Undecided):
        assert isinstance(some, Undecided)
        assert isinstance(all_, Undecided)
        assert some.label == all_.label
        assert some.whole.cost_seconds == pytest.approx(all_.whole.cost_seconds)
        return
    assert some.split_seconds == pytest.approx(all_.split_seconds)
    assert some.whole_seconds == pytest.approx(all_.whole_seconds)
    assert some.chosen == all_.chosen


def world(tpot: float) -> list[Candidate]:
    """Return 200 endpoints, with queues of prompts of different lengths that time computes."""
    tracker = LoadTracker(tpot_seconds=tpot, default_rate=1_000.0)
    pods = []
    for number in range(200):
        endpoint = Endpoint(f"p{number}", "ns", "10.0.0.1", number, {"kvist.dev/role": "both"})
        load = tracker.load(endpoint.key)
        load.slots = 12
        if load.tpot is not None:
            load.tpot.prefill_share, load.tpot._allowance = 0.2 + number / 400, -1.0
        for at in range(4 + number % 10):
            tracker.add(InFlightRequest(f"{number}/{at}", 900), endpoint.key, 20 * (number % 7), NOW)
        pods.append(Candidate(endpoint, load))
    settle_roles(pods)
    return pods


def test_endpoints_that_take_no_leg_are_no_pair() -> None:
    """Endpoints that only encode, without the ordinary pick among them, leave the request where it is."""
    pods = world(0.0)
    best = choose(pods, Demand(8_000), now=NOW)[0]
    others = []
    for pod in pods[:60]:
        if pod.endpoint.key != best.endpoint.key:
            endpoint = Endpoint(pod.endpoint.name, "ns", "10.0.0.1", 1, {"kvist.dev/role": "encode"})
            others.append(Candidate(endpoint, pod.load))
    settle_roles(others)

    found = [weigh(LegTable(others, few), Demand(8_000), best, now=NOW) for few in (0, 100)]

    assert [getattr(each, "label", "") for each in found] == ["no-pair", "no-pair"]


@pytest.mark.parametrize("tpot", [0.0, 0.05])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.15, 0.4, 3.0])
def test_a_large_pool_splits_as_if_each_endpoint_was_looked_at(tpot: float, seconds: float) -> None:
    """With 200 endpoints, the pair and all terms are the same, at any time after the last event."""
    demand, now = Demand(8_000), NOW + seconds
    best = choose(world(tpot), demand, now=now)[0]

    found = weigh(LegTable(world(tpot)), demand, best, now=now)
    expected = weigh(LegTable(world(tpot), 200), demand, best, now=now)

    assert isinstance(found, SplitDecision)
    assert isinstance(expected, SplitDecision)
    assert found.split_terms == pytest.approx(expected.split_terms)
    assert found.whole_terms == pytest.approx(expected.whole_terms)
    assert (found.chosen, found.reason) == (expected.chosen, expected.reason)
    columns = columns_of(world(tpot), demand, now)
    legs = split_decision._legs_of_all(world(tpot), demand, now, DEFAULT, RULES, inf)
    assert columns.whole_cost.tolist() == pytest.approx([one.whole_cost() for one in legs])
    assert columns.decode_cost.tolist() == pytest.approx([one.decode_cost for one in legs])
    assert columns.prefill_cost.tolist() == pytest.approx([one.prefill_cost for one in legs])
