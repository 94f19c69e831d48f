"""The policy: which endpoints are eligible, which is best, and the errors if there is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.errors import NoEndpoints
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.tpot_admission import TpotAdmission
from kvist_epp.scheduling.cost import Match
from kvist_epp.scheduling.pick import (
    NOT_IN_SUBSET,
    Candidate,
    Demand,
    ScoredEndpoint,
    canonical,
    choose,
    explain,
    named,
)

NOW = 10.0


def candidate(
    number: int,
    *,
    backlog: float = 0.0,
    untracked: int = 0,
    ready: bool = True,
    reason: str = "",
    slots: int | None = None,
    **labels: str,
) -> Candidate:
    endpoint = Endpoint(
        f"p{number}", "ns", f"10.0.0.{number}", 8000, {f"kvist.dev/{k}": v for k, v in labels.items()}
    )
    load = EndpointLoad(
        endpoint.key, rate=1000.0, backlog_tokens=backlog, untracked_requests=untracked, slots=slots, at=NOW
    )
    return Candidate(endpoint, load, ready, reason)


def names(rows: list[ScoredEndpoint]) -> list[str]:
    return [row.endpoint.name for row in rows]


def picks(
    candidates: list[Candidate],
    demand: Demand,
    subset: tuple[str, ...] | None = None,
    *,
    turn: int = 0,
    limit: int = 3,
) -> list[str]:
    return names(choose(candidates, demand, subset, now=NOW, turn=turn, limit=limit))


def test_the_longest_prefix_wins_among_equals() -> None:
    """Among endpoints of equal backlog, the one that holds the prompt's prefix is first."""
    pods = [candidate(1), candidate(2), candidate(3)]

    assert picks(pods, Demand(1000, {"ns/p2": Match(900, 3600)}))[0] == "p2"


def test_a_backlog_outweighs_a_prefix() -> None:
    """An endpoint whose backlog exceeds what its prefix saves is not picked."""
    pods = [candidate(1), candidate(2, backlog=5000.0), *(candidate(n) for n in range(3, 9))]

    assert picks(pods, Demand(1000, {"ns/p2": Match(900, 3600)}))[0] == "p1"


def test_a_busy_pool_keeps_to_its_prefixes() -> None:
    """The price of recomputing rises with the batch: what an idle pool would copy, a busy one does not."""
    hit = {"ns/p1": Match(1000, 4000)}
    idle = [candidate(1, backlog=5000.0), *(candidate(n) for n in range(2, 9))]
    busy = [candidate(1, backlog=5000.0, untracked=80), *(candidate(n, untracked=80) for n in range(2, 9))]

    assert picks(idle, Demand(1001, hit))[0] != "p1"
    assert picks(busy, Demand(1001, hit))[0] == "p1"


def test_of_two_endpoints_the_one_far_behind_is_left() -> None:
    """The price is an endpoint's own: its backlog does not hold requests there when the pool is only two."""
    pods = [candidate(1, backlog=5000.0), candidate(2)]

    assert picks(pods, Demand(1001, {"ns/p1": Match(1000, 4000)}))[0] == "p2"


def test_a_full_batch_is_waited_for() -> None:
    """An endpoint without a free slot costs the time until one is free."""
    pods = [candidate(1, untracked=8, slots=8), candidate(2, untracked=8, slots=64)]

    assert picks(pods, Demand(1000))[0] == "p2"


def test_a_full_endpoint_comes_after_all_others() -> None:
    """A full endpoint comes after all others, whatever it caches and however cheap it is; the best one is
    full only if all are."""
    hit = Demand(1000, {"ns/p1": Match(900, 3600)})
    pods = [
        candidate(1, slots=2, untracked=2),
        candidate(2, backlog=31_000.0),
        candidate(3, backlog=29_000.0),
    ]
    rows = choose(pods, hit, now=NOW, max_backlog=30.0)
    assert [(row.endpoint.name, row.full) for row in rows] == [("p3", False), ("p1", True), ("p2", True)]
    assert rows[1].reason.startswith("full, cost")

    everybody = choose(pods, hit, now=NOW, max_backlog=28.0)
    assert [row.full for row in everybody] == [True] * 3
    assert everybody[0].endpoint.name == "p1"


