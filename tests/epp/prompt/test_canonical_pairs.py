"""Promises of ``canonical_pairs``: what is called canonical is what the tokenizer makes of the text."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.models import vocabularies
from tests.models.text import PARAGRAPHS, SAMPLES
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from kvist_epp.prompt.canonical_pairs import CanonicalPairs
from kvist_epp.prompt.vocab import Vocabulary

CHAT = ["<|im_start|>", "<|im_end|>"]


def gpt4() -> Tokenizer:
    """A small vocabulary behind the pattern of GPT-4, with digits in groups of three, as Llama 3 has it."""
    tokenizer = vocabularies.byte_level(CHAT)
    pattern = vocabularies.QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "qwen": vocabularies.qwen,
    "byte level": lambda: vocabularies.byte_level(CHAT),
    "gpt4": gpt4,
    "no prefix": lambda: vocabularies.sentencepiece_bpe(CHAT, prefix="never"),
}


@cache
def family(name: str) -> Vocabulary:
    """Return one vocabulary, whose pairs are remembered from test to test."""
    return Vocabulary(FAMILIES[name]())


def pairs_of(vocabulary: Vocabulary) -> CanonicalPairs:
    """Return its pairs, which it must have."""
    assert vocabulary.pairs is not None
    return vocabulary.pairs


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


fragments = st.sampled_from(
    [
        *(
            " ",
            "  ",
            "   ",
            "\n",
            "\n\n",
            " \n",
            "\t",
            "\r\n",
            "1",
            "12",
            "1234567",
            " 12",
            "'s",
            "'ll",
            "'re",
        ),
        *("don't", "'READY", "it's", "(foo", ".(foo", "self.x", " word", "Word", "e\u0301", "é", "\u3000"),
        *(
            "木の枝",
            "👩🏽‍💻",
            "ветка",
            "<|im_start|>",
            "<|im_",
            "start|>",
            "<|",
            "im_end|>",
            "{}",
            "}}}",
            "▁",
        ),
    ]
)
texts = st.lists(fragments | st.sampled_from(SAMPLES).map(lambda text: text[:40]), min_size=1, max_size=12)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=400, deadline=None)
@example(first=["it's  "], second=["9"], other=[], known=False)
@example(first=["don'"], second=["lld on"], other=[0, 1, 0, 1], known=True)
@given(first=texts, second=texts, other=st.lists(st.integers(0, 11), max_size=8), known=st.booleans())
def test_what_is_called_canonical_is(
    name: str, first: list[str], second: list[str], other: list[int], known: bool
) -> None:
    """Tokens are called canonical behind a canonical text only if the whole text becomes all these tokens,
    however they were spelled, and whether the last token before them is known or not."""
    vocabulary = family(name)
    before, after = vocabulary.encode("".join(first)), vocabulary.encode("".join(second))
    assume(before and after)
    few, drawn = len(other) // 2, iter(other)
    begin = vocabulary.join(after[:few])
    after = spelled(name, begin, lambda count: next(drawn, count - 1) % count) + after[few:]
    said = pairs_of(vocabulary).canonical(
        after,
        vocabulary.join(after),
        behind=vocabulary.join(before)[-64:],
        last=before[-1] if known else None,
    )
    assert not said or is_canonical(vocabulary, before + after)


def is_canonical(vocabulary: Vocabulary, ids: Sequence[int]) -> bool:
    """Return whether the whole text becomes these tokens."""
    try:
        return vocabulary.encode(vocabulary.join(ids).decode()) == ids
    except UnicodeDecodeError:
        return False


def test_nearly_all_blocks_of_real_text_are_called_canonical() -> None:
    """Whatever the last token is: otherwise the whole check would go on costing what it did."""
    vocabulary = family("qwen")
    ids = vocabulary.encode("\n\n".join((*PARAGRAPHS[:5], *PARAGRAPHS[10:13]) * 3))
    blocks = [ids[at : at + 16] for at in range(0, len(ids), 16)]
    said = [
        pairs_of(vocabulary).canonical(
            block, vocabulary.join(block), behind=vocabulary.join(before)[-64:], last=last
        )
        for before, block in pairwise(blocks)
        for last in (before[-1], None)
    ]
    assert sum(said) > 0.9 * len(said)


def test_other_tokens_that_spell_an_added_one_are_not() -> None:
    """A prompt with this text has the added token itself, so its text is canonical in no other tokens,
    wherever a block begins in it."""
    vocabulary = family("qwen")
    merged = vocabularies.qwen_without_added().encode("the end.<|im_start|> a b").ids
    assert vocabulary.join(merged) == b"the end.<|im_start|> a b"
    for cut in range(1, len(merged)):
        before, after = merged[:cut], merged[cut:]
        text, behind = vocabulary.join(after), vocabulary.join(before)
        complete = b"<|im_start|>" in behind  # and not canonical itself, which the caller knows
        for last in (before[-1], None):
            said = pairs_of(vocabulary).canonical(after, text, behind=behind, last=last)
            assert complete or not said


@pytest.mark.parametrize("behind", ["the end.", "the end.<|im_end|>", "<|im_start|>"])
@pytest.mark.parametrize("known", [True, False])
def test_an_added_token_is_canonical_itself(behind: str, known: bool) -> None:
    """Blocks in which a chat's template ends are called canonical like others."""
    vocabulary = family("qwen")
    ids = vocabulary.encode(" done<|im_start|>assistant\nYes, it is.")
    last = vocabulary.encode(behind)[-1] if known else None
    assert pairs_of(vocabulary).canonical(ids, vocabulary.join(ids), behind=behind.encode(), last=last)


