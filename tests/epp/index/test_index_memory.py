"""The index keeps what engines hold, and nothing else."""

import random

from kvist_epp.index.byte_index import Index, Root

PLAIN: Root = (None, None)


def sizes(index: Index) -> dict[str, int]:
    """Return the counts that are not zero."""
    return {key: size for key, size in index.stats().items() if size}


def prompt(seed: int, count: int) -> tuple[list[int], list[bytes]]:
    """Hashes and texts of a chain."""
    source = random.Random(seed)
    return [source.getrandbits(64) for _ in range(count)], [source.randbytes(8) for _ in range(count)]


def test_02_14_the_index_is_bounded_by_what_engines_hold() -> None:
    """Engines that store and evict for ever leave no more behind than one filling of their caches (2, 14)."""
    index = Index()
    who = index.publisher("pod/0")
    held: list[list[int]] = []
    most = 0
    for seed in range(300):
        names, blocks = prompt(seed, 40)
        index.stored(who, PLAIN, None, names, blocks, block_size=16)
        held.append(names)
        if len(held) > 5:
            for name in reversed(held.pop(0)):
                assert index.removed(who, [name]) == 1
        most = max(most, index.stats()["hashes"], index.stats()["segments"])

    assert most <= 2 * 6 * 40
    assert sizes(index) == {"publishers": 1, "trees": 1, "segments": 5, "hashes": 200, "held_segments": 5}


def test_an_unheld_tail_is_at_most_half_of_what_is_kept() -> None:
    """A long segment of which only the beginning is held is cut, though not for every single block."""
    index = Index()
    who = index.publisher("pod/0")
    names, blocks = prompt(1, 64)
    index.stored(who, PLAIN, None, names, blocks, block_size=16)
    kept = []
    for held in range(63, 0, -1):
        index.removed(who, names[held : held + 1])
        kept.append(index.stats()["hashes"] / held)

    assert max(kept) < 2


def test_removing_everything_leaves_nothing() -> None:
    """Names, copies, own names, opaque blocks, tiers, segments and trees go with the last block."""
    index = Index()
    first, second = index.publisher("pod/0"), index.publisher("pod/1")
    for who in (first, second):
        for salt in (None, "salt"):
            names, blocks = prompt(7, 150)
            names = [name + who + len(salt or "") for name in names]
            for _ in range(2):
                index.stored(who, (None, salt), None, names, blocks, block_size=16)
            index.held(who, names[20:90], "CPU")
            index.opaque(who, names[5], [3, 4, 5])
    assert set(sizes(index)) >= {
        "trees",
        "segments",
        "hashes",
        "own_hashes",
        "copies",
        "opaque",
        "held_segments",
    }
    for who in (first, second):
        for salt in ("", "salt"):
            names = [name + who + len(salt) for name in prompt(7, 150)[0]]
            for _ in range(2):
                assert index.removed(who, names) == 150
            assert index.removed(who, names, medium="CPU") == 70
            assert index.removed(who, [3, 4, 5]) == 3

    assert sizes(index) == {"publishers": 2}


def test_forgotten_publishers_are_swept_in_slices() -> None:
    """``forget`` is immediate for matches; ``sweep`` frees a bounded part and returns what is left."""
    index = Index()
    who = index.publisher("pod/0")
    for seed in range(10):
        index.stored(who, PLAIN, None, *prompt(seed, 64), block_size=16)
    index.forget(who)

    assert index.match(PLAIN, b"".join(prompt(0, 64)[1]) + b"!").groups == []
    assert [index.sweep(4) for _ in range(3)] == [6, 2, 0]
    assert sizes(index) == {"publishers": 1}


def test_a_publisher_that_leaves_leaves_nothing() -> None:
    """Pods come and go for ever: neither their names nor their bits stay."""
    index = Index()
    for number in range(50):
        who = index.publisher(f"pod-{number}/0")
        index.stored(who, PLAIN, None, *prompt(1, 3), block_size=16)
        index.leave(who)
        index.sweep(10)

    assert sizes(index) == {}
    assert index._next_bit == 2


def test_a_bit_is_used_again_only_when_swept() -> None:
    """A publisher that comes after a forgotten one inherits none of its blocks, swept or not."""
    index = Index()
    first = index.publisher("pod/0")
    names, blocks = prompt(1, 100)
    index.stored(first, PLAIN, None, names, blocks, block_size=16)
    index.forget(first)
    second = index.publisher("pod/1")
    index.stored(second, PLAIN, None, names[:1], blocks[:1], block_size=16)
    text = b"".join(blocks) + b"!"

    assert [index.match(PLAIN, text).of(who).tokens for who in (first, second)] == [0, 16]

    index.sweep(100)
    index.stored(first, PLAIN, None, names[:2], blocks[:2], block_size=16)

    assert [index.match(PLAIN, text).of(who).tokens for who in (first, second)] == [32, 16]


def test_a_match_is_a_snapshot() -> None:
    """Later changes of the index do not change the result of a match."""
    index = Index()
    who = index.publisher("pod/0")
    names, blocks = prompt(1, 10)
    index.stored(who, PLAIN, None, names, blocks, block_size=16)
    matches = index.match(PLAIN, b"".join(blocks) + b"!")
    index.forget(who)
    index.sweep(100)
    index.stored(index.publisher("pod/1"), PLAIN, None, names, blocks, block_size=16)

    assert matches.of(who).tokens == 160


def test_holders_of_the_same_prefix_are_one_group() -> None:
    """A thousand pods that hold a prefix, each going on differently, cost a match what one costs."""
    index = Index()
    names, blocks = prompt(1, 100)
    for number in range(1000):
        who = index.publisher(f"pod/{number}")
        more, texts = prompt(1000 + number, 2)
        index.stored(who, PLAIN, None, [*names, *more], [*blocks, *texts], block_size=16)
    text = b"".join(blocks)

    assert [group[1:3] for group in index.match(PLAIN, text + b"!").groups] == [(1600, 800)]


def test_blocks_shared_by_pods_are_kept_once() -> None:
    """Sixteen pods with the same prompt have one copy of its text and of its names."""
    index = Index()
    for number in range(16):
        index.stored(index.publisher(f"pod/{number}"), PLAIN, None, *prompt(1, 640), block_size=16)

    assert sizes(index) == {"publishers": 16, "trees": 1, "segments": 10, "hashes": 640, "held_segments": 160}


def test_the_index_describes_itself() -> None:
    """The representations have counts, never text."""
    index = Index()
    index.stored(index.publisher("pod/0"), PLAIN, None, [1, 2], [b"secret", b"words"], block_size=16)

    assert repr(index) == "<Index 1 publishers, 2 hashes, 1 segments>"
    assert repr(index.match(PLAIN, b"secretwords!")) == "<Matches 1 groups, best 32 tokens>"
