"""Promises of ``canonical_chunks``: what is called canonical is what the tokenizer makes of the text."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.models import split_patterns, vocabularies
from tests.models.text import PARAGRAPHS, SAMPLES

from kvist_epp.prompt.canonical_chunks import MOST_BYTES, MOST_TOKENS, CanonicalChunks
from kvist_epp.prompt.text_cuts import TextCuts
from kvist_epp.prompt.vocab import Vocabulary

FAMILIES = ("qwen", *split_patterns.FAMILIES)


@cache
def family(name: str) -> Vocabulary:
    """Return one vocabulary, whose chunks are remembered from test to test."""
    return Vocabulary(vocabularies.qwen() if name == "qwen" else split_patterns.FAMILIES[name]())


def chunks_of(vocabulary: Vocabulary) -> CanonicalChunks:
    """Return its chunks, which it must have."""
    assert vocabulary.chunks is not None
    return vocabulary.chunks


def counting(vocabulary: Vocabulary, cuts: TextCuts) -> tuple[CanonicalChunks, list[str]]:
    """Return chunks that remember nothing yet, and the texts that they have tokenised."""
    calls = list[str]()

    def encode(text: str) -> list[int]:
        calls.append(text)
        return vocabulary.encode(text)

    return CanonicalChunks(vocabulary.pieces, encode, cuts), calls


@cache
def by_piece(name: str) -> dict[bytes, list[int]]:
    """Return the ids of each piece: some pieces have two."""
    found: dict[bytes, list[int]] = {}
    for token, piece in enumerate(family(name).pieces):
        found.setdefault(piece, []).append(token)
    return found


def spelled(name: str, data: bytes, draw: Callable[[int], int]) -> list[int]:
    """Spell bytes with any tokens of the vocabulary; ``draw(n)`` chooses below n."""
    pieces, ids, at = by_piece(name), list[int](), 0
    while at < len(data):
        ends = [end for end in range(at + 1, min(len(data), at + 12) + 1) if data[at:end] in pieces]
        end = ends[draw(len(ends))]
        known = pieces[data[at:end]]
        ids.append(known[draw(len(known))])
        at = end
    return ids


FRAGMENTS = (
    *(" ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", "1", "12", "1234567", " 12", "\u00a0", "\u3000"),
    *("'s", "'ll", "'re", "don't", "'READY", "it's", "ll", "'", "’s", "A", "Bc", "d", "fooBar", "HTTPServer"),
    *("(foo", ".(foo", "self.x", " word", "Word", "e\u0301", "é", "é.", "\u0301", "a/b", ")\n/", "://", "/"),
    *(
        "木の枝",
        "木",
        "枝ABc",
        "これは木",
        "カタカナー",
        "你好，世界",
        "，",
        "ই",
        "াইল",
        "³",
        "½",
        "👩🏽‍💻",
        "ветка",
        "▁",
    ),
    *(
        "<|im_start|>",
        "<|im_",
        "start|>",
        "<|",
        "im_end|>",
        "im",
        "_",
        "end",
        "|>",
        "{}",
        "}}}",
        "> <",
        "#",
        "*",
    ),
)
texts = st.lists(
    st.sampled_from(FRAGMENTS) | st.sampled_from(SAMPLES).map(lambda text: text[:40]), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=200, deadline=None)
@example(first=["it's  "], second=["9"], other=[], known=0)
@example(first=["don'"], second=["lld on"], other=[0, 1, 0, 1], known=2)
@given(first=texts, second=texts, other=st.lists(st.integers(0, 11), max_size=8), known=st.integers(0, 20))
def test_what_is_called_canonical_is(
    name: str, first: list[str], second: list[str], other: list[int], known: int
) -> None:
    """Tokens are called canonical behind a canonical text only if the whole text becomes all these tokens,
    however they were spelled, and whether the last tokens before them are known or not."""
    vocabulary = family(name)
    before, after = vocabulary.encode("".join(first)), vocabulary.encode("".join(second))
    assume(before and after)
    few, drawn = len(other) // 2, iter(other)
    begin = vocabulary.join(after[:few])
    after = spelled(name, begin, lambda count: next(drawn, count - 1) % count) + after[few:]
    behind = vocabulary.join(before)[-64:]
    said = chunks_of(vocabulary).canonical(after, behind=behind, before=before[-known:] if known else ())
    assert not said or is_canonical(vocabulary, before + after)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_walk_through_a_vocabulary_is_called_canonical_that_is_not(name: str) -> None:
    """Random tokens are added one by one as long as they are called canonical; so are some of real text."""
    vocabulary, chunks = family(name), chunks_of(family(name))
    drawn = random.Random(name)
    start = vocabulary.encode(" the")
    pieces = [piece.decode(errors="ignore") for piece in vocabulary.pieces]
    short = [token for token, piece in enumerate(pieces) if piece and len(piece) < 5]
    marks = [token for token in short if not pieces[token].strip(" \n").isalpha()]
    for _ in range(150):
        few = drawn.sample(marks, 12) + drawn.sample(short, 12)
        ids, missed = list(start), 0
        while len(ids) < 24 and missed < 12:
            text = "".join(drawn.sample(FRAGMENTS, 2))
            more = [drawn.choice(few)] if drawn.random() < 0.8 else vocabulary.encode(text)
            if said := chunks.canonical(more, behind=vocabulary.join(ids[-16:]), before=ids[-16:]):
                ids += more
            missed += not said
        assert is_canonical(vocabulary, ids), (
            vocabulary.join(ids).decode(),
            list(map(pieces.__getitem__, ids)),
        )


def is_canonical(vocabulary: Vocabulary, ids: Sequence[int]) -> bool:
    """Return whether the whole text becomes these tokens."""
    try:
        return vocabulary.encode(vocabulary.join(ids).decode()) == ids
    except UnicodeDecodeError:
        return False


CHINESE = "今天的天气很好，我们去公园散步吧。他说这本书非常有趣，所以我昨天晚上一口气读完了。"


@pytest.mark.parametrize("text", ["\n\n".join((*PARAGRAPHS[:5], *PARAGRAPHS[10:13]) * 3), CHINESE * 8])
def test_nearly_all_blocks_of_real_text_are_called_canonical(text: str) -> None:
    """The first of an answer, too: otherwise the whole check would go on costing what it did."""
    vocabulary = family("qwen")
    ids = vocabulary.encode("<|im_start|>assistant\n" + text)
    blocks = [ids[at : at + 16] for at in range(0, len(ids), 16)]
    said = [
        chunks_of(vocabulary).canonical(block, behind=vocabulary.join(before)[-64:], before=before)
        for before, block in pairwise(blocks)
    ]
    first = chunks_of(vocabulary).canonical(ids[3:19], behind=b"<|im_end|>\n<|im_start|>assistant\n")
    assert first
    assert sum(said) > 0.9 * len(said)


def test_other_tokens_that_spell_an_added_one_are_not() -> None:
    """A prompt with this text has the added token itself, so its text is canonical in no other tokens,
    wherever a block begins in it."""
    vocabulary = family("qwen")
    merged = vocabularies.qwen_without_added().encode("the end.<|im_start|> a b").ids
    assert vocabulary.join(merged) == b"the end.<|im_start|> a b"
    for cut in range(1, len(merged)):
        before, after = merged[:cut], merged[cut:]
        behind = vocabulary.join(before)
        complete = b"<|im_start|>" in behind  # and not canonical itself, which the caller knows
        for known in (before, before[-2:], ()):
            assert complete or not chunks_of(vocabulary).canonical(after, behind=behind, before=known)


@pytest.mark.parametrize("behind", ["the end.", "the end.<|im_end|>", "the <|im_start|>"])
@pytest.mark.parametrize("known", [True, False])
def test_an_added_token_is_canonical_itself(behind: str, known: bool) -> None:
    """Blocks in which a chat's template ends are called canonical like others."""
    vocabulary = family("qwen")
    ids = vocabulary.encode(" done<|im_start|>assistant\nYes, it is.")
    before = vocabulary.encode(behind) if known else []
    assert chunks_of(vocabulary).canonical(ids, behind=behind.encode(), before=before)


