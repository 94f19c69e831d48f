"""Predicted against true: when an index is believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.index.index_accuracy import Trust, TrustLimits

POD = "ns/pod"


def told(trust: Trust, predicted: int, true: int, times: int, now: float = 0.0) -> bool:
    """Records the same truth several times; whether the endpoint is believed then."""
    for _ in range(times):
        trust.record(POD, predicted, true, now)
    return trust.why_not(POD) == ""


def test_a_new_endpoint_is_believed() -> None:
    """Until its engine says otherwise."""

    assert Trust().why_not(POD) == ""


def test_exact_predictions_are_believed() -> None:
    """The normal case."""

    assert told(Trust(), 1000, 1000, 200)


def test_one_block_in_a_hundred_is_forgiven() -> None:
    """Up to 5 % of the tokens."""

    assert told(Trust(), 1000, 960, 200)


def test_an_error_over_5_percent_makes_approximate() -> None:
    """And the reason says by how much, without any text."""
    trust = Trust()

    assert not told(trust, 1000, 900, 200)
    assert trust.why_not(POD) == "predictions are off by 10.0%"


def test_errors_over_and_under_do_not_cancel() -> None:
    """Half the requests predicted double and half predicted nothing is no agreement."""
    trust = Trust()
    for _ in range(100):
        trust.record(POD, 2000, 1000, 0.0)
        trust.record(POD, 0, 1000, 0.0)

    assert trust.of(POD).error == pytest.approx(2000 / 3000)


def test_a_few_requests_decide_nothing() -> None:
    """One bad request among the first must not switch a pod off."""

    assert told(Trust(), 1000, 0, 19)


def test_it_stays_approximate_until_the_error_is_under_2_percent() -> None:
    """Between 2 % and 5 % nothing changes: no flapping."""
    trust = Trust()
    told(trust, 1000, 0, 200)

    assert [told(trust, 1000, 970, 200), told(trust, 1000, 990, 200), told(trust, 1000, 960, 200)] == [
        False,
        True,
        True,
    ]


def test_old_requests_do_not_count() -> None:
    """What is over a minute old is history, when there is enough that is not."""
    trust = Trust()
    told(trust, 1000, 0, 100, now=0.0)

    assert told(trust, 1000, 1000, 20, now=61.0)


def test_with_little_traffic_the_last_20_requests_count_however_old() -> None:
    """A pod with ten requests a minute is judged too."""
    trust = Trust()
    told(trust, 1000, 0, 20, now=0.0)

    assert [told(trust, 1000, 1000, 10, now=100.0), told(trust, 1000, 1000, 10, now=200.0)] == [False, True]


def test_cold_caches_are_no_alarm() -> None:
    """A block here and there on an empty engine is noise: errors count against 1,024 tokens."""

    assert told(Trust(), 2, 0, 20)


def test_endpoints_are_judged_one_by_one() -> None:
    """A pod with a wrong index does not switch the others off."""
    trust = Trust()
    told(trust, 1000, 0, 20)

    assert trust.why_not("ns/other") == ""


def test_an_endpoint_that_left_and_came_back_is_new() -> None:
    """Its old life is forgotten."""
    trust = Trust()
    told(trust, 1000, 0, 20)
    trust.forget(POD)

    assert trust.why_not(POD) == ""


def scrape(trust: Trust, predicted: int, hits: int, now: float, start: tuple[int, int] = (0, 0)) -> bool:
    """100,000 tokens were sent, of which so many were predicted and hit."""
    trust.counters(POD, start[0], start[1], now)
    trust.routed(POD, predicted, 100_000)
    trust.counters(POD, start[0] + 100_000, start[1] + hits, now + 10.0)
    return trust.why_not(POD) == ""


def test_without_sessions_the_engine_s_counters_are_compared_as_ratios() -> None:
    """Older engines tell no session: sums over a window, as a share of what was looked up."""

    assert [scrape(Trust(), 60_000, hits, 0.0) for hits in (60_000, 58_000, 40_000)] == [True, True, False]


def test_counters_that_fall_begin_anew() -> None:
    """An engine that restarted counts from 0: the difference to its old life says nothing."""
    trust = Trust()
    scrape(trust, 60_000, 60_000, 0.0, start=(5_000_000, 0))

    assert scrape(trust, 60_000, 60_000, 20.0)


def test_too_few_looked_up_tokens_decide_nothing() -> None:
    """A probe or two are no evidence."""
    trust = Trust()
    trust.counters(POD, 0, 0, 0.0)
    trust.routed(POD, 9_000, 10_000)
    trust.counters(POD, 10_000, 0, 1.0)

    assert trust.why_not(POD) == ""


def test_counters_are_not_listened_to_while_sessions_tell_more() -> None:
    """The engine also counts what did not pass through us."""
    trust = Trust()
    told(trust, 1000, 1000, 20, now=5.0)

    assert scrape(trust, 60_000, 0, 0.0)


def test_a_publisher_that_is_sent_requests_and_says_nothing_is_silent() -> None:
    """Weakness 7: no events, an empty tree, and no word about it."""
    trust = Trust()
    before = trust.silent(POD, messages=0)
    for _ in range(20):
        trust.routed(POD, 0, 1000)

    assert [before, trust.silent(POD, messages=0), trust.silent(POD, messages=1)] == [False, True, False]


samples = st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0, 30))


@given(st.lists(samples, max_size=300))
def test_the_running_sums_are_the_sums_of_the_window(history: list[tuple[int, int, float]]) -> None:
    """However requests come, the error is that of the samples which are still in the window."""
    limits = TrustLimits(requests=50, seconds=60.0, least=5)
    trust = Trust(limits)
    now = 0.0
    kept: list[tuple[int, int, float]] = []
    for predicted, true, pause in history:
        now += pause
        trust.record(POD, predicted, true, now)
        kept = [*kept, (predicted, true, now)][-50:]
        recent = [sample for sample in kept if now - sample[2] <= 60.0]
        kept = recent if len(recent) >= 5 else kept[-5:]

    off = sum(abs(predicted - true) for predicted, true, _ in kept)
    total = max(1024, sum(max(predicted, true) for predicted, true, _ in kept))
    assert trust.of(POD).error == (off / total if len(kept) >= 5 else 0.0)
