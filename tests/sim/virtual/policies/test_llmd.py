"""llm-d's scorers, filter and speculative entries: hand-computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.virtual.policies.ask import Held, asked, context, pods, send

from kvist_sim.virtual.policies.llmd import (
    NoHitLru,
    Speculative,
    Sticky,
    Weighted,
    blend,
    keep,
    kv_cache_utilization,
    prefix,
    queue,
    token_load,
)
from kvist_sim.virtual.policy import Sample


def test_scores_by_hand() -> None:
    """Each scorer's published arithmetic."""
    assert queue([0, 5, 10]) == [1.0, 0.5, 0.0]
    assert queue([3, 3]) == [1.0, 1.0]
    assert kv_cache_utilization([0.25, 1.0]) == [0.75, 0.0]
    assert prefix([0, 3, 12], 12) == [0.0, 0.25, 1.0]
    assert prefix([0], 0) == [0.0]
    assert token_load([0, 1_048_576, 9_000_000]) == [1.0, 0.75, 0.0]


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=9))
def test_queue_scores_fill_the_range(waiting: list[int]) -> None:
    """The shortest queue always scores 1, the longest 0 unless all are equal, and order is kept."""
    scores = queue(waiting)
    assert scores[waiting.index(min(waiting))] == 1.0
    assert scores[waiting.index(max(waiting))] == (0.0 if min(waiting) < max(waiting) else 1.0)


def test_cold_requests_go_round_least_recently_used_first() -> None:
    """Pods never used score from 1 down in order, then those used longest ago; all 0.5 after a hit."""
    lru = NoHitLru()
    assert lru.scores([7, 8, 9], cold=True) == [1.0, 0.5, 0.0]
    lru.routed(7)
    lru.routed(8)
    assert lru.scores([7, 8, 9], cold=True) == [0.5, 0.0, 1.0]
    lru.routed(7)
    lru.routed(9)
    assert lru.scores([7, 8, 9], cold=True) == [0.5, 1.0, 0.0]
    assert lru.scores([7, 8, 9], cold=False) == [0.5, 0.5, 0.5]
    assert lru.scores([7], cold=True) == [1.0]


def test_the_lru_is_bounded() -> None:
    """The pod used longest ago is forgotten and counts as never used."""
    lru = NoHitLru(size=1)
    lru.routed(1)
    lru.routed(2)
    assert lru.scores([1, 2], cold=True) == [1.0, 0.0]


def test_weights_by_hand() -> None:
    """3 x 0.5 + 2 x 0.75 + 2 x 1 + 2 x 0.5 = 6 against 0 + 2 x 1 + 2 x 0 + 2 x 0.5 = 3."""
    fleet = pods(2, Sample(waiting=0, cache_usage=0.25), Sample(waiting=4))
    assert blend(fleet, [0.5, 0.0], [0.5, 0.5]) == [6.0, 3.0]


def test_weighted_spreads_cold_requests_over_all_pods() -> None:
    """With nothing cached and nothing waiting, n cold requests reach n pods."""
    policy, fleet = Weighted(context(Held())), pods(4)
    assert {send(policy, asked([10 + i]), fleet) for i in range(4)} == {0, 1, 2, 3}


def test_weighted_follows_what_it_just_routed() -> None:
    """Before any event the second request of a prefix goes where the first went."""
    policy, fleet = Weighted(context(Held())), pods(4)
    assert send(policy, asked([1, 2]), fleet, 0.0) == send(policy, asked([1, 2]), fleet, 1.0)


def test_the_filter_by_hand() -> None:
    """Sticky from 0.80 on; broken when the best sticky pod is more than 18 s behind the best other."""
    assert keep([0.79, 0.80, 1.0], [0, 0, 0]) == [1, 2]
    assert keep([0.5, 0.7], [0, 0]) == [0, 1]
    assert keep([0.9, 0.9], [40, 0]) == [0, 1]
    assert keep([0.9, 0.1], [20.0, 2.0]) == [0]
    assert keep([0.9, 0.1], [20.1, 2.0]) == [0, 1]


def test_sticky_overloads_a_holder_until_the_penalty_then_spreads() -> None:
    """Half a second of new tokens a request at one holder: it breaks after 18 s, that is 37 requests."""
    policy, fleet = Sticky(context(Held({0: 160}), rate=1_000.0)), pods(2)
    prompt = list(range(191))  # 160 of 191 held: 0.84; 31 blocks of 16 are new: 0.496 s
    sent: list[int] = []
    while len(sent) < 60:
        policy._index = Speculative(
            Held({0: 160})
        )  # events have not come, and speculation would hide the load
        sent.append(send(policy, asked(prompt), fleet))
    assert sent.index(1) == 37


@pytest.mark.parametrize("now", [0.0, 1.9])
def test_speculative_entries_hold_until_they_expire(now: float) -> None:
    """An entry routed at 0 counts at 1.9 s and no longer at 2 s."""
    index, fleet = Speculative(Held({1: 1})), pods(2)
    index.routed([1, 2, 3], fleet[0], 0.0)
    assert index.match([1, 2, 3, 4], fleet, now) == [3, 1]
    assert index.match([1, 2, 9], fleet, now) == [2, 1]
    assert index.match([1, 2, 3], fleet, 2.0) == [0, 1]


def test_a_second_request_renews_the_entries_it_shares() -> None:
    """At 2 s only what the request at 1 s shares is left."""
    index, fleet = Speculative(Held()), pods(1)
    index.routed([1, 2, 3], fleet[0], 0.0)
    index.routed([1, 2, 4], fleet[0], 1.0)
    assert index.match([1, 2, 3], fleet, 2.5) == [2]
    index.left(fleet[0])
    assert index.match([1, 2, 3], fleet, 2.5) == [0]
