"""How many weights a model has, part by part, and how each part is spread over GPUs. Pure.

The counts are exact for the families the tests hold against published checkpoint sizes; norms and biases,
under a thousandth of a model, are left out but for one norm vector per block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from .layers import Attention, Encoder, Experts, Indexer, Latent, Layer, Mlp, Recurrent
from .shape import ModelShape

SHARDED: Final = "sharded"
"""Split over tensor-parallel ranks."""
REPLICATED: Final = "replicated"
"""Whole on every tensor-parallel rank."""
ROUTED: Final = "routed"
"""Split over tensor-parallel, or over expert-parallel ranks."""
KV: Final = "kv"
"""Split over tensor-parallel ranks down to one KV head, then replicated."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some of a model's weights."""

    name: str
    """The part that a quantisation covers or not: attention, mlp, experts, …"""
    params: int
    spread: str
    limit: int = 0
    """KV heads, for ``spread == KV``."""


def layer_parts(layer: Layer, hidden: int) -> Iterator[WeightPart]:
    """The weights of one decoder layer."""
    match layer.mixer:
        case Attention() as mixer:
            yield from _attention(mixer, hidden)
        case Latent() as mixer:
            yield from _latent(mixer, hidden)
        case Recurrent() as mixer:
            yield WeightPart("recurrent", mixer.params, SHARDED)
    if layer.mlp:
        yield WeightPart("mlp", layer.mlp.matrices * hidden * layer.mlp.width, SHARDED)
    if layer.experts:
        yield from _experts(layer.experts, hidden)
    yield WeightPart("norms", 2 * hidden, REPLICATED)


def _attention(mixer: Attention, hidden: int) -> Iterator[WeightPart]:
    queries = hidden * mixer.heads * mixer.key_dim * (2 if mixer.gated else 1)
    yield WeightPart("attention", queries + hidden * mixer.heads * mixer.value_dim, SHARDED)
    if not mixer.shared:
        cached = hidden * mixer.kv_heads * (mixer.key_dim + mixer.value_dim)
        yield WeightPart("attention", cached, KV, mixer.kv_heads)


def _latent(mixer: Latent, hidden: int) -> Iterator[WeightPart]:
    query = mixer.nope_dim + mixer.rope_dim
    down = hidden * (mixer.q_rank + mixer.kv_rank + mixer.rope_dim)
    up = (mixer.q_rank or hidden) * mixer.heads * query
    up += mixer.kv_rank * mixer.heads * (mixer.nope_dim + mixer.value_dim)
    yield WeightPart("attention", down, REPLICATED)
    yield WeightPart("attention", up + mixer.heads * mixer.value_dim * hidden, SHARDED)
    if mixer.indexer:
        yield WeightPart("attention", _indexer(mixer.indexer, mixer.q_rank, hidden), REPLICATED)


def _indexer(indexer: Indexer, q_rank: int, hidden: int) -> int:
    return q_rank * indexer.heads * indexer.dim + hidden * (indexer.dim + indexer.heads)


def _experts(experts: Experts, hidden: int) -> Iterator[WeightPart]:
    inner = experts.inner or hidden
    yield WeightPart("experts", experts.count * experts.matrices * inner * experts.width, ROUTED)
    if experts.inner:
        yield WeightPart("shared", 2 * hidden * experts.inner, REPLICATED)
    if experts.shared_width:
        yield WeightPart("shared", experts.matrices * hidden * experts.shared_width, SHARDED)
    yield WeightPart("router", hidden * experts.count, REPLICATED)


def embedding(shape: ModelShape) -> WeightPart:
    """The token embedding, on the first pipeline stage."""
    return WeightPart("embedding", shape.vocab * shape.hidden, SHARDED)


def head(shape: ModelShape) -> WeightPart:
    """The output head, on the last pipeline stage; none of its own where it is tied."""
    return WeightPart("head", 0 if shape.tied else shape.vocab * shape.hidden, SHARDED)


def encoder_part(encoder: Encoder | None) -> WeightPart:
    """The vision tower and its projector."""
    if encoder is None:
        return WeightPart("encoder", 0, SHARDED)
    layer = 4 * encoder.hidden**2 + 2 * encoder.hidden * encoder.width
    merged = encoder.hidden * encoder.merge
    return WeightPart("encoder", encoder.layers * layer + merged**2 + merged * encoder.output, SHARDED)


def mtp_parts(shape: ModelShape) -> list[WeightPart]:
    """One layer that predicts further tokens: a decoder layer and the projection into it."""
    if not shape.mtp_layers:
        return []
    return [*layer_parts(shape.layers[-1], shape.hidden), WeightPart("mtp", 2 * shape.hidden**2, SHARDED)]


def all_parts(shape: ModelShape) -> Iterator[WeightPart]:
    """Return the weights that vLLM loads: everything but the layers for multi-token prediction."""
    yield embedding(shape)
    yield head(shape)
    yield encoder_part(shape.encoder)
    for layer in shape.layers:
        yield from layer_parts(layer, shape.hidden)


def parameters(shape: ModelShape) -> int:
    """Weights vLLM loads."""
    return sum(part.params for part in all_parts(shape))


def stored_bytes(shape: ModelShape, parts: Iterable[WeightPart] | None = None) -> float:
    """Bytes of the parts as the checkpoint stores them; without parts: of all that is loaded."""
    chosen = all_parts(shape) if parts is None else parts
    plain, scheme = shape.dtype_bytes, shape.quantisation
    return sum(part.params * scheme.bytes_of(part.name, plain) for part in chosen)


def checkpoint_bytes(shape: ModelShape) -> float:
    """Bytes of the safetensors files, the layers for multi-token prediction included."""
    return stored_bytes(shape) + shape.mtp_layers * stored_bytes(shape, mtp_parts(shape))


def active_parameters(shape: ModelShape) -> int:
    """Weights one token passes through: all but the experts it is not routed to, and the embedding."""
    idle = 0
    for layer in shape.layers:
        if layer.experts:
            e = layer.experts
            idle += (e.count - e.per_token) * e.matrices * (e.inner or shape.hidden) * e.width
    return parameters(shape) - idle - shape.vocab * shape.hidden - encoder_part(shape.encoder).params


def widest_mlp(shape: ModelShape) -> Mlp | None:
    """The dense feed-forward block with the most columns."""
    blocks = [layer.mlp for layer in shape.layers if layer.mlp]
    return max(blocks, key=lambda mlp: mlp.width, default=None)
