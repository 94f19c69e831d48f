"""The index against a naive implementation, under random histories of events."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.oracle import NaiveIndex
from tests.strategies import chains, media, prompts, roots

from kvist_epp.index.byte_index import Index, Root
from kvist_epp.index.tree.segment import Segment

PUBLISHERS = 4
BLOCK_SIZES = (4, 4, 8, 4)
"""By publisher: one of them has larger blocks."""


@dataclass
class Names:
    """Engine hashes: functions of the tokens and the parent, as engines that share a seed compute them.

    Two families count up from nearly the same number: most hashes of one mean other blocks in the other.
    """

    next: int
    known: dict[tuple[object, ...], int] = field(default_factory=dict)

    def of(self, *key: object) -> int:
        """The hash of these tokens after this parent."""
        self.next += key not in self.known
        return self.known.setdefault(key, self.next)


class Histories(RuleBasedStateMachine):
    """Events of engines, some of which are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.naive = NaiveIndex()
        self.families = [Names(0), Names(0), Names(0), Names(2)]
        self.stored: list[list[int]] = [[] for _ in range(PUBLISHERS)]
        self.prompts: list[tuple[Root, bytes]] = [((None, None), b"")]
        self.variants = (0,)

    @initialize(shared=st.booleans())
    def start(self, shared: bool) -> None:
        """Either families that call equal blocks unequal names, or one that has two names for equal bytes."""
        if shared:
            self.families = [self.families[0]] * PUBLISHERS
        else:
            self.families[1] = self.families[0]
        for number in range(PUBLISHERS):
            assert self.index.publisher(f"pod/{number}") == self.naive.publisher(f"pod/{number}")

    def name(self, number: int, parent: int | None, root: Root, text: bytes) -> int:
        """Return the engine's hash of the block."""
        above = (root, BLOCK_SIZES[number]) if parent is None else parent
        return self.families[number].of(above, text)

    def store(self, number: int, root: Root, parent: int | None, texts: list[bytes], medium: str) -> None:
        """Both take a chain, or both refuse it."""
        names, last = [], parent
        for text in texts:
            last = self.name(number, last, root, text)
            names.append(last)
        self.stored[number] = [*self.stored[number], *names][-40:]
        actual, expected = (
            twin.stored(number, root, parent, names, texts, block_size=BLOCK_SIZES[number], medium=medium)
            for twin in (self.index, self.naive)
        )
        assert actual == expected

    @rule(
        number=st.integers(0, PUBLISHERS - 1),
        root=roots,
        texts=chains,
        medium=media,
        copies=st.integers(1, 2),
    )
    def prompt(self, number: int, root: Root, texts: list[bytes], medium: str, copies: int) -> None:
        """A new chain, perhaps computed by two requests at once."""
        self.prompts = [*self.prompts, (root, b"".join(texts))][-8:]
        for _ in range(copies):
            self.store(number, root, None, texts, medium)

    @rule(number=st.integers(0, PUBLISHERS - 1), data=st.data(), texts=chains, medium=media)
    def longer(self, number: int, data: st.DataObject, texts: list[bytes], medium: str) -> None:
        """A chain continues after a block that is held, was held, or is unknown."""
        parent = data.draw(st.sampled_from([*self.stored[number], 10**6]))
        root = data.draw(roots)
        self.store(number, root, parent, texts, medium)

    @rule(number=st.integers(0, PUBLISHERS - 1), data=st.data(), medium=media)
    def remove(self, number: int, data: st.DataObject, medium: str) -> None:
        """Some blocks are evicted, one after the other from the tail or anyhow."""
        names = data.draw(st.lists(st.sampled_from([*reversed(self.stored[number]), 10**6]), max_size=12))
        actual, expected = (twin.removed(number, names, medium=medium) for twin in (self.index, self.naive))
        assert actual == expected

    @rule(number=st.integers(0, PUBLISHERS - 1), data=st.data(), medium=media)
    def offload(self, number: int, data: st.DataObject, medium: str) -> None:
        """Copy blocks to another medium, named by hash."""
        names = data.draw(st.lists(st.sampled_from([*self.stored[number], 10**6]), max_size=6))
        actual, expected = (twin.held(number, names, medium) for twin in (self.index, self.naive))
        assert actual == expected

    @rule(number=st.integers(0, PUBLISHERS - 1), data=st.data(), count=st.integers(1, 3), medium=media)
    def image(self, number: int, data: st.DataObject, count: int, medium: str) -> None:
        """Blocks with media follow some block."""
        parent = data.draw(st.sampled_from([None, *self.stored[number]]))
        names = [self.families[number].of("image", parent, at) for at in range(count)]
        self.stored[number] = [*self.stored[number], *names][-40:]
        for twin in (self.index, self.naive):
            twin.opaque(number, parent, names, medium=medium)

    @rule(number=st.integers(0, PUBLISHERS - 1), medium=st.none() | media)
    def clear(self, number: int, medium: str | None) -> None:
        """The engine drops a cache."""
        for twin in (self.index, self.naive):
            twin.cleared(number, medium=medium)

    @rule(number=st.integers(0, PUBLISHERS - 1))
    def forget(self, number: int) -> None:
        """The engine restarted."""
        for twin in (self.index, self.naive):
            twin.forget(number)

    @rule(budget=st.integers(0, 4))
    def sweep(self, budget: int) -> None:
        """Memory comes back in small steps."""
        self.index.sweep(budget)

    @rule(root=roots, prompt=prompts)
    def match(self, root: Root, prompt: bytes) -> None:
        """Both find the same, whatever is asked."""
        self.compare(root, prompt)

    @rule(data=st.data(), more=prompts)
    def match_stored(self, data: st.DataObject, more: bytes) -> None:
        """Both find the same for prompts that begin like stored ones."""
        root, prompt = data.draw(st.sampled_from(self.prompts))
        self.compare(root, prompt + more)

    def compare(self, root: Root, prompt: bytes) -> None:
        """Each publisher has the same hit in both."""
        actual, expected = self.index.match(root, prompt), self.naive.match(root, prompt)
        for number in range(PUBLISHERS):
            assert actual.of(number) == expected.of(number)

    @invariant()
    def same_counts(self) -> None:
        """Check that block counts, adapters, depths and texts are those of the naive index."""
        for number in range(PUBLISHERS):
            assert self.index.blocks(number) == self.naive.blocks(number)
            for name in self.stored[number][-5:]:
                assert self.index.depth(name, number) == self.naive.depth(name, number)
                assert self.index.tail(name, 4, number) == self.naive.tail(name, 4, number)
        if not self.index.stats()["retired"]:
            assert self.index.adapters() == self.naive.adapters()

    @invariant()
    def consistent(self) -> None:
        """The tree's own promises hold."""
        check(self.index)

    def teardown(self) -> None:
        """Check that the index is empty when all publishers are forgotten."""
        for number in range(PUBLISHERS):
            self.index.forget(number)
        while self.index.sweep(3):
            pass
        assert {key: size for key, size in self.index.stats().items() if size} == {"publishers": PUBLISHERS}


