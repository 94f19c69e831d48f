"""Tokens predicted from slower tiers against those that engines count."""

from kvist_epp.index.tier_accuracy import (
    LEAST_TOKENS,
    LONGEST_SECONDS,
    WINDOW_SECONDS,
    BrokenPromise,
    TierAccuracy,
)


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
    """Tokens that a tier gave an hour ago excuse nothing."""
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


def asked_slowly(seconds: float, given: float = 0.0) -> list[BrokenPromise]:
    """Return the verdicts while a disk should give 200 tokens to one request at a time, with host memory in
    use all the while."""
    accuracy, found, host = TierAccuracy(), list[BrokenPromise](), 0.0
    accuracy.on_counters({"disk": 0.0, "host": 0.0}, 0.0)
    for number in range(1, 16):
        accuracy.on_taken_up({"disk": 200})
        for part in range(1, 11):
            host += 100.0
            accuracy.on_taken_up({"host": 100})
            now = seconds * (number - 1 + part / 10)
            found += accuracy.on_counters({"disk": given * number, "host": host}, now)
    return found


def test_a_tier_that_is_asked_rarely_is_found_out_too() -> None:
    """The window is as long as it takes until enough was predicted, an hour at most."""
    assert asked_slowly(1.0) == asked_slowly(30.0) == [BrokenPromise("disk", 2200, 0)]
    assert asked_slowly(LONGEST_SECONDS / 8) == []
    assert asked_slowly(30.0, given=60.0) == []


def test_files_that_go_under_steady_loads_are_found_out_within_the_window() -> None:
    """A disk gives all that is predicted for minutes, then nothing: that is known before 30 seconds are over,
    however much it gave before."""
    accuracy, true, found = TierAccuracy(), 0.0, list[int]()
    for now in range(240):
        accuracy.on_taken_up({"disk": 1000})
        true += 1000.0 if now < 200 else 0.0
        if accuracy.on_counters({"disk": true}, float(now)):
            found.append(now)

    assert 200 < found[0] < 200 + WINDOW_SECONDS


def test_loads_that_nobody_predicted_excuse_a_tier_no_longer_than_the_window() -> None:
    """Requests past the picker were served from the disk before its files were removed."""
    accuracy, found = TierAccuracy(), list[int]()
    accuracy.on_taken_up({"disk": 16})
    for now in range(60):
        accuracy.on_taken_up({"disk": 300} if now >= 10 else {})
        if accuracy.on_counters({"disk": 500.0 * min(now, 9)}, float(now)):
            found.append(now)

    assert 20 < found[0] <= 10 + WINDOW_SECONDS
