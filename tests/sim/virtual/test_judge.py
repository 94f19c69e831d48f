"""Figures of runs, intervals of pairs, and the table's sentences."""

from math import inf

import pytest
from tests.sim.virtual.runs import CHAT

from kvist_sim.virtual.jobs import NOTHING, Call, CallStatus, Passage
from kvist_sim.virtual.judge import Verdict, interval, judge
from kvist_sim.virtual.report import judgements, rows, sentences, table
from kvist_sim.virtual.runner import Cell, Result
from kvist_sim.virtual.world import Outcome


def call(arrived: float, ttft: float, tpot: float, *, status: CallStatus = CallStatus.DONE) -> Call:
    """A request of 100 tokens, 40 of them cached, and an answer of 11."""
    one = Call(0, "", Passage(100, [], b""), Passage(111, [], b""), 11, arrived, arrived >= 25.0)
    one.status, one.cached = status, 40
    if status is CallStatus.DONE:
        one.first_token = arrived + ttft
        one.last_token = one.first_token + 10 * tpot
    return one


def test_only_requests_within_both_bounds_are_good() -> None:
    """Late first tokens, slow further ones and lost requests are not good; the warm-up is not counted."""
    calls = [
        call(10.0, 9.0, 0.01),
        call(30.0, 1.0, 0.05),
        call(40.0, 2.5, 0.05),
        call(50.0, 1.0, 0.07),
        call(60.0, 0.0, 0.0, status=CallStatus.LOST),
    ]
    verdict = judge(Outcome(calls, 100.0, [(30.0, (3, 1))], 7), CHAT)

    assert (verdict.requests, verdict.goodput, verdict.lost) == (4, 0.25, 1)
    assert verdict.good_per_second == pytest.approx(1 / 75)
    assert (verdict.ttft_p50, verdict.ttft_p90) == pytest.approx((1.0, 2.5))
    assert verdict.hit_ratio == pytest.approx(0.4)
    assert verdict.tokens_per_second == pytest.approx(3 * 11 / 75)
    assert (verdict.spread, verdict.preemptions) == (1.5, 7)


def test_a_request_without_an_end_is_refused() -> None:
    """A run that loses track of a request is not judged at all."""
    open_call = Call(0, "", NOTHING, NOTHING, 1, 30.0)

    with pytest.raises(ValueError, match="not ended"):
        judge(Outcome([open_call], 100.0, [], 0), CHAT)


def test_the_interval_is_student_s() -> None:
    """Three differences of 1, 2 and 3: the mean is 2, half of the 95 % interval 4.30 / sqrt 3; one value has
    no interval."""
    found = interval([1.0, 2.0, 3.0])

    assert (found.mean, found.half) == pytest.approx((2.0, 4.30 / 3**0.5))
    assert interval([0.5]).half == inf


def result(policy: str, goodput: float, seed: int) -> Result:
    """A run of which only the goodput matters."""
    verdict = Verdict(10, goodput, 1.0, 0.1, 0.2, 0.3, 0.02, 0.03, 0.5, 100.0, 0, 0, 1.0)
    return Result(Cell("chat", 0.8, policy, seed), 5.0, verdict)


def test_a_lost_row_is_shown_as_lost() -> None:
    """Ten points behind, seed by seed, is a loss and, against round robin, harm; both are said."""
    results = [
        result(policy, goodput - 0.05 * seed, seed)
        for policy, goodput in (("kvist", 0.80), ("dynamo", 0.91), ("round-robin", 0.90))
        for seed in range(4)
    ]

    [one] = judgements(results)
    assert (one.best, one.lost, one.harmed) == ("dynamo", True, "round-robin")
    assert one.behind.mean == pytest.approx(0.11)
    assert [text.split(":")[0] for text in sentences(results)] == ["lost", "harm"]
    assert [row.policy for row in rows(results)] == ["dynamo", "round-robin", "kvist"]
    assert table(results).row_count == 3


def test_a_difference_of_chance_is_no_loss() -> None:
    """Behind on average, but the pairs go both ways: the interval reaches zero."""
    results = [result("kvist", 0.8, seed) for seed in range(4)]
    results += [result("dynamo", goodput, seed) for seed, goodput in enumerate((0.95, 0.70, 0.95, 0.70))]

    [one] = judgements(results)
    assert not one.lost
    assert sentences(results) == ["best, or within 2 % goodput of the best, everywhere"]
