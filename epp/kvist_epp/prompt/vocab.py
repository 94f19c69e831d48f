"""Token ids to bytes, and texts to the bytes their tokens will join to.

The index compares bytes: those of an engine's blocks (its token ids, each turned into the bytes of its piece)
with those of a prompt. Tokenizers that normalise, or put a blank in front, change the text first, so the
prompt is changed the same way here. Whether it all comes out equal is tried at load on samples, through the
real tokenizer; a vocabulary that fails is not faithful and is used in approximate mode only.

Three families are understood: byte-level BPE (each character of a piece stands for a byte), SentencePiece
style BPE and Unigram (``▁`` stands for a blank, ``<0x0A>`` for a byte). Added tokens are their literal text.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from kvist_epp.prompt.canonical_chunks import CanonicalChunks
from kvist_epp.prompt.text_cuts import BLANK, MARKS_BLANKS, find_text_cuts, steps

_NO_TEXT, _NO_TEXT_EITHER = b"\xff", b"\xfe"
"""Bytes that are in no UTF-8. The first one is left to marks (``index.media_marks``)."""

Transform = Callable[[str], str]


class Vocabulary:
    """The pieces of one tokenizer and what it does to a text before it cuts it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads the tokenizer; truncation and padding of its own are switched off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        spec = json.loads(tokenizer.to_str())
        self._tokenizer = tokenizer
        self._normalise = _text_transform(tokenizer, spec)
        self.pieces, self.absent = _pieces(tokenizer, spec)
        self._before, self._after = self._ends()
        cuts = None if _prefix(spec) else find_text_cuts(spec, self.pieces)
        self.chunks = CanonicalChunks(self.pieces, self.encode, cuts) if cuts else None
        """Which chunks of tokens are canonical; None if it is not known where this tokenizer cuts texts."""
        self.why_not = _unsupported(spec) or self._unfaithful()
        """Why bytes cannot be trusted; empty when they can."""

    def prompt(self, text: str, *, add_special_tokens: bool) -> bytes:
        """The bytes the tokens of this text join to.

        Raises:
            UnicodeEncodeError: the text has lone surrogates.
        """
        data = self._normalise(text).encode()
        return self._before + data + self._after if add_special_tokens else data

    def join(self, ids: Iterable[int]) -> bytes:
        """The bytes of these tokens.

        Raises:
            IndexError: an id beyond the vocabulary.
        """
        pieces = self.pieces
        return b"".join([pieces[identifier] for identifier in ids])

    def is_added(self, token: int) -> bool:
        """Return whether a token is an added one, which no other text is cut into."""
        return token in self._tokenizer.get_added_tokens_decoder()

    def encode(self, text: str) -> list[int]:
        """The real tokenizer's ids: specials recognised in the text, none added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _ends(self) -> tuple[bytes, bytes]:
        """Return the tokens that the post-processor puts before and after a text."""
        bare = self.encode("a")
        full = self._tokenizer.encode("a").ids
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return self.join(full[:at]), self.join(full[at + len(bare) :])

    def _unfaithful(self) -> str:
        specials = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()][:8]
        texts = [*SAMPLES, *(f"{special}{SAMPLES[0]}{special} x" for special in specials), "".join(specials)]
        wrong = [at for at, text in enumerate(texts) if not self._round_trips(text)]
        return f"{len(wrong)} of {len(texts)} sample texts do not survive the tokenizer" if wrong else ""

    def _round_trips(self, text: str) -> bool:
        return self.join(self._tokenizer.encode(text).ids) == self.prompt(text, add_special_tokens=True)


def _pieces(tokenizer: Tokenizer, spec: dict[str, Any]) -> tuple[list[bytes], frozenset[int]]:
    """The bytes of each id, and the ids that stand for nothing."""
    decode = _byte_level if _uses_byte_level(spec) else _sentencepiece
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    pieces: dict[int, bytes] = {identifier: decode(piece) for piece, identifier in vocabulary.items()}
    for identifier, token in tokenizer.get_added_tokens_decoder().items():
        pieces[identifier] = _literal(token.content, spec)
    size = max(pieces, default=-1) + 1
    absent = frozenset(identifier for identifier in range(size) if identifier not in pieces)
    found = (pieces.get(identifier, b"") for identifier in range(size))
    return [piece.replace(_NO_TEXT, _NO_TEXT_EITHER) for piece in found], absent


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(BYTES.__getitem__, piece))
    except KeyError:  # a control token in the model's own vocabulary: its text
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(BLANK, " ").encode()


def _literal(content: str, spec: dict[str, Any]) -> bytes:
    return content.encode() if _uses_byte_level(spec) else content.replace(BLANK, " ").encode()


def _uses_byte_level(spec: dict[str, Any]) -> bool:
    return any(steps(spec[part], "ByteLevel") for part in ("pre_tokenizer", "decoder"))


def _unsupported(spec: dict[str, Any]) -> str:
    """Return known components that do not keep bytes; unknown ones show in the samples."""
    kind = spec["model"]["type"]
    if kind not in ("BPE", "Unigram"):
        return f"{kind} vocabularies do not keep a text's bytes"
    if any(token["single_word"] for token in spec["added_tokens"]):
        return "added tokens that match whole words only"
    return ""


def _text_transform(tokenizer: Tokenizer, spec: dict[str, Any]) -> Transform:
    """Return the transform of a text before splitting; one pass where added tokens make no difference."""
    normalise = _normaliser(tokenizer, spec)
    prefix = _prefix(spec)
    stripping = any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])
    if not stripping and prefix is None and normalise in (_unchanged, _blanks, _composed):
        return normalise
    if not stripping and prefix is _first and normalise in (_unchanged, _blanks):
        return _first_only(spec)
    return _between_added(spec, normalise, prefix)


def _unchanged(text: str) -> str:
    return text


def _normaliser(tokenizer: Tokenizer, spec: dict[str, Any]) -> Transform:
    """The normaliser's work on one stretch of text, with blanks for ``▁``."""
    changes = steps(spec["normalizer"])
    kinds = {step["type"] for step in changes}
    sentencepiece = not _uses_byte_level(spec)
    if not changes:
        return _blanks if sentencepiece else _unchanged
    if kinds == {"NFC"}:
        return _composed
    if all(_blanks_only(step) for step in changes):
        return _blanks
    normalizer = tokenizer.normalizer
    return lambda text: (
        _blanks(normalizer.normalize_str(text)) if sentencepiece else normalizer.normalize_str(text)
    )