def test_a_full_cache_is_no_reason_to_leave_a_prefix_but_one_to_wait() -> None:
    """While another endpoint has capacity, the holder of the prefix is picked all the same; if none has, all
    are full."""
    hit = Demand(1000, {"ns/p1": Match(900, 3600)})
    crowded = candidate(1, untracked=3)
    crowded.load.kv_full_at = 3
    other = candidate(2, untracked=3)
    rows = choose([crowded, other], hit, now=NOW)
    other.load.kv_full_at = 2
    everybody = choose([crowded, other], hit, now=NOW)

    assert [(row.endpoint.name, row.full) for row in rows] == [("p1", False), ("p2", False)]
    assert [(row.endpoint.name, row.full) for row in everybody] == [("p1", True), ("p2", True)]


def test_an_endpoint_that_may_not_take_up_a_prompt_costs_a_little() -> None:
    """An endpoint that may not admit prefill yet costs a little more: its prefix still counts, but without
    one it is not picked."""
    pods = [candidate(1), candidate(2)]
    for pod in pods:
        pod.load.tpot = TpotAdmission(0.06)
    pods[0].load.backlog_tokens = 501.0
    pods[1].load.untracked_requests = 60

    assert picks(pods, Demand(1000))[0] == "p2"
    assert picks(pods, Demand(1000, {"ns/p1": Match(900, 3600)}))[0] == "p1"
    assert [row.deferred for row in choose(pods, Demand(1000), now=NOW)] == [False, True]
    assert explain(pods, Demand(1000), now=NOW)[1].reason.startswith("prefill deferred (TPOT target), cost")

    pods[0].load.tpot = None

    assert picks(pods, Demand(100, {"ns/p1": Match(50, 200)}))[0] == "p1"


def test_an_endpoint_whose_sequences_leave_little_time_gets_fewer_prompts() -> None:
    """An endpoint with a small prefill share gets fewer prompts: the prefix of a small GPU is copied to a
    large one when that costs no more. Small differences between equal endpoints change nothing."""
    pods, paces = [candidate(1), candidate(2)], [TpotAdmission(0.06), TpotAdmission(0.06)]
    for pod, pacing in zip(pods, paces, strict=True):
        pod.load.tpot = pacing
    demand = Demand(2000, {"ns/p1": Match(300, 1200)})
    taken = []
    for small in (0.6, 0.45, 0.1):
        paces[0].prefill_share, paces[1].prefill_share = small, 0.6
        taken.append(picks(pods, demand)[0])

    assert taken == ["p1", "p1", "p2"]


def test_running_requests_cost_a_little() -> None:
    """Between endpoints with nothing to prefill, fewer running requests win."""
    assert picks([candidate(1, untracked=3), candidate(2, untracked=2)], Demand(1))[0] == "p2"


def test_near_ties_go_to_the_fewest_running() -> None:
    """A millisecond does not decide: the endpoint that runs less does."""
    pods = [candidate(1, untracked=1), candidate(2, backlog=5.5)]

    assert picks(pods, Demand(1))[0] == "p2"


def test_a_popular_prefix_is_copied_sooner() -> None:
    """Behind the same backlog a prompt of its own stays, and one that came ten times in a second does not."""
    pods = [candidate(1, backlog=1000.0), candidate(2)]
    hits = {"ns/p1": Match(900, 3600)}

    assert picks(pods, Demand(1000, hits))[0] == "p1"
    assert picks(pods, Demand(1000, hits, uses=10.0))[0] == "p2"


@given(st.floats(0, 100), st.integers(0, 900))
def test_uses_do_not_matter_where_all_hold_the_same(uses: float, held: int) -> None:
    """Sharing is about copies: without one to be made, the order is that of the loads."""
    pods = [candidate(n, backlog=100.0 * n) for n in (3, 1, 2)]
    hits = {c.endpoint.key: Match(held, 4 * held) for c in pods}

    assert picks(pods, Demand(1000, hits, uses)) == ["p1", "p2", "p3"]


