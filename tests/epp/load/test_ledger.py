"""The ledger: what is owed, by whom, and how it goes away; against a model in the properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvist_epp.load.endpoint_load import Request
from kvist_epp.load.ledger import Ledger

RATE = 1000.0


def ledger(**more: float) -> Ledger:
    return Ledger(default_rate=RATE, **more)  # type: ignore[arg-type]


def test_routed_tokens_are_owed_until_settled() -> None:
    """A request owes its uncached tokens from the pick to its end."""
    books = ledger()
    books.routed("s", "p", 500, 900, now=10.0)

    assert (books.owed("p"), books.running("p"), books.owed("q")) == (500, 1, 0)

    ended = books.settled("s", now=10.0)

    assert ended is not None
    assert (ended.total, books.owed("p"), books.running("p"), len(books)) == (900, 0, 0, 0)
    assert books.settled("s", now=10.0) is None


def test_a_request_that_went_elsewhere_owes_there() -> None:
    """Its account moves whole, with what it owes on the pod that serves it; strangers move nothing."""
    books = ledger()
    books.routed("s", "p", 500, 900, now=10.0)
    books.routed("s", "q", 100, 100, now=10.0)
    books.moved("s", "p", "q", 300, now=10.0)
    books.moved("stranger", "p", "q", 300, now=10.0)

    assert (books.owed("p"), books.running("p")) == (0, 0)
    assert (books.owed("q"), books.running("q")) == (400, 2)


def test_of_one_sessions_requests_the_named_pods_is_settled() -> None:
    """With a pod named, only a request on it ends."""
    books = ledger()
    books.routed("s", "p", 500, 900, now=10.0)
    books.routed("s", "q", 100, 100, now=10.0)

    assert books.settled("s", 10.0, "r") is None
    assert books.settled("s", 10.0, "q") is not None
    assert (books.running("p"), books.running("q")) == (1, 0)


def test_a_session_with_several_requests_counts_each() -> None:
    """Clients reuse session ids: both requests are owed, and each settling ends one."""
    books = ledger()
    books.routed("s", "p", 100, 100, now=0.0)
    books.routed("s", "q", 200, 200, now=0.0)
    books.settled("s", now=0.0)

    assert (books.owed("p"), books.owed("q"), len(books)) == (0, 200, 1)


def test_a_pod_is_full_by_its_batch_or_its_backlog() -> None:
    """As many requests as slots, or more seconds of prefill than the limit; both end with the requests."""
    books = ledger()
    books.calibrate("p", slots=2)
    load = books.load("p")
    books.routed("a", "p", 0, 0, now=0.0)
    assert not load.full(30.0)

    books.routed("b", "p", 0, 0, now=0.0)
    assert load.full(30.0)

    books.settled("a", now=0.0)
    books.routed("long", "q", 45_000, 45_000, now=0.0)
    assert (load.full(30.0), books.load("q").full(30.0), books.load("q").relieved_in(30.0)) == (
        False,
        True,
        15,
    )


def test_what_a_scrape_does_not_find_makes_nobody_full() -> None:
    """Ends that the access log tells late count as soon as a scrape shows them, and then only once."""
    books = ledger()
    books.calibrate("p", slots=3)
    load = books.load("p")
    for name in "abc":
        books.routed(name, "p", 0, 0, now=0.0)
    assert load.full(30.0)

    assert books.reconcile("p", 1, 0, now=2.0) == []
    assert (load.full(30.0), load.running) == (False, 3)

    books.settled("a", now=2.1)
    books.settled("b", now=2.1)
    books.routed("d", "p", 0, 0, now=2.2)
    assert not load.full(30.0)
    books.routed("e", "p", 0, 0, now=2.2)
    assert load.full(30.0)


def test_whatever_may_give_room_is_told() -> None:
    """Ends, progress, scrapes, rates and pods that leave; a request that comes is no news."""
    books, told = ledger(), []
    books.routed("a", "p", 100, 100, now=0.0)
    books.routed("b", "p", 100, 100, now=0.0)
    books.eased = lambda: told.append(len(books))
    books.routed("c", "p", 100, 100, now=0.0)
    assert told == []
    for event in (
        lambda: books.progress("a", 10, now=0.1),
        lambda: books.settled("a", now=0.2),
        lambda: books.calibrate("p", slots=9),
        lambda: books.reconcile("p", 2, 0, now=0.3),
        lambda: books.forget("p"),
    ):
        before = len(told)
        event()
        assert len(told) > before


def test_silence_expires() -> None:
    """A request nothing is heard of is dropped after the expiry; signs of life put it off."""
    books = ledger(expire_seconds=10.0)
    books.routed("silent", "p", 100, 100, now=0.0)
    books.routed("alive", "p", 100, 100, now=0.0)
    books.progress("alive", 0, now=5.0)

    assert books.expire(now=9.9) == []
    assert books.expire(now=10.0) == ["silent"]
    assert books.expire(now=15.0) == ["alive"]
    assert (len(books), books.running("p"), books.owed("p")) == (0, 0, 0)


def test_memory_is_bounded() -> None:
    """Beyond the bound the request heard of longest ago makes room."""
    books = ledger(max_requests=2)
    for number in range(4):
        books.routed(f"s{number}", "p", 10, 10, now=float(number))

    assert (len(books), books.running("p")) == (2, 2)
    assert books.settled("s1", now=4.0) is None
    assert books.settled("s2", now=4.0) is not None


def test_forget_closes_an_account() -> None:
    """A pod that leaves takes its requests with it."""
    books = ledger()
    books.routed("s", "p", 10, 10, now=0.0)
    books.routed("t", "q", 10, 10, now=0.0)

    assert books.forget("p") == ["s"]
    assert (len(books), books.running("p"), books.owed("q")) == (1, 0, 10)
    assert books.forget("never") == []


def test_fewer_requests_twice_end_the_oldest() -> None:
    """Scrapes that show fewer requests than ours, twice in a row, end the ones heard of longest ago."""
    books = ledger()
    for number in range(3):
        books.routed(f"s{number}", "p", 10, 10, now=float(number))
    books.progress("s0", 0, now=5.0)

    assert books.reconcile("p", 1, 0, now=10.0) == []
    assert books.reconcile("p", 2, 0, now=12.0) == ["s1"]
    assert books.running("p") == 2
    assert books.reconcile("p", 2, 0, now=14.0) == []


def test_a_request_on_its_way_is_not_missing() -> None:
    """A request routed just before the scrape was sent, or after, may not have arrived: it is not ended."""
    books = ledger(grace_seconds=0.5)
    books.routed("s", "p", 10, 10, now=9.8)

    assert [books.reconcile("p", 0, 0, now=20.0, asked_at=10.0) for _ in range(3)] == [[], [], []]


def test_more_requests_are_foreign() -> None:
    """Traffic that did not pass through us counts as running, and goes when it goes."""
    books = ledger()
    books.routed("s", "p", 10, 10, now=0.0)
    books.reconcile("p", 5, 2, now=2.0)

    assert books.running("p") == 7

    books.reconcile("p", 1, 0, now=4.0)

    assert books.running("p") == 1


def test_requests_that_wait_in_the_engine_owe_everything() -> None:
    """Time drains a request on paper; the engine's queue shows that it has not begun, so it owes all
    again."""
    books = ledger()
    books.routed("begun", "p", 1000, 1000, now=0.0)
    books.routed("queued", "p", 1000, 1000, now=0.0)
    books.reconcile("p", 1, 1, now=3.0)

    assert books.owed("p") == 1000


def test_events_outweigh_the_queue() -> None:
    """A request whose prefill events have shown progress is not set back by a scrape (a preempted one waits,
    too)."""
    books = ledger()
    books.routed("s", "p", 1000, 1000, now=0.0)
    books.progress("s", 100, now=1.0)
    books.reconcile("p", 0, 1, now=1.0)

    assert books.owed("p") == 100


def test_rates_are_learned_and_shared() -> None:
    """A pod without a rate of its own was never behind: it takes the fastest's; without any, the default."""
    books = ledger()
    books.load("p")

    assert books.rate("p") == RATE

    for key, rate in (("a", 100.0), ("b", 300.0), ("c", 500.0)):
        books.calibrate(key, rate=rate, decode_seconds=2.0, slots=8)

    assert [books.rate(key) for key in ("p", "a", "late")] == [500.0, 100.0, 500.0]
    assert (books.load("a").decode_seconds, books.load("a").slots) == (2.0, 8)


