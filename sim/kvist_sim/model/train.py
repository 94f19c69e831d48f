"""``python -m kvist_sim.model.train [FOLDER]``: writes the model files from ``corpus.txt``,
deterministically.

Byte-level BPE in the shape of Qwen's: a splitting expression that isolates words, single digits and runs of
spaces, then bytes; no normalisation; nothing added by the tokenizer itself. The template is ours, in ChatML's
shape with tools.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvist_sim.model import folder

VOCABULARY: Final = 2_048
"""Entries before the added tokens. Merges seen once count, too: the corpus is small, and tokens of about
four bytes are what real vocabularies give."""

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN: Final = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are ordinary text for the decoder, as Qwen has them."""

SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATE: Final = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is not none -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set lead = text(messages[0].content) if messages and messages[0].role == 'system' else '' -%}
{%- if lead or tools -%}
<|im_start|>system
{{ lead }}
{%- if tools -%}
{{ '\\n\\n' if lead else '' }}# Tools

You may call one or more of these functions:
<tools>
{%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
{{ '\\n' }}</tools>
Answer a call with {"name": …, "arguments": …} inside <tool_call></tool_call>.
{%- endif -%}
<|im_end|>
{{ '' }}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and message.role == 'system') -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ '<tool_response>\\n' if message.role == 'tool' else '' }}
{{- text(message.content) }}
{{- '\\n</tool_response>' if message.role == 'tool' else '' }}
{%- for call in message.tool_calls or [] -%}
{{- ('' if loop.first and not message.content else '\\n') ~ '<tool_call>\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor -%}
<|im_end|>
{{ '' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{{ '' }}
{%- endif -%}
"""

TOKENIZER_CONFIG: Final[dict[str, Any]] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 40960,
    "chat_template": TEMPLATE,
}

QWEN3_32B: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The model whose speed and memory the simulator has by default; sizes from its published config.json."""


def tokenizer(corpus: str) -> Tokenizer:
    """Return a byte-level BPE trained on the lines of `corpus`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    made.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    return made


def write(target: Path) -> None:
    """Writes the three files into `target`, which must exist."""
    made = tokenizer((folder() / "corpus.txt").read_text(encoding="utf-8"))
    size = made.get_vocab_size()
    config = QWEN3_32B | {"vocab_size": size, "eos_token_id": made.token_to_id("<|im_end|>")}
    made.save(str(target / "tokenizer.json"))
    _json(target / "tokenizer_config.json", TOKENIZER_CONFIG)
    _json(target / "config.json", config)


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else folder())
