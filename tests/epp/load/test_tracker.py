"""Backlog and requests of all endpoints, and how they go away; against a model in the properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.epp.load.requests import end, progress, remote, route, sessions

from kvist_epp.load.in_flight import Attempt, DecodePlace, InFlightRequest, Leg, RequestListener, RequestState
from kvist_epp.load.tracker import LoadTracker

RATE = 1000.0


def new_tracker(**more: float) -> LoadTracker:
    return LoadTracker(default_rate=RATE, **more)  # type: ignore[arg-type]


def test_routed_tokens_are_in_the_backlog_until_the_end() -> None:
    """A request adds its uncached tokens to the backlog from the pick to its end."""
    tracker = new_tracker()
    route(tracker, "s", "p", 500, 900, now=10.0)

    assert (tracker.backlog("p"), tracker.running("p"), tracker.backlog("q")) == (500, 1, 0)

    ended = end(tracker, "s", now=10.0)

    assert ended is not None
    assert (ended.tokens, tracker.backlog("p"), tracker.running("p"), len(tracker)) == (900, 0, 0, 0)
    assert end(tracker, "s", now=10.0) is None


def test_a_request_that_went_elsewhere_has_its_backlog_there() -> None:
    """A request moves whole, with the backlog it has on the endpoint that serves it."""
    tracker = new_tracker()
    request = route(tracker, "s", "p", 500, 900, now=10.0).request
    route(tracker, "s", "q", 100, 100, now=10.0)
    tracker.move(request, "q", 300, now=10.0)

    assert (tracker.backlog("p"), tracker.running("p")) == (0, 0)
    assert (tracker.backlog("q"), tracker.running("q")) == (400, 2)


def test_a_moved_request_has_its_backlog_until_its_prompt_is_named_again() -> None:
    """A move names no prompt: the backlog stands on the new endpoint, and no name stays after the end."""
    tracker = new_tracker()
    moved = route(tracker, "a", "p", 500, 500, now=0.0)
    equal = route(tracker, "b", "q", 500, 500, now=0.0)
    tracker.set_content(moved, "prompt")
    tracker.set_content(equal, "prompt")
    tracker.move(moved.request, "q", 500, now=0.0)
    before = tracker.backlog("q")
    tracker.set_content(moved.request.attempt, "prompt")

    assert (before, tracker.backlog("q")) == (1000, 500)

    end(tracker, "a", now=0.0)
    end(tracker, "b", now=0.0)

    assert not tracker.load("q").dedup_owner


def test_events_of_equal_sessions_on_one_endpoint_are_of_the_oldest_that_can_have_them() -> None:
    """First events go to the oldest untold request; others to the oldest with a backlog, else the oldest."""
    tracker = new_tracker()
    first, second, third = (route(tracker, "s", "p", 100, 100, now=0.0).request for _ in range(3))
    at = tracker.table.at
    first.truth_known = True

    assert at("s", "p", first_event=True) is second

    second.truth_known = third.truth_known = True

    assert at("s", "p", first_event=True) is first

    tracker.on_progress(first.attempt, 0, now=0.0)

    assert at("s", "p") is at("s", "p", first_event=True) is second

    tracker.on_progress(second.attempt, 0, now=0.0)
    tracker.on_progress(third.attempt, 0, now=0.0)

    assert at("s", "p") is first
    assert at("s", "q") is at("s", "p", remote=True) is None


def test_of_one_sessions_requests_the_one_on_the_named_endpoint_ends() -> None:
    """With an endpoint named, only a request on it ends."""
    tracker = new_tracker()
    route(tracker, "s", "p", 500, 900, now=10.0)
    route(tracker, "s", "q", 100, 100, now=10.0)

    assert end(tracker, "s", 10.0, "r") is None
    assert end(tracker, "s", 10.0, "q") is not None
    assert (tracker.running("p"), tracker.running("q")) == (1, 0)


def test_a_session_with_several_requests_counts_each() -> None:
    """Two requests with one session id count separately, and each end removes one of them."""
    tracker = new_tracker()
    route(tracker, "s", "p", 100, 100, now=0.0)
    route(tracker, "s", "q", 200, 200, now=0.0)
    end(tracker, "s", now=0.0)

    assert (tracker.backlog("p"), tracker.backlog("q"), len(tracker)) == (0, 200, 1)


def test_an_endpoint_is_full_by_its_batch_or_its_backlog() -> None:
    """An endpoint is full with as many requests as slots, or with a backlog above the limit, until requests
    end."""
    tracker = new_tracker()
    tracker.calibrate("p", slots=2)
    load = tracker.load("p")
    route(tracker, "a", "p", 0, 0, now=0.0)
    assert not load.batch_or_backlog_full(30.0)

    route(tracker, "b", "p", 0, 0, now=0.0)
    assert load.batch_or_backlog_full(30.0)

    end(tracker, "a", now=0.0)
    route(tracker, "long", "q", 45_000, 45_000, now=0.0)
    assert (
        load.batch_or_backlog_full(30.0),
        tracker.load("q").batch_or_backlog_full(30.0),
        tracker.load("q").seconds_until_open(30.0),
    ) == (
        False,
        True,
        15,
    )


def test_requests_missing_from_a_scrape_make_no_endpoint_full() -> None:
    """Ends that the access log reports late count as soon as a scrape shows them, and only once."""
    tracker = new_tracker()
    tracker.end_reports.on_report()
    tracker.calibrate("p", slots=3)
    load = tracker.load("p")
    for name in "abc":
        route(tracker, name, "p", 0, 0, now=0.0)
    assert load.batch_or_backlog_full(30.0)

    assert sessions(tracker.reconcile("p", 1, 0, now=2.0)) == []
    assert (load.batch_or_backlog_full(30.0), load.running) == (False, 3)

    end(tracker, "a", now=2.1)
    end(tracker, "b", now=2.1)
    route(tracker, "d", "p", 0, 0, now=2.2)
    assert not load.batch_or_backlog_full(30.0)
    route(tracker, "e", "p", 0, 0, now=2.2)
    assert load.batch_or_backlog_full(30.0)


def test_whatever_may_give_capacity_is_reported() -> None:
    """Ends, progress, scrapes, rates and endpoints that leave call ``on_capacity``; a new request does
    not."""
    calls: list[None] = []
    tracker = LoadTracker(default_rate=RATE, on_capacity=lambda: calls.append(None))
    route(tracker, "a", "p", 100, 100, now=0.0)
    route(tracker, "b", "p", 100, 100, now=0.0)
    route(tracker, "c", "p", 100, 100, now=0.0)
    assert calls == []
    for event in (
        lambda: progress(tracker, "a", 10, now=0.1),
        lambda: end(tracker, "a", now=0.2),
        lambda: tracker.calibrate("p", slots=9),
        lambda: tracker.reconcile("p", 2, 0, now=0.3),
        lambda: tracker.remove_endpoint("p"),
    ):
        before = len(calls)
        event()
        assert len(calls) > before


def test_silence_expires() -> None:
    """A request without signs of life is dropped after the expiry; each sign of life defers that."""
    tracker = new_tracker(expire_seconds=10.0)
    route(tracker, "silent", "p", 100, 100, now=0.0)
    route(tracker, "alive", "p", 100, 100, now=0.0)
    progress(tracker, "alive", 0, now=5.0)

    assert sessions(tracker.expire(now=9.9)) == []
    assert sessions(tracker.expire(now=10.0)) == ["silent"]
    assert sessions(tracker.expire(now=15.0)) == ["alive"]
    assert (len(tracker), tracker.running("p"), tracker.backlog("p")) == (0, 0, 0)


def test_memory_is_bounded() -> None:
    """Beyond the bound, the request with the oldest sign of life is removed."""
    tracker = new_tracker(max_requests=2)
    for number in range(4):
        route(tracker, f"s{number}", "p", 10, 10, now=float(number))

    assert (len(tracker), tracker.running("p")) == (2, 2)
    assert end(tracker, "s1", now=4.0) is None
    assert end(tracker, "s2", now=4.0) is not None


def test_an_endpoint_that_leaves_takes_its_requests_with_it() -> None:
    """An endpoint that leaves takes its requests with it."""
    tracker = new_tracker()
    route(tracker, "s", "p", 10, 10, now=0.0)
    route(tracker, "t", "q", 10, 10, now=0.0)

    assert sessions(tracker.remove_endpoint("p")) == ["s"]
    assert (len(tracker), tracker.running("p"), tracker.backlog("q")) == (1, 0, 10)
    assert sessions(tracker.remove_endpoint("never")) == []


def test_fewer_requests_twice_end_the_oldest() -> None:
    """Scrapes that show fewer requests than ours, twice in a row, end those with the oldest signs of life."""
    tracker = new_tracker()
    for number in range(3):
        route(tracker, f"s{number}", "p", 10, 10, now=float(number))
    progress(tracker, "s0", 0, now=5.0)

    assert sessions(tracker.reconcile("p", 1, 0, now=10.0)) == []
    assert sessions(tracker.reconcile("p", 2, 0, now=12.0)) == ["s1"]
    assert tracker.running("p") == 2
    assert sessions(tracker.reconcile("p", 2, 0, now=14.0)) == []


def test_a_request_on_its_way_is_not_missing() -> None:
    """A request routed just before the scrape was sent, or after, may not have arrived: it is not ended."""
    tracker = new_tracker(grace_seconds=0.5)
    route(tracker, "s", "p", 10, 10, now=9.8)

    assert [tracker.reconcile("p", 0, 0, now=20.0, asked_at=10.0) for _ in range(3)] == [[], [], []]


def test_an_engine_may_not_have_looked_up_what_waits_or_is_on_its_way() -> None:
    """Requests that wait, or that the engine does not count yet, may be those with the largest hits; those
    sent half a second before the scrape may have come. Those of other replicas were not predicted here."""
    tracker = new_tracker(grace_seconds=0.5)
    for number, hit in enumerate((400, 10, 30, 5)):
        request = InFlightRequest(f"s{number}", 1000, indexed_tokens=hit)
        tracker.add(request, "p", 1000 - hit, float(number))
    tracker.add_remote(remote(tracker, "other", "p", 2.5), 2.5)

    assert tracker.unsettled_hits("p", 5, 0, asked_at=4.0) == 0
    assert tracker.unsettled_hits("p", 5, 0, asked_at=3.2) == 5
    assert tracker.unsettled_hits("p", 3, 1, asked_at=4.0) == 430
    assert tracker.unsettled_hits("p", 4, 0, asked_at=4.0) == 400
    assert tracker.unsettled_hits("p", 0, 9, asked_at=3.2) == 445
    assert tracker.unsettled_hits("never", 0, 1, asked_at=3.2) == 0


def test_more_requests_are_untracked() -> None:
    """Traffic that did not pass through us counts as running, and goes when it goes."""
    tracker = new_tracker()
    route(tracker, "s", "p", 10, 10, now=0.0)
    tracker.reconcile("p", 5, 2, now=2.0)

    assert tracker.running("p") == 7

    tracker.reconcile("p", 1, 0, now=4.0)

    assert tracker.running("p") == 1


def test_requests_that_wait_in_the_engine_have_their_whole_backlog() -> None:
    """Requests that wait in the engine have their full backlog again, although time had reduced it."""
    tracker = new_tracker()
    route(tracker, "begun", "p", 1000, 1000, now=0.0)
    route(tracker, "queued", "p", 1000, 1000, now=0.0)
    tracker.reconcile("p", 1, 1, now=3.0)

    assert tracker.backlog("p") == 1000


def test_events_outweigh_the_queue() -> None:
    """A request whose prefill events have shown progress is not set back by a scrape (a preempted one waits,
    too)."""
    tracker = new_tracker()
    route(tracker, "s", "p", 1000, 1000, now=0.0)
    progress(tracker, "s", 100, now=1.0)
    tracker.reconcile("p", 0, 1, now=1.0)

    assert tracker.backlog("p") == 100


def test_rates_are_learned_and_shared() -> None:
    """An endpoint without a rate of its own was never behind: it takes the fastest's; without any, the
    default."""
    tracker = new_tracker()
    tracker.load("p")

    assert tracker.rate("p") == RATE

    for key, rate in (("a", 100.0), ("b", 300.0), ("c", 500.0)):
        tracker.calibrate(key, rate=rate, decode_seconds=2.0, slots=8)

    assert [tracker.rate(key) for key in ("p", "a", "late")] == [500.0, 100.0, 500.0]
    assert (tracker.load("a").decode_seconds, tracker.load("a").slots) == (2.0, 8)


def test_a_scraped_rate_below_what_events_have_shown_is_not_believed() -> None:
    """Prefill times overlap on a busy engine, so scrapes may tell less than the truth."""
    tracker = new_tracker()
    route(tracker, "s", "p", 4000, 4000, now=0.0)
    progress(tracker, "s", 0, now=1.0, computed=4000.0)
    tracker.calibrate("p", rate=900.0)

    assert tracker.rate("p") == 4000.0


def test_loads_of_all_endpoints_are_of_one_moment() -> None:
    """The metrics see each endpoint drained to the same time."""
    tracker = new_tracker()
    route(tracker, "s", "p", 500, 500, now=0.0)
    tracker.load("q")

    assert {key: load.backlog_tokens for key, load in tracker.loads(now=0.2).items()} == {"p": 300, "q": 0}


session_names = st.sampled_from(["a", "b", "c", "d"])
pods = st.sampled_from(["p", "q"])
tokens = st.integers(-5, 5000)


class AnyHistory(RuleBasedStateMachine):
    """Any order of calls, clocks that stand or jump."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.loads = new_tracker(max_requests=6, expire_seconds=30.0)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(session=session_names, pod=pods, uncached=tokens)
    def routed(self, session: str, pod: str, uncached: int) -> None:
        before = self.loads.backlog(pod, self.now)
        full = len(self.loads) == 6
        route(self.loads, session, pod, uncached, 5000, self.now)
        estimated = not self.loads.end_reports.known  # another request may have ended by the way
        assert full or estimated or self.loads.backlog(pod) == pytest.approx(before + max(uncached, 0), abs=2)

    @rule(session=session_names, left=tokens)
    def progress(self, session: str, left: int) -> None:
        progress(self.loads, session, left, self.now)

    @rule(session=session_names)
    def settled(self, session: str) -> None:
        end(self.loads, session, self.now)

    @rule(pod=pods, running=st.integers(-1, 5), waiting=st.integers(-1, 5), age=st.floats(0, 2))
    def reconcile(self, pod: str, running: int, waiting: int, age: float) -> None:
        self.loads.reconcile(pod, running, waiting, self.now, asked_at=self.now - age)
        assert self.loads.running(pod) >= max(running, 0) + max(waiting, 0) - 6

    @rule(pod=pods)
    def forget(self, pod: str) -> None:
        sessions(self.loads.remove_endpoint(pod))
        assert (self.loads.backlog(pod), self.loads.running(pod)) == (0, 0)

    @rule()
    def expire_all(self) -> None:
        sessions(self.loads.expire(self.now + 1000))
        tracker = [self.loads.load(pod) for pod in ("p", "q")]
        assert len(self.loads) == 0
        assert [(load.backlog_tokens, len(load.attempts), len(load.prefill_queue)) for load in tracker] == [
            (0, 0, 0)
        ] * 2

    @invariant()
    def accounts_are_sound(self) -> None:
        tracker = [self.loads.load(pod) for pod in ("p", "q")]
        assert sum(len(load.attempts) for load in tracker) == len(self.loads) <= 6
        for load in tracker:
            assert load.backlog_tokens >= 0
            assert load.backlog_tokens == pytest.approx(sum(r.backlog for r in load.attempts), abs=1e-3)
            assert {r for r in load.attempts if r.backlog > 0} == set(load.prefill_queue)


