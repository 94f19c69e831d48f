"""The rotation between replicas: when their queued requests may use an endpoint's capacity."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.load.replica_rotation import (
    NEW_REQUEST_SECONDS,
    OVERDUE_SECONDS,
    REPLICA_SECONDS,
    TURN_SECONDS,
    ReplicaRotation,
)

PICKERS = ("a", "b", "c")


def crowd(moments: dict[str, float]) -> dict[str, ReplicaRotation]:
    """Each picker's view of an endpoint that they sent requests at these moments."""
    views = {}
    for me in moments:
        views[me] = ReplicaRotation()
        for origin, at in moments.items():
            views[me].on_sent("" if origin == me else origin, at)
    return views


def opening(turn: ReplicaRotation, since: float, at: float) -> float:
    """Return the moment at which the request may be sent, if the endpoint has capacity from now on."""
    turn.may_send(since, at, capacity=True)
    left = turn.seconds_until_turn(since, at)
    return at if left == inf else at + left


def test_without_other_replicas_a_request_is_sent_at_once() -> None:
    """Without other replicas and overdue requests, a request is sent at once."""
    turn = ReplicaRotation()
    turn.on_new_request(9.9)
    turn.on_sent("", 9.0)
    assert turn.may_send(9.9, 10.0, capacity=True)
    assert turn.seconds_until_turn(9.9, 10.0) == inf


def test_overdue_requests_leave_capacity_for_new_ones() -> None:
    """An overdue request is sent when the endpoint has had capacity for a while; a moment without capacity
    restarts the time."""
    turn = ReplicaRotation()
    turn.on_new_request(10.0)
    since = 10.0 - OVERDUE_SECONDS - 0.1
    assert not turn.may_send(since, 10.0, capacity=True)
    assert turn.seconds_until_turn(since, 10.0) == OVERDUE_SECONDS
    assert not turn.may_send(since, 10.5, capacity=False)
    assert turn.seconds_until_turn(since, 10.5) == inf
    assert not turn.may_send(since, 10.6, capacity=True)
    assert not turn.may_send(since, 10.5 + OVERDUE_SECONDS, capacity=True)
    assert turn.may_send(since, 10.6 + OVERDUE_SECONDS, capacity=True)


def test_without_new_requests_no_capacity_is_left_free() -> None:
    """An endpoint without new requests takes overdue ones at once."""
    turn = ReplicaRotation()
    assert turn.may_send(0.0, 10.0, capacity=True)
    turn.on_new_request(10.0)
    turn.on_sent("", 10.0)
    assert not turn.may_send(0.0, 10.1, capacity=True)
    assert turn.may_send(0.0, 10.0 + NEW_REQUEST_SECONDS, capacity=True)


def test_each_picker_sees_its_share_of_new_requests() -> None:
    """With three replicas sending, one new request of ours stands for two that we did not see."""
    turn = crowd(dict.fromkeys(PICKERS, 10.0))["a"]
    turn.on_new_request(10.0)
    turn.may_send(0.0, 10.0 + 2 * NEW_REQUEST_SECONDS, capacity=True)
    assert turn.seconds_until_turn(0.0, 10.0 + 2 * NEW_REQUEST_SECONDS) == OVERDUE_SECONDS
    assert turn.may_send(0.0, 10.0 + 3 * NEW_REQUEST_SECONDS, capacity=True)


@given(st.permutations(PICKERS), st.floats(0.001, 1.0))
def test_pickers_take_turns(order: list[str], apart: float) -> None:
    """The replica that sent least recently goes first, and each next one a step later, after it has heard of
    the first."""
    moments = {picker: 10.0 + apart * place for place, picker in enumerate(order)}
    now = max(moments.values()) + 0.5
    came = {picker: opening(turn, now - 0.1, now) for picker, turn in crowd(moments).items()}
    assert sorted(came, key=lambda picker: came[picker]) == list(order)
    assert all(abs(came[p] - now - place * TURN_SECONDS) < 1e-9 for place, p in enumerate(order))


def test_a_turn_ends_when_a_replica_sends() -> None:
    """A turn ends when any replica has sent a request; that replica then goes last."""
    turn = crowd({"a": 10.0, "b": 9.0})["a"]
    assert not turn.may_send(10.0, 10.1, capacity=True)
    turn.on_sent("b", 10.1)
    assert turn.may_send(10.0, 10.12, capacity=True)


def test_a_picker_that_has_left_is_not_waited_for() -> None:
    """A replica that has sent nothing for long is not waited for, and is forgotten."""
    turn = crowd({"a": 10.0, "b": 9.0})["a"]
    assert turn.may_send(9.0 + REPLICA_SECONDS, 9.0 + REPLICA_SECONDS, capacity=True)
    for number in range(100):
        turn.on_sent(f"restarted-{number}", 20.0 + number)
    assert len(turn._sent) <= REPLICA_SECONDS
