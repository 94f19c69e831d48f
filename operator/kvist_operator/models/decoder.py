"""Reads from config.json which mixer and which feed-forward block each decoder layer has. Pure.

The keys are those vLLM reads (``transformers_utils/model_arch_config_convertor.py`` and the files of the
models).
"""

from dataclasses import replace
from typing import Final

from kvist_operator.errors import ModelError

from .class_defaults import PATTERN
from .config_json import Keys
from .layers import Attention, Experts, Indexer, Latent, Layer, Mixer, Mlp, Recurrent

MAX_LAYERS: Final = 4096
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
UNGATED: Final = (
    "nemotron_h",
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "starcoder2",
    "gpt_neox",
    "phi",
    "nemotron",
    *("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "electra", "deberta-v2"),
)
"""Families whose feed-forward blocks have no gate matrix."""
STATE_DTYPE: Final = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")


def read_layers(keys: Keys) -> tuple[Layer, ...]:
    """Return the decoder layers in order.

    Raises:
        ModelError: a key is missing or invalid, or a kind of layer is not known.
    """
    found = _read_mixers(keys)
    parts = _read_feedforward(keys, len(found))
    return tuple(Layer(mixer, *part) for mixer, part in zip(found, parts, strict=True))


def _read_mixers(keys: Keys) -> list[Mixer | None]:
    """Return the mixer of each decoder layer; None for a layer without one. Raises ModelError."""
    kinds = _mixer_kinds(keys)
    read = {kind: _mixer(keys, kind) for kind in set(kinds)}
    found = [read[kind] for kind in kinds]
    types = keys.sequence("indexer_types")
    if types is not None:
        # GLM 5.2 and later: some layers share the indexer of an earlier one
        bare = {mixer: replace(mixer, indexer=None) for mixer in set(found) if isinstance(mixer, Latent)}
        found = [
            bare[mixer] if isinstance(mixer, Latent) and kind == "shared" else mixer
            for mixer, kind in zip(found, types, strict=True)
        ]
    # Gemma 3n, Gemma 4: the last layers read the cache of an earlier one
    start = len(found) - keys.number("num_kv_shared_layers", default=0)
    return [
        replace(mixer, shared=True) if i >= start and isinstance(mixer, Attention) else mixer
        for i, mixer in enumerate(found)
    ]


def _mixer_kinds(keys: Keys) -> list[str]:
    pattern = keys.word("hybrid_override_pattern")
    if pattern:
        return [_known(LETTERS, letter, keys) for letter in pattern]
    words = keys.sequence("layers_block_type", "layer_types")
    if words is not None:
        return [_known(WORDS, str(word), keys) for word in words]
    flags = keys.sequence("hybrid_layer_pattern")
    if flags is not None:
        return [SLIDING if flag else FULL for flag in flags]
    listed = keys.mapping("linear_attn_config").get("full_attn_layers")
    if listed is not None:
        full = set(listed)
        return [FULL if i + 1 in full else LINEAR for i in range(_layer_count(keys))]
    kinds = keys.sequence("attn_type_list")
    if kinds is not None:
        return [FULL if kind else LINEAR for kind in kinds]
    return _periodic_kinds(keys, _layer_count(keys))


def _known(table: dict[str, str], word: str, keys: Keys) -> str:
    if word not in table:
        raise ModelError(f"{keys.name}: layers of kind {word!r} are not known; known are {', '.join(table)}")
    return table[word]


def _layer_count(keys: Keys) -> int:
    count = keys.number("num_hidden_layers", "n_layer", "num_layers")
    if count > MAX_LAYERS:
        raise ModelError(f"{keys.name}: {count} layers are more than any model has ({MAX_LAYERS})")
    return count


def _periodic_kinds(keys: Keys, count: int) -> list[str]:
    every, other = keys.number("full_attention_interval", default=0), LINEAR
    if not every and keys.model_type == "llama4" and keys.number("attention_chunk_size", default=0):
        every, other = keys.number("no_rope_layer_interval", default=4), SLIDING
    elif not every:
        if not keys.number("sliding_window", default=0) or keys.flag("use_sliding_window") is False:
            return [FULL] * count
        every, other = keys.number("sliding_window_pattern", "_sliding_window_pattern", default=0), SLIDING
    pattern = keys.sequence(PATTERN)
    if not every and pattern is not None:
        return [_known(WORDS, pattern[i % len(pattern)], keys) for i in range(count)]
    return [FULL if every and (i + 1) % every == 0 else other for i in range(count)]


def _mixer(keys: Keys, kind: str) -> Mixer | None:
    if kind == NOTHING:
        return None
    if kind == FULL and keys.number("kv_lora_rank", default=0):
        return _latent(keys)
    if kind in (FULL, SLIDING):
        return _attention(keys, kind)
    if keys.number("linear_num_value_heads", default=0):
        return _delta_net(keys)
    if keys.mapping("linear_attn_config"):
        return _kda(keys)
    if keys.number("mamba_num_heads", "mamba_n_heads", default=0):
        return _mamba2(keys)
    raise ModelError(f"{keys.name}: recurrent layers of model_type {keys.model_type!r} are not known")


def _attention(keys: Keys, kind: str) -> Attention:
    heads = keys.number("num_attention_heads", "n_head", "num_heads")
    kv_names = (
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    )
    one = keys.flag("multi_query") and not keys.flag("new_decoder_architecture")
    kv_heads = 1 if one else keys.number(*kv_names, default=0) or heads
    dim = keys.number("head_dim", "hidden_size_per_head", default=0) or keys.hidden // heads
    gated = bool(keys.flag("attn_output_gate"))
    if kind == FULL:
        return Attention(
            heads=heads,
            kv_heads=keys.number("num_global_key_value_heads", default=0) or kv_heads,
            key_dim=keys.number("global_head_dim", default=0) or dim,
            value_dim=keys.number("global_head_dim", "v_head_dim", default=0) or dim,
            gated=gated,
        )
    window = "attention_chunk_size" if keys.model_type == "llama4" else "sliding_window"
    return Attention(
        heads=keys.number("swa_num_attention_heads", default=0) or heads,
        kv_heads=keys.number("swa_num_key_value_heads", default=0) or kv_heads,
        key_dim=keys.number("swa_head_dim", default=0) or dim,
        value_dim=keys.number("swa_v_head_dim", "v_head_dim", default=0) or dim,
        window=keys.number(window, default=0) or keys.number("sliding_window_size"),
        gated=gated,
    )


def _latent(keys: Keys) -> Latent:
    indexer = None
    if keys.number("index_topk", default=0):
        indexer = Indexer(heads=keys.number("index_n_heads"), dim=keys.number("index_head_dim"))
    return Latent(
        heads=keys.number("num_attention_heads", "n_head", "num_heads"),
        q_rank=keys.number("q_lora_rank", default=0),
        kv_rank=keys.number("kv_lora_rank"),
        nope_dim=keys.number("qk_nope_head_dim"),
        rope_dim=keys.number("qk_rope_head_dim"),
        value_dim=keys.number("v_head_dim"),
        sparse=indexer is not None,
        indexer=indexer,
    )


def _delta_net(keys: Keys) -> Recurrent:
    nk, nv = keys.number("linear_num_key_heads"), keys.number("linear_num_value_heads")
    hk, hv = keys.number("linear_key_head_dim"), keys.number("linear_value_head_dim")
    kernel, h = keys.number("linear_conv_kernel_dim"), keys.hidden
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
        state_dtype=keys.word(*STATE_DTYPE),
    )