def test_a_scraped_rate_below_what_events_have_shown_is_not_believed() -> None:
    """Prefill times overlap on a busy engine, so scrapes may tell less than the truth."""
    books = ledger()
    books.routed("s", "p", 4000, 4000, now=0.0)
    books.progress("s", 0, now=1.0, computed=4000.0)
    books.calibrate("p", rate=900.0)

    assert books.rate("p") == 4000.0


def test_all_owed_names_every_pod() -> None:
    """The metrics see each account at the same moment."""
    books = ledger()
    books.routed("s", "p", 500, 500, now=0.0)
    books.load("q")

    assert books.all_owed(now=0.2) == {"p": 300, "q": 0}


sessions = st.sampled_from(["a", "b", "c", "d"])
pods = st.sampled_from(["p", "q"])
tokens = st.integers(-5, 5000)


class AnyHistory(RuleBasedStateMachine):
    """Any order of calls, clocks that stand or jump."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.books = ledger(max_requests=6, expire_seconds=30.0)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(session=sessions, pod=pods, uncached=tokens)
    def routed(self, session: str, pod: str, uncached: int) -> None:
        before = self.books.owed(pod, self.now)
        full = len(self.books) == 6
        self.books.routed(session, pod, uncached, 5000, self.now)
        assert full or self.books.owed(pod) == pytest.approx(before + max(uncached, 0), abs=2)

    @rule(session=sessions, left=tokens)
    def progress(self, session: str, left: int) -> None:
        self.books.progress(session, left, self.now)

    @rule(session=sessions)
    def settled(self, session: str) -> None:
        self.books.settled(session, self.now)

    @rule(pod=pods, running=st.integers(-1, 5), waiting=st.integers(-1, 5), age=st.floats(0, 2))
    def reconcile(self, pod: str, running: int, waiting: int, age: float) -> None:
        self.books.reconcile(pod, running, waiting, self.now, asked_at=self.now - age)
        assert self.books.running(pod) >= max(running, 0) + max(waiting, 0) - 6

    @rule(pod=pods)
    def forget(self, pod: str) -> None:
        self.books.forget(pod)
        assert (self.books.owed(pod), self.books.running(pod)) == (0, 0)

    @rule()
    def expire_all(self) -> None:
        self.books.expire(self.now + 1000)
        loads = [self.books.load(pod) for pod in ("p", "q")]
        assert len(self.books) == 0
        assert [(load.owed, len(load.requests), len(load.queue)) for load in loads] == [(0, 0, 0)] * 2

    @invariant()
    def accounts_are_sound(self) -> None:
        loads = [self.books.load(pod) for pod in ("p", "q")]
        assert sum(len(load.requests) for load in loads) == len(self.books) <= 6
        for load in loads:
            assert load.owed >= 0
            assert load.owed == pytest.approx(sum(r.remaining for r in load.requests), abs=1e-3)
            assert {r for r in load.requests if r.remaining > 0} == set(load.queue)


TestAnyHistory = AnyHistory.TestCase


@given(st.lists(st.tuples(sessions, pods, tokens), max_size=20))
def test_settling_everything_leaves_nothing(routed: list[tuple[str, str, int]]) -> None:
    """However requests were routed, when all have ended nobody owes anything."""
    books = ledger()
    for session, pod, uncached in routed:
        books.routed(session, pod, uncached, 1, now=1.0)
    for session, _, _ in routed:
        books.settled(session, now=1.0)

    assert (len(books), books.owed("p"), books.owed("q"), books.running("p")) == (0, 0, 0, 0)


def theirs(books: Ledger, session: str, routed_at: float, now: float, **more: float) -> Request:
    """A request that a peer told of."""
    owed = more.get("remaining", 100.0)
    load = books.load("p")
    request = Request(session, load, 100.0, 200, routed_at, routed_at, remaining=owed, origin="peer")
    books.taken(request, now)
    return request


def test_a_peers_request_counts_and_is_nobody_elses_to_end() -> None:
    """It owes and runs like ours; sessions of ours, expiry and a pod's end do not report it."""
    books = ledger(expire_seconds=10.0)
    books.routed("same", "p", 50, 50, now=0.0)
    request = theirs(books, "same", 0.0, now=0.0, remaining=80.0)

    assert (books.owed("p"), books.running("p"), len(books), len(books.ours())) == (130, 2, 2, 1)
    books.settled("same", now=0.0)
    assert (books.settled("same", now=0.0), books.owed("p"), request.open) == (None, 80, True)
    assert (books.expire(now=99.0), books.forget("p"), request.open) == ([], [], False)