def test_equal_endpoints_take_turns() -> None:
    """Requests that find equal endpoints spread over all of them."""
    pods = [candidate(n) for n in range(1, 5)]

    assert [picks(pods, Demand(1), turn=t)[0] for t in range(5)] == ["p1", "p2", "p3", "p4", "p1"]


def test_the_next_best_are_named_for_retries() -> None:
    """Up to the limit, in the order of their cost."""
    pods = [candidate(n, backlog=1000.0 * n) for n in range(1, 6)]

    assert [picks(pods, Demand(1)), picks(pods, Demand(1), limit=1)] == [["p1", "p2", "p3"], ["p1"]]


def test_a_row_has_all_that_was_weighed() -> None:
    """The best row has what the load tracker, the request log and ``/debug/pick`` show; its terms add up."""
    pods = [candidate(1, backlog=500.0)]

    [found] = choose(pods, Demand(1000, {"ns/p1": Match(900, 3600)}), now=NOW)

    assert found == ScoredEndpoint(
        pods[0].endpoint,
        matched_tokens=900,
        matched_bytes=3600,
        uncached_tokens=100,
        backlog_tokens=500,
        running=0,
        predicted_ttft_seconds=0.6,
        seconds=found.seconds,
    )
    assert found.reason == f"cost {sum(found.terms.values()):.4f} s, 0 running"
    assert {name: seconds for name, seconds in found.terms.items() if seconds} == {
        "wait": 0.5,
        "work": 0.1,
        "eviction": 3 * 100 / 1000,
    }


def test_eviction_costs_the_same_on_every_kind_of_gpu() -> None:
    """Half the prefill rate doubles the cost of work, but not of evicted blocks, which other endpoints
    compute again."""
    fast, slow = candidate(1), candidate(2)
    slow.load.rate = fast.load.rate / 2
    rows = explain([fast, slow], Demand(1000), now=NOW)
    work = 1000 / fast.load.rate
    room = 3.0 * work / 0.75

    assert [row.reason for row in rows] == [
        f"cost {work + room:.4f} s, 0 running",
        f"cost {2 * work + room:.4f} s, 0 running",
    ]


def test_a_prompt_wholly_matched_computes_its_last_token() -> None:
    """The engine recomputes the last token; without a prompt there is nothing to compute."""
    pods = [candidate(1)]

    assert choose(pods, Demand(100, {"ns/p1": Match(100, 400)}), now=NOW)[0].uncached_tokens == 1
    assert choose(pods, Demand(0), now=NOW)[0].uncached_tokens == 0


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ("10.0.0.1", True),
        (" 10.0.0.1:8000 ", True),
        ("10.0.0.1:8001", False),
        ("10.0.0.2", False),
        ("pod-1", False),
        ("10.0.0.1:http", False),
        ("", False),
    ],
)
def test_a_subset_names_addresses_with_or_without_port(member: str, expected: bool) -> None:
    """``ip`` allows every port of it, ``ip:port`` this one; anything else allows nothing."""
    assert named(canonical((member,)), candidate(1).endpoint) is expected


@pytest.mark.parametrize("member", ["fd00::1", "[fd00::1]", "[fd00:0::1]:8000", "FD00::0001"])
def test_a_subset_may_spell_ipv6_as_it_likes(member: str) -> None:
    """Brackets, capitals and zeros do not matter."""
    assert named(canonical((member,)), Endpoint("a", "ns", "fd00::1", 8000))


def test_an_ipv6_port_in_a_subset_counts() -> None:
    """``[v6]:port`` allows this port only."""
    assert not named(canonical(("[fd00::1]:8001",)), Endpoint("a", "ns", "fd00::1", 8000))


