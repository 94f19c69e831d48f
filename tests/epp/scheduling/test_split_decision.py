"""Whether a prompt is computed elsewhere: pairs, roles, compatibility, and the two costs."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.tpot_admission import TpotAdmission
from kvist_epp.scheduling.cost import Match
from kvist_epp.scheduling.leg_costs import (
    RULES,
    SPLIT_TERMS,
    WHOLE_TERMS,
    odds_ratio,
    seconds_per_sequence,
    slow,
)
from kvist_epp.scheduling.leg_table import LegTable, WarmPairs
from kvist_epp.scheduling.pick import Candidate, Demand, choose, settle_roles
from kvist_epp.scheduling.split_decision import SplitDecision, Undecided, weigh

NOW = 10.0
ROLES = ("prefill", "decode", "both", "prefill-decode", "encode", "encode-prefill", "other")


def candidate(
    name: str,
    *,
    role: str = "both",
    kv: str = "",
    backlog: float = 0.0,
    running: int = 0,
    ready: bool = True,
    tpot: bool = False,
    share: float = 0.0,
    transfer_rate: float | None = None,
) -> Candidate:
    labels = {"kvist.dev/role": role} | ({"kvist.dev/kv-compatibility": kv} if kv else {})
    endpoint = Endpoint(name, "ns", "10.0.0.1", 8000 + sum(map(ord, name)), labels)
    load = EndpointLoad(
        endpoint.key,
        rate=10_000.0,
        backlog_tokens=backlog,
        untracked_requests=running,
        at=NOW,
        tpot=TpotAdmission(0.05) if tpot else None,
        transfer_rate=transfer_rate,
    )
    load.prefill_share.add(10 * share, NOW)
    return Candidate(endpoint, load, ready)


def decision(
    candidates: list[Candidate], demand: Demand, warm: WarmPairs | None = None
) -> SplitDecision | Undecided:
    settle_roles(candidates)
    best = choose(candidates, demand, now=NOW)[0]
    return weigh(LegTable(candidates), demand, best, now=NOW, warm=warm)


def split(candidates: list[Candidate], demand: Demand, warm: WarmPairs | None = None) -> SplitDecision:
    found = decision(candidates, demand, warm)
    assert isinstance(found, SplitDecision)
    return found


def test_a_busy_decoder_gets_its_prompt_computed_elsewhere() -> None:
    """An endpoint without sequences computes a long prompt for which many would have to wait."""
    pods = [candidate("p", role="prefill"), candidate("d", role="decode", running=40)]

    found = split(pods, Demand(8000))

    assert found.chosen
    assert (found.prefill.endpoint.name, found.decode.endpoint.name) == ("p", "d")
    assert found.transferred_tokens == 8000


def test_an_idle_pool_is_not_disaggregated() -> None:
    """Without sequences that would suffer, a transfer costs more than it saves."""
    found = split([candidate("a"), candidate("b")], Demand(8000))

    assert not found.chosen
    assert found.reason.startswith("not disaggregated")


def test_few_uncached_tokens_stay() -> None:
    """A short uncached remainder is never computed elsewhere, however busy its endpoint is."""
    pods = [candidate("p", role="prefill"), candidate("d", role="decode", running=200, backlog=90_000)]

    assert isinstance(decision(pods, Demand(int(RULES.least_tokens) - 1)), Undecided)
    assert isinstance(decision(pods, Demand(20_000, {"ns/d": Match(19_900, 0)})), Undecided)


def test_only_what_the_decoder_lacks_is_transferred() -> None:
    """A prefix cached at the decode endpoint is not transferred, and one at the prefill endpoint is not
    computed."""
    pods = [candidate("p", role="prefill"), candidate("d", role="decode", running=60)]
    found = split(pods, Demand(8000, {"ns/d": Match(4000, 0), "ns/p": Match(3000, 0)}))

    assert (found.transferred_tokens, found.prefill.uncached_tokens) == (4000, 5000)


def test_a_cold_pair_costs_its_handshake() -> None:
    """Two engines that have not met pay for it, so a pair that has met is taken."""
    pods = [candidate("p"), candidate("q"), candidate("d", role="decode", running=60)]
    warm = WarmPairs()
    assert split(pods, Demand(8000), warm).split_terms["handshake"] == RULES.handshake_seconds

    warm.add("ns/q", "ns/d")
    found = split(pods, Demand(8000), warm)
    assert (found.prefill.endpoint.name, found.split_terms["handshake"]) == ("q", 0.0)

    warm.remove_endpoint("ns/q")
    assert not len(warm)


def test_a_measured_transfer_rate_replaces_the_default() -> None:
    """A decode endpoint that receives slowly makes the transfer dear."""
    pods = [candidate("p", role="prefill"), candidate("d", role="decode", running=60, transfer_rate=2000.0)]

    assert split(pods, Demand(8000)).split_terms["transfer"] == pytest.approx(RULES.leg_seconds + 4.0)


def test_an_answer_goes_where_few_prompts_come() -> None:
    """The endpoint that computes many prompts is no good place to decode."""
    pods = [candidate("p"), candidate("crowded", share=0.8), candidate("calm")]
    pods[0].load.untracked_requests = 1
    found = split(pods, Demand(8000))

    assert found.decode.endpoint.name != "crowded"


def test_prefill_endpoints_serve_while_alone() -> None:
    """Endpoints with the role ``prefill`` take ordinary requests only while no other endpoint is ready."""
    pods = [candidate("p", role="prefill"), candidate("d", role="decode", ready=False)]
    settle_roles(pods)
    assert [row.endpoint.name for row in choose(pods, Demand(10), now=NOW)] == ["p"]

    pods[1].update(pods[1].endpoint, ready=True, reason="")
    settle_roles(pods)
    assert [row.endpoint.name for row in choose(pods, Demand(10), now=NOW)] == ["d"]


def test_sequences_are_packed_where_prompts_press() -> None:
    """An answer goes to an endpoint with sequences where prompts press, so that the others stay free, and
    else to the one with the fewest."""
    pressed = [candidate("a", running=20), candidate("b", share=0.9), candidate("c", share=0.9)]
    assert split(pressed, Demand(8000)).whole.endpoint.name == "a"

    calm = [candidate("a", running=20), candidate("b"), candidate("c")]
    assert split(calm, Demand(8000)).whole.endpoint.name != "a"


def test_transfers_to_one_endpoint_wait_for_each_other() -> None:
    """An endpoint to which many tokens are on their way is no good place for more, and is charged for it."""
    pods = [candidate("p", role="prefill"), candidate("d", role="decode", running=60)]
    idle = split(pods, Demand(8000)).split_terms["transfer"]
    pods[1].load.keep_place("other", 96_000)

    assert split(pods, Demand(8000)).split_terms["transfer"] > idle + 1.0


@given(share=st.floats(0, 3), more=st.floats(0, 3), allowed=st.floats(0.01, 1))
def test_more_prompts_make_more_answers_slow(share: float, more: float, allowed: float) -> None:
    """The part of slow answers is between 0 and 1, and grows with the share of time that prompts take."""
    assert 0.0 <= slow(share, allowed) <= slow(share + more, allowed) <= 1.0


def test_the_golden_explanation() -> None:
    """The decision says in words which endpoints it compared and what both alternatives cost."""
    pods = [candidate("p", role="prefill"), candidate("d", role="decode", running=50)]
    found = split(pods, Demand(9600))

    assert found.reason == (
        "prefill at ns/p and decode at ns/d costs 4.360 s, 9600 tokens transferred; all at ns/d costs 7.930 s"
    )
    assert tuple(found.split_terms) == tuple(SPLIT_TERMS)
    assert tuple(found.whole_terms) == WHOLE_TERMS


@st.composite
def pools(draw: st.DrawFn) -> list[Candidate]:
    count = draw(st.integers(1, 8))
    tpot = draw(st.booleans())
    return [
        candidate(
            chr(97 + n),
            role=draw(st.sampled_from(ROLES)),
            kv=draw(st.sampled_from(("", "x", "y"))),
            backlog=draw(st.floats(0, 50_000)),
            running=draw(st.integers(0, 100)),
            ready=draw(st.booleans()),
            share=draw(st.floats(0, 2)),
            tpot=tpot,
        )
        for n in range(count)
    ]


def _warm(pairs: list[tuple[str, str]]) -> WarmPairs:
    warm = WarmPairs()
    for prefill, decode in pairs:
        warm.add(prefill, decode)
    return warm


@given(pods=pools(), tokens=st.integers(600, 30_000), data=st.data())
def test_pairs_that_have_met_come_first(pods: list[Candidate], tokens: int, data: st.DataObject) -> None:
    """The one pair that has met is found and needs no handshake, if its prefill endpoint is the cheapest one;
    and where the cheapest pair has met, the decision is as if all had."""
    settle_roles(pods)
    if all(one.refusal for one in pods):
        return
    every = decision(pods, Demand(tokens))
    if isinstance(every, Undecided):
        return
    prefill, decode = every.prefill.endpoint, every.decode.endpoint
    others = [
        one.endpoint
        for one in pods
        if one.ready
        and one.endpoint.can_decode
        and one.endpoint.key != prefill.key
        and one.endpoint.kv_compatibility == prefill.kv_compatibility
    ]
    met = data.draw(st.sampled_from(others))
    found = decision(pods, Demand(tokens), _warm([(prefill.key, met.key)]))
    assert isinstance(found, SplitDecision)
    assert (found.prefill.endpoint.key, found.decode.endpoint.key) == (prefill.key, met.key)
    assert found.split_terms["handshake"] == 0.0
    same = decision(pods, Demand(tokens), _warm([(prefill.key, decode.key)]))
    assert isinstance(same, SplitDecision)
    assert same.split_terms == every.split_terms


def test_large_pools_use_the_pairs_that_have_met() -> None:
    """With 40 endpoints of which each has met one, the pair is one of those that have met, although no two of
    the cheapest endpoints have."""
    pods = [candidate(f"p{n}", role="prefill", backlog=100.0 * n) for n in range(20)]
    pods += [candidate(f"d{n}", role="decode", running=40 + n) for n in range(20)]
    found = split(pods, Demand(8000), _warm([(f"ns/p{n}", f"ns/d{19 - n}") for n in range(20)]))

    assert found.chosen
    assert found.split_terms["handshake"] == 0.0


@given(
    pods=pools(),
    tokens=st.integers(0, 30_000),
    held=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 30_000), max_size=4),
    pairs=st.one_of(st.none(), st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")))),
)
def test_pairs_obey_roles_and_labels(
    pods: list[Candidate],
    tokens: int,
    held: dict[str, int],
    pairs: list[tuple[str, str]] | None,
) -> None:
    """A pair is two ready endpoints with equal compatibility whose roles allow their legs; it is chosen only
    where it is cheaper; and its terms are seconds of at least 0."""
    settle_roles(pods)
    if all(one.refusal for one in pods):
        return
    demand = Demand(tokens, {f"ns/{name}": Match(min(each, tokens), 0) for name, each in held.items()})
    warm = None if pairs is None else _warm([(f"ns/{a}", f"ns/{b}") for a, b in pairs])
    found = decision(pods, demand, warm)
    if isinstance(found, Undecided):
        return
    by_key: Callable[[str], Candidate] = {one.endpoint.key: one for one in pods}.__getitem__
    prefill, decode = by_key(found.prefill.endpoint.key), by_key(found.decode.endpoint.key)
    assert prefill is not decode
    assert prefill.ready
    assert decode.ready
    assert prefill.endpoint.kv_compatibility == decode.endpoint.kv_compatibility
    assert prefill.endpoint.can_prefill
    assert decode.endpoint.can_decode
    assert found.chosen == (found.split_seconds < found.whole_seconds - RULES.margin_seconds)
    assert all(seconds >= 0 for seconds in (*found.split_terms.values(), *found.whole_terms.values()))
    assert found.predicted_ttft_seconds >= 0


def test_prompts_press_by_what_answers_allow() -> None:
    """Prompts press little where tokens come fast, and fully where answers are near the target."""
    assert odds_ratio(0.126, 0.47) < 0.2
    assert odds_ratio(0.126, 0.126) == 1.0
    assert odds_ratio(0.5, 1.0) == odds_ratio(0.5, RULES.usual_share)


def test_prompts_go_where_they_are_taken_up() -> None:
    """A prompt is not queued for the endpoint with the fewest sequences while many wait for that one and
    another one takes prompts up."""
    pods = [
        candidate("a", tpot=True),
        candidate("b", tpot=True, running=60, share=0.3),
        candidate("c", tpot=True),
    ]
    for pod in pods:
        pod.load.last_event_at = NOW

    def computes() -> str:
        found = split(pods, Demand(4000))
        return (found.prefill if found.chosen else found.whole).endpoint.name

    assert computes() in {"a", "c"}

    for pod in (pods[0], pods[2]):
        pod.load.backlog_tokens = 5_100
        assert pod.load.tpot is not None
        for number in range(10):
            pod.load.tpot.add_queued(number, 4_000, NOW)
    assert computes() == "b"


def test_a_sequence_prolongs_a_token_by_what_all_endpoints_show() -> None:
    """Nothing is known without measurements; with them, it is the mean over all sequences."""
    assert seconds_per_sequence([]) == 0.0
    assert seconds_per_sequence([candidate("a").load, candidate("b", tpot=True).load]) == 0.0