TestAnyHistory = AnyHistory.TestCase


@given(st.lists(st.tuples(session_names, pods, tokens), max_size=20))
def test_settling_everything_leaves_nothing(routed: list[tuple[str, str, int]]) -> None:
    """No backlog is left once all requests have ended, however they were routed."""
    tracker = new_tracker()
    for session, pod, uncached in routed:
        route(tracker, session, pod, uncached, 1, now=1.0)
    for session, _, _ in routed:
        end(tracker, session, now=1.0)

    assert (len(tracker), tracker.backlog("p"), tracker.backlog("q"), tracker.running("p")) == (0, 0, 0, 0)


def test_progress_of_one_of_a_sessions_requests_is_its_own() -> None:
    """One session is routed to two endpoints: progress on one changes neither backlog nor rate of the
    other."""
    tracker = new_tracker()
    route(tracker, "s", "a", 4000, 4000, now=0.0)
    route(tracker, "s", "b", 4000, 4000, now=0.0)
    request = tracker.table.at("s", "b")
    assert request is not None

    tracker.on_progress(request.attempt, 0, now=0.4, computed=4000)

    assert (tracker.backlog("a"), tracker.backlog("b")) == (4000, 0)
    assert tracker.load("a").rate_estimator.proven == 0.0
    assert tracker.load("b").rate_estimator.proven == pytest.approx(10_000.0)


