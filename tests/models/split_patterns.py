"""Small tokenizers that find words as models do, with tokens that cross the words' ends.

The tokens are trained on text that was not cut, so that a wrong cut shows: what a pattern keeps apart could
be merged.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Final

from tests.models.text import PARAGRAPHS, SAMPLES
from tests.models.vocabularies import QWEN_SPLIT, sentencepiece_bpe
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kvist_epp.prompt.tiktoken_vocab import KIMI_PATTERN

CHAT = ("<|im_start|>", "<|im_end|>")
LLAMA3 = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
MISTRAL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = MISTRAL.replace("]+|[^", f"]+{CONTRACTION}|[^").replace(
    r"]*|\p{N}", rf"]*{CONTRACTION}|\p{{N}}{{1,3}}"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = QWEN_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
SEED = LLAMA3.replace("{1,3}", "{1}").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def by_patterns(*patterns: str, chat: Sequence[str] = CHAT, composed: bool = False) -> Tokenizer:
    """Return a tokenizer that cuts by one pattern after the other; ``composed``: of texts in form NFC."""
    tokenizer = _merged_over_everything()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    behind = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, behind])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in chat])
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def byte_level() -> Tokenizer:
    """Return one that cuts as GPT-2's does, behind a cut of digits: Command R, StarCoder."""
    tokenizer = by_patterns()
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


_SHORT: Final = (*"aB木カइ.'/ \n3", "ll", "re", " a", "  ", "Bc", "木木", "カー", ")\n", "e\u0301")


def _merged_over_everything() -> Tokenizer:
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=2500, initial_alphabet=alphabet, show_progress=False)
    drawn = random.Random(1)
    mixed = ("".join(drawn.choices(_SHORT, k=20)) for _ in range(300))
    tokenizer.train_from_iterator([*PARAGRAPHS, *SAMPLES, *mixed], trainer)
    return tokenizer.to_str()


FAMILIES: Mapping[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "llama 3": lambda: by_patterns(LLAMA3),
    "qwen 3.5": lambda: by_patterns(QWEN35, composed=True),
    "mistral": lambda: by_patterns(MISTRAL),
    "gpt-4o": lambda: by_patterns(GPT4O),
    "deepseek": lambda: by_patterns(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK),
    "kimi": lambda: by_patterns(KIMI_PATTERN),
    "seed": lambda: by_patterns(SEED),
    "ling": lambda: by_patterns(LING),
    "sentencepiece": lambda: sentencepiece_bpe(CHAT, prefix="never"),
}
"""Tokenizers of which it is known where they cut texts."""
