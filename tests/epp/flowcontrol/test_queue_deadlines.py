"""The pace of a pool."""

import pytest

from kvist_epp.flowcontrol.queue_deadlines import DispatchRate


def test_a_steady_pool_has_its_dispatch_rate() -> None:
    """Ten seconds' average of what is picked; and what it says of those who wait, within bounds."""
    pace = DispatchRate()
    for tick in range(400):
        pace.observe(tick * 5, tick * 0.25)

    assert pace.rate == pytest.approx(20.0, rel=0.01)
    assert [pace.seconds(n, 1, 60) for n in (0, 90, 10**9)] == [1, 5, 60]


def test_a_pool_that_stands_still_has_none() -> None:
    """A pool that has stopped dispatching gets the upper bound as its retry time."""
    pace = DispatchRate()
    pace.observe(0, 0.0)
    pace.observe(1000, 1.0)
    for tick in range(2, 200):
        pace.observe(1000, float(tick))

    assert (pace.rate < 0.01, pace.seconds(1, 1, 60), DispatchRate().seconds(1, 1, 60)) == (True, 60, 60)
