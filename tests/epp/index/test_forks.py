"""Children of a fork are found by a prefix of their first block, exactly as by trying every length."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvist_epp.index.tree import segment
from kvist_epp.index.tree.segment import (
    Segment,
    Tree,
    attach,
    child,
    continuations,
    detach,
    last_position,
    prefix_size,
)

POSITIONS = 3
FIRST = -1
"""The position before a segment's blocks, where the children of a tree's root hang."""

positions = st.integers(FIRST, POSITIONS - 1)
blocks = st.builds(
    lambda size, other, tail: b"a" * size + other + tail,
    st.sampled_from([0, 1, 2, 7, 8, 13, 16, 30, 31, 32, 33, 62, 64, 70]),
    st.sampled_from([b"", b"", b"b", b"cc"]),
    st.text("ab", max_size=3).map(str.encode),
)
"""Short and long, many of them equal or the prefix of another, with sizes around powers of two."""


class EveryLength:
    """The plain scheme: every distinct size of a first block is tried."""

    def __init__(self) -> None:
        self.children: dict[int, dict[int, dict[bytes, list[Segment]]]] = {}
        """Position → size of the first block → the block → children, the latest first."""

    def attach(self, new: Segment) -> None:
        """Add a child."""
        by_block = self.children.setdefault(new.at, {}).setdefault(new.sizes[0], {})
        by_block.setdefault(new.block(0), []).insert(0, new)

    def detach(self, old: Segment) -> None:
        """Take a child away, and what is empty after that."""
        by_size = self.children[old.at]
        by_block = by_size[old.sizes[0]]
        by_block[old.block(0)].remove(old)
        if not by_block[old.block(0)]:
            del by_block[old.block(0)]
        if not by_block:
            del by_size[old.sizes[0]]
        if not by_size:
            del self.children[old.at]

    def equal(self, at: int, block: bytes) -> list[Segment]:
        """Return the children that begin with the block, the latest first."""
        return self.children.get(at, {}).get(len(block), {}).get(block, [])

    def continuations(self, at: int, prompt: bytes, start: int, end: int) -> list[Segment]:
        """Return the children whose first block is next in the prompt."""
        sizes = [size for size in self.children.get(at, {}) if start + size <= end]
        return [one for size in sizes for one in self.equal(at, prompt[start : start + size])]


class Forks(RuleBasedStateMachine):
    """Children come and go after the blocks of one segment."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree((None, None), 16)
        self.parent = Segment(self.tree, self.tree.root, -1, 0)
        self.parent.extend([b"parent"] * POSITIONS, tuple(range(POSITIONS)))
        self.plain = EveryLength()
        self.all: list[Segment] = []
        self.blocks: list[bytes] = [b""]

    @rule(at=positions, block=blocks, more=st.lists(blocks, max_size=2))
    def attach(self, at: int, block: bytes, more: list[bytes]) -> None:
        """One child more comes."""
        new = Segment(self.tree, self.parent, at, at + 1)
        new.extend([block, *more], tuple(range(100, 101 + len(more))))
        attach(self.parent, new)
        self.plain.attach(new)
        self.all.append(new)
        self.blocks.append(block)

    @rule(at=positions, blocks=st.lists(blocks, min_size=2, max_size=6))
    def attach_several(self, at: int, blocks: list[bytes]) -> None:
        """Children come, and the first of them once more."""
        for block in [*blocks, blocks[0]]:
            self.attach(at, block, [])

    @rule(number=st.integers(0), count=st.integers(1, 4))
    def detach(self, number: int, count: int) -> None:
        """Some children go again."""
        for _ in range(min(count, len(self.all))):
            old = self.all.pop(number % len(self.all))
            detach(self.parent, old)
            self.plain.detach(old)
            assert old.twin is None

    @rule(at=positions, before=blocks, number=st.integers(0), after=blocks, cut=st.integers(0, 6))
    def look(self, at: int, before: bytes, number: int, after: bytes, cut: int) -> None:
        """The children that a prompt may go on with are those whose first block is next in it."""
        prompt = before + self.blocks[number % len(self.blocks)] + after
        start, end = len(before), max(len(prompt) - cut, len(before))
        found = continuations(self.parent.children, at, prompt, start, end)
        if isinstance(self.parent.children, Segment):
            assert found == [one for one in self.all if one.at == at]
        else:
            expected = self.plain.continuations(at, prompt, start, end)
            assert len(found) == len(expected)
            assert set(found) == set(expected)

    @invariant()
    def every_child_is_found(self) -> None:
        """The first child of equal text is the latest, the others follow it."""
        for at in range(FIRST, POSITIONS):
            for block in {*self.blocks, b"a" * 9}:
                chain, one = [], child(self.parent.children, at, block)
                while one is not None:
                    chain.append(one)
                    one = one.twin
                assert chain == self.plain.equal(at, block)

    @invariant()
    def nothing_else_is_kept(self) -> None:
        """The positions are those that have children; with the last child the fork goes."""
        assert last_position(self.parent.children) == max((one.at for one in self.all), default=-1)
        assert (self.parent.children is None) == (not self.all)
        if isinstance(self.parent.children, dict):
            assert set(self.parent.children) == set(self.plain.children)
            for siblings in self.parent.children.values():
                assert all(siblings.values())


TestForks = Forks.TestCase
TestForks.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_lookup_tries_few_sizes() -> None:
    """First blocks of 1 to 127 bytes fall into seven classes, and a prefix is more than half of its block."""
    sizes = range(1, 128)

    assert {prefix_size(size) for size in sizes} == {1, 2, 4, 8, 16, 32, 64}
    assert all(size / 2 < prefix_size(size) <= size for size in sizes)
    assert prefix_size(0) == 0


def test_children_of_equal_prefix_leave_one_by_one() -> None:
    """A prefix that many different blocks share keeps no dictionary for the last of them."""
    tree = Tree((None, None), 16)
    children = []
    for number in range(50):
        new = Segment(tree, tree.root, -1, 0)
        new.extend([b"<|im_start|>system\nYou are a help" + b"ful %d" % number], (number,))
        attach(tree.root, new)
        children.append(new)
    for old in children[:-1]:
        detach(tree.root, old)

    assert tree.root.children == {-1: {32: {hash(children[-1].text[:32]): children[-1]}}}


def test_equal_hashes_of_unequal_prefixes_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are compared themselves: were all hashes equal, each prompt would still find its child only."""
    monkeypatch.setattr(segment, "hash", lambda _: 0, raising=False)
    tree = Tree((None, None), 16)
    texts = [b"%064d" % number for number in range(20)]
    children = {}
    for text in texts:
        children[text] = Segment(tree, tree.root, -1, 0)
        children[text].extend([text], (1,))
        attach(tree.root, children[text])

    assert all(continuations(tree.root.children, -1, text, 0, 64) == [children[text]] for text in texts)
    assert all(child(tree.root.children, -1, text) is children[text] for text in texts)
    assert not continuations(tree.root.children, -1, b"1" * 64, 0, 64)
    for text in texts:
        detach(tree.root, children[text])
    assert tree.root.children is None
