"""Prewarming in virtual time."""

from dataclasses import replace
from functools import partial

import pytest

from kvist_epp.prewarm.prewarm_planner import PrewarmLimits
from kvist_sim.virtual.fleet import Change, Fleet
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.jobs import CallStatus
from kvist_sim.virtual.ours import KVIST
from kvist_sim.virtual.policy import Spec
from kvist_sim.virtual.prewarming import PREWARMING, PrewarmingKvist, PrewarmingWorld
from kvist_sim.virtual.traffic import Shape
from kvist_sim.virtual.workloads.prefixes import system_prompts, unshared

SHARED = Shape(name="shared", summary="", bursts=system_prompts(6, (1_000, 3_000), 0.8), requests=1.0)
UNSHARED = Shape(name="unshared", summary="", bursts=unshared(800), requests=1.0)
REPLACED = Fleet((Hardware(),) * 3, (Change(0.4, 0, up=False, gently=True), Change(0.6, 0, up=True)))


def world(shape: Shape, spec: Spec) -> PrewarmingWorld:
    """A short run in which a pod goes and another comes."""
    return PrewarmingWorld(shape, REPLACED, spec, rate=10.0, requests=120, seed=3)


def with_budget(tokens: int) -> Spec:
    """Prewarm so many tokens for each pod."""
    return replace(PREWARMING, make=partial(PrewarmingKvist, terms=PrewarmLimits(tokens=tokens)))


def test_every_request_is_answered_and_the_budget_is_kept() -> None:
    """Every request is answered, and prewarming takes no more than twice the budget: once for the pod
    that leaves, once for the one that joins."""
    ran = world(SHARED, with_budget(4_000))
    outcome = ran.run()
    assert {call.status for call in outcome.calls} == {CallStatus.DONE}
    assert 0 < ran.prewarmed_tokens <= 2 * 4_000


@pytest.mark.parametrize(("shape", "budget"), [(SHARED, 0), (UNSHARED, 65_536)])
def test_nothing_to_prewarm_changes_nothing(shape: Shape, budget: int) -> None:
    """Without a budget, or if no two sessions share a prefix, requests fare as without prewarming."""
    ran = world(shape, with_budget(budget))
    warm, plain = ran.run(), world(shape, KVIST).run()
    assert ran.prewarmed_tokens == 0
    assert [call.first_token for call in warm.calls] == [call.first_token for call in plain.calls]


def test_the_new_pod_holds_what_is_hot() -> None:
    """More of the prompts' tokens are found in a cache than without."""

    def cached(spec: Spec) -> int:
        return sum(call.cached for call in world(SHARED, spec).run().calls)

    assert cached(PREWARMING) > cached(KVIST)
