"""Samples of the last minutes, and quantiles of cumulative histograms."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.admin.live.recent_samples import (
    EndpointFigures,
    PickerFigures,
    RecentSamples,
    SampleRing,
    difference,
    quantile,
)


@given(st.integers(0, 25), st.integers(1, 7))
def test_a_ring_keeps_the_last_rows_in_order(rows: int, points: int) -> None:
    """After any number of rows the ring has the last ones, oldest first."""
    ring = SampleRing(2, points)
    for number in range(rows):
        ring.append((number, -number))

    kept = list(range(max(0, rows - points), rows))
    assert [tuple(row) for row in ring.rows()] == [(number, -number) for number in kept]
    assert list(ring.column(1)) == [-number for number in kept]
    assert (len(ring), ring.first()) == (len(kept), (array("d", (kept[0], -kept[0])) if kept else None))


@given(st.lists(st.integers(0, 100), max_size=12).map(sorted), st.integers(-5, 105))
def test_a_ring_finds_the_newest_row_that_is_old_enough(times: list[int], at: int) -> None:
    """The newest row from that time or earlier is found, else the oldest row."""
    ring = SampleRing(2, 20)
    for number, time in enumerate(times):
        ring.append((time, number))
    found = ring.before(at)

    old = [number for number, time in enumerate(times) if time <= at]
    wanted = max(old) if old else (0 if times else None)
    assert (None if found is None else found[1]) == wanted


@pytest.mark.parametrize(("share", "value"), [(0.25, 0.05), (0.5, 0.1), (0.75, 0.15), (1.0, 0.2), (0.0, 0.0)])
def test_a_quantile_is_interpolated_within_its_bucket(share: float, value: float) -> None:
    """A quarter of 10 observations up to 0.1 and 10 up to 0.2 is below 0.05."""
    assert quantile((0.1, 0.2), (10, 20, 20), share) == pytest.approx(value)


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    """Observations above all bounds are shown as the largest one; none at all have no quantile."""
    assert quantile((0.1, 0.2), (0, 0, 5), 0.5) == 0.2
    assert quantile((0.1, 0.2), (0, 0, 0), 0.5) is None
    assert quantile((0.1,), (), 0.5) is None


def test_a_difference_is_what_came_after() -> None:
    """Cumulative counts are subtracted bucket by bucket."""
    assert difference((3, 5, 9), (1, 1, 4)) == (2, 4, 5)
    assert difference((3, 5, 9), None) == (3, 5, 9)


def test_samples_of_endpoints_that_left_are_dropped() -> None:
    """An endpoint's samples stay while it is there, and a new one begins without any."""
    samples = RecentSamples()
    for key in ("a", "b"):
        samples.add_endpoint(key, EndpointFigures(at=1.0, requests=7))
    samples.keep_only(["b", "c"])

    assert [len(samples.endpoint(key)) for key in ("a", "b", "c")] == [0, 1, 0]
    assert EndpointFigures(*next(samples.endpoint("b").rows())).requests == 7


def test_histograms_are_kept_as_long_as_the_pool_s_rows() -> None:
    """Memory is bounded: of both the last 30 samples are kept."""
    samples = RecentSamples()
    for number in range(100):
        samples.add_pool(PickerFigures(at=number), [("ttft", (number, number))])

    assert len(samples.pool) == 30
    assert samples.histograms["ttft"] == [(number, number) for number in range(70, 100)]
