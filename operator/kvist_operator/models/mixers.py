"""Which mixer each layer has: attention, windows, MLA, recurrent states. Pure.

The keys are those vLLM reads (transformers_utils/model_arch_config_convertor.py and the models' own files).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvist_operator.errors import ModelError

from .keys import Keys
from .layers import Attention, Indexer, Latent, Mixer, Recurrent

MOST_LAYERS: Final = 4096
FULL: Final = "full"
SLIDING: Final = "sliding"
LINEAR: Final = "linear"
NOTHING: Final = "nothing"

WORDS: Final = {
    "full_attention": FULL,
    "attention": FULL,
    "full": FULL,
    "deepseek_sparse_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": SLIDING,
    "linear_attention": LINEAR,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "moe": NOTHING,
    "mlp": NOTHING,
}
LETTERS: Final = {"*": FULL, "M": LINEAR, "-": NOTHING, "E": NOTHING}


def mixers(keys: Keys) -> list[Mixer | None]:
    """One per decoder layer; None where a layer has no mixer.

    Raises:
        ModelError: a kind of layer that is not known.
    """
    kinds = layer_kinds(keys)
    makers: dict[str, Callable[[Keys], Mixer | None]] = {
        FULL: _full,
        SLIDING: _sliding,
        LINEAR: _linear,
        NOTHING: lambda _: None,
    }
    made = {kind: makers[kind](keys) for kind in set(kinds)}
    return _shared(_indexed([made[kind] for kind in kinds], keys), keys)


def layer_kinds(keys: Keys) -> list[str]:
    """Full, sliding, linear or nothing, for each layer."""
    explicit = _explicit(keys)
    if explicit is not None:
        return explicit
    count = _count(keys)
    every = keys.number("full_attention_interval", default=0)
    if every:
        return [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)]
    if keys.number("attention_chunk_size", default=0) and keys.kind == "llama4":
        step = keys.number("no_rope_layer_interval", default=4)
        return [FULL if (i + 1) % step == 0 else SLIDING for i in range(count)]
    return _windowed(keys, count)


def _count(keys: Keys) -> int:
    count = keys.number("num_hidden_layers", "n_layer", "num_layers")
    if count > MOST_LAYERS:
        raise ModelError(f"{keys.name}: {count} layers are more than any model has ({MOST_LAYERS})")
    return count


def _explicit(keys: Keys) -> list[str] | None:
    pattern = keys.word("hybrid_override_pattern")
    if pattern:
        return [_known(LETTERS, letter, keys) for letter in pattern]
    words = keys.sequence("layers_block_type", "layer_types")
    if words is not None:
        return [_known(WORDS, str(word), keys) for word in words]
    return _numbered(keys)


def _numbered(keys: Keys) -> list[str] | None:
    swa = keys.sequence("hybrid_layer_pattern")
    if swa is not None:
        return [SLIDING if flag else FULL for flag in swa]
    linear = keys.mapping("linear_attn_config").get("full_attn_layers")
    if linear is not None:
        full = set(linear)
        return [FULL if i + 1 in full else LINEAR for i in range(_count(keys))]
    kinds = keys.sequence("attn_type_list")
    return None if kinds is None else [FULL if kind else LINEAR for kind in kinds]


def _windowed(keys: Keys, count: int) -> list[str]:
    window = keys.number("sliding_window", default=0)
    if not window or keys.text.get("use_sliding_window") is False:
        return [FULL] * count
    pattern = keys.number("sliding_window_pattern", "_sliding_window_pattern", default=0)
    if keys.kind == "gemma2":
        pattern = 2
    if pattern:
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    return [SLIDING] * count


def _known(table: dict[str, str], word: str, keys: Keys) -> str:
    if word not in table:
        raise ModelError(f"{keys.name}: layers of kind {word!r} are not known; known are {', '.join(table)}")
    return table[word]


def _full(keys: Keys) -> Mixer:
    if keys.number("kv_lora_rank", default=0):
        return _latent(keys)
    return Attention(
        heads=heads(keys),
        kv_heads=keys.number("num_global_key_value_heads", default=0) or kv_heads(keys),
        key_dim=keys.number("global_head_dim", default=0) or head_dim(keys),
        value_dim=keys.number("global_head_dim", "v_head_dim", default=0) or head_dim(keys),
        gated=keys.flag("attn_output_gate"),
    )


def _sliding(keys: Keys) -> Attention:
    window = keys.number("attention_chunk_size" if keys.kind == "llama4" else "sliding_window", default=0)
    return Attention(
        heads=keys.number("swa_num_attention_heads", default=0) or heads(keys),
        kv_heads=keys.number("swa_num_key_value_heads", default=0) or kv_heads(keys),
        key_dim=keys.number("swa_head_dim", default=0) or head_dim(keys),
        value_dim=keys.number("swa_v_head_dim", "v_head_dim", default=0) or head_dim(keys),
        window=window or keys.number("sliding_window_size"),
        gated=keys.flag("attn_output_gate"),
    )


def heads(keys: Keys) -> int:
    """Query heads."""
    return keys.number("num_attention_heads", "n_head", "num_heads")


def kv_heads(keys: Keys) -> int:
    """Heads that are cached, by any of the names in use."""
    names = (
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    )
    if keys.flag("multi_query") and not keys.flag("new_decoder_architecture"):
        return 1
    return keys.number(*names, default=0) or heads(keys)


def head_dim(keys: Keys) -> int:
    """Elements of one head; hidden size by heads where config.json does not say."""
    return keys.number("head_dim", "hidden_size_per_head", default=0) or hidden(keys) // heads(keys)


def hidden(keys: Keys) -> int:
    """Width of the residual stream."""
    return keys.number("hidden_size", "n_embd", "d_model")


def _latent(keys: Keys) -> Latent:
    sparse = bool(keys.number("index_topk", default=0))
    return Latent(
        heads=heads(keys),
        q_rank=keys.number("q_lora_rank", default=0),
        kv_rank=keys.number("kv_lora_rank"),
        nope_dim=keys.number("qk_nope_head_dim"),
        rope_dim=keys.number("qk_rope_head_dim"),
        value_dim=keys.number("v_head_dim"),
        sparse=sparse,
        indexer=Indexer(heads=keys.number("index_n_heads"), dim=keys.number("index_head_dim"))
        if sparse
        else None,
    )


def _indexed(found: list[Mixer | None], keys: Keys) -> list[Mixer | None]:
    """Takes the indexer from layers that share an earlier one's choice (GLM 5.2 and later)."""
    types = keys.sequence("indexer_types")
    if types is None:
        return found
    bare = {mixer: _without_indexer(mixer) for mixer in set(found) if isinstance(mixer, Latent)}
    return [
        bare[mixer] if isinstance(mixer, Latent) and kind == "shared" else mixer
        for mixer, kind in zip(found, types, strict=True)
    ]


