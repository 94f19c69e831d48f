# mypy: disable-error-code="import-not-found, misc, no-untyped-call, no-untyped-def"
"""Stands for ``tokenization_kimi.py`` beside a model of Kimi: engines run it in their own environment.

It does what the published code does with a vocabulary and with tools, by tiktoken itself and by the encoder
of declarations in PyPI's ``tinker-cookbook``, a copy of the published one.
"""

from pathlib import Path

import tiktoken
from kimi_k2_5_tool_declaration_ts import encode_tools_to_typescript_style
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

PATTERN = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TikTokenTokenizer(PreTrainedTokenizer):
    """A tokenizer whose tokens are written as characters of one byte each."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012 - as transformers has it
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, added_tokens_decoder=None, **settings):
        """Read the vocabulary; special tokens follow it."""
        ranks = load_tiktoken_bpe(vocab_file)
        named = {rank: str(token) for rank, token in (added_tokens_decoder or {}).items()}
        behind = range(len(ranks), len(ranks) + 258)
        self.special_ranks = {named.get(rank, f"<|reserved_token_{rank}|>"): rank for rank in behind}
        self.model = tiktoken.Encoding(
            Path(vocab_file).name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_ranks
        )
        self.spelled = [
            self.model.decode_single_token_bytes(rank).decode("latin-1") for rank in range(self.model.n_vocab)
        ]
        self.ranks = {text: rank for rank, text in enumerate(self.spelled)}
        super().__init__(**settings)

    @property
    def vocab_size(self) -> int:
        """The number of all tokens."""
        return self.model.n_vocab

    def get_vocab(self) -> dict[str, int]:
        """Ranks by token."""
        return dict(self.ranks)

    def encode(self, text, **_) -> list[int]:
        """Special tokens are recognised in the text, none is added."""
        return self.model.encode(text, allowed_special="all")

    def __call__(self, text, **_):
        """Return what ``encode`` does, for what calls a tokenizer."""
        return {"input_ids": self.encode(text)}

    def _tokenize(self, text, **_):
        return [self.spelled[rank] for rank in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.ranks.get(token, 0)

    def _convert_id_to_token(self, index):
        return self.spelled[index]

    def convert_tokens_to_string(self, tokens):
        """Join the bytes of tokens."""
        return "".join(tokens).encode("latin-1").decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        """Save no file."""
        return ()

    def apply_chat_template(self, conversation, tools=None, thinking=True, **others):
        """Sort the fields of tools, and declare them in TypeScript where that is possible."""
        tools = ordered(tools)
        if tools:
            try:
                others["tools_ts_str"] = encode_tools_to_typescript_style(tools)
            except Exception:  # noqa: BLE001 - as the published code
                others.pop("tools_ts_str", None)
        return super().apply_chat_template(conversation, tools=tools, thinking=thinking, **others)


def ordered(value):
    """Return a value whose objects have their fields in alphabetical order."""
    if isinstance(value, dict):
        return {name: ordered(value[name]) for name in sorted(value)}
    return [ordered(one) for one in value] if isinstance(value, list) else value
