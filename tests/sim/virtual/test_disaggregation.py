"""Requests that two engines share, in virtual time."""

from random import Random

import pytest

from kvist_epp.scheduling.leg_costs import RULES
from kvist_sim.virtual.disaggregation_page import disaggregation_section
from kvist_sim.virtual.fleet import Change
from kvist_sim.virtual.hardware import Hardware
from kvist_sim.virtual.jobs import NOTHING, REMOTE, Call, CallStatus
from kvist_sim.virtual.legs import TRANSFER_RATE, Links, first_leg
from kvist_sim.virtual.policy import RATIOS, Pod
from kvist_sim.virtual.runner import SPECS, Cell, Job


def test_transfers_of_one_engine_wait_for_each_other() -> None:
    """Each engine sends or receives one prompt at a time; others are not held up."""
    a, b, c, d = (Pod(n, f"pod-{n}", 10, 64) for n in range(4))
    links = Links(lambda _seconds, _what, _about: None)

    assert links.occupy(a, b, 1.0, 0.0) == 1.0
    assert links.occupy(a, c, 1.0, 0.0) == 2.0
    assert links.occupy(d, b, 1.0, 5.0) == 6.0


@pytest.mark.parametrize("policy", ["kvist-pd-1:1", "llm-d-pd-1:1", "dynamo-pd-1:1"])
def test_prompts_are_computed_elsewhere(policy: str) -> None:
    """With fixed roles many answers come from engines to which their prompts were transferred; each request
    is served, and no block of a prompt stays held."""
    job = Job(engines=2, requests=40)
    world = job._world(Cell("pd-long-short", 1.0, policy, 0), job.case("pd-long-short"), 1.0)
    outcome = world.run()

    assert {call.status for call in outcome.calls} == {CallStatus.DONE}
    moved = [call for call in outcome.calls if call.loaded.get(REMOTE, 0)]
    assert len(moved) > len(outcome.calls) / 3
    for call in moved:
        assert call.first_token is not None
        assert call.first_token - call.arrived > call.loaded[REMOTE] / TRANSFER_RATE
    end = world.agenda.now + 60.0  # a picker looks at its requests four times a second for ever
    world.agenda.run(lambda: world.agenda.now > end)
    assert all(site.engine.pool.usage == 0 for site in world.sites.values())


@pytest.mark.parametrize("policy", ["kvist-pd-1:1", "kvist-fluid", "llm-d-pd-1:1", "dynamo-pd-1:1"])
@pytest.mark.parametrize("engine", [0, 3])
@pytest.mark.parametrize("gently", [False, True])
def test_engines_that_leave_take_along_what_they_answer(policy: str, engine: int, *, gently: bool) -> None:
    """An engine takes along the requests that it was to answer, and none if it drains; prompts that it was
    computing for others are computed elsewhere."""
    job = Job(engines=4, requests=80)
    world = job._world(Cell("pd-long-short", 1.0, policy, 0), job.case("pd-long-short"), 2.0)
    world.agenda.at(15.0, world._change, Change(0.5, engine, up=False, gently=gently))
    outcome = world.run()

    lost = sum(call.status is CallStatus.LOST for call in outcome.calls)
    assert {call.status for call in outcome.calls} <= {CallStatus.DONE, CallStatus.LOST}
    assert not lost or not (gently or (engine == 0 and policy != "kvist-fluid")), lost
    assert len(world.sites) == 3


def test_short_prompts_and_long_answers_are_served_as_without() -> None:
    """A fluid pool serves as many requests well as an aggregated one where answers fill all caches and
    prompts hardly prolong them: sequences are not packed on few engines."""
    job = Job(engines=8, requests=800)
    capacity = job.capacity("pd-short-long")
    aggregated, fluid = (
        job.run(Cell("pd-short-long", 1.0, policy, 1000), capacity).verdict.goodput
        for policy in ("kvist", "kvist-fluid")
    )

    assert aggregated > 0.9
    assert fluid > aggregated - 0.02


def test_the_first_leg_is_no_answer() -> None:
    """The first leg of a call has its prompt and one token, and is not judged."""
    prompt = NOTHING.on(200, Random(1))
    leg = first_leg(Call(7, "s", prompt, prompt.on(50, Random(2)), 50, 1.0))

    assert (leg.tokens, leg.output, leg.measured, bool(leg.leg)) == (200, 1, False, True)


def test_engines_with_small_caches_have_a_third() -> None:
    """The workload with long answers has engines whose caches are filled by them."""
    [small, *_] = Job(engines=2, requests=1).case("pd-short-long").fleet(2).engines

    assert small.blocks == pytest.approx(Hardware().blocks / 3, abs=1)


def test_the_page_needs_every_constant() -> None:
    """A constant without a docstring cannot be written to the page of the policy."""
    with pytest.raises(KeyError):
        disaggregation_section({"least_tokens": "x"})
    assert RULES.least_tokens > 256


@pytest.mark.parametrize("engines", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("ratio", RATIOS)
def test_either_role_has_an_engine(engines: int, ratio: str) -> None:
    """Pools with fixed roles have at least one engine of either role, and prefill engines come first."""
    spec = SPECS[f"llm-d-pd-{ratio}"]
    roles = [spec.role(position, engines) for position in range(engines)]

    assert set(roles) == {"prefill", "decode"}
    assert roles == sorted(roles, reverse=True)
