"""The work queue: one worker for each key, no key lost, the earliest time counts."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_operator.reconcile.work_queue import FIRST_SECONDS, LONGEST_SECONDS, WorkQueue


def test_a_key_added_several_times_is_returned_once() -> None:
    """Three additions of a key are one, at the earliest of their times."""
    made: WorkQueue[str] = WorkQueue()
    for at in (3.0, 1.0, 2.0):
        made.add("a", at)

    assert made.pop(0.5) is None
    assert made.pop(1.0) == "a"
    assert made.pop(9.0) is None


def test_a_key_added_while_processed_comes_again() -> None:
    """A key that is added while it is processed is returned afterwards, to one worker."""
    made: WorkQueue[str] = WorkQueue()
    made.add("a", 0.0)
    assert made.pop(0.0) == "a"
    made.add("a", 0.0)
    made.add("b", 0.0)

    assert [made.pop(1.0), made.pop(1.0)] == ["b", None]
    assert made.next_at() is None
    made.done("a")
    assert made.next_at() == 0.0
    assert made.pop(1.0) == "a"


def test_failures_wait_longer_each_time_and_success_forgets_them() -> None:
    """Pauses double up to five minutes; after a success they start again at one second."""
    made: WorkQueue[str] = WorkQueue()
    waits = [made.failed("a") for _ in range(12)]

    assert waits[:3] == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    assert waits[-1] == LONGEST_SECONDS
    made.done("a")
    assert made.failed("a") == FIRST_SECONDS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.booleans()), max_size=60))
def test_nothing_is_lost_and_nothing_comes_early(asked: list[tuple[str, int, bool]]) -> None:
    """After any additions and removals every added key is returned, never early and never to two workers."""
    made: WorkQueue[str] = WorkQueue()
    due: dict[str, int] = {}
    busy: list[str] = []
    for now, (key, delay, take) in enumerate(asked):
        made.add(key, now + delay)
        due[key] = min(due.get(key, 10**6), now + delay)
        if take and (found := made.pop(now)) is not None:
            assert found not in busy
            assert due.pop(found) <= now
            busy.append(found)
        elif busy:
            made.done(busy.pop(0))
    for key in busy:
        made.done(key)
    left = set()
    while (found := made.pop(10**6)) is not None:
        left.add(found)
    assert left == set(due)