def test_white_space_is_known_with_what_follows_it() -> None:
    """The last of three blanks is a token of its own before a digit, and is not at the end of a text."""
    vocabulary = family("qwen")
    text = "| 1 |\n  12   6\n\n    3 | x\n \n   y"
    ids = vocabulary.encode(text)
    data = vocabulary.join(ids[1:])
    assert pairs_of(vocabulary).canonical(ids[1:], data, behind=b"|", last=ids[0])
    three, one = vocabulary.encode("   "), vocabulary.encode("   6")[:2]
    for tokens, canonical in ((three, True), (one, False)):
        data = vocabulary.join(tokens)
        assert pairs_of(vocabulary).canonical(tokens, data, behind=b"x", last=None) is canonical


def test_pairs_are_tokenised_once() -> None:
    """A text that was seen costs the tokenizer nothing, in any order of its words."""
    vocabulary = family("byte level")
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return vocabulary.encode(text)

    pairs = CanonicalPairs(vocabulary.pieces, encode, {})
    calls.clear()
    for text in ("the fox, the dog", "the dog, the fox", "the fox, the dog, the fox"):
        ids = vocabulary.encode(text)
        assert pairs.canonical(ids[1:], vocabulary.join(ids[1:]), behind=b"the", last=ids[0])
    assert len(calls) == len(set(calls)) == len(pairs)


def test_few_pairs_are_kept() -> None:
    """At most twice as many as asked for, those seen last; a forgotten one is learned again."""
    vocabulary = family("byte level")
    pairs = CanonicalPairs(vocabulary.pieces, vocabulary.encode, {}, most=10)
    ids = vocabulary.encode(" ".join(PARAGRAPHS[:5]))
    for _ in range(2):
        for left, right in pairwise(ids):
            pairs.canonical([right], vocabulary.pieces[right], behind=vocabulary.pieces[left], last=left)
            assert 0 < len(pairs) <= 20


def superwords() -> Tokenizer:
    """A vocabulary with a token of two words."""
    tokens = ["a", "b", "Ġ", "aĠ", "aĠb"]
    merges = [("a", "Ġ"), ("aĠ", "b")]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def by_length() -> Tokenizer:
    """A vocabulary that cuts texts by length."""
    tokenizer = vocabularies.byte_level([])
    cuts = [pre_tokenizers.FixedLength(5), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


def dropout() -> Tokenizer:
    """A vocabulary that leaves out merges by chance."""
    tokenizer = vocabularies.byte_level([])
    tokenizer.model.dropout = 0.1
    return tokenizer


@pytest.mark.parametrize(
    "build",
    [
        superwords,
        by_length,
        dropout,
        vocabularies.unigram,
        lambda: vocabularies.sentencepiece_bpe([]),
        lambda: vocabularies.sentencepiece_bpe([], prefix="prepend"),
    ],
)
def test_vocabularies_whose_pairs_decide_nothing_have_none(build: Callable[[], Tokenizer]) -> None:
    """Merges over blanks, by chance or by place, Unigram, and a blank that is put before each text."""
    assert Vocabulary(build()).pairs is None


def test_added_tokens_that_strip_blanks_are_no_cut() -> None:
    """Phi's tokens swallow the blanks behind them, which a pair shows."""
    tokenizer = vocabularies.byte_level([])
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    vocabulary = Vocabulary(tokenizer)
    ids = vocabulary.encode("<|end|>") + vocabulary.encode(" the")
    assert not pairs_of(vocabulary).canonical(ids, b"<|end|> the", behind=b"x", last=None)
