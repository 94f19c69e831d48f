"""Promises of the model package: config.json of every current kind becomes layers, weights and a size."""

from typing import Any

import pytest
from tests.operator.pools import DENSE, known

from kvist_operator.errors import ModelError
from kvist_operator.models.catalogue import catalogue
from kvist_operator.models.layers import Attention, Latent, Recurrent
from kvist_operator.models.shape import active_parameters, checkpoint_bytes, parameters, read_shape

PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": 16_060_522_496,
    "meta-llama/Llama-3.1-70B-Instruct": 141_107_412_992,
    "Qwen/Qwen3-8B": 16_381_470_720,
    "Qwen/Qwen3-32B": 65_524_246_528,
    "Qwen/Qwen3-30B-A3B": 61_064_245_248,
}
"""``metadata.total_size`` of their safetensors indexes, as quoted in public repositories."""

BILLIONS = {
    "deepseek-ai/DeepSeek-R1": (671, 37),
    "moonshotai/Kimi-K2-Instruct": (1026, 32),
    "zai-org/GLM-5": (744, 40),
    "openai/gpt-oss-120b": (117, 5.1),
    "openai/gpt-oss-20b": (21, 3.6),
    "Qwen/Qwen3-235B-A22B": (235, 22),
    "Qwen/Qwen3.5-397B-A17B": (397, 17),
    "MiniMaxAI/MiniMax-M2.5": (229, 10),
    "XiaomiMiMo/MiMo-V2-Flash": (309, 15),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, 12.9),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.2),
}
"""Total and active parameters, as published."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_size_from_the_shape_is_the_published_one(name: str) -> None:
    """The computed size is within a hundred-thousandth of every published index."""
    assert checkpoint_bytes(known(name).shape) == pytest.approx(PUBLISHED[name], rel=1e-5)


@pytest.mark.parametrize("name", sorted(BILLIONS))
def test_parameters_are_what_the_makers_say(name: str) -> None:
    """Total parameters are within 2 % of the published ones, active ones within an eighth (counts differ)."""
    shape = known(name).shape
    everything, active = BILLIONS[name]

    assert parameters(shape) / 1e9 == pytest.approx(everything, rel=0.02)
    assert active_parameters(shape) / 1e9 == pytest.approx(active, rel=0.125)


def test_a_compressed_checkpoint_has_the_size_on_its_card() -> None:
    """Kimi K2.5, with experts in 4 bits and the rest in 16 bits, has about 595 GB on disk."""
    assert checkpoint_bytes(known("moonshotai/Kimi-K2.5").shape) / 1e9 == pytest.approx(595, rel=0.002)


KAITO: dict[str, tuple[float, int, int, int, int, int]] = {
    "microsoft/phi-4": (27.31, 16384, 5120, 40, 40, 10),
    "microsoft/Phi-4-mini-instruct": (7.15, 131072, 3072, 32, 24, 8),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (14.96, 131072, 4096, 32, 32, 8),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": (27.51, 131072, 5120, 48, 40, 8),
    "microsoft/Phi-3.5-mini-instruct": (7.12, 131072, 3072, 32, 32, 32),
    "Qwen/Qwen2.5-Coder-7B-Instruct": (14.19, 32768, 3584, 28, 28, 4),
    "Qwen/Qwen2.5-Coder-32B-Instruct": (61.03, 32768, 5120, 64, 40, 8),
    "meta-llama/Llama-3.1-8B-Instruct": (14.96, 131072, 4096, 32, 32, 8),
    "meta-llama/Llama-3.3-70B-Instruct": (131.42, 131072, 8192, 80, 64, 8),
    "mistralai/Mistral-7B-v0.3": (13.50, 32768, 4096, 32, 32, 8),
    "mistralai/Mistral-7B-Instruct-v0.3": (13.50, 32768, 4096, 32, 32, 8),
    "google/gemma-3-4b-it": (8.01, 131072, 2560, 34, 8, 4),
    "google/gemma-3-27b-it": (51.10, 131072, 5376, 62, 32, 16),
    "deepseek-ai/DeepSeek-R1-0528": (641.30, 163840, 7168, 61, 128, 128),
    "deepseek-ai/DeepSeek-V3-0324": (641.30, 163840, 7168, 61, 128, 128),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (58.82, 262144, 2688, 52, 32, 2),
    "Qwen/Qwen3-8B-AWQ": (5.68, 40960, 4096, 36, 32, 8),
    "mistralai/Ministral-3-3B-Instruct-2512": (4.35, 262144, 3072, 26, 32, 8),
}
"""GiB of the files, context, hidden size, layers, heads and KV heads (kaito-project/kaito at 037fb35,
``presets/workspace/models/model_catalog.yaml``): a source beside those of the catalogue."""


@pytest.mark.parametrize("name", sorted(KAITO))
def test_a_second_source_has_the_same_dimensions_and_size(name: str) -> None:
    """Context, layers and heads are those that KAITO lists, and sizes differ by 0.6 % at most."""
    facts = known(name)
    size, context, hidden, layers, heads, kv_heads = KAITO[name]
    gib = (facts.checkpoint_bytes or checkpoint_bytes(facts.shape)) / 2**30

    assert gib == pytest.approx(size, rel=0.006)
    assert (facts.shape.max_len, facts.shape.hidden) == (context, hidden)
    assert (len(facts.shape.layers), heads in facts.shape.heads) == (layers, True)
    assert facts.shape.latent or kv_heads in facts.shape.kv_heads


def test_vision_towers_with_a_gate_have_three_matrices_in_a_block() -> None:
    """Qwen2.5-VL 7B has the 8,292,166,656 weights of its index (exolabs' model cards)."""
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    decoder = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "vocab_size": 152064,
    }
    decoder |= {"num_hidden_layers": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
    decoder |= {"max_position_embeddings": 128_000}
    shape = read_shape(
        {
            **decoder,
            "model_type": "qwen2_5_vl",
            "vision_config": {**vision, "patch_size": 14, "spatial_merge_size": 2},
        }
    )

    assert parameters(shape) == pytest.approx(8_292_166_656, rel=0.001)


def test_the_side_of_merged_patches_may_stand_outside_the_tower() -> None:
    """Mistral's files have ``spatial_merge_size`` beside ``vision_config``: four patches are one token."""
    tower: dict[str, Any] = {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "image_size": 1540,
        "patch_size": 14,
    }
    text = {**DENSE, "model_type": "mistral", "sliding_window": None}
    shape = read_shape(
        {"model_type": "mistral3", "spatial_merge_size": 2, "text_config": text, "vision_config": tower}
    )

    assert shape.encoder is not None
    assert (shape.encoder.merge, shape.encoder.tokens, shape.encoder.matrices) == (4, 55 * 55, 3)


def test_the_catalogue_is_large_and_readable() -> None:
    """The catalogue has 190 models, each with a readable shape and the source of its size; where something of
    a type is not modelled, the plan is unverified and says so."""
    found = [known(name) for name in catalogue()]

    assert len(found) >= 190
    assert all(facts.checkpoint_source for facts in found)
    assert {facts.shape.model_type for facts in found if facts.shape.notes} == {"deepseek_v4", "minimax_m3"}


def test_gqa_mqa_and_mha_are_distinguished() -> None:
    """MHA, GQA and MQA differ by the number of KV heads, under any of its names."""
    kinds = [
        read_shape({**DENSE, **keys}).describe().split(",")[0]
        for keys in ({}, {"num_key_value_heads": None, "multi_query": True}, {"num_key_value_heads": 32})
    ]

    assert kinds == ["32 layers of GQA 32/8", "32 layers of MQA 32/1", "32 layers of MHA 32/32"]


def test_a_layer_list_makes_a_hybrid() -> None:
    """Layers have a window where the list says so, and full attention elsewhere."""
    shape = known("openai/gpt-oss-120b").shape
    windows = [layer.mixer.window for layer in shape.layers if isinstance(layer.mixer, Attention)]

    assert windows == [128, 0] * 18


def test_a_window_that_is_switched_off_is_none() -> None:
    """The window in Qwen 2's config.json is ignored if its switch is off."""
    shape = read_shape({**DENSE, "sliding_window": 4096, "use_sliding_window": False})

    assert not any(isinstance(layer.mixer, Attention) and layer.mixer.window for layer in shape.layers)


def test_mla_is_one_row_for_all_heads() -> None:
    """MLA is read with its dimensions; every fourth layer of GLM 5.3 has an indexer of its own."""
    dense = known("deepseek-ai/DeepSeek-R1").shape.latent
    sparse = [layer.mixer for layer in known("zai-org/GLM-5.3-FP8").shape.layers]

    assert dense is not None
    assert (dense.kv_rank, dense.rope_dim, dense.sparse) == (512, 64, False)
    assert sum(isinstance(m, Latent) and m.indexer is not None for m in sparse) == 21


def test_recurrent_states_are_read_with_their_dtype() -> None:
    """Recurrent states of Qwen3.5 and Nemotron are in 32 bits, as config.json says."""
    qwen, nemotron = (
        next(layer.mixer for layer in known(name).shape.layers if isinstance(layer.mixer, Recurrent))
        for name in ("Qwen/Qwen3.5-27B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    )

    assert (qwen.kind, qwen.state, qwen.state_dtype) == ("gated delta net", 48 * 128 * 128, "float32")
    assert (nemotron.kind, nemotron.state, nemotron.state_dtype) == ("Mamba 2", 64 * 64 * 128, "float32")


def test_layers_of_one_part_have_no_other() -> None:
    """Mixers, experts and attention are separate layers in Nemotron's pattern."""
    layers = known("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").shape.layers

    assert len(layers) == 52
    assert all((layer.mixer is None) != (layer.experts is None) for layer in layers)


@pytest.mark.parametrize(
    ("quantisation", "bits", "label"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "AWQ INT4 (groups of 128)"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
            4.125,
            "GPTQ INT4 (groups of 128)",
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, 8, "GPTQ INT8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2, "FP8 (blocks of 128)"),
        ({"quant_method": "fp8"}, 8, "FP8"),
        ({"quant_algo": "NVFP4", "group_size": 16}, 4.5, "NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, "FP8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
            },
            4.5,
            "INT4 (groups of 32)",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            8,
            "FP8",
        ),
    ],
)
def test_checkpoints_are_read_in_their_own_quantisation(
    quantisation: dict[str, object], bits: float, label: str
) -> None:
    """A quantized weight has these bits, scales included; embedding and head are not quantized."""
    found = read_shape({**DENSE, "quantization_config": quantisation}).quantization

    assert found.label == label
    assert found.bits == pytest.approx(bits)
    assert found.covers("mlp")
    assert not found.covers("head")


@pytest.mark.parametrize(
    ("rule", "attention", "mlp"),
    [
        ("re:.*self_attn.*", False, True),
        ("model.layers.*.self_attn", False, True),
        ("model.layers.5.mlp.gate", True, True),
        ("gate", True, True),
        ("re:.*mlp\\.(gate|up|down)_proj.*", True, False),
    ],
)
def test_what_a_checkpoint_leaves_out_is_counted_in_full(rule: str, attention: bool, mlp: bool) -> None:
    """Skip lists have regular expressions, globs and names; a router ``gate`` is not a gate projection."""
    config = {"quant_method": "compressed-tensors", "ignore": [rule]}
    config["config_groups"] = {"g": {"weights": {"num_bits": 8, "type": "float"}}}  # type: ignore[assignment]
    found = read_shape({**DENSE, "quantization_config": config}).quantization

    assert (found.covers("attention"), found.covers("mlp")) == (attention, mlp)


def test_a_kv_scheme_in_the_checkpoint_is_seen() -> None:
    """KV scales are found in the formats of ModelOpt and compressed-tensors."""
    for scheme in ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": {"num_bits": 8}}):
        config = {"quant_method": "modelopt", **scheme}
        assert read_shape({**DENSE, "quantization_config": config}).quantization.kv == "fp8"


def test_modelopt_s_file_beside_config_json_counts() -> None:
    """The scheme of older ModelOpt checkpoints is read from hf_quant_config.json."""
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}
    found = read_shape(DENSE, quant_config=beside).quantization

    assert (found.label, found.kv) == ("NVFP4", "fp8")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"quantization_config": {"quant_method": "gguf"}}, "GGUF checkpoints are refused"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes checkpoints are refused"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"layer_types": ["spiral_attention"] * 32}, "layers of kind 'spiral_attention' are not known"),
        ({"model_type": "whisper"}, "encoder-decoder"),
        ({"torch_dtype": "int3"}, "dtype 'int3'"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(keys: dict[str, object], said: str) -> None:
    """The error has the key and the reason."""
    with pytest.raises(ModelError, match=said):
        read_shape({**DENSE, **keys}, name="config.json")


def test_what_is_not_modelled_is_noted() -> None:
    """A model with parts that are not modelled is planned, unverified."""
    assert read_shape({**DENSE, "model_type": "deepseek_v4"}).notes


def test_a_vision_tower_is_measured() -> None:
    """The vision tower is read with its layers, patches per token, and most tokens of an image."""
    tower = known("Qwen/Qwen3-VL-8B-Instruct").shape.encoder

    assert tower is not None
    assert (tower.layers, tower.hidden, tower.merge, tower.tokens) == (27, 1152, 4, 16_384)


def test_a_nested_part_leaves_out_what_its_class_defaults() -> None:
    """Gemma 3's files have neither vocabulary, heads nor the pattern of windows; those of the class count."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}
    found = read_shape(config)

    assert found.describe() == "29 of GQA 8/4 with a window of 1024 + 5 layers of GQA 8/4, bfloat16"
    assert (found.vocab, found.tied, found.max_len) == (262_208, True, 131_072)


def test_a_flat_file_has_all_keys_but_few() -> None:
    """A number of layers that is missing is an error and no default; tied embeddings follow the class."""
    flat = {key: value for key, value in DENSE.items() if key != "tie_word_embeddings"}
    assert not read_shape(flat).tied
    assert read_shape({**flat, "model_type": "gemma2", "sliding_window": 4096}).tied
    with pytest.raises(ModelError, match="num_hidden_layers is missing"):
        read_shape({key: value for key, value in flat.items() if key != "num_hidden_layers"})


def test_what_a_file_says_wins_over_the_class() -> None:
    """A null is a statement: Mistral's files turn the window of their class off by it."""
    text = {**DENSE, "model_type": "mistral", "sliding_window": None}
    mixer = read_shape({"model_type": "llava_next", "text_config": text}).layers[0].mixer
    assert isinstance(mixer, Attention)
    assert not mixer.window
