"""Tests of histograms and of the stage stopwatch."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.telemetry.counters import Histogram, Stages


def test_buckets_are_cumulative() -> None:
    """Each bound counts the durations up to it, and +Inf counts all, as Prometheus expects."""
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(seconds)

    assert list(histogram.cumulative()) == [("0.1", 2), ("1.0", 3), ("+Inf", 4)]
    assert histogram.total == 3.65


@given(st.lists(st.floats(0, 1e6)))
def test_nothing_is_lost(durations: list[float]) -> None:
    """Every duration is in +Inf, and counts never fall from bound to bound."""
    histogram = Histogram()
    for seconds in durations:
        histogram.observe(seconds)
    counts = [count for _, count in histogram.cumulative()]

    assert (counts[-1], counts) == (len(durations), sorted(counts))


def test_stages_add_up() -> None:
    """Laps have their names in order, a repeated stage is summed, and skipped time belongs to no stage."""
    stages = Stages()
    stages.mark("parse")
    stages.mark("match")
    stages.skip()
    stages.mark("parse")

    assert [stage for stage, _ in stages.laps] == ["parse", "match", "parse"]
    assert list(stages.microseconds()) == ["parse", "match"]
    assert stages.seconds == sum(seconds for _, seconds in stages.laps) >= 0


def test_each_bucket_keeps_its_last_request() -> None:
    """An exemplar is the last request of its bucket; a value without a request changes none."""
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.05, "first")
    histogram.observe(0.06, "second", "a trace")
    histogram.observe(0.07)
    histogram.observe(3.0, "slow")
    found = histogram.exemplars()

    assert {at: one[:3] for at, one in found.items()} == {
        0: ("second", "a trace", 0.06),
        2: ("slow", "", 3.0),
    }
    assert found[0].at > 1e9
    assert histogram.count == 4