def test_white_space_is_known_with_what_follows_it() -> None:
    """The last of three blanks is a token of its own before a digit, and is not at the end of a text."""
    vocabulary = family("qwen")
    text = "| 1 |\n  12   6\n\n    3 | x\n \n   y"
    ids = vocabulary.encode(" |" + text)
    assert chunks_of(vocabulary).canonical(ids[1:], behind=b" |", before=ids[:1])
    three, one = vocabulary.encode("   "), vocabulary.encode("   6")[:2]
    for tokens, canonical in ((three, True), (one, False)):
        assert chunks_of(vocabulary).canonical(tokens, behind=b"x") is canonical


def test_a_chunk_that_begins_before_the_known_tokens_is_not_known() -> None:
    """A block may begin in the middle of a word whose beginning is not given."""
    vocabulary = family("qwen")
    ids = vocabulary.encode(" xkcdqrztwvplmn is")
    assert len(ids) > 5
    chunks = chunks_of(vocabulary)
    assert chunks.canonical(ids[3:], behind=b"", before=ids[:3])
    assert not chunks.canonical(ids[3:], behind=b"", before=ids[1:3])


@pytest.mark.parametrize(
    "text", ["x" + "zq" * MOST_TOKENS, " " + "=" * (MOST_BYTES + 1), "👩" + "\u200d" * 3 * MOST_TOKENS]
)
def test_a_text_without_cuts_is_not_tokenised(text: str) -> None:
    """One call of the tokenizer would take longer than the whole check is allowed to."""
    vocabulary = family("byte level")
    chunks, calls = counting(vocabulary, TextCuts())
    ids = vocabulary.encode(text)
    assert not chunks.canonical(ids, behind=b"x ", before=vocabulary.encode("x "))
    assert not chunks.canonical(ids, behind=b"x ")
    assert calls == []


