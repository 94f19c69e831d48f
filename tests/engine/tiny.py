"""Model folders a real vLLM can load: a tokenizer folder plus the configuration of a tiny random Qwen3."""

import json
import random
import shutil
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.models import folders
from tokenizers import Tokenizer


def build(shape: str, folder: Path, *, context: int = 32768) -> Path:
    """A loadable model of one of ``tests.models.folders.SHAPES``, for ``--load-format dummy``."""
    return add_weights_config(folders.write(shape, folder), context=context)


def harmony(folder: Path) -> Path:
    """A tiny gpt-oss with the real vocabulary, for ``--load-format dummy`` and ``--dtype bfloat16``."""
    described = json.loads((folders.write_harmony(folder) / "config.json").read_text())
    add_weights_config(folder)
    path = folder / "config.json"
    rotary = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    rotary |= {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0}
    oss = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "rope_parameters": rotary,
        "tie_word_embeddings": False,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | described | oss))
    return folder


def deepseek(version: str, folder: Path) -> Path:
    """A model that engines take for one of DeepSeek until they load its weights, of which it has none."""
    described = json.loads((folders.write_deepseek(version, folder) / "config.json").read_text())
    path = add_weights_config(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | described | {"index_topk": 512}))
    return folder


def mistral(version: str, folder: Path) -> Path:
    """A tiny model with Mistral's own tokenizer, for ``--load-format dummy``."""
    settings = json.loads((folders.write_mistral(version, folder) / "tekken.json").read_text())["config"]
    return _write_config(folder, settings["default_vocab_size"], 2)


