"""The prefill rate of an endpoint, learned from its own events."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.load.prefill_rate import ALIKE, WINDOW_TOKENS, WINDOWS, PoolPrefillRates, PrefillRateEstimator

FAR = 10 * WINDOW_TOKENS


def behind(
    pace: PrefillRateEstimator, steps: int, tokens: float, seconds: float, *, at: float = 0.0, parts: int = 2
) -> float:
    """Report steps of an endpoint that is always busy, each in parts; return the end of the last step."""
    for step in range(steps):
        for part in range(parts):
            now = at + step * seconds + part * 1e-4
            pace.on_progress(tokens / parts, FAR, now - seconds, now)
    return at + steps * seconds


@given(st.floats(300, 8_000), st.floats(0.05, 2.0), st.integers(1, 5))
def test_an_endpoint_that_is_behind_shows_its_rate(tokens: float, seconds: float, parts: int) -> None:
    """The rate is the tokens of a step over its duration, in however many events the step is reported."""
    pace = PrefillRateEstimator()
    behind(pace, 2 + 4 * ceil(max(WINDOW_TOKENS / tokens, 1 / seconds)), tokens, seconds, parts=parts)

    assert pace.rate == pytest.approx(tokens / seconds, rel=0.01)


def test_an_endpoint_that_has_little_to_do_shows_nothing() -> None:
    """An endpoint that is not always busy shows its load, not its rate, so that nothing is learned."""
    pace = PrefillRateEstimator()
    for second in range(100):
        pace.on_progress(1_000.0, WINDOW_TOKENS - 1, second - 0.1, float(second))

    assert pace.rate is None


@given(st.floats(0.02, 0.9))
def test_an_idle_endpoint_with_an_assumed_backlog_shows_no_rate(pause: float) -> None:
    """No rate is learned from an endpoint that was idle although it seemed busy: each prompt came after the
    one before it had ended, because other prompts were cached."""
    pace = PrefillRateEstimator()
    for step in range(100):
        now = step * (0.1 + pause)
        pace.on_progress(1_600.0, FAR, now - 0.1, now)

    assert pace.rate is None


def test_what_a_full_cache_holds_up_is_no_rate() -> None:
    """Steps in which next to nothing was computed make few windows, and few slow ones hardly count."""
    pace = PrefillRateEstimator()
    end = behind(pace, 40, 4_000.0, 0.25)
    fast = pace.rate
    end = behind(pace, 30, 100.0, 0.25, at=end)
    behind(pace, 8, 2_000.0, 0.25, at=end)

    assert fast == pytest.approx(16_000.0)
    assert pace.rate == pytest.approx(16_000.0)


def test_another_rate_is_learned_in_the_end() -> None:
    """An engine that became slow for good is found out when the windows before have faded."""
    pace = PrefillRateEstimator()
    end = behind(pace, 40, 4_000.0, 0.25)
    behind(pace, 4 * (WINDOWS + 4), 2_000.0, 0.25, at=end)

    assert pace.rate == pytest.approx(8_000.0)


def test_a_large_step_shows_that_it_is_no_slower() -> None:
    """The tokens of one event were computed since their request was routed."""
    pace = PrefillRateEstimator()
    pace.on_progress(4_000.0, 0.0, 10.0, 10.5)
    pace.on_progress(WINDOW_TOKENS - 1.0, 0.0, 20.0, 20.01)

    assert pace.proven == 8_000.0


def test_endpoints_that_differ_little_are_alike() -> None:
    """Endpoints of nearly the same rate get the fastest one's; an endpoint that is slower by more keeps its
    own."""
    paces = PoolPrefillRates(15_000.0)
    changed = [paces.learn("a", 10_000.0), paces.learn("b", 8_000.0), paces.learn("c", 5_000.0)]

    assert changed == [True, False, False]
    assert [paces.rate(key) for key in "abc"] == [10_000.0, 10_000.0, 5_000.0]


def test_an_endpoint_that_was_never_busy_is_as_fast_as_the_fastest_or_as_it_has_shown() -> None:
    """The rates of slow endpoints, which are busy first, are no upper bound for endpoints that were never
    busy."""
    paces = PoolPrefillRates(15_000.0)
    paces.learn("slow", 4_000.0)

    assert [paces.rate("other"), paces.rate("other", proven=12_000.0)] == [4_000.0, 12_000.0]

    paces.remove("slow")

    assert paces.rate("other") == 15_000.0


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(100, 1e5), min_size=1))
def test_no_rate_is_off_by_more_than_what_is_alike(learned: dict[str, float]) -> None:
    """Whatever was learned in whatever order, each endpoint has its own rate or at most a third more."""
    paces = PoolPrefillRates(15_000.0)
    for key, rate in learned.items():
        paces.learn(key, rate)
    for key, rate in learned.items():
        assert rate <= paces.rate(key) <= rate / (1.0 - ALIKE) * (1 + 1e-9)
