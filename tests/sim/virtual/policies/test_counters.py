"""Tests of the routers' counters, and of least requests, which uses only them."""

from hypothesis import given
from hypothesis import strategies as st
from tests.sim.virtual.policies.ask import asked, context, pods, send

from kvist_sim.virtual.policies.counters import Prefill, depth, least
from kvist_sim.virtual.policies.load_balancing import LeastRequests


def test_a_prompt_is_in_the_backlog_until_its_first_token() -> None:
    """A request's expected tokens count from routing to its first token, and the request until it ends."""
    counts, pod, request = Prefill(), pods(1)[0], asked([1, 2])
    counts.expect([320], 0)
    counts.routed(request, pod, 0.0)
    assert (counts.tokens[pod], counts.requests[pod]) == (320, 1)
    counts.first_token(request, pod, 1.0)
    assert (counts.tokens[pod], counts.requests[pod]) == (0, 1)
    counts.finished(request, pod, 2.0)
    assert (counts.tokens[pod], counts.requests[pod]) == (0, 0)


def test_a_request_that_ends_before_its_first_token_leaves_no_backlog() -> None:
    """An interrupted request removes its backlog, also when its pod left before."""
    counts, (kept, lost) = Prefill(), pods(2)
    for pod in (kept, lost):
        request = asked([1])
        counts.expect([100], 0)
        counts.routed(request, pod, 0.0)
        if pod is lost:
            counts.left(pod, 1.0)
        counts.finished(request, pod, 1.0)
        assert (counts.tokens[pod], counts.requests[pod]) == (0, 0)


def test_least_requests_takes_the_pod_with_the_fewest() -> None:
    """Requests fill the pods evenly, and a pod that finished one gets the next."""
    policy, fleet, request = LeastRequests(context()), pods(3), asked([1])
    assert sorted(send(policy, asked([1]), fleet) for _ in fleet) == [0, 1, 2]
    assert sorted(send(policy, asked([1]), fleet) for _ in fleet) == [0, 1, 2]
    policy.finished(request, fleet[1], 1.0)
    assert send(policy, request, fleet) == 1


def test_equal_ones_are_chosen_by_lot() -> None:
    """Among equal values each is chosen sometimes, a greater one never."""
    dice = context().random
    assert {least([2, 1, 3, 1], dice) for _ in range(50)} == {1, 3}


@given(st.lists(st.integers(0, 9), unique=True), st.integers(0, 12))
def test_depth_is_the_number_of_first_blocks_held(blocks: list[int], held: int) -> None:
    """The depth counts the leading blocks held, given that no later block is held alone."""
    assert depth(blocks, set(blocks[:held])) == min(held, len(blocks))
