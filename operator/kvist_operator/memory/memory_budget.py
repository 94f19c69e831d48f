"""Memory of the fullest GPU, item by item: weights, peak of a step, CUDA graphs, overhead, KV cache. Pure.

The KV cache gets what the share leaves beside the weights, the padding of 4-bit experts included
(``padding``), and what vLLM's profile finds (``memory_profile``). Versions of vLLM before 0.21 do not
subtract CUDA graphs: they capture them outside of the share, where the memory of the GPU has to hold them.
"""

from collections import Counter
from dataclasses import dataclass, replace

from kvist_operator.hardware import Accelerator
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
from kvist_operator.models.shape import (
    Facts,
    ModelShape,
    checkpoint_bytes,
    embedding_and_head,
    mtp_parts,
)

from .kv_cache import Cache, caches
from .layout import GIB, EngineSettings, Layout, stages
from .memory_profile import (
    activations,
    beyond_share,
    communication,
    encoder,
    graphs,
    graphs_are_counted,
    runtime,
)
from .padding import expert_padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU; tokens and concurrency of the whole replica."""

    total: float
    usable: float
    """The share that vLLM may use, or less where the GPU has to hold CUDA graphs outside of it."""
    weights: float
    activations: float
    encoder: float
    """What pictures need beyond the peak of a text step."""
    graphs: float
    """CUDA graphs inside of the share; 0 for versions of vLLM that capture them outside."""
    graphs_outside: float
    """CUDA graphs outside of the share, of versions before 0.21."""
    runtime: float
    """Libraries, kernels, and what the model runner keeps for each sequence."""
    communication: float
    """NCCL and all-reduce buffers."""
    kv: float
    """Bytes left for the KV cache, if there is one; negative if even the other items do not fit."""
    stages: tuple[Cache, ...]
    layout: Layout
    max_len: int

    @property
    def overhead(self) -> float:
        """Memory of libraries and communication."""
        return self.runtime + self.communication

    def concurrency(self, length: int) -> float:
        """Return how many sequences of this many tokens fit at once, all data-parallel ranks together."""
        return self.layout.data * min(cache.concurrency(self.kv, length) for cache in self.stages)

    @property
    def max_concurrency(self) -> float:
        """Sequences of ``max_len`` tokens that fit at once."""
        return self.concurrency(self.max_len)

    @property
    def caches(self) -> bool:
        """Whether the model has a KV cache; encoders have none, so ``kv`` is left over."""
        return any(cache.block_bytes for cache in self.stages)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of the replica holds; 0 of a model without one."""
        if not self.caches:
            return 0
        return int(self.max_concurrency * self.max_len)

    @property
    def bytes_per_token(self) -> float:
        """KV cache per token of a sequence of ``max_len``, on the fullest GPU."""
        return max(cache.request_bytes(self.max_len) for cache in self.stages) / self.max_len

    def missing(self, length: int, sequences: int) -> float:
        """Return the bytes that a GPU lacks for ``sequences`` of ``length`` tokens; 0 if they fit."""
        each = -(-sequences // self.layout.data)
        need = max(cache.request_bytes(length) * each for cache in self.stages)
        return max(0.0, need - self.kv)

    def fits(self, length: int, sequences: float = 1) -> bool:
        """Return whether ``sequences`` of ``length`` tokens fit at once."""
        return self.concurrency(length) >= sequences


def budget(facts: Facts, gpu: Accelerator, layout: Layout, settings: EngineSettings) -> Memory:
    """Return the memory of the fullest GPU."""
    shape, version = facts.shape, settings.version
    total = gpu.memory_gib * GIB
    weights = weight_bytes(shape, layout, settings, facts.checkpoint_bytes, gpu)
    step = activations(shape, layout, settings, gpu)
    pictures = encoder(shape, settings, step)
    captured = graphs(shape, layout, settings, gpu)
    counted = captured if graphs_are_counted(version) else 0
    libraries, links = runtime(shape, settings, gpu), communication(layout, gpu, version)
    usable = total * settings.share / 100
    if gpu.vendor != "cpu":
        usable = min(usable, beyond_share(total, captured - counted))
    left = usable - weights - step - pictures - counted - libraries - links
    return Memory(
        total=total,
        usable=usable,
        weights=weights,
        activations=step,
        encoder=pictures,
        graphs=counted,
        graphs_outside=captured - counted,
        runtime=libraries,
        communication=links,
        kv=min(left, settings.kv_bytes) if settings.kv_bytes else left,
        stages=tuple(caches(shape, layout, settings, gpu.capability)),
        layout=layout,
        max_len=settings.max_len,
    )


def weight_bytes(
    shape: ModelShape,
    layout: Layout,
    settings: EngineSettings,
    known_checkpoint: float = 0,
    gpu: Accelerator | None = None,
) -> float:
    """Return the bytes of weights on the fullest GPU, adapters and a draft model included.

    ``known_checkpoint`` is the size of the files in bytes, by which the computed size is scaled; 0 = unknown.
    The files include the layers for multi-token prediction, which are loaded only when they are used. The
    kernels of a ``gpu`` pad 4-bit experts; without one they are as in the files.
    """
    padding = expert_padding(shape, layout, gpu, settings) if gpu else 1.0

    def on_rank(part: WeightPart) -> float:
        linear = part.name not in ("embedding", "head", "router", "norms", "encoder")
        online = settings.online_fp8 and linear and not shape.quantization.method
        each = 1.0 if online else shape.quantization.bytes_of(part.name, shape.dtype_bytes)
        return part.params / _shards(part, layout) * each * (padding if part.name == "experts" else 1)

    embedding, head = embedding_and_head(shape)
    scale = _scale(shape, head, known_checkpoint, settings)
    cut = stages(shape.layers, layout.pipeline)
    by_stage = [
        sum(
            number * (sum(map(on_rank, layer_parts(layer, shape.hidden))) + _absorbed(layer) / layout.tensor)
            for layer, number in layers.items()
        )
        for layers in cut
    ]
    by_stage[0] += on_rank(embedding)
    if settings.images:
        by_stage[0] += on_rank(encoder_part(shape.encoder))
    if not settings.pooling:  # pooling models are built without their output head
        by_stage[-1] += on_rank(head)
    found = scale * max(by_stage) + _adapters(shape, cut[0], layout, settings)
    draft = settings.draft
    if draft and draft.shape:
        alone = replace(settings, draft=None, adapters=0)
        found += weight_bytes(draft.shape, Layout(tensor=layout.tensor), alone, draft.checkpoint_bytes, gpu)
    elif draft and draft.is_mtp:
        found += sum(map(on_rank, mtp_parts(shape)))
    return found


def _scale(shape: ModelShape, head: WeightPart, known: float, settings: EngineSettings) -> float:
    """Return by what the computed size of weights is multiplied for files of a ``known`` size.

    The files of an embedding model may or may not have the output head of the model it was made from: they
    are taken to have it if that comes closer.
    """
    if not known:
        return 1.0
    computed = [checkpoint_bytes(shape)]
    if settings.pooling and head.params:
        each = shape.quantization.bytes_of(head.name, shape.stored_bytes)
        computed.append(computed[0] - head.params * each)
    return known / min(computed, key=lambda size: abs(size - known))


def _shards(part: WeightPart, layout: Layout) -> int:
    """Return the number of shards, of which a rank has one."""
    if part.spread == REPLICATED:
        return 1
    if part.spread == ROUTED and layout.expert:
        return layout.expert_size
    return min(layout.tensor, part.kv_heads) if part.spread == KV else layout.tensor


def _absorbed(layer: Layer) -> int:
    """Return the bytes of the second, absorbed copy that MLA keeps of its up-projections, in 16 bits."""
    m = layer.mixer
    return 2 * m.kv_rank * m.heads * (m.nope_dim + m.value_dim) if isinstance(m, Latent) else 0


def _adapters(shape: ModelShape, layers: Counter[Layer], layout: Layout, settings: EngineSettings) -> float:
    """Return the bytes for LoRA: two 16-bit matrices beside each of attention and dense feed-forward."""
    sides = 0
    for layer, number in layers.items():
        if isinstance(layer.mixer, Attention):
            a = layer.mixer
            rows = 4 * shape.hidden + 2 * a.heads * a.key_dim + a.kv_heads * (a.key_dim + a.value_dim)
            sides += number * rows
        if layer.mlp:
            sides += number * layer.mlp.matrices * (shape.hidden + layer.mlp.width)
    return settings.adapters * settings.adapter_rank * sides * 2 / layout.tensor
