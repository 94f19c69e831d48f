"""``tekken.json``, the vocabulary of Mistral's own tokenizer, as a tokenizer of the ``tokenizers`` library.

Many models of Mistral have no other file of a vocabulary. Format: ``mistral_common.tokens.tokenizers.tekken``
(1.13): tokens of bytes with their ranks, behind ``default_num_special_tokens`` special ones.
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from kvist_epp.errors import ModelFilesError
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


def tekken_tokenizer(described: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a ``tekken.json`` describes.

    Raises:
        ModelFilesError: the file has another format.
    """
    try:
        return _tokenizer(described)
    except (LookupError, TypeError, ValueError) as error:
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
    specials = [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(reserved)]
    words = settings["default_vocab_size"] - reserved
    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in described["vocab"][:words]}
    vocabulary = {_spelled(piece): reserved + rank for piece, rank in ranks.items()}
    vocabulary |= {text: rank for rank, text in enumerate(specials)}
    merges = [(_spelled(left), _spelled(right)) for left, right in merge_pairs(ranks)]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(settings["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[begin]
    )
    return tokenizer


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
