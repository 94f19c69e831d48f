"""Promises of ``text_cuts``: where a tokenizer cuts texts, and of which ones that is known."""

import json
from collections.abc import Callable
from itertools import product

import pytest
from tests.models import split_patterns, vocabularies
from tests.models.split_patterns import GPT4O, LLAMA3, MISTRAL, QWEN35, by_patterns
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from kvist_epp.prompt.text_cuts import TextCuts, find_text_cuts
from kvist_epp.prompt.tiktoken_vocab import KIMI_PATTERN
from kvist_epp.prompt.vocab import Vocabulary


def cuts_of(tokenizer: Tokenizer) -> TextCuts | None:
    """Return where a tokenizer cuts texts."""
    chunks = Vocabulary(tokenizer).chunks
    return None if chunks is None else chunks.cuts


LEFT = (
    *("a", "Z", "9", "é", "木", "カ", "e\u0301", "ই", "³", "👩", ".", ")", "'", "/", "_", "|"),
    *("don't", "'ll", "a'", "12345", "fooB", " ", "  ", "\t", "\n", "\n\n", " \n", ")\n", ")\n ", "\r\n"),
    *("\u00a0", "\u3000", "x  ", "x \n"),
)
RIGHT = (
    *("a", "Zb", "9", "é", "木", "カ", "ই", "³", "👩", ".", ")", "'s", "/", "_", "|", "a'll", ".b", "//"),
    *("**b", " a", " Z", " 9", " é", " 木", " .", " 's", " /", " '", "  a", "   ", " \n", "\n", "\n\n a"),
    *("\t", "\r\n"),
)


@pytest.mark.parametrize("name", split_patterns.FAMILIES)
def test_both_sides_of_a_cut_become_what_they_do_by_themselves(name: str) -> None:
    """All sorts of characters beside it, in front of more text and behind some."""
    vocabulary = Vocabulary(split_patterns.FAMILIES[name]())
    assert vocabulary.chunks is not None
    cut = vocabulary.chunks.is_cut
    found = 0
    for left, right in product(LEFT, RIGHT):
        for before, after in (("", ""), ("see x", "b.c"), ("木.\n", " the end"), ("it's ", "  9\n")):
            one, other = before + left, right + after
            data = (one + other).encode()
            if cut(data, len(one.encode())):
                found += 1
                apart = vocabulary.encode(one) + vocabulary.encode(other)
                assert vocabulary.encode(one + other) == apart, (one, other)
    assert found > 100


def strips_blanks() -> Tokenizer:
    """Phi's tokens swallow the blanks behind them."""
    tokenizer = by_patterns(LLAMA3)
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


def has_blanks() -> Tokenizer:
    """GPT-NeoX's blanks are added tokens."""
    tokenizer = by_patterns(LLAMA3)
    tokenizer.add_tokens([AddedToken("  "), AddedToken("    ")])
    return tokenizer