def check(index: Index) -> None:
    """Walks the trees: each segment is used, each name leads to its segment, holders are in one place."""
    forest = index._forest
    found: set[Segment] = set()
    todo = [tree.root for trees in forest.trees.values() for tree in trees.values()]
    while todo:
        segment = todo.pop()
        below = list(_children(segment))
        todo += below
        found.update(below)
        assert segment.parent is None or segment.reach() * 2 > len(segment.hashes)
        assert len(segment.text) == sum(segment.sizes)
        assert len(set(segment.hashes)) == len(segment.hashes) == len(segment.sizes)
        assert segment.shadowed or all(forest.nodes.get(name) is segment for name in segment.hashes)
        for _, holders in segment.media():
            places = [holders.full, *(holders.runs or {}).values(), *(holders.part or ())]
            assert sum(bits.bit_count() for bits in places) == holders.everybody().bit_count()
    assert len(found) == forest.segments
    assert all(segment in found and name in segment.hashes for name, segment in forest.nodes.items())
    for who in [*index._presences.values(), *index._retired]:
        assert who.segments == {segment for segment in found if segment.held(who.bit)}


def _children(segment: Segment) -> list[Segment]:
    if isinstance(segment.children, Segment):
        return [segment.children]
    found = []
    for first in _first_children(segment):
        twin: Segment | None = first
        while twin is not None:
            assert (twin.parent, twin.block(0)) == (segment, first.block(0))
            found.append(twin)
            twin = twin.twin
    return found


