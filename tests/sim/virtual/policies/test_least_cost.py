"""Greedy time to first token, LMetric, Dynamo: hand-computed costs."""

import itertools
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.virtual.policies.ask import Held, asked, context, pods, send

from kvist_sim.virtual.policies.dynamo import Dynamo, Weights, cost, pick, softmax
from kvist_sim.virtual.policies.least_cost import Greedy, LMetric, score, ttft

costs = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


def test_ttft_by_hand() -> None:
    """3,000 tokens queued and 1,000 of its own at 2,000 tokens/s: two seconds."""
    assert ttft(3_000, 1_000, 2_000.0) == 2.0


def test_greedy_leaves_a_holder_that_would_answer_later() -> None:
    """The policy follows the prefix as long as the queue is shorter than the time that the prefix saves."""
    policy, fleet = Greedy(context(Held({0: 4}))), pods(2)
    prompt = range(5)
    sent = [send(policy, asked([*prompt]), fleet) for _ in range(6)]
    # pod 0 has a backlog of 16 a request; at 64, 64 + 16 equals the 80 that an idle pod needs
    assert sent[:4] == [0, 0, 0, 0]
    assert sent.count(1) >= 1


def test_lmetric_by_hand() -> None:
    """1,200 tokens to prefill in a batch of 5, itself included: 6,000."""
    assert score(1_200, 5) == 6_000


def test_lmetric_weighs_the_batch_against_the_prefix() -> None:
    """A holder of three of four blocks keeps the request until its batch is four times as large."""
    policy, fleet = LMetric(context(Held({0: 3}))), pods(2)
    sent: list[int] = []
    for _ in range(4):
        request = asked([1, 2, 3, 4])
        sent.append(send(policy, request, fleet))
        policy.first_token(request, fleet[sent[-1]], 0.0)
    # 16 x 1, 16 x 2, 16 x 3 against 64 x 1; then 16 x 4 = 64 x 1 is a tie
    assert sent[:3] == [0, 0, 0]
    assert [score(16, 4), score(64, 1)] == [64, 64]


def test_dynamo_cost_by_hand() -> None:
    """Prefill 30 blocks less 10 held, 25 decode blocks: 45; at scale 2 and weight 1.5 for 4 requests: 71."""
    assert cost(30.0, 10, 25, 4) == 45.0
    assert cost(30.0, 10, 25, 4, Weights(prefill_load_scale=2.0, decode_active_request_weight=1.5)) == 71.0


def test_dynamo_cost_is_what_the_real_one_says() -> None:
    """Logits of ai-dynamo-runtime 1.6.1: 640 tokens, nothing held: 80; 1,202 with 75 of 75 blocks: 75.125."""
    assert cost(640 / 16, 0, 40, 0) == 80.0
    assert cost(1_202 / 16, 75, 75, 0) == 75.125


def test_dynamo_credit_never_makes_prefill_negative() -> None:
    """More credit than prefill costs nothing, not less than nothing."""
    assert cost(4.0, 10, 7, 0) == 7.0


def test_dynamo_counts_shared_blocks_once() -> None:
    """A second request with the same blocks adds nothing to a pod's decode, so it goes where they are."""
    policy, fleet = Dynamo(context(Held())), pods(2)
    first = asked([1, 2, 3])
    there = send(policy, first, fleet)
    policy.first_token(first, fleet[there], 0.0)
    # prefill is 3 blocks on both; decode 3 where they are shared, 0 + 3 on the other: a tie broken by more
    longer = asked([1, 2, 3, 4])
    assert policy._cost(longer, fleet[there], 0) == 4 + 4
    assert policy._cost(longer, fleet[1 - there], 0) == 4 + 4
    policy.finished(first, fleet[there], 1.0)
    assert policy._cost(longer, fleet[there], 0) == 4 + 4


def test_dynamo_prefill_counts_until_the_first_token() -> None:
    """While a prompt of three blocks is computed the pod costs six more: three to prefill, three active."""
    policy, fleet = Dynamo(context(Held())), pods(2)
    first = asked([1, 2, 3])
    there = fleet[send(policy, first, fleet)]
    assert policy._cost(asked([9]), there, 0) == (3 + 1) + (3 + 1)
    policy.first_token(first, there, 1.0)
    assert policy._cost(asked([9]), there, 0) == 1 + (3 + 1)
    policy.finished(first, there, 2.0)
    assert policy._cost(asked([9]), there, 0) == 1 + 1


def test_softmax_by_hand() -> None:
    """Costs 10, 20, 30 at temperature 0.5 are 0, 1/2 and 1 normalised: weights 1, e^-1, e^-2."""
    total = 1 + exp(-1) + exp(-2)
    assert softmax([10, 20, 30], 0.5) == pytest.approx([1 / total, exp(-1) / total, exp(-2) / total])


@given(costs, st.floats(0.01, 10))
def test_softmax_is_a_distribution_that_prefers_less(values: list[float], temperature: float) -> None:
    """Probabilities sum to one and never rise with the cost."""
    chances = softmax(values, temperature)
    assert sum(chances) == pytest.approx(1.0)
    ordered = [chance for _, chance in sorted(zip(values, chances, strict=True), key=lambda pair: pair[0])]
    assert all(first >= second - 1e-12 for first, second in itertools.pairwise(ordered))


@given(costs)
def test_temperature_nought_takes_the_least(values: list[float]) -> None:
    """Without temperature the chosen cost is the least."""
    assert values[pick(values, 0.0, context().random)] == min(values)
