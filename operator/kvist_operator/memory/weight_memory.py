"""Bytes of weights on the fullest GPU. Pure."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvist_operator.models.layers import (
    KV,
    REPLICATED,
    ROUTED,
    Attention,
    Latent,
    Layer,
    WeightPart,
    encoder_part,
    layer_parts,
)
from kvist_operator.models.shape import ModelShape, checkpoint_bytes, embedding, head, mtp_parts

from .layout import Draft, EngineSettings, Layout, stages

FP8: Final = 1.0
Cut = tuple[Counter[Layer], ...]


def weight_bytes(
    shape: ModelShape, layout: Layout, settings: EngineSettings, known_checkpoint: float = 0
) -> float:
    """On the fullest GPU. ``known_checkpoint`` = bytes of the files; they scale what the shape says.

    The layers for multi-token prediction are in the files but are loaded only when they are used.
    """
    scale = known_checkpoint / checkpoint_bytes(shape) if known_checkpoint else 1.0
    cut = stages(shape, layout.pipeline)
    heaviest = max(_stage_bytes(shape, cut, i, layout, settings) for i in range(len(cut)))
    return (
        scale * heaviest + _adapters(shape, cut[0], layout, settings) + draft_bytes(shape, layout, settings)
    )


def draft_bytes(shape: ModelShape, layout: Layout, settings: EngineSettings) -> float:
    """Return the bytes that speculative decoding loads, on the GPU that holds them."""
    draft = settings.draft
    if draft is None:
        return 0
    if draft.shape is None:
        return _mtp(shape, layout, settings) if is_mtp(draft) else 0
    return weight_bytes(
        draft.shape,
        Layout(tensor=layout.tensor),
        settings.but(draft=None, adapters=0),
        draft.checkpoint_bytes,
    )


def is_mtp(draft: Draft) -> bool:
    """Whether the proposer is layers of the model's own checkpoint."""
    return draft.method.lower().endswith("mtp")


def _mtp(shape: ModelShape, layout: Layout, settings: EngineSettings) -> float:
    return sum(_rank_bytes(shape, part, layout, settings) for part in mtp_parts(shape))


def _stage_bytes(shape: ModelShape, cut: Cut, stage: int, layout: Layout, settings: EngineSettings) -> float:
    """One pipeline stage on one tensor-parallel rank."""
    layers = sum(
        number * (_layer_bytes(shape, layer, layout, settings) + _absorbed(layer, layout))
        for layer, number in cut[stage].items()
    )
    ends = _ends(shape, stage, len(cut) - 1, settings)
    return layers + sum(_rank_bytes(shape, part, layout, settings) for part in ends)


def _layer_bytes(shape: ModelShape, layer: Layer, layout: Layout, settings: EngineSettings) -> float:
    return sum(_rank_bytes(shape, part, layout, settings) for part in layer_parts(layer, shape.hidden))


def _ends(shape: ModelShape, stage: int, last: int, settings: EngineSettings) -> Iterator[WeightPart]:
    """Return the bytes of the first and the last stage besides layers."""
    if stage == 0:
        yield embedding(shape)
        if settings.pictures:
            yield encoder_part(shape.encoder)
    if stage == last:
        yield head(shape)


def _rank_bytes(shape: ModelShape, part: WeightPart, layout: Layout, settings: EngineSettings) -> float:
    return part.params / _split(part, layout) * _bytes_each(shape, part, settings)


def _split(part: WeightPart, layout: Layout) -> int:
    if part.spread == REPLICATED:
        return 1
    if part.spread == ROUTED:
        return layout.expert_split
    if part.spread == KV:
        return min(layout.tensor, part.kv_heads)
    return layout.tensor


def _bytes_each(shape: ModelShape, part: WeightPart, settings: EngineSettings) -> float:
    linear = part.name not in ("embedding", "head", "router", "norms", "encoder")
    if settings.online_fp8 and linear and not shape.quantization.method:
        return FP8
    return shape.quantization.bytes_of(part.name, shape.dtype_bytes)


def _absorbed(layer: Layer, layout: Layout) -> float:
    """MLA keeps its up-projections once more in 16 bits, absorbed into queries and outputs."""
    m = layer.mixer
    if not isinstance(m, Latent):
        return 0
    return 2 * m.kv_rank * m.heads * (m.nope_dim + m.value_dim) / layout.tensor


def _adapters(shape: ModelShape, layers: Counter[Layer], layout: Layout, settings: EngineSettings) -> float:
    """Room for LoRA adapters: two 16-bit matrices beside each matrix of attention and dense feed-forward."""
    if not settings.adapters:
        return 0
    sides = sum(number * _sides(layer, shape.hidden) for layer, number in layers.items())
    return settings.adapters * settings.adapter_rank * sides * 2 / layout.tensor


def _sides(layer: Layer, hidden: int) -> int:
    """Rows and columns of a layer's matrices together."""
    total = 0
    if isinstance(layer.mixer, Attention):
        a = layer.mixer
        total += 4 * hidden + 2 * a.heads * a.key_dim + a.kv_heads * (a.key_dim + a.value_dim)
    if layer.mlp:
        total += layer.mlp.matrices * (hidden + layer.mlp.width)
    return total
