"""How often beginnings were asked for."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.cache.uses import PLACES, USE_SECONDS, Uses


def test_uses_add_up_and_fade() -> None:
    """Each counts one when it comes and a third of that a second later; other places do not count."""
    uses = Uses()
    for now in (0.0, 0.0, USE_SECONDS):
        uses.note("a", now)

    assert uses.lately("a", USE_SECONDS) == pytest.approx(1 + 2 * exp(-1))
    assert [uses.lately("b", 0.0), uses.lately("a", 1e9)] == [0.0, 0.0]


@given(st.floats(0.1, 200))
def test_a_steady_stream_counts_what_comes_in_the_time(rate: float) -> None:
    """Requests a second times the seconds that a use counts."""
    uses = Uses()
    for number in range(round(20 * rate) + 1):
        uses.note("a", number / rate)

    assert uses.lately("a", round(20 * rate) / rate) == pytest.approx(rate * USE_SECONDS, abs=1.0)


@given(st.integers(1, 5), st.floats(5, 100))
def test_a_replica_sees_what_one_alone_would(replicas: int, rate: float) -> None:
    """Of a steady stream each gets a share, and looks back so much longer."""
    uses, step = Uses(), replicas / rate
    uses.replicas = replicas
    for number in range(round(20 * rate) + 1):
        uses.note("a", number * step)

    assert uses.lately("a", round(20 * rate) * step) == pytest.approx(rate * USE_SECONDS, abs=1.0)


def test_memory_is_bounded() -> None:
    """The place that was used longest ago goes first."""
    uses = Uses()
    for number in range(PLACES + 10):
        uses.note(number, 0.0)
        uses.note("kept", 0.0)

    assert len(uses) == PLACES
    assert uses.lately("kept", 0.0) > 100
    assert uses.lately(0, 0.0) == 0.0
