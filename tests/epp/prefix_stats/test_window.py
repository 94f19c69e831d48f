"""Tests of the sliding window against a list of everything that was recorded."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.prefix_stats.window import Window

steps = st.lists(st.floats(0, 700, allow_nan=False), max_size=30)


@given(steps, st.floats(0, 1300))
def test_a_record_counts_until_twenty_slot_boundaries_have_passed(waits: list[float], later: float) -> None:
    """Live records are those with fewer than twenty 30-second boundaries between them and now, in order."""
    window: Window[list[float]] = Window(list)
    times = list(accumulate(waits))
    for at in times:
        window.current(at).append(at)
    now = (times[-1] if times else 0.0) + later
    found = [at for slot in window.live(now) for at in slot]
    assert found == [at for at in times if now // 30 - at // 30 < 20]


def test_time_that_runs_backwards_is_the_present() -> None:
    """A clock that is set back writes to the newest slot, which stays live."""
    window: Window[list[int]] = Window(list)
    window.current(1000.0).append(1)
    window.current(900.0).append(2)
    assert window.live(900.0) == [[1, 2]]
    assert window.live(1600.0) == []
    assert window.all() == [[1, 2]]
