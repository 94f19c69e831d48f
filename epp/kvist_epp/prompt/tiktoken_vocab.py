"""Vocabularies of tokens with ranks, as tiktoken reads them, as tokenizers of the ``tokenizers`` library.

Some publishers have no other file: Mistral's ``tekken.json`` (``mistral_common.tokens.tokenizers.tekken``,
1.13) has a number of special tokens in front of the words; Kimi's ``tiktoken.model`` has a word and its rank
in each line, and special tokens behind them (``tokenization_kimi.py`` beside the model).
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.text_cuts import KIMI_LETTERS
from kvist_epp.prompt.vocab import BYTES

BEGIN: Final = "<s>"
"""Begins each prompt."""

_CHARACTERS: Final = {byte: character for character, byte in BYTES.items()}
_FIRST_SPECIALS: Final = (
    *("<unk>", BEGIN, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that list none: those up to version 7."""
_MAX_SPECIALS: Final = 10_000
_MAX_WORD: Final = 1_024
"""Most bytes of a word, whose pairs are found in the square of its length."""
_KIMI_SPECIALS: Final = 258
KIMI_PATTERN: Final = "|".join(
    (KIMI_LETTERS, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
)
"""The pattern by which Kimi's tokenizer finds words."""


def tekken_tokenizer(described: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a ``tekken.json`` describes.

    Raises:
        ModelFilesError: the file has another format.
    """
    try:
        return _tokenizer(described)
    except Exception as error:  # the library raises nothing more precise for a pattern
        raise ModelFilesError(
            f"tekken.json has an unknown format ({type(error).__name__}): fetch it again, or upgrade kvist"
        ) from error


def _tokenizer(described: Mapping[str, Any]) -> Tokenizer:
    settings = described["config"]
    reserved = settings["default_num_special_tokens"]
    listed = described.get("special_tokens")
    named = (
        dict(enumerate(_FIRST_SPECIALS))
        if listed is None
        else {one["rank"]: one["token_str"] for one in listed}
    )
    words = settings["default_vocab_size"] - reserved
    if not (0 < reserved <= _MAX_SPECIALS and 0 < words <= len(described["vocab"])):
        raise ValueError("sizes that do not fit")
    specials = {rank: named.get(rank, f"<SPECIAL_{rank}>") for rank in range(reserved)}
    ranks = {_bytes(one["token_bytes"]): one["rank"] for one in described["vocab"][:words]}
    tokenizer = _of_ranks(ranks, reserved, specials, settings["pattern"])
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[begin]
    )
    return tokenizer


def kimi_tokenizer(words: bytes, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a ``tiktoken.model``; ``settings``: its ``tokenizer_config.json``.

    Raises:
        ModelFilesError: the file has another format.
    """
    try:
        pairs = [line.split() for line in words.splitlines() if line]
        ranks = {_bytes(word): int(rank) for word, rank in pairs}
        named = {int(rank): one["content"] for rank, one in settings["added_tokens_decoder"].items()}
        behind = range(len(ranks), len(ranks) + _KIMI_SPECIALS)
        specials = {rank: named.get(rank, f"<|reserved_token_{rank}|>") for rank in behind}
        return _of_ranks(ranks, 0, specials, KIMI_PATTERN)
    except Exception as error:
        raise ModelFilesError(
            f"tiktoken.model has an unknown format ({type(error).__name__}): fetch it again, or give a "
            "tokenizer.json"
        ) from error


def _of_ranks(ranks: Mapping[bytes, int], first: int, specials: Mapping[int, str], pattern: str) -> Tokenizer:
    """Return a tokenizer whose words have ids from ``first`` on; the pattern cuts texts before merges.

    Raises ValueError if ranks are missing, or a word is too long.
    """
    if sorted(ranks.values()) != list(range(len(ranks))) or max(map(len, ranks)) > _MAX_WORD:
        raise ValueError("ranks that are not those of words")
    vocabulary = {_spelled(piece): first + rank for piece, rank in ranks.items()}
    vocabulary |= {text: rank for rank, text in specials.items()}
    merges = [(_spelled(left), _spelled(right)) for left, right in merge_pairs(ranks)]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in specials.values()]
    tokenizer.add_special_tokens(added)
    return tokenizer


def _bytes(word: str | bytes) -> bytes:
    return base64.b64decode(word, validate=True)


def _spelled(piece: bytes) -> str:
    return "".join([_CHARACTERS[byte] for byte in piece])


def merge_pairs(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each pair of tokens that makes a token, in the order in which pairs are merged: by its rank.

    Example: of ranks a: 0, b: 1, c: 2, ab: 3, bc: 4, abc: 5 the pairs are (a, b), (b, c), (a, bc), (ab, c).
    """
    for piece in sorted(ranks, key=ranks.__getitem__):
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        yield from sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
