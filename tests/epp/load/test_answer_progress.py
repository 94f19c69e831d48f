"""Events of answers: where no prompt waits they change nothing that picks read."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.epp.load.requests import end, progress, route

from kvist_epp.admin.live.prefill_times import PrefillTimes
from kvist_epp.load.in_flight import Attempt
from kvist_epp.load.tracker import LoadTracker

RATE = 1000.0
SESSIONS = ("a", "b", "c", "d")


class LongWay(LoadTracker):
    """Applies each event as one of a prompt."""

    def _answer_goes_on(self, attempt: Attempt, now: float) -> bool:
        return False


def tracker_of(kind: type[LoadTracker]) -> tuple[LoadTracker, PrefillTimes, list[float]]:
    """Return a tracker, the times that it has observed, and how often an endpoint may have got room."""
    room: list[float] = []
    tracker = kind(default_rate=RATE, on_capacity=lambda: room.append(0.0), tpot_seconds=0.05)
    times = PrefillTimes()
    tracker.add_listener(times)
    return tracker, times, room


def figures(tracker: LoadTracker, times: PrefillTimes) -> list[object]:
    """Return what picks, expiry and the pages read."""
    found: list[object] = [[one.request.session for one in tracker.own()]]
    for load in (tracker.load("p"), tracker.load("q")):
        found += [
            (load.backlog_tokens, load.at, load.drains_from, load.first_done_at, load.last_event_at),
            (load.rate, load.blind, load.running, load.counted_requests, load.seconds_until_open(0.5)),
            [getattr(load.rate_estimator, name) for name in type(load.rate_estimator).__slots__],
            [
                (one.request.session, one.request.state, one.last_event_at, one.backlog)
                for one in load.attempts
            ],
        ]
    return [*found, times.histogram.count, times.histogram.total]


def apply(tracker: LoadTracker, kind: str, session: str, tokens: int, now: float) -> None:
    """Apply one step of a history."""
    request = tracker.table.find(session)
    if kind == "route":
        route(tracker, session, "p", tokens, tokens, now)
    elif kind == "prompt":
        progress(tracker, session, tokens // 2, now, computed=tokens / 2)
    elif kind == "waits":
        progress(tracker, session, tokens, now)
    elif kind == "rest":
        progress(tracker, session, 0, now, computed=float(tokens))
    elif kind == "answer":
        progress(tracker, session, 0, now)
    elif kind == "moved" and request is not None:
        tracker.move(request, "q", tokens, now)
    elif kind == "end":
        end(tracker, session, now)


def history(steps: str) -> list[tuple[str, str, int, float]]:
    """Return steps that are written as ``kind:session:tokens:seconds``."""
    parts = [[*step.split(":"), "0", "0"] for step in steps.split()]
    return [(kind, session, int(tokens), float(seconds)) for kind, session, tokens, seconds, *_ in parts]


histories = st.lists(
    st.tuples(
        st.sampled_from(["route", "prompt", "rest", "waits", "answer", "answer", "answer", "moved", "end"]),
        st.sampled_from(SESSIONS),
        st.sampled_from([0, 100, 900, 20_000]),
        st.sampled_from([0.0, 0.001, 0.05, 3.0, 60.0]),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(histories)
@example(history("route:a:4000 prompt:a:4000:1 route:b:0:60 answer:a"))
@example(history("route:a:20000 rest:a:100:1 rest:a:20000:1"))
@example(history("route:a:9 rest:a:9:1 waits:a:9:1"))
@example(history("route:a:9 rest:a:9:1 moved:a:0:0.05 answer:a:0:1"))
@example(history("route:b:0 answer:b route:a:20000 prompt:a:20000:1 prompt:a:18000:1 route:c:0:60 answer:b"))
def test_the_short_way_leaves_the_same_figures(
    steps: Sequence[tuple[str, str, int, float]],
) -> None:
    """Whatever comes before and after, an event of an answer leaves the figures that any event leaves."""
    pairs = [tracker_of(LoadTracker), tracker_of(LongWay)]
    now = 0.0
    for kind, session, tokens, seconds in steps:
        now += seconds
        for tracker, _, _ in pairs:
            apply(tracker, kind, session, tokens, now)
        short, long = (figures(tracker, times) for tracker, times, _ in pairs)
        assert short == long


def test_answers_do_not_make_picks_read_the_load_again() -> None:
    """The first event of an answer says that its prompt is computed; a pick need not read the others."""
    tracker, times, room = tracker_of(LoadTracker)
    route(tracker, "a", "p", 100, 100, 0.0)
    progress(tracker, "a", 0, 1.0)
    first = (set(tracker.changed), len(room), times.histogram.count)
    tracker.changed.clear()
    for second in range(2, 9):
        progress(tracker, "a", 0, float(second))

    load = tracker.load("p")
    assert first == ({load}, 1, 1)
    assert (tracker.changed, len(room), times.histogram.count) == (set(), 1, 1)
    assert (load.last_event_at, tracker.expire(8.0 + tracker.expire_seconds / 2)) == (8.0, [])


def test_an_answer_beside_a_prompt_that_waits_is_read() -> None:
    """The engine is alive, so that what waits does not drain by itself: picks have to know."""
    tracker, _, _ = tracker_of(LoadTracker)
    route(tracker, "a", "p", 100, 100, 0.0)
    progress(tracker, "a", 0, 1.0)
    route(tracker, "b", "p", 4000, 4000, 1.5)
    before = tracker.load("p").drains_from
    tracker.changed.clear()
    progress(tracker, "a", 0, 2.0)

    assert tracker.load("p").drains_from > before
    assert tracker.changed == {tracker.load("p")}
