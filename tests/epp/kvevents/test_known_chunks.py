"""Decode blocks that are known to be canonical are credited at once; others wait for their check."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.learning import PROMPT, SIZE, Learning, prompted, stored
from tests.fakes.vocabulary import word
from tests.models import vocabularies

from kvist_epp.engines.vllm.kv_events import Batch, Removed
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock
from kvist_epp.kvevents.decode_check import Chunks, DecodeChecker
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.publisher_state import PublisherState
from kvist_epp.prompt.vocab import Vocabulary

A, C, HEL, LO = b"a"[0], b"c"[0], word(b" hel"), word(b"lo")


class KnownTokens:
    """Says that blocks of some tokens are canonical, and keeps what it was asked."""

    def __init__(self, tokens: Collection[int]) -> None:
        self.tokens = tokens
        self.asked: list[tuple[bytes, Sequence[int], Sequence[int]]] = []

    def canonical(self, ids: Sequence[int], *, behind: bytes, before: Sequence[int] = ()) -> bool:
        """Return whether all of them are known."""
        self.asked.append((behind, before, ids))
        return all(token in self.tokens for token in ids)


def test_a_block_of_known_chunks_is_credited_at_once() -> None:
    """The tokenizer is not asked; the block before it counts with its tokens, a prompt with its text."""
    chunks = KnownTokens(b"cd")
    engine = prompted(chunks=chunks)
    engine.send(stored([3], 2, b"cccc"), stored([4], 3, b"dddd"))

    assert (engine.tokens(PROMPT + b"ccccdddd"), len(engine.ingestor.checker)) == (16, 0)
    assert (engine.words.encoded, engine.stats) == ([], (2, 0, 0))
    assert [(behind, bytes(before), bytes(ids)) for behind, before, ids in chunks.asked] == [
        (PROMPT, b"", b"cccc"),
        (b"cccc", b"cccc", b"dddd"),
    ]


def test_known_blocks_behind_a_doubtful_one_wait_for_it_and_are_not_checked() -> None:
    """One check, of the doubtful block and the next one, which may settle it."""
    engine = prompted(chunks=KnownTokens(b"c"))
    engine.send(stored([3], 2, b"dddd"), *(stored([name], name - 1, b"cccc") for name in range(4, 40)))
    before = engine.tokens(PROMPT + b"dddd" + b"cccc" * 36)
    engine.settle()

    assert (before, engine.tokens(PROMPT + b"dddd" + b"cccc" * 36)) == (8, 156)
    assert engine.words.encoded == [(PROMPT + b"ddddcccc").decode()]


def test_doubtful_blocks_in_a_row_are_checked_together() -> None:
    """Doubtful blocks cost what they would without chunks, and the known one behind them settles the last."""
    engine = prompted(chunks=KnownTokens(b"c"))
    engine.send(*(stored([name], name - 1, b"dddd" if name < 9 else b"cccc") for name in range(3, 12)))
    engine.settle()

    assert engine.tokens(PROMPT + b"dddd" * 6 + b"cccc" * 3) == 44
    assert engine.words.encoded == [(PROMPT + b"dddd" * 6 + b"cccc").decode()]


@pytest.mark.parametrize("more", [0, 1, 2, 9])
def test_blocks_of_one_token_inside_a_character_wait_for_its_end(more: int) -> None:
    """Three blocks end inside it; the check of others goes on meanwhile."""
    engine = Learning(chunks=KnownTokens(b"c"))
    engine.send(stored([1, 2], None, b"ab", size=1))
    characters = b"\xf0\x9f\x8c\xbf" * 2 + b"c" * more
    for name, byte in enumerate(characters[:7], 3):
        engine.send(stored([name], name - 1, [byte], size=1))
    engine.settle()
    half = engine.tokens(b"ab" + characters)
    engine.send(*(stored([name], name - 1, [byte], size=1) for name, byte in enumerate(characters[7:], 10)))
    engine.settle()

    assert (half, engine.tokens(b"ab" + characters)) == (6, 10 + more)


def test_credit_of_known_chunks_is_taken_back_when_the_next_block_shows_that_the_boundary_is_wrong() -> None:
    """' hel' is canonical by itself until 'lo' comes."""
    engine = prompted(chunks=KnownTokens([A, HEL]))
    engine.send(stored([3], 2, [A, A, A, HEL]))
    before = engine.tokens(PROMPT + b"aaa hel")
    engine.send(stored([4], 3, [LO, A, A, A]))
    engine.settle()

    assert (before, engine.tokens(PROMPT + b"aaa hello"), engine.stats) == (12, 8, (1, 2, 1))


def test_a_known_block_behind_a_rejected_one_is_rejected() -> None:
    """A later prompt parts from the chain before it."""
    engine = prompted(chunks=KnownTokens(b"c"))
    engine.send(stored([3], 2, [A, HEL, LO, C]))
    engine.settle()
    engine.send(stored([4], 3, b"cccc"))
    engine.settle()

    assert (engine.tokens(PROMPT + b"a helloc" + b"cccc"), engine.stats) == (8, (0, 2, 0))


def test_a_known_block_whose_parent_went_is_not_credited() -> None:
    """There is nothing that it could follow."""
    engine = prompted(chunks=KnownTokens(b"cd"))
    engine.send(stored([3], 2, b"cccc"), Removed(hashes=[3]), stored([4], 3, b"dddd"))
    engine.settle()

    assert engine.tokens(PROMPT + b"ccccdddd") == 8


def test_blocks_that_come_in_any_order_from_a_snapshot_are_all_checked() -> None:
    """A block whose parents wait, too, is looked at again after them."""
    engine = prompted()
    publisher = PublisherState(engine.source, engine.index.publisher(engine.source))
    chunks = KnownTokens(b"")
    checker = DecodeChecker(engine.index, engine.words.pieces, engine.words.encode, chunks)
    for name in range(10, 2, -1):
        root, depth = (None, None), SIZE * name
        checker.adopt(
            publisher, DecodeBlock(name, name - 1, root, BlockTokens(b"cccc", b"cccc"), SIZE, depth)
        )
    while checker.step():
        pass

    assert engine.tokens(PROMPT + b"cccc" * 8) == 40


@dataclass(frozen=True)
class Trained:
    """A small byte pair encoding, with or without its chunks."""

    vocabulary: Vocabulary
    chunks: Chunks | None

    @property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of each token."""
        return self.vocabulary.pieces

    def encode(self, text: str) -> list[int]:
        """Tokenize a text as the vocabulary does."""
        return self.vocabulary.encode(text)


