"""Which feed-forward part each layer has: dense, routed experts, both or none. Pure."""

from collections.abc import Sequence
from typing import Any, Final

from .keys import Keys
from .layers import Experts, Mlp
from .mixers import hidden

UNGATED: Final = ("nemotron_h", "gpt2", "opt", "bloom", "falcon", "starcoder2", "gpt_neox", "phi", "nemotron")

Parts = tuple[Mlp | None, Experts | None]


def feedforward(keys: Keys, layers: int) -> list[Parts]:
    """One pair per decoder layer."""
    blocks = _blocks(keys)
    if blocks is not None:
        return [_block(keys, kind) for kind in blocks]
    experts = routed(keys)
    if experts is None:
        return [(dense(keys), None)] * layers
    beside = dense(keys) if keys.flag("enable_moe_block") else None
    chosen = sparse_layers(keys, layers)
    first = Mlp(width=dense_width(keys), gated=gated(keys))
    return [(beside, experts) if sparse else (first, None) for sparse in chosen]


def dense(keys: Keys) -> Mlp:
    """The feed-forward block of a layer without experts."""
    width = keys.number("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", default=0)
    return Mlp(width=width or 4 * hidden(keys), gated=gated(keys))


def dense_width(keys: Keys) -> int:
    """Width of the dense layers of a model that also has sparse ones."""
    return keys.number("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", default=0)


def gated(keys: Keys) -> bool:
    """Whether a block has a gate matrix; all current families have, those listed have not."""
    return keys.kind not in UNGATED


def routed(keys: Keys) -> Experts | None:
    """The experts, by any of the names in use; None for a dense model."""
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    count = keys.number(*names, default=0)
    if count <= 1:
        return None
    width = keys.number("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    return Experts(
        count=count,
        per_token=keys.number(
            "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", default=1
        ),
        width=width,
        shared_width=_shared_width(keys, width),
        inner=keys.number("routed_expert_hidden_size", "moe_latent_size", default=0),
        gated=gated(keys),
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
    if keys.kind == "llama4":
        return width
    return width * number


def sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers have experts."""
    explicit = _explicit(keys)
    if explicit is not None:
        return explicit
    first = keys.number("first_k_dense_replace", "moe_layer_start_index", default=0)
    step = keys.number("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1)
    only = set(keys.sequence("mlp_only_layers") or ())
    offset = 0 if keys.text.get("first_k_dense_replace") is not None else 1
    return [i >= first and i not in only and (i + offset) % max(1, step) == 0 for i in range(layers)]


def _explicit(keys: Keys) -> list[bool] | None:
    named = keys.sequence("mlp_layer_types")
    if named is not None:
        return [kind == "sparse" for kind in named]
    flags = keys.sequence("moe_layer_freq")
    return None if flags is None else [bool(flag) for flag in flags]


def _blocks(keys: Keys) -> Sequence[Any] | None:
    """Hybrids whose layers hold one part each spell them out."""
    return keys.word("hybrid_override_pattern") or keys.sequence("layers_block_type")


def _block(keys: Keys, kind: str) -> Parts:
    if kind in ("E", "moe"):
        return None, routed(keys)
    if kind in ("-", "mlp"):
        return dense(keys), None
    return None, None
