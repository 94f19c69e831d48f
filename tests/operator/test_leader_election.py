"""Leader election: one leader at a time, whatever fails, and a new one in time."""

import asyncio
from datetime import UTC, datetime
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.memory import Memory

from kvist_operator.cluster import leader_election
from kvist_operator.cluster.kinds import LEASE, Target
from kvist_operator.cluster.leader_election import DURATION_SECONDS, RENEW_SECONDS, LeaderElection
from kvist_operator.errors import ClusterError, LeadershipLost, Unavailable

LEASE_OF_THE_TEST = Target(LEASE, "system", "kvist")


class Replica(LeaderElection):
    """A replica with the clock of the test, which may be off by a constant."""

    def __init__(self, store: Memory, name: str, times: list[float], *, offset: float = 0.0) -> None:
        super().__init__(
            *(store, "system", "kvist", name),
            clock=lambda: times[0] + offset,
            now=lambda: datetime.fromtimestamp(1e9 + times[0] + 3 * offset, UTC),
        )
        self.times = times
        self.led_until = 0.0

    async def look(self) -> bool:
        """Take or renew the Lease once; a leader goes on for ``RENEW_SECONDS`` without another success."""
        held = await self._try()
        if held:
            self.led_until = self.times[0] + RENEW_SECONDS
        return held

    @property
    def leads(self) -> bool:
        """Whether the replica works as the leader now."""
        return self.times[0] < self.led_until


async def test_the_first_replica_leads_until_it_stops_renewing() -> None:
    """Another replica takes the Lease when it has not changed for its duration, not before."""
    times, store = [0.0], Memory()
    first, second = Replica(store, "a", times), Replica(store, "b", times)
    assert [await first.look(), await second.look()] == [True, False]
    times[0] = 14.0
    assert [await first.look(), await second.look()] == [True, False]
    times[0] = 14.0 + DURATION_SECONDS - 0.1
    assert not await second.look()
    times[0] = 14.0 + DURATION_SECONDS
    assert [await second.look(), await first.look()] == [True, False]

    found = await store.get(LEASE_OF_THE_TEST)
    assert found is not None
    assert (found["spec"]["holderIdentity"], found["spec"]["leaseTransitions"]) == ("b", 2)


async def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    """A leader that ends in order delays nothing."""
    times, store = [0.0], Memory()
    first, second = Replica(store, "a", times), Replica(store, "b", times)
    await first.look()
    await second.look()
    await first.release()
    times[0] = 0.5

    assert await second.look()


async def test_only_the_holder_gives_a_lease_back() -> None:
    """A replica that waits and ends leaves the Lease to its leader."""
    times, store = [0.0], Memory()
    first, second = Replica(store, "a", times), Replica(store, "b", times)
    await first.look()
    await second.release()

    assert not await second.look()


@given(st.integers(0, 2**32))
@settings(max_examples=100)
def test_there_are_never_two_leaders(seed: int) -> None:
    """Terms of two replicas do not overlap, whatever the order of looks, pauses, errors and clocks."""

    async def run() -> None:
        dice, times, store = Random(seed), [0.0], Memory()
        replicas = [Replica(store, name, times, offset=dice.uniform(-500, 500)) for name in ("a", "b", "c")]
        broken = Unavailable("no answer", 503)

        def refuse(_verb: str, _target: Target) -> ClusterError | None:
            return broken if dice.random() < 0.2 else None

        store.refuse = refuse
        led = 0
        for _ in range(200):
            times[0] += dice.choice((0.1, 1.0, 2.0, 6.0, 16.0))
            await dice.choice(replicas).look()
            leaders = [each.identity for each in replicas if each.leads]
            assert len(leaders) <= 1
            led += len(leaders)
        assert led

    asyncio.run(run())


async def test_a_leader_that_cannot_renew_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the API server the leader stops before another could begin, and says so."""
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(leader_election, "RENEW_SECONDS", 0.05)
    store = Memory()
    election = LeaderElection(store, "system", "kvist", "a")
    await election.acquire()
    store.refuse = lambda _verb, _target: Unavailable("no answer", 503)

    with pytest.raises(LeadershipLost, match="no longer the leader, so it stops"):
        await election.hold()


async def test_a_leader_whose_lease_was_taken_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Lease with another holder ends the term at the next renewal."""
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.01)
    store = Memory()
    election = LeaderElection(store, "system", "kvist", "a")
    await election.acquire()
    found = await store.get(LEASE_OF_THE_TEST)
    assert found is not None
    found["spec"]["holderIdentity"] = "b"
    await store.replace(found)

    async with asyncio.timeout(5):
        with pytest.raises(LeadershipLost):
            await election.hold()


async def test_waiting_can_be_cancelled_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is stopped while it waits has written nothing."""
    monkeypatch.setattr(leader_election, "RETRY_SECONDS", 0.01)
    times, store = [0.0], Memory()
    await Replica(store, "a", times).look()
    store.writes.clear()
    waits = asyncio.ensure_future(Replica(store, "b", times).acquire())
    await asyncio.sleep(0.05)
    waits.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waits
    assert store.writes == []