def test_progress_of_a_peers_request_is_taken_from_events() -> None:
    """Events reach every replica: what is left of the prefill is known without the peer."""
    books = ledger()
    request = theirs(books, "s", 0.0, now=0.0)
    books.advanced(request, 30, now=0.01)
    owed = books.owed("p", now=0.01)
    books.parted(request, now=0.01)
    books.parted(request, now=0.01)

    assert (owed, books.owed("p"), books.running("p")) == (30, 0, 0)


def test_a_request_that_a_scrape_took_for_foreign_is_not_foreign_once_it_is_told() -> None:
    """The scrape came before the peer's word; a request routed after the scrape was not in it."""
    books = ledger()
    books.reconcile("p", 1, 0, now=10.0)
    theirs(books, "later", 10.5, now=11.0)
    between = books.load("p").foreign
    request = theirs(books, "before", 9.9, now=11.0)

    assert (between, books.load("p").foreign, books.running("p")) == (1, 0, 2)
    books.parted(request, now=11.0, silent=True)
    assert (books.load("p").foreign, books.running("p")) == (1, 2)


def test_whoever_wants_to_know_is_told_of_each_request_that_was_routed_or_has_ended() -> None:
    """Ours alone, in order; the request itself says which."""
    books = ledger()
    books.routed("unseen", "p", 1, 1, now=0.0)
    books.changes = []
    books.routed("s", "p", 1, 1, now=0.0)
    theirs(books, "peer's", 0.0, now=0.0)
    books.settled("unseen", now=0.0)
    books.forget("p")

    told = [(request.session, request.number, request.open) for request in books.changes]
    assert told == [("s", 2, False), ("unseen", 1, False), ("s", 2, False)]
