"""Load follows the scrapes where no gateway reports how requests end."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.load.end_reports import (
    ASSUMED_SECONDS,
    ASSUMED_SPREAD,
    ASSUMED_STAYS,
    GOLDEN,
    LONGEST_INTERVAL,
    LOST_REQUESTS,
    MOST_OVERDUE,
    SHORTEST_STAY,
    SOME_REPORTS,
    UNREPORTED_SECONDS,
    AssumedStays,
    EndReports,
    LateEnds,
    StayEstimate,
)
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.in_flight import Attempt, InFlightRequest
from kvist_epp.load.tracker import LoadTracker


def send(tracker: LoadTracker, number: int, now: float) -> InFlightRequest:
    """One request to the endpoint ``p``."""
    request = InFlightRequest(f"s{number}", 10)
    tracker.add(request, "p", 0, now)
    return request


def test_reports_are_expected_until_a_scrape_shows_that_they_are_missing() -> None:
    """Requests that ended unnoticed show that ends are not reported; one report shows that they are."""
    reports = EndReports()
    assert (reports.known, reports.certain) == (True, False)
    reports.on_unnoticed(1.0)
    assert reports.known, "nothing was sent"

    reports.on_sent(1.0)
    reports.on_unnoticed(2.0)
    assert not reports.known
    reports.on_report()
    assert reports.certain


def test_reports_that_cease_are_missed_after_a_while() -> None:
    """A lost report now and then means nothing; a hundred requests in a minute without any do."""
    reports = EndReports()
    reports.on_report()
    for at in range(101):
        reports.on_sent(float(at) / 2)
        reports.on_unnoticed(float(at) / 2)
    assert reports.known
    reports.on_unnoticed(61.0)
    assert not reports.known


def test_missing_reports_are_named_only_when_they_will_not_come() -> None:
    """Twenty requests and half a minute: no access log is that late."""
    reports = EndReports()
    for at in range(20):
        reports.on_sent(float(at))
    reports.on_unnoticed(20.0)
    assert not reports.missing(29.0)
    assert reports.missing(30.0)
    reports.on_report()
    assert not reports.missing(100.0)


@given(st.floats(0.01, 10.0), st.floats(1.0, 100.0), st.floats(0.1, 3.0))
def test_stays_are_learned_by_littles_law(stay: float, rate: float, interval: float) -> None:
    """In a steady state the estimate is twice the true stay, whatever the rate and interval of scrapes."""
    estimate, now, sent = StayEstimate(), 0.0, 0
    while now < 3 * stay + 30:
        now += interval
        while sent / rate < now:
            estimate.on_sent(sent / rate)
            sent += 1
        ended = int((now - stay) * rate) + 1 if now > stay else 0
        estimate.on_scrape(max(0, sent - ended), now)

    assert estimate.seconds == pytest.approx(max(SHORTEST_STAY, 2 * stay), rel=0.35, abs=3 / rate)


def test_without_metrics_a_stay_is_assumed() -> None:
    """A request of an engine without metrics has ended after some seconds."""
    estimate = StayEstimate()
    assert estimate.seconds == float("inf")
    estimate.forget()
    assert estimate.seconds == ASSUMED_SECONDS


def serve(
    tracker: LoadTracker,
    *,
    stay: float,
    rate: float,
    seconds: float,
    slots: int,
    scrapes: float = 2.0,
    begin: float = 0.0,
) -> Counter[str]:
    """Send requests to an engine with ``slots`` that each stay, where there is room; count what happened."""
    tracker.calibrate("p", slots=slots)
    load, counts = tracker.load("p"), Counter[str]()
    asked: list[str] = []
    tracker.on_doubt = asked.append
    running: list[float] = []  # ends, in order
    step, scraped = 1 / rate, begin
    for number in range(int(seconds * rate)):
        now = begin + number * step
        while running and running[0] <= now:
            running.pop(0)
        tracker.end_overdue(now)
        load.drain(now)
        if now - scraped >= (0.1 if asked else scrapes):
            scraped = now
            asked.clear()
            tracker.reconcile("p", min(len(running), slots), max(0, len(running) - slots), now)
        if load.batch_or_backlog_full(30.0):
            counts["held"] += 1
            asked.append("p")
            continue
        counts["sent"] += 1
        send(tracker, number, now)
        begins = now if len(running) < slots else running[-slots]
        running.append(begins + stay)
        counts["most"] = max(counts["most"], len(running))
    return counts


def test_an_engine_that_answers_at_once_is_never_full() -> None:
    """4,000 requests/s of a millisecond each pass an endpoint of 256 slots; only the start is held back,
    until a scrape has shown that ends are not reported."""
    tracker = LoadTracker()
    counts = serve(tracker, stay=0.001, rate=4_000.0, seconds=10.0, slots=256)

    assert not tracker.end_reports.known
    assert counts["held"] < 0.08 * 40_000
    later = serve(tracker, stay=0.001, rate=4_000.0, seconds=10.0, slots=256, begin=10.0)
    assert later["held"] == 0


@pytest.mark.parametrize("stay", [2.0, 10.0, 40.0])
def test_an_engine_that_is_full_still_holds_requests(stay: float) -> None:
    """Twice the load that an engine can take: hardly more than its slots are sent, and it is kept busy."""
    tracker = LoadTracker()
    slots = 64
    rate = 2 * slots / stay
    counts = serve(tracker, stay=stay, rate=rate, seconds=20 * stay, slots=slots)

    assert counts["held"] > 0.3 * (counts["sent"] + counts["held"])
    assert counts["most"] <= 1.5 * slots
    assert counts["sent"] >= 0.8 * 20 * slots


def test_ends_that_are_reported_are_not_estimated() -> None:
    """With an access log a request lasts until its end is reported."""
    tracker = LoadTracker()
    tracker.end_reports.on_report()
    request = send(tracker, 1, 0.0)
    tracker.reconcile("p", 1, 0, 1.0)
    send(tracker, 2, 50.0)

    assert tracker.end_overdue(200.0) == []
    tracker.end(request, 201.0)
    assert len(tracker) == 1


def test_reports_of_some_requests_only_prove_nothing() -> None:
    """A report does not count where scrapes show other requests that ended without one; once nearly all are
    reported for a while, reports count again."""
    reports = EndReports()
    for number in range(1000):
        reports.on_sent(number / 100)
        reports.on_report()
    reports.on_lost(LOST_REQUESTS - 1, 10.0)
    assert reports.certain, "some are always lost"

    reports.on_lost(LOST_REQUESTS, 10.5)
    assert (reports.known, reports.certain, reports.partial) == (False, False, True)
    for number in range(3000):
        reports.on_sent(11.0 + number / 100)
        if number % 2:
            reports.on_report()
    assert not reports.known
    assert reports.missing(41.0) == SOME_REPORTS

    for number in range(3000):
        reports.on_sent(41.0 + number / 100)
        reports.on_report()
    assert (reports.known, reports.certain, reports.partial) == (True, True, False)


def test_a_gateway_whose_log_stops_is_noticed_by_two_scrapes() -> None:
    """Requests that two scrapes in a row do not show, and that were not reported, make ends be estimated: the
    endpoint is held for seconds, not for a minute."""
    tracker = LoadTracker()
    tracker.calibrate("p", slots=64)
    for number in range(500):
        tracker.end(send(tracker, number, number / 100), number / 100)
        tracker.end_reports.on_report()
    for number in range(70):
        send(tracker, 500 + number, 5.0)
    assert tracker.load("p").full(30.0)
    tracker.reconcile("p", 0, 0, 7.0)
    tracker.reconcile("p", 0, 0, 9.0)
    assert tracker.end_reports.partial
    counts = serve(tracker, stay=0.001, rate=1_000.0, seconds=10.0, slots=64, begin=9.0)
    assert counts["held"] < 0.08 * 10_000


def eight_in_eight_slots() -> tuple[LoadTracker, list[str]]:
    """Return a tracker whose endpoint ``p`` is full since second 1, and the endpoints that it will doubt."""
    tracker, asked = LoadTracker(), list[str]()
    tracker.calibrate("p", slots=8)
    for number in range(8):
        send(tracker, number, 1.0)
    tracker.on_doubt = asked.append
    return tracker, asked


def test_a_picker_that_has_just_started_looks_at_a_full_endpoint_again_and_again() -> None:
    """Before the first report nothing is certain: a full endpoint is scraped until a scrape has shown the
    newest requests, so that an instantly answering one is held for a moment only."""
    tracker, asked = eight_in_eight_slots()
    for at in (1.05, 1.3):
        asked.clear()
        tracker.end_overdue(at)
        assert asked == ["p"]
        tracker.reconcile("p", 0, 0, at)
        assert tracker.end_reports.known, "an engine counts a request at the end of a step"
    tracker.reconcile("p", 0, 0, 1.55)
    assert not tracker.end_reports.known
    assert not tracker.load("p").full(30.0)


def test_a_full_endpoint_whose_requests_a_scrape_has_shown_is_left_alone() -> None:
    """An engine that is truly full is not scraped any more often while it is not certain that ends are
    reported."""
    tracker, asked = eight_in_eight_slots()
    tracker.reconcile("p", 8, 0, 1.5)
    for at in range(20):
        tracker.end_overdue(1.6 + at / 10)
    assert asked == []
    assert tracker.load("p").full(30.0)


def unmeasured() -> LoadTracker:
    """Return a tracker whose engine ``p`` answers without metrics."""
    tracker = LoadTracker()
    tracker.load("p")
    tracker.forget_scrapes("p")
    return tracker


def test_an_engine_without_metrics_or_reports_is_never_full() -> None:
    """Neither a number of requests nor a backlog that nothing corrects holds requests back, and the picker
    asks for no scrapes that cannot show anything."""
    tracker = unmeasured()
    asked: list[str] = []
    tracker.on_doubt = asked.append
    for number in range(3000):
        request = InFlightRequest(f"s{number}", 4000)
        tracker.add(request, "p", 4000, number / 1000)
    assert not tracker.load("p").full(30.0)
    assert tracker.load("p").seconds_until_open(30.0) == 0.0
    assert asked == []


def test_an_engine_without_metrics_is_known_to_be_unreported_without_a_scrape() -> None:
    """Twenty requests and ten seconds without a report: from then on a request counts for some seconds, each
    for another time, so that endpoints do not take turns in looking empty."""
    tracker = unmeasured()
    for number in range(200):
        send(tracker, number, number / 10)
    assert not tracker.end_reports.known
    ended = [len(tracker.end_overdue(20.0 + at / 2)) for at in range(20)]
    assert len(tracker.load("p").attempts) == 0
    assert max(ended[1:]) <= 12, "they end little by little"


def test_a_lost_report_of_an_engine_without_metrics_is_forgotten_after_a_minute() -> None:
    """With reports a request counts until its own; one whose report was lost counts for a minute at most."""
    tracker = unmeasured()
    lost = send(tracker, 0, 0.0)
    tracker.end_reports.on_report()
    assert tracker.end_overdue(UNREPORTED_SECONDS * 0.4) == []
    assert tracker.end_overdue(UNREPORTED_SECONDS * 1.6) == [lost]


@given(st.lists(st.floats(-5.0, 100.0), min_size=1, max_size=50))
def test_the_interval_of_reports_is_bounded(delays: list[float]) -> None:
    """Clocks that differ and reports of minutes ago leave it between nothing and the longest."""
    reports = EndReports()
    for delay in delays:
        reports.on_delay(delay)

    assert 0.0 <= reports.interval <= LONGEST_INTERVAL


def test_ends_between_two_reports_follow_from_their_rate() -> None:
    """Forty ends a second in messages that come every second are about forty late ends; they fade when no
    more come."""
    late = LateEnds()
    for second in range(20):
        for _ in range(40):
            late.on_report(1.0, float(second))

    assert late.requests(19.5) == pytest.approx(40, rel=0.1)
    assert late.requests(40.0) == 0


def busy(tracker: LoadTracker, *, interval: float, seconds: int = 20) -> int:
    """Requests that the endpoint ``p`` of 8 slots gets after the last report, which says that all have
    ended."""
    tracker.calibrate("p", slots=8)
    load = tracker.load("p")
    for _ in range(100):
        tracker.end_reports.on_delay(interval / 2)
    number = 0
    sent: list[InFlightRequest] = []
    for second in range(seconds):
        sent = []
        while not load.full(float("inf")) and len(sent) < 40:
            sent.append(send(tracker, number, float(second)))
            number += 1
        for request in sent:
            tracker.end_reports.on_report()
            tracker.end(request, second + 1.0)
    return len(sent)


def test_an_endpoint_gets_work_until_the_next_report() -> None:
    """An engine of 8 slots that answers 40 requests/s gets 40 at once if reports come every second, and 8 if
    they come as soon as requests end."""
    assert busy(LoadTracker(), interval=0.0) == 8
    assert busy(LoadTracker(), interval=1.0) == 40


def test_ends_are_only_late_where_reports_are_sure() -> None:
    """Reports of some requests only say nothing of the others: there ends are estimated from scrapes."""
    tracker = LoadTracker()
    busy(tracker, interval=1.0)
    load = tracker.load("p")
    assert load.late_ends > 8
    tracker.end_reports.certain = False
    tracker.reconcile("p", 0, 0, 21.0)

    assert load.late_ends == 0


def test_scrapes_let_late_ends_fade() -> None:
    """An endpoint whose requests become longer has fewer late ends at each scrape, without any report."""
    tracker = LoadTracker()
    busy(tracker, interval=1.0)
    load = tracker.load("p")
    before = load.late_ends
    tracker.reconcile("p", 0, 0, 22.0)
    assert 0 < load.late_ends < before
    tracker.reconcile("p", 0, 0, 40.0)

    assert load.late_ends == 0
    for number in range(8):
        send(tracker, 1000 + number, 41.0)
    assert load.full(float("inf"))


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_requests_that_take_a_slot_are_never_below_none(sent: int, unseen: int, late: int) -> None:
    """Requests that a scrape did not show, and those that end before their report, are not added: they
    are the same."""
    tracker = LoadTracker()
    load = tracker.load("p")
    for number in range(sent):
        send(tracker, number, 0.0)
    load.unseen_requests, load.late_ends = unseen, late

    assert load.counted_requests == max(0, sent - max(unseen, late))


def attempt(number: int, at: float, origin: str = "") -> Attempt:
    """An attempt of a replica (this one by default) that was sent at this time."""
    request = InFlightRequest(f"s{number}", 10, origin=origin)
    return Attempt(request, EndpointLoad("p"), 0.0, at, at, number=number)


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.sampled_from(["", "other"]), st.booleans()), max_size=60),
    st.floats(0.1, 30.0),
    st.floats(0.0, 60.0),
)
def test_assumed_stays_find_what_a_look_at_all_attempts_finds(
    history: list[tuple[float, str, bool]], seconds: float, wait: float
) -> None:
    """An attempt is overdue after half of the time to one and a half of it, by its number, if it is of this
    replica and has not ended."""
    at, sent = 0.0, []
    stays = AssumedStays()
    for number, (pause, origin, ended) in enumerate(history):
        at += pause
        new = attempt(number, at, origin)
        stays.add(new)
        sent.append(new)
        if ended:
            stays.remove(new)
    now = at + wait
    there = [one for one, (_, origin, ended) in zip(sent, history, strict=True) if not (origin or ended)]
    overdue = set(stays.overdue(now, seconds))

    for one in there:
        step = int(one.number * GOLDEN % 1.0 * ASSUMED_STAYS)
        stay = seconds * (1 - ASSUMED_SPREAD + 2 * ASSUMED_SPREAD * (step + 0.5) / ASSUMED_STAYS)
        assert (one in overdue) == (one.routed_at < now - stay) or abs(now - stay - one.routed_at) < 1e-9
    assert overdue <= set(there)


def test_stays_are_assumed_for_requests_sent_before_metrics_were_missed() -> None:
    """An engine that loses its metrics has its requests ended, and one that gets them keeps its requests."""
    tracker = LoadTracker()
    for number in range(30):
        send(tracker, number, float(number) / 10)
    tracker.forget_scrapes("p")
    tracker.end_reports.known = False
    assert len(tracker.end_overdue(20.0)) == 30

    for number in range(30, 60):
        send(tracker, number, 20.0)
    tracker.reconcile("p", 30, 0, 20.5)
    assert tracker.end_overdue(21.0) == []
    assert tracker.running("p") == 30


def test_many_overdue_requests_end_in_turn() -> None:
    """Thousands of requests, found overdue when it turns out that no reports come, do not stop the picker."""
    tracker = LoadTracker()
    tracker.forget_scrapes("p")
    for number in range(2 * MOST_OVERDUE):
        send(tracker, number, 0.0)
    tracker.end_reports.known = False

    assert [len(tracker.end_overdue(20.0)) for _ in range(3)] == [MOST_OVERDUE, MOST_OVERDUE, 0]
