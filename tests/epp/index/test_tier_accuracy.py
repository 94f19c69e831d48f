"""Tokens predicted from slower tiers against those that engines count."""

from kvist_epp.index.tier_accuracy import LEAST_TOKENS, BrokenPromise, TierAccuracy


def compared(
    predicted: dict[str, int], true: dict[str, float], *, before: float = 0.0
) -> list[BrokenPromise]:
    """Return the verdict on one window."""
    accuracy = TierAccuracy()
    assert accuracy.on_counters(dict.fromkeys(("device", "host", "disk"), before), 0.0) == []
    accuracy.on_taken_up(predicted)
    counters = {name: before + true.get(name, 0.0) for name in ("device", "host", "disk")}
    return accuracy.on_counters(counters, 2.0)


def test_a_tier_that_gives_what_was_predicted_is_believed() -> None:
    """Half of it is enough, and more is no harm."""
    assert compared({"disk": 8000}, {"disk": 8000.0}) == []
    assert compared({"disk": 8000}, {"disk": 4000.0}, before=1e6) == []
    assert compared({"disk": 8000}, {"disk": 80_000.0}) == []
    assert compared({}, {"host": 80_000.0}) == []


def test_a_tier_that_gives_hardly_anything_breaks_its_promise() -> None:
    """Each tier by itself: the other one is not to blame."""
    assert compared({"disk": 8000, "host": 4000}, {"disk": 100.0, "host": 4000.0}) == [
        BrokenPromise("disk", 8000, 100)
    ]


def test_blocks_that_came_from_another_tier_break_no_promise() -> None:
    """A disk's blocks may be in host memory by the time of the load, for another request's sake."""
    assert compared({"disk": 8000, "host": 100}, {"host": 8100.0}) == []


def test_a_few_tokens_decide_nothing() -> None:
    """One short prompt that was cancelled must not cost a disk's blocks."""
    assert compared({"disk": LEAST_TOKENS - 1}, {}) == []
    assert compared({"disk": LEAST_TOKENS}, {}) != []


def test_old_predictions_do_not_count() -> None:
    """The window is a minute: what a tier gave an hour ago excuses nothing."""
    accuracy = TierAccuracy()
    accuracy.on_counters({"disk": 0.0}, 0.0)
    accuracy.on_taken_up({"disk": 100_000})
    assert accuracy.on_counters({"disk": 100_000.0}, 2.0) == []
    accuracy.on_counters({"disk": 100_000.0}, 3600.0)
    accuracy.on_taken_up({"disk": 5000})

    assert accuracy.on_counters({"disk": 100_000.0}, 3602.0) == [BrokenPromise("disk", 5000, 0)]


def test_after_a_verdict_the_window_begins_anew() -> None:
    """Tokens that were missing once are not held against a tier twice."""
    accuracy = TierAccuracy()
    accuracy.on_counters({"disk": 0.0}, 0.0)
    accuracy.on_taken_up({"disk": 5000})

    assert [len(accuracy.on_counters({"disk": 0.0}, now)) for now in (2.0, 4.0, 6.0)] == [1, 0, 0]
