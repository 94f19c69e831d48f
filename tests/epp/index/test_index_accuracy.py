"""Predicted against true cached tokens: when an index is trusted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.index.index_accuracy import AccuracyLimits, AccuracyMonitor


def judged(monitor: AccuracyMonitor, predicted: int, true: int, times: int, now: float = 0.0) -> bool:
    """Compare the same request several times; return whether the endpoint is trusted then."""
    for _ in range(times):
        monitor.on_cache_truth(predicted, true, now)
    return monitor.why_not == ""


def test_a_new_endpoint_is_believed() -> None:
    """Until its engine says otherwise."""

    assert AccuracyMonitor().why_not == ""


def test_exact_predictions_are_believed() -> None:
    """The normal case."""

    assert judged(AccuracyMonitor(), 1000, 1000, 200)


def test_one_block_in_a_hundred_is_forgiven() -> None:
    """Up to 5 % of the tokens."""

    assert judged(AccuracyMonitor(), 1000, 960, 200)


def test_an_error_over_5_percent_makes_approximate() -> None:
    """An error over 5 % makes the endpoint approximate; the reason states the error, without any text."""
    monitor = AccuracyMonitor()

    assert not judged(monitor, 1000, 900, 200)
    assert monitor.why_not == "predictions are off by 10.0%"


def test_errors_over_and_under_do_not_cancel() -> None:
    """Half the requests predicted double and half predicted nothing is no agreement."""
    monitor = AccuracyMonitor()
    for _ in range(100):
        monitor.on_cache_truth(2000, 1000, 0.0)
        monitor.on_cache_truth(0, 1000, 0.0)

    assert monitor.error == pytest.approx(2000 / 3000)


def test_a_few_requests_decide_nothing() -> None:
    """One bad request among the first must not switch a pod off."""

    assert judged(AccuracyMonitor(), 1000, 0, 19)


def test_it_stays_approximate_until_the_error_is_under_2_percent() -> None:
    """Between 2 % and 5 % nothing changes: no flapping."""
    monitor = AccuracyMonitor()
    judged(monitor, 1000, 0, 200)

    assert [
        judged(monitor, 1000, 970, 200),
        judged(monitor, 1000, 990, 200),
        judged(monitor, 1000, 960, 200),
    ] == [
        False,
        True,
        True,
    ]


def test_old_requests_do_not_count() -> None:
    """Requests over a minute old do not count if there are enough newer ones."""
    monitor = AccuracyMonitor()
    judged(monitor, 1000, 0, 100, now=0.0)

    assert judged(monitor, 1000, 1000, 20, now=61.0)


def test_with_little_traffic_the_last_20_requests_count_however_old() -> None:
    """A pod with ten requests a minute is judged too."""
    monitor = AccuracyMonitor()
    judged(monitor, 1000, 0, 20, now=0.0)

    assert [judged(monitor, 1000, 1000, 10, now=100.0), judged(monitor, 1000, 1000, 10, now=200.0)] == [
        False,
        True,
    ]


def test_cold_caches_are_no_alarm() -> None:
    """A block here and there on an empty engine is noise: errors count against 1,024 tokens."""

    assert judged(AccuracyMonitor(), 2, 0, 20)


def scrape(
    monitor: AccuracyMonitor, predicted: int, hits: int, now: float, start: tuple[int, int] = (0, 0)
) -> bool:
    """100,000 tokens were sent, of which so many were predicted and hit."""
    monitor.on_counters(start[0], start[1], now)
    monitor.on_routed(predicted, 100_000)
    monitor.on_counters(start[0] + 100_000, start[1] + hits, now + 10.0)
    return monitor.why_not == ""


def test_without_sessions_the_engine_s_counters_are_compared() -> None:
    """Older engines tell no session, nor do blocks that were transferred: sums over a window."""

    assert [scrape(AccuracyMonitor(), 60_000, hits, 0.0) for hits in (60_000, 58_000, 40_000)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("looked_up", "hits", "precise"),
    [
        (100_000, 60_000, True),  # as estimated
        (220_000, 60_000, True),  # prompts are longer than their bytes suggest
        (200_000, 120_000, True),  # other clients send as much again
        (220_000, 90_000, False),
    ],
)
def test_hits_or_their_share_are_enough_to_trust(looked_up: int, hits: int, precise: bool) -> None:
    """Neither an estimate of prompts' lengths nor clients that bypass the picker make an index wrong."""
    monitor = AccuracyMonitor()
    monitor.on_counters(0, 0, 0.0)
    monitor.on_routed(60_000, 100_000)
    monitor.on_counters(looked_up, hits, 10.0)

    assert (monitor.why_not == "") is precise


