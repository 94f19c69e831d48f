"""An endpoint's backlog between events: which reports count, and when time reduces it."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st
from tests.epp.load.requests import end, progress, remote, route

from kvist_epp.load.endpoint_load import QUIET_SECONDS, STEP_TOKENS
from kvist_epp.load.in_flight import Attempt
from kvist_epp.load.tracker import LoadTracker

RATE = 1000.0
QUIET = QUIET_SECONDS + STEP_TOKENS / RATE


def new_tracker() -> LoadTracker:
    return LoadTracker(default_rate=RATE)


def reporting(*, now: float = 0.0) -> LoadTracker:
    """Return a tracker whose endpoint ``p`` has reported progress before."""
    tracker = new_tracker()
    route(tracker, "first", "p", 1000, 1000, now)
    progress(tracker, "first", 0, now, computed=1000)
    return tracker


def test_backlog_without_events_drains_with_time_oldest_first() -> None:
    """Without events tokens go away at the endpoint's rate, those of the oldest request first."""
    tracker = new_tracker()
    route(tracker, "old", "p", 500, 500, now=0.0)
    route(tracker, "new", "p", 1000, 1000, now=0.0)

    assert tracker.backlog("p", now=0.6) == 900

    end(tracker, "old", now=0.6)

    assert tracker.backlog("p", now=0.6) == 900
    assert tracker.backlog("p", now=9.0) == 0
    assert tracker.running("p") == 1


def test_a_backlog_with_events_falls_only_by_events() -> None:
    """While events can still come, time alone does not reduce the backlog: the engine may have begun late."""
    tracker = reporting()
    route(tracker, "s", "p", 1000, 1000, now=5.0)

    assert [tracker.backlog("p", now=5.0 + QUIET), tracker.backlog("p", now=5.2 + QUIET)] == [1000, 800]


def test_events_correct_the_estimate_both_ways() -> None:
    """Events override the estimate, whether prefill is faster or slower than estimated."""
    tracker = new_tracker()
    route(tracker, "s", "p", 1000, 1000, now=0.0)
    progress(tracker, "s", 200, now=0.1)

    assert tracker.backlog("p") == 200

    progress(tracker, "s", 150, now=5.0)

    assert tracker.backlog("p") == 150

    progress(tracker, "s", 0, now=5.1)
    progress(tracker, "stranger", 7, now=5.1)

    assert tracker.backlog("p", now=5.1) == 0


def test_less_than_a_block_is_computed_with_a_later_request() -> None:
    """A prompt below one block causes no event; progress of a later request shows that it is computed. For
    larger ones that holds only once they are certain to have come first, because other replicas' requests may
    share their prefix."""
    tracker = reporting()
    sizes = {"small": 15, "large": 2000, "small too": 15, "reported": 500, "later": 15}
    for at, (session, tokens) in enumerate(sizes.items(), 1):
        route(tracker, session, "p", tokens, tokens, now=at / 100)
    progress(tracker, "reported", 0, now=0.6)

    assert tracker.backlog("p") == 2000 + 15

    route(tracker, "last", "p", 500, 500, now=0.7)
    progress(tracker, "last", 0, now=0.8)

    assert tracker.backlog("p") == 0


def test_a_prompt_with_a_cached_prefix_adds_no_backlog() -> None:
    """A prompt whose prefix another replica's request has computed causes no event; progress of a later
    request ends its backlog. A half-computed prompt reports its own progress."""
    tracker = reporting()
    route(tracker, "duplicate", "p", 3000, 3000, now=1.0)
    route(tracker, "half", "p", 2000, 2000, now=1.1)
    progress(tracker, "half", 800, now=1.3)
    route(tracker, "after", "p", 500, 500, now=1.5)
    progress(tracker, "after", 100, now=1.7)

    assert tracker.backlog("p") == 800 + 100


