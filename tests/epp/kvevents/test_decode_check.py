"""Decode blocks are credited only if the tokenizer makes the same tokens of their text."""

from collections.abc import Sequence

import pytest
from tests.fakes.learning import PROMPT, SIZE, Learning, prompted, stored
from tests.fakes.vocabulary import Words, word

from kvist_epp.engines.vllm.kv_events import Cleared, Removed, Stored
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock, DecodeBlockTable
from kvist_epp.kvevents.decode_check import CanonicalBlocks, DecodeChecker, find_canonical

HEL, LO, HELLO, ACCENT = word(b" hel"), word(b"lo"), word(b" hello"), word(b"\xc3\xa9")


def spell(ids: Sequence[int]) -> bytes:
    return b"".join(Words().pieces[token] for token in ids)


def piece(*ids: int) -> BlockTokens:
    return BlockTokens(ids, spell(ids))


def look(tail: bytes, *blocks: BlockTokens) -> CanonicalBlocks:
    words = Words()
    return find_canonical(tail, blocks, words.encode, words.pieces)


A, B, C = b"abcd"[0], b"b"[0], b"c"[0]


def test_canonical_tokens_are_found_canonical() -> None:
    """Text that tokenises to the very ids, after any tail."""

    assert look(b"xy", piece(A, HELLO, B, C), piece(A, A, A, A)) == CanonicalBlocks(2, 0)


def test_a_split_word_is_not_canonical() -> None:
    """A prompt with the same bytes from other tokens would not hit, so the block is not canonical."""

    assert look(b"", piece(A, HEL, LO, C), piece(A, A, A, A)) == CanonicalBlocks(0, 0)


def test_what_follows_a_block_that_is_not_canonical_is_not_either() -> None:
    """A later prompt parts from the chain at the first difference."""

    assert look(b"", piece(A, B, C, A), piece(HEL, LO, A, A), piece(A, B, A, B)) == CanonicalBlocks(1, 0)


def test_a_boundary_that_would_merge_spoils_the_block_before_it() -> None:
    """The last token of a block depends on what follows: ' hel' + 'lo' would be ' hello'."""

    assert look(b"", piece(A, B, C, HEL), piece(LO, A, A, A)) == CanonicalBlocks(0, 0)


def test_a_block_that_merges_with_the_text_before_it_is_not_canonical() -> None:
    """The prompt ended in ' hel' and the model said 'lo': a longer prompt has another token there."""

    assert look(b"ab hel", piece(LO, A, B, C), piece(A, B, C, A)) == CanonicalBlocks(0, 0)


def test_a_difference_at_the_very_end_waits_for_more_text() -> None:
    """The tokenizer may change its mind about the last tokens when the text goes on."""

    assert look(b"", piece(A, B, HEL, LO)) == CanonicalBlocks(0, 1)


def test_a_block_that_ends_inside_a_character_waits() -> None:
    """Half a character cannot be tokenised; the block before it can."""

    assert look(b"", piece(A, A, A, A), piece(A, B, C, 0xC3)) == CanonicalBlocks(1, 1)


def test_a_character_over_two_blocks_is_read_when_it_is_whole() -> None:
    """The bytes of é as two tokens are not canonical here, because é is one token."""

    assert look(b"", piece(A, B, C, 0xC3), piece(0xA9, A, A, A), piece(A, A, A, A)) == CanonicalBlocks(0, 0)


def test_bytes_that_are_no_text_are_not_canonical() -> None:
    """No prompt can spell invalid UTF-8."""

    assert look(b"", piece(A, A, A, A), piece(A, 0xFF, A, A), piece(A, A, A, A)) == CanonicalBlocks(1, 0)


def test_a_tail_cut_inside_a_character_is_cleaned() -> None:
    """The window may begin anywhere in the text before."""

    assert look(b"\xa9ab", piece(A, B, C, A)) == CanonicalBlocks(1, 0)


def test_a_prompt_is_credited_at_once() -> None:
    """Blocks that come together are a prompt: nothing to check."""
    engine = prompted()

    assert (engine.tokens(PROMPT), len(engine.ingestor.checker)) == (8, 0)