def _without_indexer(mixer: Latent) -> Latent:
    return replace(mixer, indexer=None)


def _shared(found: list[Mixer | None], keys: Keys) -> list[Mixer | None]:
    """Marks the last layers that read an earlier layer's cache (Gemma 3n, Gemma 4)."""
    shared = keys.number("num_kv_shared_layers", default=0)
    start = len(found) - shared
    return [
        replace(mixer, shared=True) if i >= start and isinstance(mixer, Attention) else mixer
        for i, mixer in enumerate(found)
    ]


def _linear(keys: Keys) -> Recurrent:
    if keys.number("linear_num_value_heads", default=0):
        return _delta_net(keys)
    if keys.mapping("linear_attn_config"):
        return _kda(keys)
    if keys.number("mamba_num_heads", "mamba_n_heads", default=0):
        return _mamba2(keys)
    raise ModelError(f"{keys.name}: recurrent layers of model_type {keys.kind!r} are not known")


def _state_dtype(keys: Keys) -> str:
    return keys.word("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="")


def _delta_net(keys: Keys) -> Recurrent:
    nk, nv = keys.number("linear_num_key_heads"), keys.number("linear_num_value_heads")
    hk, hv = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    kernel, h = keys.number("linear_conv_kernel_dim"), hidden(keys)
    conv = 2 * hk * nk + hv * nv
    # in: q, k, v, z and the two gates per value head; out: v back to the hidden size
    params = h * (conv + hv * nv + 2 * nv) + hv * nv * h + conv * kernel
    return Recurrent(
        kind="gated delta net",
        params=params,
        conv_width=conv,
        conv_kernel=kernel,
        state=nv * hv * hk,
        heads=nk,
        state_dtype=_state_dtype(keys),
    )


def _kda(keys: Keys) -> Recurrent:
    inner = keys.mapping("linear_attn_config")
    n, d, kernel = (int(inner[k]) for k in ("num_heads", "head_dim", "short_conv_kernel_size"))
    h, width = hidden(keys), n * d
    gates = h * width if inner.get("use_full_rank_gate") else 2 * (h * d + d * width)
    return Recurrent(
        kind="KDA",
        params=4 * h * width + gates + h * n + 3 * width * kernel,
        conv_width=3 * width,
        conv_kernel=kernel,
        state=n * d * d,
        heads=n,
        state_dtype="float32",
    )


def _mamba2(keys: Keys) -> Recurrent:
    n = keys.number("mamba_num_heads", "mamba_n_heads")
    d = keys.number("mamba_head_dim", "mamba_d_head")
    state = keys.number("ssm_state_size", "mamba_d_state")
    groups = keys.number("n_groups", "mamba_n_groups", default=1)
    kernel = keys.number("conv_kernel", "mamba_d_conv")
    h, inner = hidden(keys), n * d
    conv = inner + 2 * groups * state
    return Recurrent(
        kind="Mamba 2",
        params=h * (inner + conv + n) + inner * h + conv * kernel,
        conv_width=conv,
        conv_kernel=kernel,
        state=n * d * state,
        heads=n,
        state_dtype=_state_dtype(keys),
    )


def windows(found: Sequence[Mixer | None]) -> set[int]:
    """The window sizes in use."""
    return {mixer.window for mixer in found if isinstance(mixer, Attention) and mixer.window}
