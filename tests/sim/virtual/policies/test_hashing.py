"""The ring, session hash, bounded loads."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.sim.virtual.policies.ask import asked, context, joined, pods, send

from kvist_sim.virtual.policies.hashing import BoundedLoads, Ring, SessionHash, capacity

keys = st.lists(st.binary(max_size=8), min_size=1, max_size=50)


@given(keys, st.integers(0, 5))
def test_a_pod_that_goes_moves_only_its_own_keys(sent: list[bytes], gone: int) -> None:
    """Consistent hashing: keys of other pods stay where they are when a pod is removed."""
    fleet, ring = pods(6), Ring(replication=16)
    for pod in fleet:
        ring.add(pod)
    before = {key: next(ring.walk(key)) for key in sent}
    ring.remove(fleet[gone])
    for key, pod in before.items():
        assert next(ring.walk(key)) is pod or pod is fleet[gone]


def test_the_ring_is_walked_once_round() -> None:
    """Every pod comes exactly once."""
    fleet, ring = pods(5), Ring(replication=8)
    for pod in fleet:
        ring.add(pod)
    assert sorted(pod.number for pod in ring.walk(b"key")) == [0, 1, 2, 3, 4]


def test_the_ring_shares_evenly() -> None:
    """With 256 points a pod no pod of eight has less than half or more than one and a half of its share."""
    fleet, ring = pods(8), Ring()
    for pod in fleet:
        ring.add(pod)
    shares = Counter(next(ring.walk(str(key).encode())).number for key in range(4_000))
    assert all(250 < shares[pod.number] < 750 for pod in fleet)


def test_a_session_stays_where_it_is() -> None:
    """Requests of a session meet one pod, whatever is in flight, and sessions spread."""
    policy, fleet = SessionHash(context()), pods(4)
    joined(policy, fleet)
    first = [send(policy, asked([1], session=f"s{i}"), fleet) for i in range(40)]
    assert first == [send(policy, asked([2], session=f"s{i}"), fleet) for i in range(40)]
    assert set(first) == {0, 1, 2, 3}


def test_capacity_by_hand() -> None:
    """ceil(1.25 x 9 / 4) = ceil(2.8125) = 3 with eight in flight on four pods; 1 on an empty pool."""
    assert capacity(8, 4) == 3
    assert capacity(0, 4) == 1


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_no_pod_has_more_than_its_bound(prefixes: list[int], size: int) -> None:
    """After each request every pod has at most ceil(1.25 m / n) of m in flight."""
    policy, fleet = BoundedLoads(context()), pods(size)
    joined(policy, fleet)
    for sent, prefix in enumerate(prefixes):
        send(policy, asked([prefix]), fleet)
        assert max(policy.requests.values()) <= capacity(sent, size)


def test_prompts_with_a_shared_prefix_meet_while_there_is_capacity() -> None:
    """Two prompts with the same first 100 characters go to one pod when the pool is busy elsewhere."""
    policy, fleet = BoundedLoads(context()), pods(3)
    joined(policy, fleet)
    shared = list(range(100, 113))
    chosen = []
    for end in (1, 2):
        request = asked([*shared, end])
        chosen.append(send(policy, request, fleet))
        policy.finished(request, fleet[chosen[-1]], 1.0)
    assert chosen[0] == chosen[1]
