"""Generated blocks, which come one at a time: appended to a segment, or put into the tree like all others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.index.test_index_histories import check

from kvist_epp.index.byte_index import Index
from kvist_epp.index.tree.forest import Forest
from kvist_epp.index.tree.holders import SEGMENT_BLOCKS, Presence
from kvist_epp.index.tree.segment import Segment

ROOT = (None, None)
SIZE = 4
PROMPT = [b"ab", b"c"]
PUBLISHERS = 3

words = st.sampled_from([b"a", b"b"])
events = st.one_of(
    st.tuples(st.just("prompt"), st.integers(0, 2), st.just(b"")),
    st.tuples(st.just("answer"), st.integers(0, 2), words),
    st.tuples(st.just("answer"), st.integers(0, 2), words),
    st.tuples(st.just("renamed"), st.integers(0, 2), words),
    st.tuples(st.just("remove"), st.integers(0, 2), st.just(b"")),
    st.tuples(st.just("copied"), st.integers(0, 2), st.just(b"")),
    st.tuples(st.just("fork"), st.integers(0, 2), words),
    st.tuples(st.just("clash"), st.integers(0, 2), words),
    st.tuples(st.just("clash"), st.integers(0, 2), words),
    st.tuples(st.just("lost"), st.integers(0, 2), words),
)


class Slow(Forest):
    """Puts all blocks into the tree in the general way."""

    __slots__ = ()

    def append_own(self, who: Presence, segment: Segment, at: int, name: int, block: bytes) -> bool:
        """Leave the block to the general way."""
        return False


class Engines:
    """Engines of which each has one conversation; the last one calls all blocks otherwise than the others."""

    def __init__(self) -> None:
        self.twins = (Index(), Index())
        """The second one appends nothing."""
        self.twins[1]._forest = Slow()
        self.path: list[list[tuple[int, bytes]]] = [[] for _ in range(PUBLISHERS)]
        """Names and texts of the blocks of each conversation."""
        self.names: dict[tuple[bool, tuple[bytes, ...], int], int] = {}
        self.number = 0
        for publisher in range(PUBLISHERS):
            assert {twin.publisher(f"pod/{publisher}") for twin in self.twins} == {publisher}

    def store(
        self, publisher: int, texts: list[bytes], *, behind: int, other: int = 0, name: int | None = None
    ) -> None:
        """Store blocks behind the first ``behind`` ones of the conversation, which goes on with them.

        ``other``: number of another name for the same blocks. ``name``: that of a single block.
        """
        above = self.path[publisher][:behind]
        added: list[tuple[int, bytes]] = []
        for text in texts:
            texts_before = tuple(known for _, known in (*above, *added))
            key = (publisher == 2, (*texts_before, text), other)
            self.number += key not in self.names
            added.append((self.names.setdefault(key, self.number), text))
        parent = above[-1][0] if above else None
        if name is not None:
            added = [(name, texts[0])]
        names = [name for name, _ in added]
        taken = {twin.stored(publisher, ROOT, parent, names, texts, block_size=SIZE) for twin in self.twins}
        assert len(taken) == 1
        self.path[publisher] = [*above, *added]

    def apply(self, kind: str, publisher: int, text: bytes) -> None:
        """Apply one event to both."""
        length = len(self.path[publisher])
        if kind == "prompt":
            self.store(publisher, PROMPT, behind=0)
        elif kind == "answer":
            self.store(publisher, [text], behind=length)
        elif kind == "renamed":
            self.store(publisher, [text], behind=length, other=1)
        elif kind == "clash":
            self.store(publisher, [text], behind=length, name=1 + (length + text[0]) % 5)
        elif kind == "lost":
            self.path[publisher] = self.path[publisher][: length // 2]
        elif kind == "fork":
            self.store(publisher, [text, b"x"], behind=max(0, length - 1))
        elif length:
            names = [self.path[publisher][-1][0]]
            if kind == "copied":
                assert len({twin.held(publisher, names, "CPU") for twin in self.twins}) == 1
            else:
                assert len({twin.removed(publisher, names) for twin in self.twins}) == 1
                self.path[publisher].pop()

    def compare(self) -> None:
        """Check that both find the same for all conversations, on each engine."""
        index, slow = self.twins
        check(index)
        assert index.stats() == slow.stats()
        for path in self.path:
            prompt = b"".join(text for _, text in path)
            for end in (b"?", b"a?", b"b?", b"x?"):
                found, expected = index.match(ROOT, prompt + end), slow.match(ROOT, prompt + end)
                for publisher in range(PUBLISHERS):
                    assert found.of(publisher) == expected.of(publisher)
        for publisher in range(PUBLISHERS):
            assert index.blocks(publisher) == slow.blocks(publisher)


@settings(max_examples=500)
@given(st.lists(events, max_size=25))
def test_answers_of_several_engines_are_kept_apart(history: list[tuple[str, int, bytes]]) -> None:
    """Prompts are shared, blocks copied, removed and renamed, answers go on from earlier blocks: each engine
    has the hits and blocks that it has if nothing is appended."""
    engines = Engines()
    for publisher in range(PUBLISHERS):
        engines.apply("prompt", publisher, b"")
    for event in history:
        engines.apply(*event)
    engines.compare()


def test_an_answer_of_many_blocks_fills_segments() -> None:
    """A segment ends where it would with a prompt of as many blocks."""
    engines = Engines()
    engines.apply("prompt", 0, b"")
    for _ in range(2 * SEGMENT_BLOCKS):
        engines.apply("answer", 0, b"a")
    engines.compare()

    assert engines.twins[0].stats()["segments"] == 3


@pytest.mark.parametrize("sharers", [(0,), (0, 1), (0, 1, 2)])
def test_only_the_engine_that_generates_has_more(sharers: tuple[int, ...]) -> None:
    """Others that hold the whole prompt do not hold the answer."""
    engines = Engines()
    for publisher in sharers:
        engines.apply("prompt", publisher, b"")
    before = [engines.twins[0].match(ROOT, b"abcab?").of(publisher).tokens for publisher in sharers]
    for text in (b"a", b"b"):
        engines.apply("answer", 0, text)
    after = [engines.twins[0].match(ROOT, b"abcab?").of(publisher).tokens for publisher in sharers]

    assert (before, after) == ([8] * len(sharers), [16] + [8] * (len(sharers) - 1))
