"""Writes the defaults of transformers' configuration classes: ``python -m tests.engine.class_defaults``.

vLLM reads config.json with these classes, so a key that a file leaves out has the default of its class. The
classes are those of the transformers that the newest vLLM of the engine tests runs with.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.engine import install

FILE: Final = Path(__file__).parents[2] / "operator" / "kvist_operator" / "models" / "class_defaults.json"
KEYS: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "attention_chunk_size", "no_rope_layer_interval"),
    *("attention_bias", "qkv_bias", "use_qk_norm", "multi_query", "new_decoder_architecture"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"),
    *("top_k_experts", "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "intermediate_size_mlp", "enable_moe_block"),
    *("interleave_moe_layer_step", "first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq"),
    *("moe_layer_start_index", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "index_topk", "index_n_heads", "index_head_dim", "full_attention_interval"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_value_head_dim", "mamba_num_heads", "mamba_head_dim", "mamba_n_heads", "mamba_d_head"),
    *("mamba_d_state", "mamba_d_conv", "mamba_n_groups", "ssm_state_size", "n_groups", "conv_kernel"),
    *("attn_output_gate", "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers"),
)
"""Keys of a decoder that ``kvist_operator.models`` reads."""
VISION: Final = (
    *("hidden_size", "intermediate_size", "depth", "num_hidden_layers", "num_heads", "image_size"),
    *("num_attention_heads", "patch_size", "spatial_merge_size", "pooling_kernel_size", "embed_dim"),
)
OUTER: Final = ("tie_word_embeddings", "mm_tokens_per_image", "vision_soft_tokens_per_image")
DUMP: Final = '''
import json, sys, transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

keys, vision_keys, outer_keys = json.load(sys.stdin)
decoders = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
several = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

MIXED = [{"full_attention", kind} for kind in ("sliding_attention", "chunked_attention", "linear_attention")]

def values(config, names):
    """Numbers and switches of the configuration, by the names it stores them under."""
    return {k: v for k, v in config.to_dict().items() if k in names and type(v) in (int, bool)}

def fixed(make, names):
    """Defaults that do not follow from another key: they are the same in a model of other dimensions."""
    base = make()
    found = values(base, names)
    for other in ({"num_attention_heads": 64}, {"hidden_size": 8192}, {"num_hidden_layers": 96}):
        if all(getattr(base, key, None) is not None for key in other):
            try:
                changed = values(make(**other), names)
            except Exception:
                continue
            found = {k: v for k, v in found.items() if k in other or changed.get(k) == v}
    return found

def repeats(kinds, unit):
    return all(kind == unit[i % len(unit)] for i, kind in enumerate(kinds))

def pattern(make):
    """The kinds that repeated give the layers of models of several depths; None if all are equal."""
    lists = []
    for count in (96, 47):
        try:
            lists.append(list(make(num_hidden_layers=count).layer_types))
        except Exception:
            return None
    for size in range(2, 13):
        unit = lists[0][:size]
        if set(unit) in MIXED and all(repeats(kinds, unit) for kinds in lists):
            return unit
    return None

text, outer, names = {}, {}, sorted({*decoders, *several})
for name in names:
    try:
        cls = CONFIG_MAPPING[name]
        config = cls()
    except Exception:
        continue
    inner = getattr(config, "text_config", None)
    if inner is not None and inner is not config:
        row = {"text": inner.model_type, **values(config, outer_keys)}
        seen = getattr(config, "vision_config", None)
        if seen is not None:
            row["vision_type"] = seen.model_type
            row["vision"] = fixed(type(seen), vision_keys)
        outer[name] = row
        name, cls = inner.model_type, type(inner)
    config = cls()
    if name in text or getattr(config, "is_encoder_decoder", False):
        continue
    text[name] = fixed(cls, keys)
    aliases = {k: v for k, v in config.attribute_map.items() if v in text[name]}
    if aliases:
        text[name]["aliases"] = aliases
    unit = pattern(cls)
    if unit:
        text[name]["layer_pattern"] = unit
print("FOUND" + json.dumps({"transformers": transformers.__version__, "text": text, "outer": outer}))
'''


def read() -> dict[str, Any]:
    """Return the table as the installed classes give it. Raises CalledProcessError."""
    done = subprocess.run(
        [str(install.install()), "-W", "ignore", "-c", DUMP],
        input=json.dumps([KEYS, VISION, OUTER]),
        env=os.environ | {"PYTHONPATH": str(install.newest_code())},
        capture_output=True,
        text=True,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    return found


def spelled(table: dict[str, Any]) -> str:
    """Return the text of the file: one line for each type."""
    parts = [f'"transformers": {json.dumps(table["transformers"])}']
    for part in ("text", "outer"):
        rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(table[part].items()))
        parts.append(f'"{part}": {{\n' + ",\n".join(rows) + "\n}")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    FILE.write_text(spelled(read()))
