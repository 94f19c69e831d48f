"""Runs in virtual time: the same for a seed, nothing lost, and queues as theory has them."""

from statistics import fmean

import pytest
from tests.sim.virtual.runs import CHAT, fixed, run

from kvist_sim.virtual.fleet import Change
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.jobs import CallStatus
from kvist_sim.virtual.judge import first_after, judge, token_time
from kvist_sim.virtual.policy import Spec
from kvist_sim.virtual.runner import SPECS
from kvist_sim.virtual.world import Outcome, Setting

ALL = sorted(SPECS)
SMALL = Hardware(blocks=60)
LOSS = (Change(0.4, 0, up=False), Change(0.6, 0, up=True), Change(0.7, 1, up=False, gently=True))


def diary(outcome: Outcome) -> list[tuple[object, ...]]:
    """All that happened to each request."""
    return [
        (c.number, c.session, c.arrived, c.tokens, c.output, c.cached, c.first_token, c.last_token, c.status)
        for c in outcome.calls
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_seed_decides_on_everything(name: str) -> None:
    """Two runs with one seed are the same to the last digit; another seed is another run."""
    first, again = (run(SPECS[name], changes=LOSS) for _ in range(2))

    assert diary(first) == diary(again)
    assert first.loads == again.loads
    assert diary(first) != diary(run(SPECS[name], changes=LOSS, seed=2))


@pytest.mark.parametrize("name", ALL)
def test_every_request_ends_once(name: str) -> None:
    """With small caches, a pod lost, one that comes back and one that drains: each request ends once, and
    those that were answered have both times in order.

    Users ask again when they have their answer: with fixed roles, one or two of three engines answer, and
    fewer requests come.
    """
    outcome = run(SPECS[name], hardware=SMALL, changes=LOSS, requests=200)

    assert len(outcome.calls) > (100 if SPECS[name].prefill_share is None else 80)
    assert {c.status for c in outcome.calls} <= {CallStatus.DONE, CallStatus.LOST}
    for call in outcome.calls:
        if call.status is CallStatus.DONE:
            assert call.first_token is not None
            assert call.last_token is not None
            assert call.arrived < call.first_token <= call.last_token
            assert 0 <= call.cached < call.tokens


def test_users_do_not_depend_on_the_router() -> None:
    """Sessions, words, lengths and pauses depend on the seed alone, so runs of two policies are
    comparable."""
    said = [
        {(c.session, c.tokens, c.output) for c in run(SPECS[name], rate=2.0).calls}
        for name in ("kvist", "random", "dynamo")
    ]

    common = set.intersection(*said)
    assert len(common) > 0.9 * max(map(len, said))


def test_a_queue_is_as_long_as_theory_says() -> None:
    """One engine that takes one prompt at a time is an M/D/1 queue: the mean wait is D rho / 2 (1 - rho)
    (Pollaczek-Khinchine)."""
    hardware = Hardware(max_num_seqs=1)
    service = 1_600 / hardware.timing.prefill_tokens_per_second
    load = 0.6
    outcome = run(
        SPECS["random"],
        fixed(1_600, 1),
        engines=1,
        rate=load / service,
        requests=12_000,
        hardware=hardware,
    )

    waited = fmean(first_after(call) - service for call in outcome.calls if call.measured)
    assert waited == pytest.approx(service * load / 2 / (1 - load), rel=0.1)


def test_an_idle_pool_answers_at_once() -> None:
    """A lone request takes its prefill and then a step a token; the second with its prefix, a step."""
    timing = Hardware().timing
    outcome = run(SPECS["kvist"], fixed(6_400, 11, shared=6_336), engines=2, rate=0.02, requests=20)
    first, *others = outcome.calls

    assert first_after(first) == pytest.approx(timing.step(6_400, 0))
    assert token_time(first) == pytest.approx(timing.step(0, 1))
    assert {call.cached for call in others} == {6_336}
    assert [first_after(call) for call in others] == pytest.approx([timing.step(64, 0)] * len(others))


@pytest.mark.parametrize("pickers", [2, 3])
def test_replicas_share_the_requests(pickers: int) -> None:
    """With several replicas each routes some, and still every request ends once."""
    outcome = run(SPECS["kvist"], requests=300, setting=Setting(replicas=pickers, gossip=0.3))

    assert all(call.status is CallStatus.DONE for call in outcome.calls)
    assert judge(outcome, CHAT).hit_ratio > 0.5


def test_a_policy_that_asks_for_no_events_gets_none() -> None:
    """A policy without ``events`` gets none, and its indexer refuses look-ups."""
    nosy = Spec("nosy", "", SPECS["dynamo"].make)

    with pytest.raises(LookupError, match="events"):
        run(nosy)


def test_late_events_cost_hits_and_nothing_else() -> None:
    """A policy that learns of caches ten seconds late finds less there."""
    now, late = (
        run(SPECS["llm-d-affinity"], requests=400, setting=Setting(events=delay)) for delay in (0.0, 10.0)
    )

    assert judge(late, CHAT).hit_ratio < judge(now, CHAT).hit_ratio
    assert len({call.status for call in late.calls}) == 1
