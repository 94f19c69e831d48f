"""Places where a tokenizer cuts every text: the two sides become the same tokens as by themselves. Pure.

Two kinds of byte pair encodings are understood:

- A pattern of known alternatives finds words, and each is merged by itself. No alternative takes a blank
  behind another character, or punctuation behind a letter (an apostrophe excepted), so that there is a cut
  before each of these. Of several blanks the last goes with what follows it, so that there is a cut before
  that one, too. If line breaks are taken with the white space before them, there is a cut behind them.
- The whole text is merged. There is a cut before a blank behind another character, except one that a token
  has before a blank (Gemma 3 has the token "> </").

Chinese and Japanese have no blanks. They have joints: between two characters of a word, tokens are canonical
if those up to the first of the two are, and those from its token on. For tokens are merged only where two
neighbours alone would be merged, too (source: corollary III in the README of the crate ``bpe``,
github.com/github/rust-gems). There are none where a word's end depends on its beginning (by the pattern of
GPT-4o, "abc木Bc" is two words and "木Bc" is one), or a word that is a token is not merged (Llama 3).

Example: the tokens "这是", "对", "的" are canonical if "这是对" becomes the first two, "对的" the others.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from unicodedata import is_normalized

BLANK: Final = "▁"
"""SentencePiece's mark of a blank. A text that contains it literally gives the same tokens as a blank."""
MARKS_BLANKS: Final = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
"""The step of a normaliser that puts marks in place of blanks."""

_FIRST: Final = r"[^\r\n\p{L}\p{N}]?"
"""One character that may precede the letters of a word."""
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER_NO_HAN, _LOWER_NO_HAN = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_MARKS: Final = r" ?[^\s\p{L}\p{N}]+"


def _cased(upper: str, lower: str, ending: str) -> str:
    return f"{_FIRST}{upper}*{lower}+{ending}|{_FIRST}{upper}+{lower}*{ending}"


