"""The approximate tree and the policy over it."""

from hypothesis import given
from hypothesis import strategies as st
from tests.sim.virtual.policies.ask import asked, context, joined, pods, send

from kvist_sim.virtual.policies.approximate import Found, Tree
from kvist_sim.virtual.policies.cache_aware import CacheAware, Settings, imbalanced, matches

words = st.lists(st.integers(0, 2), max_size=6)


def chain(word: list[int]) -> tuple[int, ...]:
    """Hashes of a word's blocks: each covers all before it."""
    return tuple(hash((*word[: end + 1], "chain")) for end in range(len(word)))


def test_thresholds_by_hand() -> None:
    """70 against 5 in flight is imbalanced; 64 apart is not, nor is 150 against 100."""
    assert imbalanced([5, 70])
    assert not imbalanced([6, 70])
    assert not imbalanced([100, 150])
    assert imbalanced([100, 170])
    assert matches(Found(1, 31), 100)
    assert not matches(Found(1, 30), 100)
    assert not matches(Found(None, 90), 100)


@given(st.lists(st.tuples(words, st.integers(0, 2)), max_size=12), words)
def test_a_look_up_finds_the_longest_prefix_ever_routed(
    routed: list[tuple[list[int], int]], wanted: list[int]
) -> None:
    """The blocks found are those of the longest common prefix with any prompt, whichever worker got it."""
    tree = Tree()
    for word, worker in routed:
        tree.insert(chain(word), worker)
    shared = [len(_common(word, wanted)) for word, _ in routed]
    assert tree.find(chain(wanted)).blocks == max(shared, default=0)


@given(st.lists(st.tuples(words, st.integers(0, 2)), max_size=12))
def test_sizes_are_the_distinct_blocks_of_each_worker(routed: list[tuple[list[int], int]]) -> None:
    """A worker's size counts each block it got once, however often edges were split."""
    tree = Tree()
    for word, worker in routed:
        tree.insert(chain(word), worker)
    for worker in tree.sizes:
        assert tree.sizes[worker] == len(
            {block for word, w in routed if w == worker for block in chain(word)}
        )


@given(st.lists(st.tuples(words, st.integers(0, 2)), max_size=12), st.integers(0, 8))
def test_eviction_keeps_within_the_limit(routed: list[tuple[list[int], int]], limit: int) -> None:
    """After an eviction no worker has more than the limit, and one with less keeps all."""
    tree = Tree()
    for word, worker in routed:
        tree.insert(chain(word), worker)
    before = dict(tree.sizes)
    tree.evict(limit)
    for worker, size in tree.sizes.items():
        assert size <= limit
        assert size == before[worker] or before[worker] > limit


@given(st.lists(st.tuples(words, st.integers(0, 2)), max_size=12))
def test_a_worker_that_goes_leaves_nothing(routed: list[tuple[list[int], int]]) -> None:
    """Removing every worker empties the tree; removing one leaves what the others got."""
    tree = Tree()
    for word, worker in routed:
        tree.insert(chain(word), worker)
    tree.remove(0)
    for word, worker in routed:
        if worker != 0:
            assert tree.find(chain(word)).blocks == len(word)
    tree.remove(1)
    tree.remove(2)
    assert all(tree.find(chain(word)) == Found(None, 0) for word, _ in routed)


def test_the_least_recently_used_leaf_goes_first() -> None:
    """The least recently used leaf behind a shared prefix is evicted, and the shared prefix stays."""
    tree = Tree()
    for word in ([1, 1], [1, 2]):
        tree.insert(chain(word), 0)
    tree.find(chain([1, 1]))
    tree.evict(2)
    assert tree.find(chain([1, 1])).blocks == 2
    assert tree.find(chain([1, 2])).blocks == 1


def test_a_shared_prefix_stays_with_the_worker_that_made_it() -> None:
    """The worker of a node is the first that got it, while it is there; then another that has it."""
    tree = Tree()
    tree.insert(chain([1, 2]), 5)
    tree.insert(chain([1, 3]), 6)
    assert tree.find(chain([1])) == Found(5, 1)
    tree.remove(5)
    assert tree.find(chain([1])) == Found(6, 1)


def test_requests_follow_their_prefix_until_the_pool_is_unbalanced() -> None:
    """One prefix goes to one pod until that has 65 more in flight than the other, then to the other."""
    policy, fleet = CacheAware(context()), pods(2)
    joined(policy, fleet)
    sent = [send(policy, asked([1, 2, 3]), fleet) for _ in range(66)]
    assert sent[:65] == [0] * 65
    assert sent[65] == 1


def test_prompts_that_share_little_go_to_the_least_loaded() -> None:
    """At 0.3 of the prompt or less the load decides."""
    policy, fleet = CacheAware(context()), pods(2)
    joined(policy, fleet)
    assert send(policy, asked([1, 2, 3, *range(10, 17)]), fleet) == 0
    assert send(policy, asked([1, 2, 3, *range(20, 27)]), fleet) == 1


def test_old_prompts_are_evicted_by_the_clock() -> None:
    """After the interval a tree above its limit has lost its oldest prompt."""
    policy = CacheAware(context(), Settings(max_tree_size=2 * 64))
    fleet = pods(2)
    joined(policy, fleet)
    send(policy, asked([1, 2]), fleet, 0.0)
    send(policy, asked([1, 2]), fleet, 119.0)
    policy._tree.insert([3, 4], 0)
    policy.choose(asked([9]), fleet, 120.0)
    assert policy._tree.sizes[0] == 2


def _common(first: list[int], second: list[int]) -> list[int]:
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    return first[:shared]