def test_a_decode_block_is_credited_only_after_its_check() -> None:
    """A decode block is not credited before its check; the check needs no further event."""
    engine = prompted()
    engine.send(stored([3], 2, b"cccc"))
    before = engine.tokens(PROMPT + b"cccc")
    engine.settle()

    assert (before, engine.tokens(PROMPT + b"cccc"), engine.stats) == (8, 12, (1, 0, 0))


def test_a_decode_block_of_other_tokens_is_never_credited() -> None:
    """Trap 3: equal bytes are not equal tokens (inference-perf#649); its children are not credited either."""
    engine = prompted()
    text = spell([A, HEL, LO, C])
    engine.send(stored([3], 2, [A, HEL, LO, C]), stored([4], 3, b"dddd"), stored([5], 4, b"eeee"))
    engine.settle()
    engine.send(stored([6], 5, b"ffff"))
    engine.settle()

    assert engine.tokens(PROMPT + text + b"ddddeeeeffff") == 8
    assert (engine.stats, engine.ingestor.stats(engine.source).orphans) == ((0, 4, 0), 0)


def test_credit_is_taken_back_when_the_next_block_shows_the_boundary_is_wrong() -> None:
    """' hel' at the end of a block was right until 'lo' came."""
    engine = prompted()
    engine.send(stored([3], 2, [A, A, A, HEL]))
    engine.settle()
    before = engine.tokens(PROMPT + b"aaa hel")
    engine.send(stored([4], 3, [LO, A, A, A]))
    engine.settle()

    assert (before, engine.tokens(PROMPT + b"aaa hello"), engine.stats) == (12, 8, (1, 2, 1))


def test_a_block_that_ends_inside_a_character_waits_for_the_next() -> None:
    """Then both are credited."""
    engine = prompted()
    engine.send(stored([3], 2, [A, A, A, 0xE2]))
    engine.settle()
    before = engine.tokens(PROMPT + b"aaa\xe2")
    engine.send(stored([4], 3, [0x82, 0xAC, A, A]))
    engine.settle()

    assert (before, engine.tokens(PROMPT + "aaa€aa".encode())) == (8, 16)


def test_another_request_that_continues_a_pending_chain_proves_it() -> None:
    """A prompt of another request that hits the blocks in the engine proves that they are canonical."""
    engine = prompted()
    engine.send(stored([3], 2, [A, HEL, LO, C]), stored([4], 3, b"cccc"))
    engine.send(stored([5, 6], 4, b"ddddeeee", session="other"))

    assert engine.tokens(PROMPT + spell([A, HEL, LO, C]) + b"ccccddddeeee") == 24


def test_another_request_proves_a_rejected_chain_too() -> None:
    """A prompt of token ids can hit what no text can."""
    engine = prompted()
    engine.send(stored([3], 2, [A, HEL, LO, C]), stored([4], 3, b"cccc"))
    engine.settle()
    engine.send(stored([5, 6], 4, b"ddddeeee", session="other"))

    assert engine.tokens(PROMPT + spell([A, HEL, LO, C]) + b"ccccddddeeee") == 24


def test_a_preempted_request_proves_nothing_by_computing_its_answer_again() -> None:
    """After a preemption the answer comes many blocks at a time: still generated, still to be checked."""
    engine = prompted()
    engine.send(stored([3], 2, [A, HEL, LO, C]))
    engine.send(stored([4, 5], 3, b"ddddeeee"))
    engine.send(stored([7, 8], 2, [A, A, HEL, LO, *b"gggg"]))
    engine.settle()

    assert [engine.tokens(PROMPT + tail) for tail in (b"a helloc", b"aa hellogggg")] == [8, 8]


def test_a_block_stored_twice_before_its_check_is_held_twice_after() -> None:
    """Trap 2: two requests may generate the same block at once; one removal leaves one."""
    engine = prompted()
    engine.send(stored([3], 2, b"cccc"), stored([3], 2, b"cccc", session="t"))
    engine.settle()
    engine.send(Removed(hashes=[3]))
    once = engine.tokens(PROMPT + b"cccc")
    engine.send(Removed(hashes=[3]))

    assert (once, engine.tokens(PROMPT + b"cccc")) == (12, 8)


def test_a_block_removed_before_its_check_is_not_credited() -> None:
    """A block that is removed before its check is never credited."""
    engine = prompted()
    engine.send(stored([3], 2, b"cccc"), stored([3], 2, b"cccc", session="t"))
    engine.send(Removed(hashes=[3]), Removed(hashes=[3]))
    engine.settle()

    assert (engine.tokens(PROMPT + b"cccc"), engine.stats) == (8, (0, 0, 0))


