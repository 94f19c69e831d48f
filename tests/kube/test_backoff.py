"""Pauses between repeated attempts."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_kube.backoff import backoff_seconds, jittered


def test_pauses_double_up_to_the_longest() -> None:
    """The first failure waits for ``first``; each further one twice as long, up to ``longest``."""
    assert [backoff_seconds(n, first=0.2, longest=1.0) for n in range(1, 6)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert [backoff_seconds(n, first=1.0) for n in (1, 2, 3)] == [1.0, 2.0, 4.0]


@given(st.integers(1, 1_000_000), st.floats(0, 1))
def test_many_failures_do_not_overflow(failures: int, chance: float) -> None:
    """Any number of failures gives a pause within the bounds; jitter shortens it by half at most."""
    pause = backoff_seconds(failures, first=0.1, longest=30.0)

    assert 0.1 <= pause <= 30.0
    assert pause / 2 <= jittered(pause, chance) <= pause
