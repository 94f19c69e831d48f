"""Which subsets have room, as endpoints fill up."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.scheduling.test_pick import NOW, candidate

from kvist_epp.flowcontrol.capacity import TPOT_POLL_SECONDS, Capacity
from kvist_epp.flowcontrol.deficit_round_robin import EndpointFlow
from kvist_epp.load.end_reports import LOOK_SECONDS
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.replica_rotation import TURN_SECONDS
from kvist_epp.load.tpot_admission import TpotAdmission
from kvist_epp.load.tracker import LoadTracker

ONE, TWO = frozenset({"10.0.0.1"}), frozenset({"10.0.0.2:8000"})


def test_an_endpoint_that_is_not_full_has_capacity() -> None:
    """A request without a subset can be dispatched to any endpoint with capacity, one with a subset only
    inside it."""
    pods = [
        candidate(1, slots=2, untracked=2),
        candidate(2, slots=2, untracked=1),
        candidate(3, ready=False),
    ]
    room = Capacity(pods, NOW, 30.0)
    assert [room.can_dispatch(subset) for subset in (None, ONE, TWO)] == [True, False, True]

    pods[1].load.untracked_requests = 2
    later = Capacity(pods, NOW, 30.0)
    assert [later.can_dispatch(subset) for subset in (None, ONE, TWO)] == [False, False, False]


def test_capacity_ends_while_requests_are_dispatched() -> None:
    """A slice of work sees each endpoint fill up."""
    pods = [candidate(1, slots=1), candidate(2, slots=1)]
    room, seen = Capacity(pods, NOW, 30.0), []
    for pod in pods:
        seen.append((room.can_dispatch(None), room.can_dispatch(ONE)))
        pod.load.untracked_requests = 1

    assert [*seen, (room.can_dispatch(None), room.can_dispatch(ONE))] == [
        (True, True),
        (True, False),
        (False, False),
    ]


def test_a_subset_without_endpoints_leaves_the_queue_to_be_refused() -> None:
    """A request whose subset has no eligible endpoint leaves the queue to be refused; without a subset it
    waits."""
    room = Capacity([candidate(1, ready=False)], NOW, 30.0)
    assert (
        room.pool_empty,
        room.can_dispatch(None),
        room.can_dispatch(ONE),
        room.can_dispatch(frozenset()),
    ) == (
        True,
        False,
        True,
        True,
    )


def test_time_alone_gives_capacity_where_there_is_backlog() -> None:
    """The time until capacity is that in which a backlog falls to its limit. If the batch is full it is
    infinite, but short as long as it is not certain that ends are reported."""
    owing = [candidate(1, backlog=40_000.0), candidate(2, backlog=35_000.0)]
    assert Capacity(owing, NOW, 30.0).seconds_until_capacity() == 5.0
    full = candidate(1, backlog=40_000.0, slots=1, untracked=1)
    assert Capacity([full], NOW, 30.0).seconds_until_capacity() == LOOK_SECONDS
    full.load.end_reports.on_report()
    assert Capacity([full], NOW, 30.0).seconds_until_capacity() == inf
    assert Capacity([candidate(1)], NOW, 30.0).seconds_until_capacity() == inf


def test_capacity_is_checked_when_a_queued_requests_turn_comes() -> None:
    """While a request waits for an endpoint that may take no prefill, capacity is checked often; if only the
    rotation delays it, when its turn comes."""
    pod = candidate(1)
    pacing = pod.load.tpot = TpotAdmission(0.06)
    assert Capacity([pod], NOW, inf).seconds_until_capacity() == inf

    pacing.add_queued("late", 1000, NOW - 5.0)
    assert Capacity([pod], NOW, inf).seconds_until_capacity() == TPOT_POLL_SECONDS

    pacing.rotation.on_sent("peer", NOW - 2.0)
    pacing.rotation.on_sent("", NOW - 1.0)
    room = Capacity([pod], NOW, inf)
    assert not room.can_dispatch(EndpointFlow(pod.endpoint.key, light=False), 1000)
    assert room.seconds_until_capacity() == pytest.approx(TURN_SECONDS)


@given(st.lists(st.integers(1, 50_000), min_size=1, max_size=5), st.floats(0.1, 100))
def test_an_endpoint_is_full_until_it_is_relieved(prompts: list[int], limit: float) -> None:
    """After the predicted time until capacity, the endpoint has capacity."""
    tracker = LoadTracker(default_rate=1000.0)
    for number, tokens in enumerate(prompts):
        tracker.add(InFlightRequest(str(number), tokens), "p", tokens, NOW)
    load = tracker.load("p")
    relief, full = load.seconds_until_open(limit), load.batch_or_backlog_full(limit)
    load.drain(NOW + relief + 1e-6)

    assert (full, load.batch_or_backlog_full(limit)) == (relief > 0, False)