def test_chunks_are_tokenised_once() -> None:
    """A text that was seen costs the tokenizer nothing, in any order of its words; a wrong one costs one call
    with each word before it."""
    vocabulary = family("byte level")
    chunks, calls = counting(vocabulary, chunks_of(vocabulary).cuts)
    single = [vocabulary.encode(letter)[0] for letter in "fox"]
    for text in ("the fox, the dog", "the dog, the fox", "the fox, the dog, the fox"):
        ids = vocabulary.encode(" " + text)
        assert chunks.canonical(ids[1:], behind=b"", before=ids[:1])
        assert not chunks.canonical(single, behind=b"", before=ids)
    assert calls == [" the fox, the dog", " dogfox", " foxfox"]
    assert len(chunks) == 4


def test_many_new_chunks_are_tokenised_together() -> None:
    """A block of words that were not seen costs one call of the tokenizer; one that is refused is looked at
    chunk by chunk, until the wrong one is known."""
    vocabulary = family("byte level")
    chunks, calls = counting(vocabulary, chunks_of(vocabulary).cuts)
    right = vocabulary.encode(" a router knows which pod holds what")
    wrong = vocabulary.encode(" the least of all work is")
    letters = [vocabulary.encode(letter)[0] for letter in "left"]
    for _ in range(2):
        assert chunks.canonical(right[1:], behind=b"", before=right[:1])
        assert not chunks.canonical([*wrong[1:], *letters], behind=b"", before=wrong[:1])
    assert chunks.canonical(vocabulary.encode(" knows what a pod holds"), behind=b"", before=right[:1])
    assert calls[:2] == [" router knows which pod holds what", " the least of all work isleft"]
    assert 2 < len(calls) <= 2 + len(wrong)


def test_few_chunks_are_kept() -> None:
    """At most twice as many as asked for, those seen last; a forgotten one is learned again."""
    vocabulary = family("byte level")
    chunks = CanonicalChunks(vocabulary.pieces, vocabulary.encode, chunks_of(vocabulary).cuts, most=10)
    ids = vocabulary.encode(" ".join(PARAGRAPHS[:5]))
    for _ in range(2):
        for at in range(16, len(ids), 16):
            chunks.canonical(ids[at : at + 16], behind=b"", before=ids[at - 16 : at])
            assert 0 < len(chunks) <= 20
