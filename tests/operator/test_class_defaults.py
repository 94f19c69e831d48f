"""Promises for keys that config.json leaves out: they have the defaults of the class in transformers."""

from typing import Any

import pytest
from tests.operator.pools import DENSE
from tests.operator.published import TABLE

from kvist_operator.errors import ModelError
from kvist_operator.models.class_defaults import class_defaults
from kvist_operator.models.layers import Attention
from kvist_operator.models.shape import ModelShape, parameters, read_shape

VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}


def gemma3(**text: Any) -> ModelShape:
    """Return the shape of a Gemma 3 whose file has these keys of the decoder, as the hub's files have few."""
    inner = {"model_type": "gemma3_text", "sliding_window": 1024, **text}
    return read_shape(
        {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": inner, "vision_config": VISION}
    )


def test_gemma_3_4b_is_read_from_the_few_keys_of_its_file() -> None:
    """Heads, their size, vocabulary, length and tied embeddings of Gemma 3 4B are in no key of its file."""
    shape = gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34)

    assert (shape.heads, shape.kv_heads, shape.vocab) == ((8,), (4,), 262_208)
    assert (shape.max_len, shape.tied) == (131_072, True)
    assert parameters(shape) / 1e9 == pytest.approx(4.3, rel=0.01)


def test_gemma_3_has_full_attention_in_each_sixth_layer_without_a_pattern() -> None:
    """Five layers with a window and one without are repeated, to the last of 34 layers."""
    shape = gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34)
    windows = [layer.mixer.window for layer in shape.layers if isinstance(layer.mixer, Attention)]

    assert windows == ([1024] * 5 + [0]) * 5 + [1024] * 4


def test_gemma_3_27b_of_few_keys_is_the_one_of_the_published_log() -> None:
    """Without the keys that equal the defaults the shape is that of the file with all keys."""
    whole = dict(TABLE["models"]["Gemma-3-27B"]["config"])
    dropped = ("vocab_size", "max_position_embeddings", "sliding_window_pattern", "torch_dtype")
    few = {key: value for key, value in whole["text_config"].items() if key not in dropped}
    brief = {**whole, "text_config": few}
    del brief["tie_word_embeddings"], brief["mm_tokens_per_image"]

    assert read_shape(brief) == read_shape(whole)


def test_a_key_that_is_null_has_no_default() -> None:
    """A window that the file sets to null stays off, though the class has one."""
    flat = read_shape({**DENSE, "model_type": "mistral", "sliding_window": None})
    inner = read_shape(
        {"model_type": "mistral3", "text_config": {**DENSE, "model_type": "mistral", "sliding_window": None}}
    )

    assert [window(shape) for shape in (flat, inner)] == [0, 0]


def test_a_window_left_out_is_the_class_s_only_inside_another_model() -> None:
    """transformers leaves out a decoder's keys only inside another model; elsewhere a user left it out, and a
    window would promise too large a cache."""
    mistral = {**DENSE, "model_type": "mistral"}

    assert window(read_shape(mistral)) == 0
    assert window(read_shape({"model_type": "mistral3", "text_config": mistral})) == 4096


def window(shape: ModelShape) -> int:
    """Return the window of the first layer; 0 without one."""
    mixer = shape.layers[0].mixer
    assert isinstance(mixer, Attention)
    return mixer.window


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_file_without_its_own_dimensions_is_refused(key: str) -> None:
    """The dimensions of a plain decoder have no default: a file without one of them is not whole."""
    with pytest.raises(ModelError, match=f"{key} is missing"):
        read_shape({name: value for name, value in DENSE.items() if name != key})


def test_a_key_under_another_name_of_the_class_wins_over_its_default() -> None:
    """gpt-oss may call its experts ``num_experts``; the default of ``num_local_experts`` is then not used."""
    config = {**DENSE, "model_type": "gpt_oss", "num_experts": 32, "head_dim": 64}
    experts = read_shape(config).experts

    assert experts is not None
    assert (experts.count, experts.per_token) == (32, 4)


def test_a_model_without_a_decoder_s_type_has_that_of_its_class() -> None:
    """A ``text_config`` without a type is read as the decoder that its model has by default."""
    inner = {key: value for key, value in DENSE.items() if key not in ("model_type", "num_key_value_heads")}
    shape = read_shape({"model_type": "mistral3", "text_config": inner})

    assert shape.kv_heads == (8,)


def test_the_table_has_the_types_of_the_catalogue_that_transformers_knows() -> None:
    """The table says which transformers it is from, and knows the decoders that most models are made of."""
    table = class_defaults()
    common = {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_text",
        "phi3",
    }
    common |= {"gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "llama4_text", "deepseek_v3", "glm4_moe"}

    assert table["transformers"].count(".") == 2
    assert common - set(table["text"]) == set()
    assert {"gemma3", "gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl"} - set(table["outer"]) == set()