def test_a_replicas_request_counts_and_is_left_to_that_replica_to_end() -> None:
    """Another replica's request counts like ours, but ending our session, expiry and the removal of its
    endpoint do not report it."""
    tracker = new_tracker(expire_seconds=10.0)
    route(tracker, "same", "p", 50, 50, now=0.0)
    attempt = remote(tracker, "same", "p", 0.0, backlog=80.0)
    tracker.add_remote(attempt, now=0.0)

    assert (tracker.backlog("p"), tracker.running("p"), len(tracker), len(tracker.own())) == (130, 2, 2, 1)
    end(tracker, "same", now=0.0)
    assert (end(tracker, "same", now=0.0), tracker.backlog("p"), attempt.open) == (None, 80, True)
    assert (tracker.expire(now=99.0), tracker.remove_endpoint("p"), attempt.open) == ([], [], False)


def test_progress_of_a_replicas_request_is_taken_from_events() -> None:
    """Events reach every replica: what is left of the prefill is known without the one that routed it."""
    tracker = new_tracker()
    attempt = remote(tracker, "s", "p", 0.0)
    tracker.add_remote(attempt, now=0.0)
    tracker.on_progress(attempt, 30, now=0.01)
    backlog = tracker.backlog("p", now=0.01)
    tracker.end_remote(attempt, now=0.01)
    tracker.end_remote(attempt, now=0.01)

    assert (backlog, tracker.backlog("p"), tracker.running("p")) == (30, 0, 0)