def duplicates() -> tuple[LoadTracker, Attempt, Attempt]:
    """One prompt that a peer and this replica sent to one endpoint."""
    tracker = reporting()
    ours = route(tracker, "ours", "p", 3000, 3000, now=1.0)
    theirs = remote(tracker, "theirs", "p", 1.0, uncached=3000.0, backlog=3000.0, tokens=3000, content=42)
    tracker.set_content(ours, 42)
    tracker.add_remote(theirs, now=1.1)
    return tracker, ours, theirs


def test_one_prompt_of_several_replicas_counts_once() -> None:
    """A prompt that several replicas sent to one endpoint counts once, whichever request the engine
    computes."""
    tracker, _, theirs = duplicates()
    both = tracker.backlog("p")
    tracker.on_progress(theirs, 1000, now=1.2)
    half = tracker.backlog("p")
    tracker.on_progress(theirs, 0, now=1.3)

    assert (both, half, tracker.backlog("p")) == (3000, 1000, 0)


def test_a_duplicate_that_is_described_late_adds_no_backlog_from_then_on() -> None:
    """A peer's update may come before ours is made; the engine's queue gives its tokens back to neither."""
    tracker, _, theirs = duplicates()
    late = route(tracker, "late", "p", 3000, 3000, now=1.2)
    before = tracker.backlog("p")
    tracker.set_content(late, 42)
    tracker.reconcile("p", 0, 4, now=9.0)

    assert (before, tracker.backlog("p")) == (6000, 3000)
    assert (late.open, theirs.open, tracker.running("p")) == (True, True, 4)


def test_the_next_duplicate_has_the_backlog_when_the_first_has_ended() -> None:
    """A client left before its prompt was computed: the engine computes it for the other."""
    tracker, ours, _ = duplicates()
    progress(tracker, "ours", 2000, now=1.2)
    end(tracker, ours.request.session, now=1.3)
    left = tracker.backlog("p")
    tracker.reconcile("p", 0, 1, now=9.0)

    assert (left, tracker.backlog("p")) == (2000, 2000)


def test_a_prompt_counts_again_once_its_duplicates_have_ended() -> None:
    """A prompt counts again once its duplicates have ended, because its blocks may have been evicted."""
    tracker, ours, theirs = duplicates()
    end(tracker, ours.request.session, now=2.0)
    tracker.end_remote(theirs, now=2.0)
    tracker.set_content(route(tracker, "again", "p", 3000, 3000, now=3.0), 42)

    assert tracker.backlog("p") == 3000


@given(st.lists(st.tuples(st.sampled_from("rtpds"), st.integers(0, 3000), st.floats(0, 3)), max_size=40))
def test_backlog_is_the_sum_over_its_requests(history: list[tuple[str, int, float]]) -> None:
    """The backlog is the sum over its requests, in whatever order they are routed, reported, drained and
    ended."""
    tracker, now, names = new_tracker(), 0.0, list[str]()
    for what, tokens, seconds in history:
        now += seconds
        if what == "r":
            names.append(f"s{len(names)}")
            route(tracker, names[-1], "p", tokens, tokens, now)
        elif what == "t":
            names.append(f"s{len(names)}")
            tracker.set_content(route(tracker, names[-1], "p", tokens, tokens, now), 1 + tokens % 2)
        elif what == "d":
            tracker.backlog("p", now)
        elif names and what == "p":
            progress(tracker, names[tokens % len(names)], tokens // 2, now, computed=tokens / 3)
        elif names:
            end(tracker, names[tokens % len(names)], now)
        load = tracker.load("p")

        assert abs(load.backlog_tokens - sum(attempt.backlog for attempt in load.attempts)) < 1e-3
        assert load.backlog_tokens >= 0


def test_a_large_batch_has_spare_slots() -> None:
    """A batch of 256 sequences is full with 12 more, which wait in the engine; one of 8 with none."""
    tracker = LoadTracker()
    large, small = tracker.load("large"), tracker.load("small")
    large.slots, small.slots = 256, 8
    large.untracked_requests, small.untracked_requests = 267, 7
    assert (large.full(inf), small.full(inf)) == (False, False)
    large.untracked_requests, small.untracked_requests = 268, 8
    assert (large.full(inf), small.full(inf)) == (True, True)
