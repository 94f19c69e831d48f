"""Snapshots of the index: what is read is what was written, whole sections or nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.epp.index.test_index_histories import PUBLISHERS, Histories, check
from tests.fakes.copying import copied, heard
from tests.fakes.learning import PROMPT, Learning, prompted, stored
from tests.fakes.vocabulary import word
from tests.oracle import NaiveIndex
from tests.strategies import chains

from kvist_epp.engines.vllm.kv_events import Removed
from kvist_epp.index.byte_index import Index
from kvist_epp.index.snapshot.parts import Begin
from kvist_epp.index.snapshot.sections import Captured, Reader, Writer

NAMES = [f"pod/{number}" for number in range(PUBLISHERS)]
ROOT = (None, None)


class Copies(Histories):
    """Histories that go on in a copy of the index, and in a copy of the copy."""

    @rule()
    def copy(self) -> None:
        """From here on the copy answers instead."""
        self.index = copied(self.index, NAMES)


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@dataclass
class Pair:
    """An index and a naive one, of two publishers that use few hashes in different ways."""

    index: Index = field(default_factory=Index)
    naive: NaiveIndex = field(default_factory=NaiveIndex)
    prompts: list[bytes] = field(default_factory=list)
    names: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in NAMES[:2]:
            assert self.index.publisher(name) == self.naive.publisher(name)

    def store(self, number: int, texts: Sequence[bytes], *, agree: bool) -> None:
        """A chain of blocks; publishers that do not agree call "a" what the other calls "b"."""
        self.prompts.append(b"".join(texts))
        swapped = number == 1 and not agree
        named = [_name(texts[: at + 1], swapped=swapped) for at in range(len(texts))]
        self.names += [(number, name) for name in named]
        for twin in (self.index, self.naive):
            twin.stored(number, ROOT, None, named, texts, block_size=4)

    def remove(self, picks: Sequence[int]) -> None:
        """Any blocks: holes, loose ends."""
        for pick in picks:
            number, name = self.names[pick % len(self.names)]
            for twin in (self.index, self.naive):
                twin.removed(number, [name])

    def same(self, index: Index) -> None:
        """Check that an index is equal to the naive one."""
        check(index)
        for number in range(2):
            assert index.blocks(number) == self.naive.blocks(number)
            for prompt in self.prompts:
                assert index.match(ROOT, prompt + b"?").of(number) == self.naive.match(
                    ROOT, prompt + b"?"
                ).of(number)
        for number, name in self.names:
            assert index.depth(name, number) == self.naive.depth(name, number)


def _name(chain: Sequence[bytes], *, swapped: bool) -> int:
    text = b"/".join(chain)
    return _hash64(text.translate(bytes.maketrans(b"ab", b"ba")) if swapped else text)


def _hash64(text: bytes) -> int:
    """Return a hash as long as an engine's."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


@settings(max_examples=300)
@given(
    stored=st.lists(st.tuples(st.integers(0, 1), chains), min_size=1, max_size=6),
    removed=st.lists(st.integers(0, 100), max_size=12),
    again=st.lists(st.integers(0, 100), max_size=6),
    agree=st.booleans(),
)
def test_holes_and_loose_ends_are_copied(
    stored: list[tuple[int, list[bytes]]], removed: list[int], again: list[int], agree: bool
) -> None:
    """Blocks without those before them come back with their place and their name, and go on as the others."""
    pair = Pair()
    for number, texts in stored:
        pair.store(number, texts, agree=agree)
    pair.remove(removed)
    pair.same(pair.index)

    pair.index = copied(pair.index, NAMES[:2])
    pair.same(pair.index)

    for pick in again:
        pair.store(*stored[pick % len(stored)], agree=agree)
    pair.same(pair.index)
    pair.remove(removed[::-1])
    pair.same(pair.index)


def test_a_hole_whose_name_means_another_block_does_not_take_it_away() -> None:
    """A publisher's hash may name a block that it does not hold for others, and one that it does hold for
    itself."""
    index = Index()
    first, second = (index.publisher(name) for name in NAMES[:2])
    for number in range(100, 900, 100):
        root = (str(number), None)
        index.stored(first, root, None, [number, number + 1], [b"a", b"b"], block_size=4)
        index.stored(second, root, None, [number + 2, number + 3], [b"a", b"c"], block_size=4)
        index.stored(second, root, None, [number], [b"d"], block_size=4)
        index.removed(second, [number + 2])

    copy = copied(index, NAMES[:2])

    for number in range(100, 900, 100):
        assert (copy.depth(number, second), copy.tail(number, 9, second)) == (4, b"d")
        assert (copy.depth(number + 3, second), copy.tail(number + 3, 9, second)) == (8, b"ac")
    check(copy)