def _blanks_only(step: dict[str, Any]) -> bool:
    return step in ({"type": "Prepend", "prepend": BLANK}, MARKS_BLANKS)


def _composed(text: str) -> str:
    return text if _is_composed(text) else unicodedata.normalize("NFC", text)


def _is_composed(text: str, step: int = 1_024) -> bool:
    """Return whether a text is in form NFC, by looking at pieces of ``step`` characters that are not ASCII.

    An ASCII character never combines with what is before it, so a text may be cut before each of them: a run
    of pieces with other characters is looked at with the one character before it, and the rest is composed.
    450 KB with one emoji take a quarter of the time (180 us), with one each 100 characters a fifth more.
    """
    if text.isascii():
        return True
    at, size = 0, len(text)
    while at < size:
        begin = at
        while at < size and not text[at : at + step].isascii():
            at += step
        if at > begin and not unicodedata.is_normalized("NFC", text[max(begin - 1, 0) : at]):
            return False
        at += step
    return True


def _blanks(text: str) -> str:
    return text.replace(BLANK, " ")


Prefix = Callable[[str, int], str]
"""What is put before a stretch of text that starts at this offset of the whole."""


def _prefix(spec: dict[str, Any]) -> Prefix | None:
    """The blank put in front: by ``Prepend`` always, by a pre-tokenizer unless there is one."""
    changes = steps(spec["normalizer"])
    if steps(spec["normalizer"], "Prepend") and all(_blanks_only(step) for step in changes):
        return _always
    for step in steps(spec["pre_tokenizer"]):
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        if step["type"] == "ByteLevel" and scheme != "never":
            return _unless_space
        if step["type"] == "Metaspace" and scheme != "never":
            return _first if scheme == "first" else _unless_blank
    return None


def _always(stretch: str, _offset: int) -> str:
    return " " if stretch else ""


def _unless_space(stretch: str, _offset: int) -> str:
    return "" if not stretch or stretch[0] == " " else " "


def _unless_blank(stretch: str, _offset: int) -> str:
    return "" if not stretch or stretch[0] in " ▁" else " "


def _first(stretch: str, offset: int) -> str:
    return _unless_blank(stretch, offset) if offset == 0 else ""


def _first_only(spec: dict[str, Any]) -> Transform:
    """For a prefix at the very beginning only: no need to look for added tokens beyond it."""
    added = tuple(token["content"] for token in spec["added_tokens"])

    def transform(text: str) -> str:
        begins_with_text = not text.startswith(added)
        return (_first(text, 0) if begins_with_text else "") + _blanks(text)

    return transform


def _between_added(spec: dict[str, Any], normalise: Transform, prefix: Prefix | None) -> Transform:
    """The text cut at added tokens, which stay as they are, and the stretches between them changed."""
    patterns: dict[str, str] = {token["content"]: _pattern(token) for token in spec["added_tokens"]}
    contents = sorted(patterns, key=len, reverse=True)
    stripped = re.compile(rf"\A{_SPACES}|{_SPACES}\Z")
    cut = re.compile("|".join(patterns[content] for content in contents) or r"(?!)")

    def transform(text: str) -> str:
        made: list[str] = []
        end = 0
        for found in cut.finditer(text):
            made += (_stretch(text[end : found.start()], end), _content(found.group()))
            end = found.end()
        return "".join((*made, _stretch(text[end:], end)))

    def _content(matched: str) -> str:
        return matched if matched in patterns else stripped.sub("", matched)

    def _stretch(text: str, offset: int) -> str:
        changed = normalise(text)
        return prefix(changed, offset) + changed if prefix else changed

    return transform


def _pattern(token: dict[str, Any]) -> str:
    content = re.escape(str(token["content"]))
    return (_SPACES if token["lstrip"] else "") + content + (_SPACES if token["rstrip"] else "")


def _alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


BYTES: Final = _alphabet()
_SPACES: Final = r"[^\S\x1c-\x1f]*"
"""Unicode's white space, as Rust has it; Python's ``\\s`` has four separators more."""

SAMPLES: Final[Sequence[str]] = (
    "The quick brown fox, 1,234.5 times; it's the fox's.",
    "Größe über åäö, déjà vu, naïve, ß\u2019s",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم.",
    "नमस्ते दुनिया, สวัสดีชาวโลก, 안녕하세요 세계",
    "你好，世界。こんにちは、世界！\u3000全角ＡＢＣ①",
    "emoji 🌿👩🏽‍💻🇸🇪 and e\u0301 a\u030a, ﬁ ligature, Å angstrom, ½ ² ™",
    "  two spaces, then   three\n\n\tand a tab\r\nthe end  ",
    "\n",
    " ",
    "",
    "def f(x):\n    return {'a': [1, 2.50, None]}  # `f`\n",
    '{"name": "get_weather", "arguments": {"city": "Göteborg\\n"}}',
    "\x00\x07 control, zero\u200bwidth, no\u00a0break, \U0001d504\U00010348",
)
