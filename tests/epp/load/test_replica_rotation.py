"""When those who wait for a pod may use its room."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.load.replica_rotation import (
    LATE_SECONDS,
    NEWCOMER_SECONDS,
    PICKER_SECONDS,
    QUIET_SECONDS,
    STEP_SECONDS,
    Turn,
)

PICKERS = ("a", "b", "c")


def crowd(moments: dict[str, float]) -> dict[str, Turn]:
    """Each picker's view of a pod that they sent requests at these moments."""
    views = {}
    for me in moments:
        views[me] = Turn()
        for origin, at in moments.items():
            views[me].sent("" if origin == me else origin, at)
    return views


def opening(turn: Turn, since: float, at: float) -> float:
    """When it comes, if the pod has room from then on."""
    turn.comes(since, at, room=True)
    left = turn.comes_in(since, at)
    return at if left == inf else at + left


def test_alone_and_in_time_it_goes_at_once() -> None:
    """Nobody else sends there and it has not waited long: there is nobody to give way to."""
    turn = Turn()
    turn.wanted(9.9)
    turn.sent("", 9.0)
    assert turn.comes(9.9, 10.0, room=True)
    assert turn.comes_in(9.9, 10.0) == inf


def test_the_late_leave_room_for_newcomers() -> None:
    """Who has waited long goes when the pod has had room for a while; without room the while begins anew."""
    turn = Turn()
    turn.wanted(10.0)
    since = 10.0 - LATE_SECONDS - 0.1
    assert not turn.comes(since, 10.0, room=True)
    assert turn.comes_in(since, 10.0) == QUIET_SECONDS
    assert not turn.comes(since, 10.5, room=False)
    assert turn.comes_in(since, 10.5) == inf
    assert not turn.comes(since, 10.6, room=True)
    assert not turn.comes(since, 10.5 + QUIET_SECONDS, room=True)
    assert turn.comes(since, 10.6 + QUIET_SECONDS, room=True)


def test_where_nobody_new_comes_nothing_is_left_free() -> None:
    """A pod that is wanted by the late alone takes them up as it can."""
    turn = Turn()
    assert turn.comes(0.0, 10.0, room=True)
    turn.wanted(10.0)
    turn.sent("", 10.0)
    assert not turn.comes(0.0, 10.1, room=True)
    assert turn.comes(0.0, 10.0 + NEWCOMER_SECONDS, room=True)


def test_each_picker_sees_its_share_of_the_newcomers() -> None:
    """Where three send, a newcomer of ours tells of two that we did not see."""
    turn = crowd(dict.fromkeys(PICKERS, 10.0))["a"]
    turn.wanted(10.0)
    turn.comes(0.0, 10.0 + 2 * NEWCOMER_SECONDS, room=True)
    assert turn.comes_in(0.0, 10.0 + 2 * NEWCOMER_SECONDS) == QUIET_SECONDS
    assert turn.comes(0.0, 10.0 + 3 * NEWCOMER_SECONDS, room=True)


@given(st.permutations(PICKERS), st.floats(0.001, 1.0))
def test_pickers_take_turns(order: list[str], apart: float) -> None:
    """Who sent there longest ago goes first, and each next one a step later: it will have heard by then."""
    moments = {picker: 10.0 + apart * place for place, picker in enumerate(order)}
    now = max(moments.values()) + 0.5
    came = {picker: opening(turn, now - 0.1, now) for picker, turn in crowd(moments).items()}
    assert sorted(came, key=lambda picker: came[picker]) == list(order)
    assert all(abs(came[p] - now - place * STEP_SECONDS) < 1e-9 for place, p in enumerate(order))


def test_a_turn_ends_when_somebody_sent() -> None:
    """What room is left then is another question, and the one who sent goes last."""
    turn = crowd({"a": 10.0, "b": 9.0})["a"]
    assert not turn.comes(10.0, 10.1, room=True)
    turn.sent("b", 10.1)
    assert turn.comes(10.0, 10.12, room=True)


def test_a_picker_that_is_gone_holds_nobody_back() -> None:
    """Who has sent nothing for long is not waited for, nor kept in mind."""
    turn = crowd({"a": 10.0, "b": 9.0})["a"]
    assert turn.comes(9.0 + PICKER_SECONDS, 9.0 + PICKER_SECONDS, room=True)
    for number in range(100):
        turn.sent(f"restarted-{number}", 20.0 + number)
    assert len(turn._sent) <= PICKER_SECONDS
