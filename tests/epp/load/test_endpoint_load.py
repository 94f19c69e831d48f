"""A pod's account between events: who is believed, and when time drains it."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.load.endpoint_load import QUIET_SECONDS, STEP_TOKENS, Request
from kvist_epp.load.ledger import Ledger

RATE = 1000.0
QUIET = QUIET_SECONDS + STEP_TOKENS / RATE


def ledger() -> Ledger:
    return Ledger(default_rate=RATE)


def telling(*, now: float = 0.0) -> Ledger:
    """A ledger whose pod ``p`` has told of work before."""
    books = ledger()
    books.routed("first", "p", 1000, 1000, now)
    books.progress("first", 0, now, computed=1000)
    return books


def test_owed_drains_with_time_where_nobody_tells_oldest_first() -> None:
    """Without events tokens go away at the pod's rate, those of the oldest request first."""
    books = ledger()
    books.routed("old", "p", 500, 500, now=0.0)
    books.routed("new", "p", 1000, 1000, now=0.0)

    assert books.owed("p", now=0.6) == 900

    books.settled("old", now=0.6)

    assert books.owed("p", now=0.6) == 900
    assert books.owed("p", now=9.0) == 0
    assert books.running("p") == 1


def test_a_pod_that_tells_owes_until_it_says_otherwise() -> None:
    """Its engine may have begun late: the clock takes nothing away while events can still come."""
    books = telling()
    books.routed("s", "p", 1000, 1000, now=5.0)

    assert [books.owed("p", now=5.0 + QUIET), books.owed("p", now=5.2 + QUIET)] == [1000, 800]


def test_events_correct_the_estimate_both_ways() -> None:
    """What events say counts: prefill that is faster or slower than the clock thought."""
    books = ledger()
    books.routed("s", "p", 1000, 1000, now=0.0)
    books.progress("s", 200, now=0.1)

    assert books.owed("p") == 200

    books.progress("s", 150, now=5.0)

    assert books.owed("p") == 150

    books.progress("s", 0, now=5.1)
    books.progress("stranger", 7, now=5.1)

    assert books.owed("p", now=5.1) == 0


def test_less_than_a_block_is_computed_with_whoever_came_later() -> None:
    """No event tells of it: the next request's progress does, and of nothing later. Of what is larger only
    once it is clear that it came before: other pickers' requests may have met theirs on the way."""
    books = telling()
    sizes = {"small": 15, "large": 2000, "small too": 15, "told": 500, "later": 15}
    for at, (session, tokens) in enumerate(sizes.items(), 1):
        books.routed(session, "p", tokens, tokens, now=at / 100)
    books.progress("told", 0, now=0.6)

    assert books.owed("p") == 2000 + 15

    books.routed("last", "p", 500, 500, now=0.7)
    books.progress("last", 0, now=0.8)

    assert books.owed("p") == 0


def test_a_prompt_that_found_its_prefix_cached_owes_nothing() -> None:
    """Two pickers sent one prefix at once: no event tells of the second, but of who came after it. What is
    half computed is told of itself."""
    books = telling()
    books.routed("twin", "p", 3000, 3000, now=1.0)
    books.routed("half", "p", 2000, 2000, now=1.1)
    books.progress("half", 800, now=1.3)
    books.routed("after", "p", 500, 500, now=1.5)
    books.progress("after", 100, now=1.7)

    assert books.owed("p") == 800 + 100


def twins() -> tuple[Ledger, Request, Request]:
    """One prompt that a peer and this replica sent to one pod."""
    books = telling()
    ours = books.routed("ours", "p", 3000, 3000, now=1.0)
    theirs = Request("theirs", books.load("p"), 3000.0, 3000, 1.0, 1.0, 3000.0, origin="peer")
    books.described(ours, 42)
    theirs.content = 42
    books.taken(theirs, now=1.1)
    return books, ours, theirs


def test_one_prompt_of_several_replicas_is_owed_once() -> None:
    """Whichever of them the engine computes: the others find it cached, and no event tells of those."""
    books, _, theirs = twins()
    both = books.owed("p")
    books.advanced(theirs, 1000, now=1.2)
    half = books.owed("p")
    books.advanced(theirs, 0, now=1.3)

    assert (both, half, books.owed("p")) == (3000, 1000, 0)


def test_a_twin_that_is_described_late_owes_nothing_from_then_on() -> None:
    """A peer's update may come before ours is made; the engine's queue gives its tokens back to neither."""
    books, _, theirs = twins()
    late = books.routed("late", "p", 3000, 3000, now=1.2)
    before = books.owed("p")
    books.described(late, 42)
    books.reconcile("p", 0, 4, now=9.0)

    assert (before, books.owed("p")) == (6000, 3000)
    assert (late.open, theirs.open, books.running("p")) == (True, True, 4)


def test_of_twins_the_next_one_owes_when_the_first_has_gone() -> None:
    """A client left before its prompt was computed: the engine computes it for the other."""
    books, ours, _ = twins()
    books.progress("ours", 2000, now=1.2)
    books.settled(ours.session, now=1.3)
    left = books.owed("p")
    books.reconcile("p", 0, 1, now=9.0)

    assert (left, books.owed("p")) == (2000, 2000)


def test_a_prompt_whose_twins_have_ended_is_owed_anew() -> None:
    """Its blocks may have been evicted since."""
    books, ours, theirs = twins()
    books.settled(ours.session, now=2.0)
    books.parted(theirs, now=2.0)
    books.described(books.routed("again", "p", 3000, 3000, now=3.0), 42)

    assert books.owed("p") == 3000


@given(st.lists(st.tuples(st.sampled_from("rtpds"), st.integers(0, 3000), st.floats(0, 3)), max_size=40))
def test_owed_is_the_sum_of_what_requests_have_left(history: list[tuple[str, int, float]]) -> None:
    """Whatever is routed, told, drained and settled in whatever order, to rounding."""
    books, now, names = ledger(), 0.0, list[str]()
    for what, tokens, seconds in history:
        now += seconds
        if what == "r":
            names.append(f"s{len(names)}")
            books.routed(names[-1], "p", tokens, tokens, now)
        elif what == "t":
            names.append(f"s{len(names)}")
            books.described(books.routed(names[-1], "p", tokens, tokens, now), 1 + tokens % 2)
        elif what == "d":
            books.owed("p", now)
        elif names and what == "p":
            books.progress(names[tokens % len(names)], tokens // 2, now, computed=tokens / 3)
        elif names:
            books.settled(names[tokens % len(names)], now)
        load = books.load("p")

        assert abs(load.owed - sum(request.remaining for request in load.requests)) < 1e-3
        assert load.owed >= 0