def kimi(folder: Path, declarations: Path) -> Path:
    """A tiny model with the tokenizer of Kimi K2.5, for ``--load-format dummy`` and ``--trust-remote-code``;
    ``declarations``: the file of code that declares tools."""
    words = folders.write_kimi(folder) / "tiktoken.model"
    code = (Path(__file__).with_name("kimi_code.py")).read_text()
    (folder / "tokenization_kimi.py").write_text(code.replace("from kimi_k2_5", "from .kimi_k2_5"))
    shutil.copy(declarations, folder)
    size = len(words.read_text().splitlines()) + 258
    return _write_config(folder, -(-size // 64) * 64, size - 257)


def embedding(folder: Path, *, encoder: bool) -> Path:
    """A loadable embedding model: a BERT, or a Qwen3 that sentence-transformers pools by its last token."""
    build("chatml", folder, context=512)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if encoder:
        bert = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu"}
        dropped = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps")
        config = {key: value for key, value in config.items() if key not in dropped} | bert
    else:
        module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
        (folder / "modules.json").write_text(json.dumps([module]))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    path.write_text(json.dumps(config))
    return folder


VISION_PIXELS = 28
"""Height and width of what one token of a picture stands for."""
VISION_LEAST, VISION_MOST = 16, 200
"""Tokens of a picture: smaller and larger ones are scaled."""


def vision(folder: Path) -> Path:
    """A tiny Qwen2-VL, for ``--load-format dummy`` and an engine with ``install.torchvision`` on its path."""
    described = json.loads((folders.write_vision(folder) / "config.json").read_text())
    config = json.loads((add_weights_config(folder) / "config.json").read_text())
    # two layers that read pictures; their result is as wide as the text model
    tower = {
        "model_type": "qwen2_vl",
        "depth": 2,
        "embed_dim": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "hidden_size": config["hidden_size"],
        "patch_size": VISION_PIXELS // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    # the three parts of a position share the frequencies of a head
    sections = [config["head_dim"] // 8, config["head_dim"] * 3 // 16, config["head_dim"] * 3 // 16]
    seeing: dict[str, object] = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": tower,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
    }
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(described | config | seeing))
    processor = {
        "processor_class": "Qwen2VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": VISION_LEAST * VISION_PIXELS**2,
        "max_pixels": VISION_MOST * VISION_PIXELS**2,
        "patch_size": VISION_PIXELS // 2,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def with_windows(folder: Path, *, window: int = 256) -> Path:
    """Make the model in the folder a Gemma 3: two layers with a sliding window, then one that attends to all,
    in KV cache groups of their own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    gemma = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "sliding_window": window,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 1e4,
    }
    path.write_text(json.dumps(config | gemma))
    return folder


def with_drafts(folder: Path, draft: Path) -> Path:
    """Make the model in the folder a Llama, and write the EAGLE head of one layer that drafts for it."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    path.write_text(json.dumps(config))
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


def add_weights_config(folder: Path, *, context: int = 32768) -> Path:
    """Writes ``config.json`` for the tokenizer in the folder: 2 layers, 128 hidden, ``context`` tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(str(settings["eos_token"]))
    return _write_config(folder, -(-size // 64) * 64, end, context)


def _write_config(folder: Path, size: int, end: int | None, context: int = 32768) -> Path:
    """Writes the configuration for a vocabulary of this size, whose token ``end`` ends answers."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": size,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_weights(folder: Path, *, seed: int = 1) -> Path:
    """Write random weights, for ``--load-format safetensors``, with which outputs depend on the KV cache.

    With ``--load-format dummy`` all logits are nearly equal, whatever the KV cache contains. Here the scale
    of queries, keys and their norms makes attention peaked, and ``lm_head`` is a matrix of its own, so that
    one wrong block changes text and logprobs. The file is that of the safetensors format: the length of a
    JSON header (8 bytes, little endian), the header, the numbers."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"tie_word_embeddings": False}
    path.write_text(json.dumps(config))
    return _write(folder / "model.safetensors", _tensors(config), seed)


RANK = 8
"""Of ``adapter``."""


def adapter(folder: Path, base: Path, *, seed: int = 2) -> Path:
    """Write a LoRA adapter of the attention of a model in ``base``, large enough to change its answers."""
    folder.mkdir()
    config = json.loads((base / "config.json").read_text())
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    _write(folder / "adapter_model.safetensors", _adapter_tensors(config), seed)
    return folder


def _write(path: Path, tensors: Iterable[tuple[str, list[int], float]], seed: int) -> Path:
    """Write a file of random matrices and constant vectors; return its folder."""
    generator = random.Random(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    numbers, at = bytearray(), 0
    for name, shape, scale in tensors:
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = (generator.gauss(0.0, scale) for _ in range(count)) if len(shape) > 1 else [scale] * count
        numbers += array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, len(numbers)]}
        at = len(numbers)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    return path.parent


def _adapter_tensors(config: dict[str, int]) -> Iterator[tuple[str, list[int], float]]:
    """Yield name, shape and deviation of each matrix of an adapter."""
    for name, shape, _ in _tensors(config):
        if "self_attn" in name and len(shape) > 1:
            prefix, (out, into) = f"base_model.model.{name.removesuffix('.weight')}", shape
            yield f"{prefix}.lora_A.weight", [RANK, into], into**-0.5
            yield f"{prefix}.lora_B.weight", [out, RANK], RANK**-0.5


def _tensors(config: dict[str, int]) -> Iterator[tuple[str, list[int], float]]:
    """Yield name, shape and scale of each tensor: the deviation of a matrix, the value of a norm."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", [vocabulary, hidden], 1.0
    yield "model.norm.weight", [hidden], 1.0
    yield "lm_head.weight", [vocabulary, hidden], 0.6
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}self_attn.{name}_proj.weight", [rows, hidden], 2 / hidden**0.5
        yield f"{prefix}self_attn.o_proj.weight", [hidden, queries], 2 / queries**0.5
        yield f"{prefix}self_attn.q_norm.weight", [size], 2.0
        yield f"{prefix}self_attn.k_norm.weight", [size], 2.0
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", [inner, hidden], 1 / hidden**0.5
        yield f"{prefix}mlp.down_proj.weight", [hidden, inner], 1 / inner**0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", [hidden], 1.0