def test_a_block_whose_parent_went_is_not_credited() -> None:
    """Nothing to hang it on."""
    engine = prompted()
    engine.send(stored([3], 2, b"cccc"), Removed(hashes=[2]))
    engine.settle()

    assert (engine.tokens(PROMPT + b"cccc"), engine.stats) == (4, (0, 1, 0))


def test_clearing_drops_what_is_pending() -> None:
    """AllBlocksCleared empties the table too."""
    engine = prompted()
    engine.send(stored([3], 2, b"cccc"), Cleared())
    engine.settle()

    assert (engine.tokens(PROMPT + b"cccc"), engine.stats) == (0, (0, 0, 0))


def test_without_a_tokenizer_no_decode_block_is_credited() -> None:
    """Without a tokenizer it is unknown whether a block is canonical, so none is credited."""
    engine = prompted(check=False)
    engine.send(stored([3], 2, b"cccc"), stored([4], 3, b"dddd"))
    engine.settle()

    assert (engine.tokens(PROMPT + b"ccccdddd"), engine.stats) == (8, (0, 2, 0))


def test_the_queue_is_bounded() -> None:
    """A block that exceeds the queue is known and not credited, and neither are its children."""
    engine = prompted()
    engine.ingestor.checker = DecodeChecker(engine.index, engine.words.pieces, engine.words.encode, limit=1)
    engine.send(stored([3], 2, b"cccc"), stored([4], 3, b"dddd"), stored([5], 4, b"eeee"))
    engine.settle()

    assert (engine.tokens(PROMPT + b"ccccddddeeee"), engine.stats) == (12, (1, 2, 0))


def test_a_block_that_another_pod_has_proved_needs_no_check() -> None:
    """Same hash, same text, credited elsewhere: canonical."""
    engine = prompted()
    engine.send(stored([3, 4], 2, b"ccccdddd"))
    engine.source = "ns/twin/0"
    engine.send(stored([1, 2], None, PROMPT), stored([3], 2, b"cccc"))

    assert (engine.tokens(PROMPT + b"cccc"), engine.words.encoded) == (12, [])


def test_many_blocks_of_one_answer_share_a_window() -> None:
    """The cost of a check falls as blocks gather, and no window is long: a call must not hold up a pick."""
    engine = prompted()
    for block in range(400):
        engine.send(stored([10 + block], 9 + block if block else 2, b"cccc"))
    engine.settle()

    assert engine.tokens(PROMPT + b"cccc" * 400) == 1608
    assert (len(engine.words.encoded), max(map(len, engine.words.encoded))) == (4, 64 + 4 + 512)


def test_a_long_word_gets_a_second_look_with_more_text() -> None:
    """The first window begins inside a run that only resolves further back."""
    engine = Learning()
    engine.send(stored(list(range(1, 13)), None, [word(b"zzz")] * 48), stored([13], 12, [word(b"zzz")] * 4))
    engine.settle()

    assert (engine.tokens(b"zzz" * 52), len(engine.words.encoded)) == (52, 2)


@pytest.mark.parametrize("names", [[3], [3, 4]])
def test_an_answer_offloaded_before_its_check_is_held_there_after(names: list[int]) -> None:
    """The tier names hashes that are pending; the credit includes it, the rejection does not."""
    engine = prompted()
    for name in names:
        engine.send(stored([name], name - 1, b"cccc"))
    engine.send(Stored(hashes=names, parent=None, token_ids=[], block_size=0, medium="CPU"))
    engine.settle()

    number = engine.index.publisher(engine.source)
    assert engine.index.blocks(number) == {"GPU": 2 + len(names), "CPU": len(names)}


def test_a_circle_of_blocks_without_text_ends() -> None:
    """A damaged snapshot may have one; the check goes on with what it has."""
    table = DecodeBlockTable()
    root = (None, None)
    blocks = [
        DecodeBlock(name, parent, root, BlockTokens((), b""), SIZE, 8) for name, parent in ((3, 4), (4, 3))
    ]
    for block in blocks:
        table.add(block)
    assert set(table.pending_chain(blocks[0], 64)) == set(blocks)
