"""The table of policies as a whole."""

import pytest
from tests.sim.virtual.policies.ask import Asked, Held, asked, context, joined, pods, send

from kvist_sim.virtual.policies import POLICIES
from kvist_sim.virtual.policy import Spec

MINE = [spec for spec in POLICIES if not spec.name.startswith("kvist")]


def test_names_are_unique() -> None:
    """A name on the command line means one policy."""
    assert len({spec.name for spec in POLICIES}) == len(POLICIES)


@pytest.mark.parametrize("spec", MINE, ids=lambda spec: spec.name)
def test_pods_come_and_go(spec: Spec) -> None:
    """Any policy goes on choosing among the pods there are while they join, leave and break requests."""
    policy, fleet = spec.make(context(Held({0: 1}))), pods(4)
    joined(policy, fleet)
    sent = [(request, fleet[send(policy, request, fleet)]) for request in map(_prompt, range(30))]
    lost = fleet.pop(2)
    policy.left(lost, 1.0)
    for request, pod in sent:
        if pod is lost:
            policy.finished(request, pod, 1.0)
    assert {send(policy, _prompt(i), fleet, 1.0) for i in range(30, 60)} <= {0, 1, 3}
    new = pods(5)[4]
    fleet.append(new)
    policy.joined(new, 2.0)
    assert {send(policy, _prompt(i), fleet, 2.0 + i) for i in range(60, 90)} <= {0, 1, 3, 4}


@pytest.mark.parametrize("spec", MINE, ids=lambda spec: spec.name)
def test_a_run_is_repeated_by_its_seed(spec: Spec) -> None:
    """Equal seeds and traffic give equal choices."""
    runs = []
    for _ in range(2):
        policy, fleet = spec.make(context(Held({1: 2}), seed=9)), pods(3)
        joined(policy, fleet)
        runs.append([send(policy, _prompt(i), fleet, i / 10) for i in range(50)])
    assert runs[0] == runs[1]


def _prompt(number: int) -> Asked:
    return asked([number % 3, 100 + number], session=f"session {number % 7}")
