"""Removals of blocks that an engine has evicted, many in one call."""

from hypothesis import example, given
from hypothesis import strategies as st
from tests.epp.index.test_byte_index import PLAIN, store

from kvist_epp.index.byte_index import Index


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.sampled_from([1, -1])), max_size=6),
)
def test_many_removals_at_once_are_those_one_by_one(
    stored: list[tuple[int, int]], runs: list[tuple[int, int, int]]
) -> None:
    """Removals in any order, repeated or unknown, leave the same blocks in one call as in one call each."""
    together, apart = Index(), Index()
    for each in (together, apart):
        assert [each.publisher(f"pod/{number}") for number in range(3)] == [0, 1, 2]
        for number, (who, length) in enumerate(stored):
            store(each, who, "|".join("abcdefghi"[:length]), first=10 * number, root=(str(number), None))
    hashes = [name for start, length, step in runs for name in range(start, start + length)[::step]]

    known = together.removed(0, hashes)

    assert known == sum(apart.removed(0, [name]) for name in hashes)
    assert [together.blocks(number) for number in range(3)] == [apart.blocks(number) for number in range(3)]
    for name in range(50):
        assert together.depth(name, 0) == apart.depth(name, 0)


@example([(0, "00"), (0, "01")], [[2, 4], [5, 2]])
@given(
    st.lists(st.tuples(st.integers(0, 1), st.text("01", min_size=2, max_size=2)), min_size=2, max_size=5),
    st.lists(st.lists(st.integers(2, 7), min_size=2, max_size=12), min_size=1, max_size=3),
)
def test_many_removals_from_forks_are_those_one_by_one(
    stored: list[tuple[int, str]], removals: list[list[int]]
) -> None:
    """A block that only its children kept is gone after the last of them, also when it is named next."""
    together, apart = Index(), Index()
    for each in (together, apart):
        assert [each.publisher(f"pod/{number}") for number in range(2)] == [0, 1]
        for who, text in stored:
            names = [int(f"1{text[: at + 1]}", 2) for at in range(len(text))]
            new = [name for name in names if each.depth(name, who) is None]
            parent = names[-len(new) - 1] if len(new) < len(names) else None
            blocks = [letter.encode() for letter in text[len(text) - len(new) :]]
            assert each.stored(who, PLAIN, parent, new, blocks, block_size=4)

    for hashes in removals:
        assert together.removed(0, hashes) == sum(apart.removed(0, [name]) for name in hashes)
        assert together.blocks(0) == apart.blocks(0)
        assert together.stats() == apart.stats()
