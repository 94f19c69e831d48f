"""Random and round robin."""

from collections import Counter

from tests.sim.virtual.policies.ask import asked, context, pods, send

from kvist_sim.virtual.policies.load_balancing import ByLot, RoundRobin


def test_round_robin_serves_every_pod_once_in_a_round() -> None:
    """In each round of n requests every one of n pods gets one, in the same order."""
    policy, fleet = RoundRobin(context()), pods(5)
    rounds = [[send(policy, asked([1]), fleet) for _ in fleet] for _ in range(3)]
    assert sorted(rounds[0]) == [0, 1, 2, 3, 4]
    assert rounds[0] == rounds[1] == rounds[2]


def test_random_is_even_and_follows_its_dice() -> None:
    """Over many requests no pod gets far more than its share, and the same seed chooses the same pods."""
    fleet = pods(4)
    first, again = ByLot(context(seed=3)), ByLot(context(seed=3))
    chosen = [send(first, asked([1]), fleet) for _ in range(4_000)]
    assert chosen == [send(again, asked([1]), fleet) for _ in range(4_000)]
    assert all(900 < count < 1_100 for count in Counter(chosen).values())