@pytest.mark.parametrize(
    ("pods", "subset", "message"),
    [
        ([], None, "no endpoints are known"),
        ([], ("10.0.0.1",), "no endpoints are known"),
        ([candidate(1)], (), "none of the 1 known endpoints is in the gateway's subset of 0"),
        (
            [candidate(1), candidate(2, ready=False, reason="unreachable")],
            ("10.0.0.2",),
            "none of 1 endpoints can be picked: 1 unreachable",
        ),
        (
            [
                candidate(1, ready=False, reason="unreachable"),
                candidate(2, ready=False),
                candidate(3, role="prefill"),
                candidate(4, ready=False, reason="unreachable"),
            ],
            None,
            "none of 4 endpoints can be picked: 2 unreachable, 1 not ready, 1 role prefill",
        ),
    ],
)
def test_no_endpoint_is_eligible(pods: list[Candidate], subset: tuple[str, ...] | None, message: str) -> None:
    """The refusal says why, in counts and without addresses."""
    with pytest.raises(NoEndpoints) as caught:
        choose(pods, Demand(1), subset, now=NOW)

    assert (caught.value.message, caught.value.status) == (message, 503)


def test_explain_shows_everybody() -> None:
    """The page has the eligible in the order of the pick, then the others with what stands in the way."""
    pods = [
        candidate(1, ready=False, reason="unreachable"),
        candidate(2, backlog=5.0),
        candidate(3),
        candidate(4),
    ]
    rows = explain(pods, Demand(1), ("10.0.0.1", "10.0.0.2", "10.0.0.3"), now=NOW)

    assert [(row.endpoint.name, not row.refusal) for row in rows] == [
        ("p3", True),
        ("p2", True),
        ("p1", False),
        ("p4", False),
    ]
    assert [row.reason for row in rows[2:]] == ["unreachable", NOT_IN_SUBSET]


loads = st.tuples(st.floats(0, 1e5), st.integers(0, 300), st.booleans(), st.none() | st.integers(1, 300))
fleets = st.lists(loads, min_size=1, max_size=6)
hits = st.dictionaries(st.integers(1, 6), st.integers(1, 900), max_size=6)


def built(fleet: list[tuple[float, int, bool, int | None]]) -> list[Candidate]:
    return [
        candidate(n, backlog=backlog, untracked=untracked, ready=ready, slots=slots)
        for n, (backlog, untracked, ready, slots) in enumerate(fleet, 1)
    ]


def asked(matched: dict[int, int]) -> Demand:
    return Demand(1000, {f"ns/p{n}": Match(tokens, 4 * tokens) for n, tokens in matched.items()})


@given(fleets, hits, st.sets(st.integers(1, 8)), st.integers(0, 9))
def test_the_subset_is_always_respected(
    fleet: list[tuple[float, int, bool, int | None]], matched: dict[int, int], allowed: set[int], turn: int
) -> None:
    """Whatever the loads and matches: only ready endpoints of the subset, none twice, else NoEndpoints."""
    pods = built(fleet)
    possible = {f"p{n}" for n, pod in enumerate(pods, 1) if pod.ready and n in allowed}
    try:
        picked = picks(pods, asked(matched), tuple(f"10.0.0.{n}" for n in allowed), turn=turn, limit=9)
    except NoEndpoints:
        picked = []

    assert sorted(picked) == sorted(possible)


@given(fleets, hits, st.floats(1, 1e5))
def test_more_backlog_never_makes_an_endpoint_better(
    fleet: list[tuple[float, int, bool, int | None]], matched: dict[int, int], more: float
) -> None:
    """A larger backlog never shortens the predicted time to the first token."""
    rows = explain(built(fleet), asked(matched), now=NOW)
    pods = built(fleet)
    pods[0].load.backlog_tokens += more
    later = explain(pods, asked(matched), now=NOW)
    before = next(row for row in rows if row.endpoint.name == "p1")
    after = next(row for row in later if row.endpoint.name == "p1")

    assert after.predicted_ttft_seconds >= before.predicted_ttft_seconds


@given(fleets, hits, st.integers(0, 9))
def test_choose_and_explain_agree(
    fleet: list[tuple[float, int, bool, int | None]], matched: dict[int, int], turn: int
) -> None:
    """The debug page shows the very order in which requests are sent."""
    rows = [row for row in explain(built(fleet), asked(matched), now=NOW, turn=turn) if not row.refusal]
    try:
        chosen = choose(built(fleet), asked(matched), now=NOW, turn=turn, limit=9)
    except NoEndpoints:
        chosen = []

    assert chosen == rows
