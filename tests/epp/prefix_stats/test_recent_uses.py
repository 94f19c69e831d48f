"""Tests of the decayed number of uses of a prefix."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.prefix_stats.recent_uses import BURST_SECONDS, PLACES, USE_SECONDS, RecentUses


def test_uses_add_up_and_fade() -> None:
    """A use counts one at first and about a third a second later; uses of other places do not count."""
    uses = RecentUses()
    for now in (0.0, 0.0, USE_SECONDS):
        uses.record("a", now)

    later = USE_SECONDS + BURST_SECONDS
    assert uses.decayed_count("a", later) == pytest.approx(exp(-BURST_SECONDS) + 2 * exp(-later))
    assert [uses.decayed_count("b", 0.0), uses.decayed_count("a", 1e9)] == [0.0, 0.0]


def test_a_burst_counts_when_it_is_over() -> None:
    """Sixteen uses at once count nothing during their burst, and sixteen after it."""
    uses = RecentUses()
    for number in range(16):
        uses.record("a", number * BURST_SECONDS / 32)
        assert uses.decayed_count("a", number * BURST_SECONDS / 32) == 0.0

    assert uses.decayed_count("a", BURST_SECONDS) == pytest.approx(16 * exp(-BURST_SECONDS))


@given(st.floats(0.1, 200))
def test_the_count_of_a_steady_stream_is_its_uses_in_one_time_constant(rate: float) -> None:
    """The count is the rate times the time constant, give or take a burst or two."""
    uses = RecentUses()
    for number in range(round(20 * rate) + 1):
        uses.record("a", number / rate)

    seen = uses.decayed_count("a", round(20 * rate) / rate)
    assert abs(seen - rate * USE_SECONDS) <= 2 + 2 * rate * BURST_SECONDS


@given(st.integers(1, 5), st.floats(5, 100))
def test_a_replica_counts_as_much_as_a_single_picker_would(replicas: int, rate: float) -> None:
    """Each replica gets a share of a steady stream and looks back longer in proportion."""
    uses, step = RecentUses(), replicas / rate
    uses.replicas = replicas
    for number in range(round(20 * rate) + 1):
        uses.record("a", number * step)

    seen = uses.decayed_count("a", round(20 * rate) * step)
    assert abs(seen - rate * USE_SECONDS) <= 2 + 2 * rate * BURST_SECONDS


def test_memory_is_bounded() -> None:
    """The least recently used place is removed first."""
    uses = RecentUses()
    for number in range(PLACES + 10):
        uses.record(number, 0.0)
        uses.record("kept", 0.0)

    assert len(uses) == PLACES
    assert uses.decayed_count("kept", BURST_SECONDS) > 100
    assert uses.decayed_count(0, BURST_SECONDS) == 0.0
