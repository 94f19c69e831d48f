"""Model folders as publishers lay them out: five template shapes, each with a tokenizer of its family."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.models import vocabularies
from tokenizers import AddedToken, Tokenizer

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class Shape:
    """One family of models."""

    tokenizer: Callable[[], Tokenizer]
    bos: str | None
    eos: str
    inline: bool
    """The template is in ``tokenizer_config.json``; else in ``chat_template.jinja``."""
    add_bos: bool = False
    """The tokenizer config repeats ``add_bos_token``, as older models do."""

    def write(self, name: str, folder: Path) -> Path:
        """The folder with ``tokenizer.json``, ``tokenizer_config.json`` and the chat template."""
        folder.mkdir(parents=True, exist_ok=True)
        template = (TEMPLATES / f"{name}.jinja").read_text()
        config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos}
        if self.bos is not None:
            config["bos_token"] = {"content": self.bos, "__type": "AddedToken", "special": True}
        if self.add_bos:
            config["add_bos_token"] = True
        if self.inline:
            config["chat_template"] = template
        else:
            (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self.tokenizer().save(str(folder / "tokenizer.json"))
        return folder


LLAMA = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
MISTRAL = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
]

SHAPES = {
    "chatml": Shape(vocabularies.qwen, None, "<|im_end|>", inline=True),
    "llama3": Shape(
        lambda: vocabularies.byte_level(LLAMA, bos=LLAMA[0]), LLAMA[0], "<|eot_id|>", inline=True
    ),
    "mistral": Shape(
        lambda: vocabularies.sentencepiece_bpe(MISTRAL, bos="<s>"), "<s>", "</s>", inline=False, add_bos=True
    ),
    "deepseek": Shape(
        lambda: vocabularies.byte_level(DEEPSEEK, bos=DEEPSEEK[0]), DEEPSEEK[0], DEEPSEEK[1], inline=True
    ),
    "gemma": Shape(
        lambda: vocabularies.sentencepiece_bpe(
            ["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"], bos="<bos>", prefix="never"
        ),
        "<bos>",
        "<end_of_turn>",
        inline=False,
    ),
}


def write_harmony(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """The model folder of a gpt-oss, by default with the real vocabulary; its template is not used."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or vocabularies.harmony()).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    described = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


DEEPSEEK_CODED = {
    "v32": "DeepseekV32ForCausalLM",
    "v4": "DeepseekV4ForCausalLM",
    "v41": "DeepseekV41ForCausalLM",
}
"""Architectures of the models of DeepSeek whose chats engines write by code."""
DEEPSEEK_TOKENS = (
    *("<think>", "</think>", "｜DSML｜", "<｜System｜>", "<｜latest_reminder｜>", "<｜deepseek_image｜>"),
    *("<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"),
)


def write_deepseek(version: str, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """The model folder of a key of ``DEEPSEEK_CODED``, by default with a small vocabulary; it has no
    template."""
    folder.mkdir(parents=True, exist_ok=True)
    found = tokenizer or vocabularies.byte_level(DEEPSEEK[:4], bos=DEEPSEEK[0])
    tokens = [*DEEPSEEK[:4], *DEEPSEEK_TOKENS]
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    found.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": DEEPSEEK[0],
        "eos_token": DEEPSEEK[1],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"architectures": [DEEPSEEK_CODED[version]]}))
    return folder


MISTRAL_VERSIONS = ("v3", "v7", "v11", "v13", "v15")


def write_mistral(version: str, folder: Path) -> Path:
    """The model folder of one of ``MISTRAL_VERSIONS``: Mistral's own tokenizer and no other."""
    folder.mkdir(parents=True, exist_ok=True)
    words, reserved = vocabularies.tekken_words(), 100
    described: dict[str, object] = {
        "config": {
            "pattern": vocabularies.QWEN_SPLIT,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + reserved,
            "default_num_special_tokens": reserved,
            "version": version,
        },
        "vocab": words,
    }
    if version not in ("v3", "v7"):
        described["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(vocabularies.TEKKEN_TOKENS)
        ]
    if version == "v15":
        efforts = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}
        described["model_settings_builder"] = {"reasoning_effort": efforts}
    (folder / "tekken.json").write_text(json.dumps(described))
    (folder / "consolidated.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "config.json").write_text(json.dumps({"architectures": ["MistralForCausalLM"]}))
    return folder


KIMI_TOKENS = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)


def write_kimi(folder: Path) -> Path:
    """The model folder of a Kimi K2.5, without the code of its tokenizer; special tokens follow the words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = vocabularies.tekken_words()
    lines = [f"{word['token_bytes']} {word['rank']}\n" for word in words]
    (folder / "tiktoken.model").write_text("".join(lines))
    listed = {str(len(words) + at): {"content": text, "special": True} for at, text in enumerate(KIMI_TOKENS)}
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": listed,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": (TEMPLATES / "kimi.jinja").read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    return folder


VISION_TOKENS = (
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>"),
    *("<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>"),
    "<|video_pad|>",
)
"""What Qwen2-VL adds to Qwen's special tokens, in its order: ids are those of the real model."""


def write_vision(folder: Path) -> Path:
    """The model folder of a Qwen2-VL, but for its weights, sizes and the settings of its processor."""
    SHAPES["chatml"].write("vision", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in VISION_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", **described}))
    return folder


def write(name: str, folder: Path) -> Path:
    """The model folder of one shape of ``SHAPES``, without weights."""
    return SHAPES[name].write(name, folder)