def unmerged(tokenizer: Tokenizer) -> Tokenizer:
    """A word, or a text that is not divided, is not merged if it is a token, as with Llama 3."""
    spec = json.loads(tokenizer.to_str())
    spec["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(spec))


def parts_of_characters() -> Tokenizer:
    """The end of an ellipsis and a blank are one token, and the whole text is merged."""
    tokens = ["a", "Ġ", "â", "Ģ", "¦", "¦Ġ"]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [("¦", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def composed_added() -> Tokenizer:
    """An added token is looked for in form NFC, in which its semicolon is another one."""
    tokenizer = by_patterns(LLAMA3, composed=True)
    tokenizer.add_tokens([AddedToken("ab\u037ecd", normalized=True)])
    return tokenizer


def cut_before(step: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A step comes before words are found."""
    tokenizer = vocabularies.byte_level([])
    cuts = [step, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


def dropout() -> Tokenizer:
    """Merges are left out by chance."""
    tokenizer = vocabularies.byte_level([])
    tokenizer.model.dropout = 0.1
    return tokenizer


def ends_of_words() -> Tokenizer:
    """A token at the end of a word is another one than in its middle."""
    vocabulary = {"a": 0, "b": 1, "a</w>": 2, "b</w>": 3, "Ġ": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


EXAONE = LLAMA3.replace(r"?\p{L}+", r"?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
"""Words that go over blanks."""


@pytest.mark.parametrize(
    "build",
    [
        *(strips_blanks, has_blanks, parts_of_characters, composed_added, dropout, ends_of_words),
        lambda: unmerged(by_patterns()),
        lambda: cut_before(pre_tokenizers.FixedLength(5)),
        lambda: cut_before(pre_tokenizers.UnicodeScripts()),
        vocabularies.unigram,
        lambda: by_patterns(EXAONE),
        lambda: by_patterns(r"(?<=a)\p{N}", LLAMA3),
        lambda: by_patterns(LLAMA3.removesuffix(r"|\s+")),
        lambda: by_patterns(LLAMA3, chat=["<tool call>"]),
        lambda: by_patterns(LLAMA3.replace(r"|\p{N}{1,3}", "")),
        lambda: by_patterns(LLAMA3.replace(r"| ?[^\s\p{L}\p{N}]+[\r\n]*", "")),
        lambda: by_patterns(r"\p{N}|\s+(?!\S)|\s+"),
        lambda: by_patterns(r"\p{Han}+|" + LLAMA3),
        lambda: vocabularies.sentencepiece_bpe([]),
        lambda: vocabularies.sentencepiece_bpe([], prefix="prepend"),
        lambda: vocabularies.unigram(nmt=True),
    ],
)
def test_tokenizers_that_are_not_understood_have_no_cuts(build: Callable[[], Tokenizer]) -> None:
    """Their blocks are checked whole, as all are without chunks."""
    assert cuts_of(build()) is None


@pytest.mark.parametrize(
    ("build", "known"),
    [
        *((split_patterns.FAMILIES[name], "木カ") for name in ("byte level", "llama 3", "qwen 3.5")),
        *((split_patterns.FAMILIES[name], "木カ") for name in ("deepseek", "ling", "seed", "sentencepiece")),
        (split_patterns.FAMILIES["kimi"], "木"),
        *((split_patterns.FAMILIES[name], "") for name in ("mistral", "gpt-4o")),
        (lambda: unmerged(by_patterns(LLAMA3)), ""),
        (lambda: by_patterns(LLAMA3, chat=["工具箱"]), ""),
        (lambda: by_patterns(LLAMA3, chat=["<｜工｜>"]), "木カ"),
    ],
)
def test_joints_are_where_a_word_ends_alike_wherever_it_begins(
    build: Callable[[], Tokenizer], known: str
) -> None:
    """The pattern of GPT-4o has none, nor have words that are tokens and not merged, nor added tokens."""
    cuts = cuts_of(build())
    assert cuts is not None
    assert "".join(letter for letter in "木カaइ。" if letter.encode() in cuts.joints) == known


def test_words_are_cut_nowhere_in_a_spelled_added_token() -> None:
    """An added token is found before all words are."""
    cuts = cuts_of(by_patterns(LLAMA3, chat=["<|a_b|>", "\n\n"]))
    assert cuts is not None
    assert not cuts.parts & set(b"_|'")
    assert cuts.parts >= set(b"->.,:;()\n\t\r")


def test_line_breaks_are_cuts_if_they_are_taken_before_other_white_space() -> None:
    """GPT-2's pattern divides two line breaks before a letter, which it does not at the end of a text; added
    tokens with a break go over it."""
    breaks = (
        by_patterns(LLAMA3, chat=["\n"]),
        by_patterns(LLAMA3, chat=["\n\n"]),
        split_patterns.byte_level(),
    )
    found = [cuts for cuts in map(cuts_of, breaks) if cuts is not None]
    assert [bool(cuts.lines) for cuts in found] == [True, False, False]


def test_patterns_are_known_however_their_line_breaks_are_written() -> None:
    """DeepSeek's file has the characters themselves."""
    for pattern in (MISTRAL, GPT4O, QWEN35, KIMI_PATTERN):
        raw = pattern.replace(r"\r", "\r").replace(r"\n", "\n")
        assert cuts_of(by_patterns(raw)) == cuts_of(by_patterns(pattern)) is not None


@pytest.mark.parametrize(
    ("behavior", "invert", "known"),
    [
        ("Isolated", False, True),
        ("Removed", True, True),
        ("Removed", False, False),
        ("MergedWithNext", False, False),
    ],
)
def test_matches_of_a_pattern_are_kept_apart(behavior: str, invert: bool, known: bool) -> None:
    """Other uses of a pattern are not understood."""
    spec = json.loads(by_patterns(LLAMA3).to_str())
    split = spec["pre_tokenizer"]["pretokenizers"][0]
    split["behavior"], split["invert"] = behavior, invert
    assert (find_text_cuts(spec, []) is not None) is known


def test_no_cut_is_behind_a_character_that_a_token_has_before_a_blank() -> None:
    """Gemma 3 merges "> </" to one token."""
    tokens = ["a", ">", "▁", "<", ">▁", ">▁<", "▁a"]
    merges = [(">", "▁"), (">▁", "<"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    chunks = Vocabulary(tokenizer).chunks
    assert chunks is not None
    assert chunks.cuts.crossed == {">"}
    assert (chunks.is_cut(b"> a", 1), chunks.is_cut(b"a a", 1)) == (False, True)
