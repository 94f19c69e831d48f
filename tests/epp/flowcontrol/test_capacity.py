"""Which subsets have room, as pods fill up."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.scheduling.test_pick import NOW, candidate

from kvist_epp.flowcontrol.capacity import PACED_SECONDS, Room
from kvist_epp.flowcontrol.deficit_round_robin import Bound
from kvist_epp.load.ledger import Ledger
from kvist_epp.load.replica_rotation import STEP_SECONDS
from kvist_epp.load.tpot_admission import Pacing

ONE, TWO = frozenset({"10.0.0.1"}), frozenset({"10.0.0.2:8000"})


def test_room_is_where_a_pod_is_not_full() -> None:
    """Any pod with room serves who may go anywhere, its own subset, and nobody else's."""
    pods = [candidate(1, slots=2, foreign=2), candidate(2, slots=2, foreign=1), candidate(3, ready=False)]
    room = Room(pods, NOW, 30.0)
    assert [room.may_go(subset) for subset in (None, ONE, TWO)] == [True, False, True]

    pods[1].load.foreign = 2
    later = Room(pods, NOW, 30.0)
    assert [later.may_go(subset) for subset in (None, ONE, TWO)] == [False, False, False]


def test_room_ends_while_requests_go() -> None:
    """A slice of work sees each pod fill up."""
    pods = [candidate(1, slots=1), candidate(2, slots=1)]
    room, seen = Room(pods, NOW, 30.0), []
    for pod in pods:
        seen.append((room.may_go(None), room.may_go(ONE)))
        pod.load.foreign = 1

    assert [*seen, (room.may_go(None), room.may_go(ONE))] == [(True, True), (True, False), (False, False)]


def test_a_subset_of_nobody_may_go_to_be_told() -> None:
    """Where nobody of a given subset can be picked, waiting is in vain; without a subset it is not."""
    room = Room([candidate(1, ready=False)], NOW, 30.0)
    assert (room.empty, room.may_go(None), room.may_go(ONE), room.may_go(frozenset())) == (
        True,
        False,
        True,
        True,
    )


def test_time_alone_gives_room_where_prefill_is_owed() -> None:
    """The least time in which a pod owes no more than the limit; never where the batch is full."""
    owing = [candidate(1, owed=40_000.0), candidate(2, owed=35_000.0)]
    assert Room(owing, NOW, 30.0).relieved_in() == 5.0
    assert Room([candidate(1, owed=40_000.0, slots=1, foreign=1)], NOW, 30.0).relieved_in() == inf
    assert Room([candidate(1)], NOW, 30.0).relieved_in() == inf


def test_a_look_is_due_when_the_turn_of_who_waits_comes() -> None:
    """While somebody waits for a pod that may take up no more, it is looked at often; where the newest only
    has to give way, when it no longer has to."""
    pod = candidate(1)
    pacing = pod.load.pacing = Pacing(0.06)
    assert Room([pod], NOW, inf).relieved_in() == inf

    pacing.hold("late", 1000, NOW - 5.0)
    assert Room([pod], NOW, inf).relieved_in() == PACED_SECONDS

    pacing.turn.sent("peer", NOW - 2.0)
    pacing.turn.sent("", NOW - 1.0)
    room = Room([pod], NOW, inf)
    assert not room.may_go(Bound(pod.endpoint.key, light=False), 1000)
    assert room.relieved_in() == pytest.approx(STEP_SECONDS)


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=5), st.floats(0.1, 100))
def test_a_pod_is_full_until_it_is_relieved(prompts: list[int], limit: float) -> None:
    """What is said to be the time until there is room is that time."""
    ledger = Ledger(default_rate=1000.0)
    for number, tokens in enumerate(prompts):
        ledger.routed(str(number), "p", tokens, tokens, NOW)
    load = ledger.load("p")
    relief, full = load.relieved_in(limit), load.full(limit)
    load.drain(NOW + relief + 1e-6)

    assert (full, load.full(limit)) == (relief > 0, False)