@pytest.mark.parametrize(
    ("before", "after", "hits", "precise"),
    [
        (0, 8_000, 4_000, True),  # the last request waits
        (0, 8_000, 12_000, True),  # it does not: it has reached the engine since
        (8_000, 0, 20_000, True),  # the first one was counted after the first scrape
        (8_000, 8_000, 12_000, True),
        (0, 8_000, 3_000, False),
        (0, 8_000, 13_000, False),
        (0, 0, 4_000, False),
    ],
)
def test_requests_that_wait_may_be_counted_or_not(before: int, after: int, hits: int, precise: bool) -> None:
    """Tokens predicted for requests that an engine may not have looked up yet are no error either way."""
    monitor = AccuracyMonitor()
    monitor.on_counters(0, 0, 0.0, unsettled=before)
    monitor.on_routed(12_000, 100_000)
    monitor.on_counters(200_000, hits, 10.0, unsettled=after)

    assert (monitor.why_not == "") is precise


@pytest.mark.parametrize(
    ("hits", "precise"), [(50_000, True), (90_000, True), (139_000, True), (45_000, False)]
)
def test_requests_that_the_index_cannot_know_may_have_hit_anything(hits: int, precise: bool) -> None:
    """More hits than were predicted are no error beside unknown prompts, whose tokens are estimates, too."""
    monitor = AccuracyMonitor()
    monitor.on_counters(0, 0, 0.0)
    monitor.on_routed(50_000, 100_000)
    monitor.on_routed(0, 40_000, known=False)
    monitor.on_counters(140_000, hits, 10.0)

    assert monitor.precise is precise


def test_counters_that_fall_begin_anew() -> None:
    """A restarted engine counts from 0: the difference from its earlier count is not used."""
    monitor = AccuracyMonitor()
    scrape(monitor, 60_000, 60_000, 0.0, start=(5_000_000, 0))

    assert scrape(monitor, 60_000, 60_000, 20.0)


def test_too_few_looked_up_tokens_decide_nothing() -> None:
    """A probe or two are no evidence."""
    monitor = AccuracyMonitor()
    monitor.on_counters(0, 0, 0.0)
    monitor.on_routed(9_000, 10_000)
    monitor.on_counters(10_000, 0, 1.0)

    assert monitor.why_not == ""


def test_counters_are_ignored_while_sessions_report_more() -> None:
    """The engine also counts what did not pass through us."""
    monitor = AccuracyMonitor()
    judged(monitor, 1000, 1000, 20, now=5.0)

    assert scrape(monitor, 60_000, 0, 0.0)


def test_a_publisher_that_is_sent_requests_and_says_nothing_is_silent() -> None:
    """Weakness 7: no events, an empty tree, and no word about it."""
    monitor = AccuracyMonitor()
    before = monitor.silent(0)
    for _ in range(20):
        monitor.on_routed(0, 1000)

    assert [before, monitor.silent(0), monitor.silent(1)] == [False, True, False]


samples = st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.floats(0, 30))


@given(st.lists(samples, max_size=300))
def test_the_running_sums_are_the_sums_of_the_window(history: list[tuple[int, int, float]]) -> None:
    """However requests come, the error is that of the samples which are still in the window."""
    limits = AccuracyLimits(requests=50, seconds=60.0, least=5)
    monitor = AccuracyMonitor(limits)
    now = 0.0
    kept: list[tuple[int, int, float]] = []
    for predicted, true, pause in history:
        now += pause
        monitor.on_cache_truth(predicted, true, now)
        kept = [*kept, (predicted, true, now)][-50:]
        recent = [sample for sample in kept if now - sample[2] <= 60.0]
        kept = recent if len(recent) >= 5 else kept[-5:]

    off = sum(abs(predicted - true) for predicted, true, _ in kept)
    total = max(1024, sum(max(predicted, true) for predicted, true, _ in kept))
    assert monitor.error == (off / total if len(kept) >= 5 else 0.0)