def _kda(keys: Keys) -> Recurrent:
    inner = keys.mapping("linear_attn_config")
    n, d, kernel = (int(inner[k]) for k in ("num_heads", "head_dim", "short_conv_kernel_size"))
    h, width = keys.hidden, n * d
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
    h, inner = keys.hidden, n * d
    conv = inner + 2 * groups * state
    return Recurrent(
        kind="Mamba 2",
        params=h * (inner + conv + n) + inner * h + conv * kernel,
        conv_width=conv,
        conv_kernel=kernel,
        state=n * d * state,
        heads=n,
        state_dtype=keys.word(*STATE_DTYPE),
    )


def _read_feedforward(keys: Keys, layers: int) -> list[tuple[Mlp | None, Experts | None]]:
    """Return the dense block and the experts of each decoder layer: either, both or none."""
    # hybrids whose layers have one part each list the parts
    blocks = keys.word("hybrid_override_pattern") or keys.sequence("layers_block_type")
    if blocks is not None:
        return [
            (
                _dense(keys) if kind in ("-", "mlp") else None,
                _experts(keys) if kind in ("E", "moe") else None,
            )
            for kind in blocks
        ]
    experts = _experts(keys)
    if experts is None:
        return [(_dense(keys), None)] * layers
    beside = _dense(keys) if keys.flag("enable_moe_block") else None
    names = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "n_inner")
    dense = Mlp(width=keys.number(*names, default=0), matrices=experts.matrices)
    return [(beside, experts) if sparse else (dense, None) for sparse in _sparse_layers(keys, layers)]


def _dense(keys: Keys) -> Mlp:
    width = keys.number("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=0)
    return Mlp(width=width or 4 * keys.hidden, matrices=_matrices(keys))


def _matrices(keys: Keys) -> int:
    """Return 3 with a gate matrix, otherwise 2; Nomic's BERT has one if its activation is SwiGLU."""
    plain = keys.model_type == "nomic_bert" and "glu" not in keys.word(
        "activation_function", default="swiglu"
    )
    return 2 if plain or keys.model_type in UNGATED else 3


def _experts(keys: Keys) -> Experts | None:
    count = keys.number("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", default=0)
    if count <= 1:
        return None
    width = keys.number("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "n_inner")
    routed = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
    latent = keys.number("routed_expert_hidden_size", "moe_latent_size", default=0)
    return Experts(
        count=count,
        per_token=keys.number(*routed, default=1),
        width=width,
        shared_width=_shared_width(keys, width),
        hidden=latent or keys.hidden,
        latent=bool(latent),
        matrices=_matrices(keys),
    )


def _shared_width(keys: Keys, width: int) -> int:
    names = (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    )
    explicit = keys.number(*names, default=0)
    number = keys.number("n_shared_experts", "num_shared_experts", default=0)
    if explicit:
        return explicit * max(1, number)
    return width if keys.model_type == "llama4" else width * number


def _sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Return for each layer whether it has experts."""
    named = keys.sequence("mlp_layer_types")
    if named is not None:
        return [kind == "sparse" for kind in named]
    flags = keys.sequence("moe_layer_freq")
    if flags is not None:
        return [bool(flag) for flag in flags]
    first = keys.number("first_k_dense_replace", "moe_layer_start_index", default=0)
    every = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "moe_every_n_layers")
    step = keys.number(*every, default=1)
    dense = set(keys.sequence("mlp_only_layers") or ())
    offset = 0 if keys.text.get("first_k_dense_replace") is not None else 1
    return [i >= first and i not in dense and (i + offset) % max(1, step) == 0 for i in range(layers)]