def test_other_publishers_may_go_on_while_one_is_recorded() -> None:
    """Between two steps others store, evict and leave; what is recorded is the one publisher's, unchanged."""
    index = Index()
    still, busy = (index.publisher(name) for name in NAMES[:2])
    chains = [list(range(start, start + 70)) for start in range(1000, 301_000, 1000)]
    for hashes in chains:
        blocks = [b"%d " % name for name in hashes]
        index.stored(busy, ROOT, None, hashes, blocks, block_size=4)
        index.stored(still, ROOT, None, hashes[:40], blocks[:40], block_size=4)
    expected = index.blocks(still)
    capture = index.capture(still)
    for step, _ in enumerate(capture.steps()):
        for hashes in chains[step::5]:
            index.removed(busy, hashes[::-1])
            index.stored(busy, ROOT, hashes[9], [hashes[0] + 500], [b"other"], block_size=4)
    index.leave(busy)
    while index.sweep(1000):
        pass

    copy = Index()
    row = [Begin(NAMES[0], 1, b"", None), *Writer().section(capture, ())]
    assert (heard(copy, row), capture.valid) == ([NAMES[0]], True)
    assert copy.blocks(copy.publisher(NAMES[0])) == expected
    for hashes in chains:
        prompt = b"".join(b"%d " % name for name in hashes) + b"?"
        assert copy.match(ROOT, prompt).of(0).tokens == 40 * 4
    check(copy)


def test_a_publisher_forgotten_while_it_is_recorded_has_no_section() -> None:
    """A publisher that is forgotten while it is recorded has no section, because its engine has restarted."""
    index = Index()
    number = index.publisher(NAMES[0])
    for start in range(0, 100_000, 1000):
        index.stored(number, ROOT, None, [start + 1], [b"%d" % start], block_size=4)
    capture = index.capture(number)
    steps = capture.steps()
    next(steps)
    index.forget(number)

    assert (list(steps), capture.valid) == ([], False)


def taken_over(engine: Learning, captured: Captured) -> Learning:
    """Another replica's ingestor, with what was captured of this one."""
    other = Learning()
    for _ in captured.capture.steps():
        pass
    begin = Begin(engine.source, 1, b"", captured.group)
    reader = Reader(other.ingestor, lambda _: True, lambda _: None)
    for part in (begin, *Writer().section(captured.capture, captured.pending)):
        for _ in reader.feed(part):
            pass
    return other


def learned(engine: Learning) -> Learning:
    """Another replica's ingestor with this one's snapshot."""
    return taken_over(engine, engine.ingestor.capture(engine.source))


def test_blocks_that_wait_for_their_check_are_checked_by_the_reader() -> None:
    """Decode blocks that are not yet credited at the writer are checked and credited by the reader, with
    their children."""
    engine = prompted()
    engine.send(stored([3], 2, b"abcd"), stored([4], 3, b"efgh"))
    other = learned(engine)
    for one in (engine, other):
        one.settle()
        one.send(stored([5, 6], 4, b"rld! yes", session="t"))

    assert engine.tokens(PROMPT + b"abcdefghrld! yes") == other.tokens(PROMPT + b"abcdefghrld! yes") == 24


def test_refused_blocks_stay_refused_and_credit_can_still_be_taken_back() -> None:
    """The reader knows of generated blocks what the writer knew: none is credited twice or wrongly."""
    engine = prompted()
    engine.send(stored([3], 2, [word(b" hel"), *b"abc"]))
    engine.settle()
    other = learned(engine)
    for one in (engine, other):
        one.send(stored([4], 3, b"xyzu"))
        one.settle()

    text = PROMPT + b" helabcxyzu"
    assert [engine.tokens(text), engine.stats] == [other.tokens(text), engine.stats]
    for one in (engine, other):
        one.send(Removed(hashes=[4]), Removed(hashes=[3]))
    assert engine.tokens(text) == other.tokens(text) == 8


def test_a_block_credited_while_it_was_recorded_is_held_once() -> None:
    """A block recorded both as pending and as held is held once, and one removal is enough."""
    engine = prompted()
    engine.send(stored([3], 2, b"abcd"), stored([4], 3, b"efgh"))
    captured = engine.ingestor.capture(engine.source)
    engine.settle()
    other = taken_over(engine, captured)
    other.settle()
    before = other.tokens(PROMPT + b"abcdefgh")
    other.send(Removed(hashes=[4]), Removed(hashes=[3]))

    assert (before, other.tokens(PROMPT + b"abcdefgh")) == (16, 8)


def test_the_learned_group_is_in_the_snapshot() -> None:
    """The reader continues with the KV cache group that the writer learned."""
    engine = Learning()
    engine.send(stored([1, 2], None, PROMPT, group=3))
    other = learned(engine)
    other.send(Removed(hashes=[2], group=1), stored([8, 9], None, b"ccccdddd", group=1))

    assert (other.tokens(PROMPT), other.tokens(b"ccccdddd")) == (8, 0)


def test_a_block_whose_credit_was_taken_back_while_it_was_recorded_is_refused() -> None:
    """A block recorded as credited but not as held is refused, and so are its children."""
    engine = prompted()
    engine.send(stored([3], 2, [*b"abc", word(b" hel")]))
    engine.settle()
    captured = engine.ingestor.capture(engine.source)
    engine.send(stored([4], 3, [word(b"lo"), *b"xyz"]))
    engine.settle()
    other = taken_over(engine, captured)
    other.send(stored([4], 3, [word(b"lo"), *b"xyz"]))

    assert engine.counters.revoked == 1
    assert (other.counters.orphans, other.counters.uncredited) == (0, 1)