def _first_children(segment: Segment) -> Iterator[Segment]:
    assert not isinstance(segment.children, Segment)
    for siblings in (segment.children or {}).values():
        for by_prefix in siblings.values():
            for one in by_prefix.values():
                if isinstance(one, Segment):
                    yield one
                else:
                    yield from (first for by_block in one.values() for first in by_block.values())


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Twins(RuleBasedStateMachine):
    """Blocks of the same bytes and other tokens, evicted as engines do: no block before what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.naive = NaiveIndex()
        self.names = Names(0)
        self.chains: list[tuple[int, list[int]]] = []
        for number in range(2):
            self.index.publisher(f"pod/{number}")
            self.naive.publisher(f"pod/{number}")

    @rule(
        number=st.integers(0, 1),
        texts=st.lists(
            st.tuples(st.sampled_from([b"a", b"aa", b"b"]), st.integers(0, 2)), min_size=1, max_size=5
        ),
    )
    def prompt(self, number: int, texts: list[tuple[bytes, int]]) -> None:
        """A chain whose blocks come in three tokenisations."""
        names, last = [], 0
        for text, variant in texts:
            last = self.names.of(last, text, variant)
            names.append(last)
        self.chains.append((number, names))
        for twin in (self.index, self.naive):
            assert twin.stored(number, (None, None), None, names, [text for text, _ in texts], block_size=4)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """A request's blocks are evicted from the tail; what others share with it has a copy left."""
        if self.chains:
            number, names = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
            for twin in (self.index, self.naive):
                assert twin.removed(number, names[::-1]) == len(names)

    @rule(prompt=st.text(alphabet="ab", max_size=8).map(str.encode))
    def match(self, prompt: bytes) -> None:
        """Both find the same."""
        actual, expected = (twin.match((None, None), prompt) for twin in (self.index, self.naive))
        assert [actual.of(number) for number in range(2)] == [expected.of(number) for number in range(2)]

    @invariant()
    def consistent(self) -> None:
        """The tree's own promises hold."""
        check(self.index)

    def teardown(self) -> None:
        """Check that the index is empty when all blocks are evicted."""
        for number, names in self.chains:
            self.index.removed(number, names)
        assert {key: size for key, size in self.index.stats().items() if size} == {"publishers": 2}


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class Garbage(RuleBasedStateMachine):
    """Hashes that mean anything at any time: the index need not be right, but sound, and empty in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        for number in range(3):
            self.index.publisher(f"pod/{number}")

    @rule(
        number=st.integers(0, 2),
        parent=st.none() | st.integers(0, 9),
        blocks=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([b"", b"a", b"b", b"ab"])), max_size=6),
        medium=media,
    )
    def store(self, number: int, parent: int | None, blocks: list[tuple[int, bytes]], medium: str) -> None:
        """Store an arbitrary chain."""
        names, texts = [name for name, _ in blocks], [text for _, text in blocks]
        self.index.stored(number, (None, None), parent, names, texts, block_size=4, medium=medium)

    @rule(number=st.integers(0, 2), names=st.lists(st.integers(0, 9), max_size=4), medium=media)
    def others(self, number: int, names: list[int], medium: str) -> None:
        """Any hashes, as opaque blocks, or held elsewhere."""
        self.index.held(number, names, medium)
        self.index.opaque(number, None, names[:1], medium=medium)

    @rule(number=st.integers(0, 2), names=st.lists(st.integers(0, 9), max_size=4), medium=media)
    def remove(self, number: int, names: list[int], medium: str) -> None:
        """Remove arbitrary hashes."""
        assert self.index.removed(number, names, medium=medium) <= len(names)

    @rule(number=st.integers(0, 2), medium=media)
    def clear(self, number: int, medium: str) -> None:
        """Clear an arbitrary medium."""
        self.index.cleared(number, medium=medium)

    @rule(prompt=prompts)
    def match(self, prompt: bytes) -> None:
        """No publisher holds more bytes than the prompt has, less the last one."""
        found = self.index.match((None, None), prompt)
        assert all(found.of(number).bytes <= max(0, len(prompt) - 1) for number in range(3))

    @invariant()
    def consistent(self) -> None:
        """The tree's own promises hold."""
        check(self.index)

    def teardown(self) -> None:
        """Whatever happened, removing everything leaves nothing."""
        for number in range(3):
            for medium in self.index.blocks(number):
                while self.index.removed(number, range(10), medium=medium):
                    pass
        while self.index.sweep(1):
            pass
        assert {key: size for key, size in self.index.stats().items() if size} == {"publishers": 3}


def test_a_name_only_one_publisher_knows_comes_once_in_a_segment() -> None:
    """A hash that came to mean another block to its only holder is free for the others, but not beside it."""
    index, root = Index(), (None, None)
    first, second = index.publisher("pod/0"), index.publisher("pod/1")
    for text in (b"xy", b"ab"):
        index.stored(first, root, None, [1], [text], block_size=4)
    index.stored(second, root, None, [2, 1], [b"ab", b"cd"], block_size=4)

    check(index)
    assert [index.depth(1, first), index.depth(1, second)] == [4, 8]
    assert index.stored(first, root, 1, [3], [b"ef"], block_size=4)
    assert index.match(root, b"abef!").of(first).tokens == 8


TestGarbage = Garbage.TestCase
TestGarbage.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
