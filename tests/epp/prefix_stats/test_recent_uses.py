"""How often beginnings were asked for."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.prefix_stats.recent_uses import BURST_SECONDS, PLACES, USE_SECONDS, RecentUses


def test_uses_add_up_and_fade() -> None:
    """Each counts one when it comes and a third of that a second later; other places do not count."""
    uses = RecentUses()
    for now in (0.0, 0.0, USE_SECONDS):
        uses.record("a", now)

    later = USE_SECONDS + BURST_SECONDS
    assert uses.decayed_count("a", later) == pytest.approx(exp(-BURST_SECONDS) + 2 * exp(-later))
    assert [uses.decayed_count("b", 0.0), uses.decayed_count("a", 1e9)] == [0.0, 0.0]


def test_a_burst_counts_when_it_is_over() -> None:
    """Sixteen at once are no reason for a copy yet; those that still ask afterwards find them counted."""
    uses = RecentUses()
    for number in range(16):
        uses.record("a", number * BURST_SECONDS / 32)
        assert uses.decayed_count("a", number * BURST_SECONDS / 32) == 0.0

    assert uses.decayed_count("a", BURST_SECONDS) == pytest.approx(16 * exp(-BURST_SECONDS))


@given(st.floats(0.1, 200))
def test_a_steady_stream_counts_what_comes_in_the_time(rate: float) -> None:
    """Requests a second times the seconds that a use counts, but for a burst or two."""
    uses = RecentUses()
    for number in range(round(20 * rate) + 1):
        uses.record("a", number / rate)

    seen = uses.decayed_count("a", round(20 * rate) / rate)
    assert abs(seen - rate * USE_SECONDS) <= 2 + 2 * rate * BURST_SECONDS


@given(st.integers(1, 5), st.floats(5, 100))
def test_a_replica_sees_what_one_alone_would(replicas: int, rate: float) -> None:
    """Of a steady stream each gets a share, and looks back so much longer."""
    uses, step = RecentUses(), replicas / rate
    uses.replicas = replicas
    for number in range(round(20 * rate) + 1):
        uses.record("a", number * step)

    seen = uses.decayed_count("a", round(20 * rate) * step)
    assert abs(seen - rate * USE_SECONDS) <= 2 + 2 * rate * BURST_SECONDS


def test_memory_is_bounded() -> None:
    """The place that was used longest ago goes first."""
    uses = RecentUses()
    for number in range(PLACES + 10):
        uses.record(number, 0.0)
        uses.record("kept", 0.0)

    assert len(uses) == PLACES
    assert uses.decayed_count("kept", BURST_SECONDS) > 100
    assert uses.decayed_count(0, BURST_SECONDS) == 0.0
