"""Ten minutes in pieces, against a list of everything that was ever noted."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.prefix_stats.window import Window

steps = st.lists(st.floats(0, 700, allow_nan=False), max_size=30)


@given(steps, st.floats(0, 1300))
def test_a_note_counts_until_twenty_borders_are_behind_it(waits: list[float], later: float) -> None:
    """What is there is what lies fewer than twenty borders of 30 seconds back, in order, and nothing else."""
    window: Window[list[float]] = Window(list)
    times = list(accumulate(waits))
    for at in times:
        window.at(at).append(at)
    now = (times[-1] if times else 0.0) + later
    found = [at for piece in window.live(now) for at in piece]
    assert found == [at for at in times if now // 30 - at // 30 < 20]


def test_time_that_runs_backwards_is_the_present() -> None:
    """A clock that is set back adds to the newest piece, which goes on counting."""
    window: Window[list[int]] = Window(list)
    window.at(1000.0).append(1)
    window.at(900.0).append(2)
    assert window.live(900.0) == [[1, 2]]
    assert window.live(1600.0) == []
    assert window.all() == [[1, 2]]
