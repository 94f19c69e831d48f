"""Promises of ``vocab``: the pieces of a text's tokens join to the bytes the prompt is matched with."""

import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.models import vocabularies
from tests.models.text import SAMPLES
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from kvist_epp.prompt import vocab
from kvist_epp.prompt.vocab import Vocabulary

INST = ["[INST]", "[/INST]"]


@settings(max_examples=500)
@given(
    text=st.text(
        st.characters() | st.sampled_from("aeo \u0301\u0323\u0327\u1100\u1161\u11a8\u212b"), max_size=20
    ),
    step=st.integers(1, 4),
)
def test_a_text_is_composed_if_its_pieces_are(text: str, step: int) -> None:
    """Looking at pieces says of any text whether it is in form NFC."""
    assert vocab._is_composed(text, step) == unicodedata.is_normalized("NFC", text)


def stripping() -> Tokenizer:
    """Added tokens that swallow the blanks beside them, as Phi has them."""
    tokenizer = vocabularies.byte_level([])
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True), AddedToken("<mask>", lstrip=True)])
    return tokenizer


def prefix_space() -> Tokenizer:
    """A byte-level tokenizer that puts a blank in front, as RoBERTa's."""
    tokenizer = vocabularies.byte_level(INST)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: vocabularies.byte_level(["<|bos|>", *INST], bos="<|bos|>"),
    "qwen": vocabularies.qwen,
    "metaspace first": lambda: vocabularies.sentencepiece_bpe(INST, bos="<s>"),
    "metaspace always": lambda: vocabularies.sentencepiece_bpe(INST, bos="<s>", prefix="always"),
    "prepend": lambda: vocabularies.sentencepiece_bpe(INST, bos="<s>", prefix="prepend"),
    "no prefix": lambda: vocabularies.sentencepiece_bpe(INST, bos="<s>", prefix="never"),
    "unigram": lambda: vocabularies.unigram(INST),
    "unigram nfkc": lambda: vocabularies.unigram(INST, nmt=True),
    "stripping": stripping,
    "prefix space": prefix_space,
}


@cache
def family(name: str) -> tuple[Tokenizer, Vocabulary]:
    """One tokenizer and its vocabulary."""
    tokenizer = FAMILIES[name]()
    return tokenizer, Vocabulary(tokenizer)


texts = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from([*INST, " ", "  ", "\n", "<s>", "<|end|>", "<mask>", "e\u0301", "▁", *SAMPLES]),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@example(text="[INST] hi [/INST]")
@example(text=" <|end|> \n x <mask> ")
@given(text=texts.filter(lambda text: "<0x" not in text))
def test_the_pieces_of_any_text_join_to_its_prompt(name: str, text: str) -> None:
    """With and without the tokens the tokenizer adds itself, whatever it normalises or puts in front."""
    tokenizer, vocabulary = family(name)
    joined = [
        vocabulary.join(tokenizer.encode(text, add_special_tokens=extra).ids) for extra in (True, False)
    ]
    assert joined == [vocabulary.prompt(text, add_special_tokens=extra) for extra in (True, False)]


@pytest.mark.parametrize("name", FAMILIES)
def test_these_families_are_faithful(name: str) -> None:
    """None of the samples is lost in them."""
    assert family(name)[1].why_not == ""


def test_each_byte_has_a_piece() -> None:
    """Tokens may end within a character: pieces are bytes, never text. 0xFF is left to marks."""
    pieces = set(family("byte level")[1].pieces)
    assert all(bytes([byte]) in pieces for byte in range(255))


def test_encode_recognises_specials_and_adds_none() -> None:
    """Special tokens in a text are recognised, and none are added; the check of decode blocks relies on
    it."""
    tokenizer, vocabulary = family("byte level")
    assert vocabulary.encode("<|bos|>a") == [tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("a")]


def test_ids_without_a_token_are_absent() -> None:
    """Ids without a token decode to nothing and are listed."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 3}, []))
    vocabulary = Vocabulary(tokenizer)
    assert (vocabulary.pieces, vocabulary.absent) == ([b"a", b"", b"", b"b"], frozenset({1, 2}))


def test_a_tokenizer_that_truncates_does_not_here() -> None:
    """The tokenizer's own truncation and padding are switched off."""
    tokenizer = vocabularies.byte_level([])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    assert (Vocabulary(tokenizer).why_not, len(tokenizer.encode("abc " * 100).ids) > 8) == ("", True)


def lossy() -> Tokenizer:
    """BPE without byte fallback: unknown characters are lost."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        ["plain words"], trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False)
    )
    return tokenizer


def words() -> Tokenizer:
    """WordPiece, as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    return tokenizer


def whole_words() -> Tokenizer:
    """An added token that matches whole words only."""
    tokenizer = vocabularies.byte_level([])
    tokenizer.add_tokens([AddedToken("fox", single_word=True)])
    return tokenizer


@pytest.mark.parametrize(
    ("build", "why"), [(lossy, "sample texts"), (words, "WordPiece"), (whole_words, "whole words")]
)
def test_tokenizers_that_lose_bytes_are_not_faithful(build: object, why: str) -> None:
    """A tokenizer that loses bytes states the reason and is used in approximate mode only."""
    assert callable(build)
    assert why in Vocabulary(build()).why_not