def test_a_request_that_a_scrape_counted_as_untracked_is_tracked_once_it_is_known() -> None:
    """The scrape came before the other replica's word; a request routed after the scrape was not in it."""
    tracker = new_tracker()
    tracker.reconcile("p", 1, 0, now=10.0)
    tracker.add_remote(remote(tracker, "later", "p", 10.5), now=11.0)
    between = tracker.load("p").untracked_requests
    attempt = remote(tracker, "before", "p", 9.9)
    tracker.add_remote(attempt, now=11.0)

    assert (between, tracker.load("p").untracked_requests, tracker.running("p")) == (1, 0, 2)
    tracker.end_remote(attempt, now=11.0, untracked=True)
    assert (tracker.load("p").untracked_requests, tracker.running("p")) == (1, 2)


class RecordingListener(RequestListener):
    """Records all notifications."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, int]] = []

    def on_routed(self, attempt: Attempt) -> None:
        self.said.append(("routed", attempt.request.session, attempt.number))

    def on_moved(self, old: Attempt, new: Attempt) -> None:
        self.said.append(("moved", old.endpoint + new.endpoint, new.number))

    def on_ended(self, attempt: Attempt) -> None:
        assert attempt.request.state is RequestState.ENDED
        self.said.append(("ended", attempt.request.session, attempt.number))


def test_listeners_are_notified_of_each_request_of_this_replica_once() -> None:
    """Routed, moved and ended, in order; requests of other replicas are not reported."""
    tracker, recorded = new_tracker(), RecordingListener()
    route(tracker, "unseen", "p", 1, 1, now=0.0)
    tracker.add_listener(recorded)
    moved = route(tracker, "s", "p", 1, 1, now=0.0).request
    tracker.add_remote(remote(tracker, "theirs", "p", 0.0), now=0.0)
    tracker.move(moved, "q", 1, now=0.0)
    end(tracker, "unseen", now=0.0)
    tracker.remove_endpoint("p")
    tracker.remove_endpoint("q")
    tracker.end(moved, now=0.0)

    assert recorded.said == [
        ("routed", "s", 2),
        ("moved", "pq", 3),
        ("ended", "unseen", 1),
        ("ended", "s", 3),
    ]


def test_a_request_passes_its_states_in_order() -> None:
    """Sent, prefilling with its first progress, decoding when the prompt is computed, ended."""
    tracker = new_tracker()
    request = route(tracker, "s", "p", 100, 100, now=0.0).request
    states = [request.state]
    for backlog in (60, 0, 0):
        progress(tracker, "s", backlog, now=1.0)
        states.append(request.state)
    end(tracker, "s", now=2.0)

    assert states == [
        RequestState.SENT,
        RequestState.PREFILLING,
        RequestState.DECODING,
        RequestState.DECODING,
    ]
    assert request.state is RequestState.ENDED


def test_a_place_at_a_replaced_endpoint_is_given_back_to_no_other() -> None:
    """An endpoint that comes back under its key, as a StatefulSet's pod does, has its own places only."""
    tracker = LoadTracker()
    first, second = InFlightRequest("first", 50_000), InFlightRequest("second", 100)
    tracker.add(first, "p", 50_000, 1.0, leg=Leg.PREFILL)
    tracker.keep_place(first, DecodePlace("d", "", 50_000, 0, None))
    tracker.remove_endpoint("d")
    tracker.add(second, "p", 100, 2.0, leg=Leg.PREFILL)
    tracker.keep_place(second, DecodePlace("d", "", 100, 0, None))
    tracker.release_place(first)
    load = tracker.load("d")
    assert (load.reserved, load.promised_tokens) == (1, 100)
    tracker.release_place(second)
    assert (load.reserved, load.promised_tokens, load.places) == (0, 0, {})