@cache
def trained() -> Vocabulary:
    """The vocabulary, whose chunks are remembered from example to example."""
    return Vocabulary(vocabularies.byte_level(["<|im_start|>", "<|im_end|>"]))


words = st.sampled_from([*"aeilnorst", " ", "  ", "\n", " the", " fox", "12", "é", "'s", "<|im_", "end|>"])


@settings(max_examples=300, deadline=None)
@given(text=st.lists(words, max_size=40).map("".join), split=st.sets(st.integers(0, 40)), pauses=st.data())
def test_known_chunks_change_when_a_block_is_credited_and_not_whether(
    text: str, split: set[int], pauses: st.DataObject
) -> None:
    """Whatever an engine generates (some tokens as their bytes), and whenever checks are done, the same text
    is credited in the end as by the whole check alone."""
    vocabulary = trained()
    prompt = vocabulary.encode("the quick brown fox jumps")[:SIZE]
    single = {piece: token for token, piece in enumerate(vocabulary.pieces) if len(piece) == 1}
    ids: list[int] = []
    for at, token in enumerate(vocabulary.encode(text)):
        piece = vocabulary.pieces[token]
        ids += [single[bytes([byte])] for byte in piece] if at in split else [token]
    found = []
    for chunks in (vocabulary.chunks, None):
        index = Index()
        ingestor = Ingestor(index, Trained(vocabulary, chunks))
        ingestor.apply("ns/pod/0", Batch(ts=0.0, rank=0, events=[stored([1], None, prompt)]))
        for block in range(len(ids) // SIZE):
            tokens = ids[block * SIZE : (block + 1) * SIZE]
            event = stored([block + 2], block + 1, tokens)
            ingestor.apply("ns/pod/0", Batch(ts=block + 1.0, rank=0, events=[event]))
            while pauses.draw(st.booleans()) and ingestor.checker.step():
                pass
        while ingestor.checker.step():
            pass
        whole = vocabulary.join(prompt + ids) + b"?"
        found.append(index.match((None, None), whole).of(index.publisher("ns/pod/0")).tokens)
    assert found[0] == found[1]