KIMI_LETTERS: Final = r"[\p{Han}]+|" + _cased(_UPPER_NO_HAN, _LOWER_NO_HAN, f"{_CONTRACTION}?")
"""How Kimi K2 finds words of letters (source: ``tokenization_kimi.py`` beside the model)."""
_CONTRACTIONS: Final = (_CONTRACTION, r"'(?i:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d")
_LETTERS: Final = (
    *(r" ?\p{L}+", rf"{_FIRST}\p{{L}}+", rf"{_FIRST}+\p{{L}}+", rf"{_FIRST}[\p{{L}}\p{{M}}]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
    *(_cased(_UPPER, _LOWER, ending) for ending in ("", f"{_CONTRACTION}?")),
    *(
        han + _cased(_UPPER_NO_HAN, _LOWER_NO_HAN, ending)
        for han in (r"[\p{Han}]+|", r"\p{Han}+|")
        for ending in ("", f"{_CONTRACTION}?")
    ),
)
_NUMBERS: Final = (r"\p{N}", r"\p{N}+", r"\p{N}{1}", r"\p{N}{1,3}", r" ?\p{N}+")
_PUNCTUATION: Final = (
    *(_MARKS, rf"{_MARKS}[\r\n]*", rf"{_MARKS}[\r\n/]*", rf"{_MARKS}+[\r\n]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+", r" ?[\p{P}\p{S}]+[\r\n]*"),
)
_BREAKS: Final = (r"\s*[\r\n]+", r"\s*[\r\n]")
"""Line breaks with the white space before them."""
_WHITE_SPACE: Final = r"\s+(?!\S)|\s+"


def _any(alternatives: Iterable[str]) -> str:
    return "|".join(map(re.escape, alternatives))


_KNOWN: Final = (
    rf"(?:(?:{_any(_CONTRACTIONS)})\|)?(?:{_any(_LETTERS)})\|(?P<numbers>(?:{_any(_NUMBERS)})\|)?"
    rf"(?:{_any(_PUNCTUATION)})\|(?:(?:{_any(_BREAKS)})\|)?{re.escape(_WHITE_SPACE)}"
)
"""The patterns of GPT-2, GPT-4 and 4o, Llama 3, Qwen, DeepSeek, Mistral, Kimi, GLM, Ling, Seed and MiniMax.
(Source: their files ``tokenizer.json``, and ``src/llama-vocab.cpp`` of github.com/ggml-org/llama.cpp.)"""
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the pre-tokenizer ``ByteLevel`` (source: ``byte_level.rs`` of huggingface/tokenizers)."""
_APART: Final = (*_NUMBERS[:4], "[一-龥぀-ゟ゠-ヿ]+")
"""Patterns of what is cut out before words are: numbers; Chinese and Japanese."""

_PRINTABLE: Final = frozenset(map(chr, range(0x21, 0x7F)))
_ALPHANUMERIC: Final = frozenset(filter(str.isalnum, _PRINTABLE))
_DIGITS: Final = frozenset(filter(str.isdigit, _PRINTABLE))
_CHINESE, _KANA = range(ord("一"), ord("龥") + 1), (*range(0x3041, 0x3097), *range(0x30A1, 0x30FB), 0x30FC)


@dataclass(frozen=True, slots=True)
class TextCuts:
    """Places where one tokenizer cuts texts: before each blank behind another character, and these."""

    crossed: frozenset[str] = frozenset()
    """Characters behind which a blank is no cut."""
    words: frozenset[int] = frozenset()
    """ASCII characters behind a blank, before which there is a cut, whatever precedes it."""
    lines: frozenset[int] = frozenset()
    """ASCII characters before which there is a cut if they follow a line break."""
    parts: frozenset[int] = frozenset()
    """ASCII characters before which there is a cut if they follow an ASCII letter or digit."""
    joints: frozenset[bytes] = frozenset()
    """Characters between which there are joints, of three bytes each."""


def steps(part: dict[str, Any] | None, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the steps of a normaliser, pre-tokenizer or decoder, or those of one kind, without sequences."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = next(part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part)
        return [step for item in inner for step in steps(item, kind)]
    return [part] if kind in (None, part["type"]) else []


def find_text_cuts(spec: Mapping[str, Any], pieces: Sequence[bytes]) -> TextCuts | None:
    """Return where the tokenizer of this ``tokenizer.json`` cuts texts; None if that is not known.

    It must put nothing before a text. ``pieces``: bytes of each token id.
    """
    model, added = spec["model"], spec["added_tokens"]
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(map(model.get, unusual)):
        return None
    normalisers, cuts = steps(spec["normalizer"]), steps(spec["pre_tokenizer"])
    pattern = _words(cuts) if normalisers in ([], [{"type": "NFC"}]) else None
    unmerged = bool(model.get("ignore_merges"))
    if pattern is None and (unmerged or not _merges_whole(cuts, normalisers)):
        return None
    if any(_crosses_cuts(token, marks=pattern is None) for token in added):
        return None
    texts = [token["content"] for token in added]
    joints = frozenset[bytes]() if unmerged else _joints(pattern or "", texts)
    if pattern is None:
        crossed = _before_blanks(pieces)
        return None if "\ufffd" in crossed else TextCuts(crossed=crossed, joints=joints)
    return _around_words(pattern, texts, joints)


def _around_words(pattern: str, added: Sequence[str], joints: frozenset[bytes]) -> TextCuts:
    """Return the cuts of a tokenizer that finds words by a pattern.

    Other tokens may spell an added one, which is found before all words and is not cut.
    """
    no_lines = not any(breaks in pattern for breaks in _BREAKS) or any("\n" in text[:-1] for text in added)
    spelled = {right for text in added for left, right in pairwise(text) if left in _ALPHANUMERIC}
    return TextCuts(
        words=_ordinals(_PRINTABLE - _DIGITS),
        lines=_ordinals([] if no_lines else _PRINTABLE - {"/"}),
        parts=_ordinals({*"\t\n\r", *_PRINTABLE} - _ALPHANUMERIC - {"'"} - spelled),
        joints=joints,
    )


def _ordinals(characters: Iterable[str]) -> frozenset[int]:
    return frozenset(map(ord, characters))


def _words(cuts: Sequence[dict[str, Any]]) -> str | None:
    """Return the pattern by which words are found; None if they are not, or by an unknown one."""
    if not cuts or cuts[-1]["type"] != "ByteLevel":
        return None
    *cuts, last = cuts
    pattern = _GPT2 if last["use_regex"] else _split_pattern(cuts.pop()) if cuts else None
    known = re.fullmatch(_KNOWN, pattern) if pattern else None
    apart = [_NUMBERS[0] if cut["type"] == "Digits" else _split_pattern(cut) for cut in cuts]
    if not known or not set(apart) <= set(_APART):
        return None
    return pattern if known["numbers"] or not set(apart).isdisjoint(_NUMBERS) else None


def _split_pattern(cut: Mapping[str, Any]) -> str | None:
    """Return the pattern of a step whose matches are cut out and kept; None if it is another step."""
    kept = cut["type"] == "Split" and (cut["behavior"], cut["invert"]) in (
        ("Isolated", False),
        ("Removed", True),
    )
    pattern = cut["pattern"].get("Regex") if kept else None
    return None if pattern is None else pattern.replace("\r", r"\r").replace("\n", r"\n")


def _merges_whole(cuts: Sequence[Mapping[str, Any]], normalisers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a text is merged as a whole, or cut at blanks only."""
    others = [cut for cut in cuts if not (cut["type"] == "ByteLevel" and not cut["use_regex"])]
    if normalisers == [MARKS_BLANKS]:  # the blanks at which Gemma's would cut are "▁" by then
        others = [cut for cut in others if cut.get("pattern") != {"String": " "}]
    return normalisers in ([], [MARKS_BLANKS]) and all(cut["type"] == "Metaspace" for cut in others)


def _before_blanks(pieces: Sequence[bytes]) -> frozenset[str]:
    """Return the characters, except white space, that tokens have before a blank; U+FFFD: a part of one."""
    texts = {piece.decode(errors="replace") for piece in pieces if piece.find(b" ", 1) > 0}
    return frozenset(found for text in texts for found in re.findall(r"(\S) ", text))


def _crosses_cuts(added: Mapping[str, Any], *, marks: bool) -> bool:
    """Return whether an added token takes a blank that is not its first character; ``marks``: "▁" is one.

    What a normaliser makes of its text, which is looked for then, is not known either.
    """
    content = added["content"].replace(BLANK, " ") if marks and added["normalized"] else added["content"]
    changed = added["normalized"] and not is_normalized("NFC", content)
    return changed or added["lstrip"] or added["rstrip"] or added["single_word"] or " " in content[1:]


def _joints(pattern: str, added: Sequence[str]) -> frozenset[bytes]:
    """Return the characters of which a word's end does not depend on its beginning."""
    if _UPPER in pattern:
        return frozenset()
    codes = _CHINESE if _UPPER_NO_HAN in pattern else (*_CHINESE, *_KANA)
    joints = frozenset(chr(code).encode() for code in codes)
    pairs = (pair for text in added for pair in pairwise(map(str.encode, text)))
    return frozenset() if any(joints.issuperset(pair) for pair in pairs) else joints
