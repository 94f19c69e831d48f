"""Memory of the fullest GPU, item by item: weights, peak of a step, CUDA graphs, overhead, KV cache. Pure.

What a step needs is estimated, not copied from vLLM's profile: each item is the largest set of tensors that
live at once in a dummy step of ``batched_tokens``. The constants were set by start-up logs of vLLM in public
issues.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.models.layers import (
    KV,
    REPLICATED,
    ROUTED,
    Attention,
    Latent,
    Layer,
    Recurrent,
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

ELEMENT: Final = 2
"""Bytes of an element of the activations."""
SAMPLER: Final = 24
"""Bytes per logit during sampling: 16-bit, 32-bit and sorted values, and their positions."""
MLA_WORKSPACE: Final = 65_536
"""Maximum cached tokens that chunked prefill of MLA expands at once (``mla_attention.py``)."""
INDEX_WORKSPACE: Final = GIB
"""Logits and gathered keys of the sparse indexer."""
GRAPH: Final = 0.22 * (1 << 20)
"""Bytes of one layer in one captured graph. Logs: 86 graphs of a 36-layer model 0.64 to 0.78 GiB, 54 graphs
0.37, 15 graphs of a 64-layer model 0.22."""
RUNTIME: Final = 1.5 * GIB
"""CUDA context, library workspaces, fragmentation."""
COMMUNICATION: Final = {1: 0.0, 2: 0.7 * GIB, 4: 1.0 * GIB, 8: 1.4 * GIB}
"""NCCL, custom all-reduce and symmetric memory, by tensor-parallel size."""
PIPELINE: Final = 0.4 * GIB
CPU_RUNTIME: Final = 4 * GIB
"""Python, torch and its thread buffers in the memory of a CPU engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU; tokens and concurrency of the whole replica."""

    total: float
    usable: float
    """The share that vLLM may use."""
    weights: float
    activations: float
    encoder: float
    """What an image needs beyond the peak of a text step."""
    graphs: float
    overhead: float
    """Context, libraries, communication."""
    kv: float
    """Bytes left for the KV cache; negative if even the other items do not fit."""
    stages: tuple[Cache, ...]
    layout: Layout
    max_len: int

    def concurrency(self, length: int) -> float:
        """Return how many sequences of this many tokens fit at once, all data-parallel ranks together."""
        return self.layout.data * min(cache.concurrency(self.kv, length) for cache in self.stages)

    @property
    def max_concurrency(self) -> float:
        """Sequences of ``max_len`` tokens that fit at once."""
        return self.concurrency(self.max_len)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of the replica holds."""
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
    shape = facts.shape
    total = gpu.memory_gib * GIB
    usable = total * settings.share / 100
    weights = weight_bytes(shape, layout, settings, facts.checkpoint_bytes)
    step = _activations(shape, layout, settings)
    encoder = _encoder(shape, settings, step)
    graphs = _graphs(shape, layout, settings, gpu)
    tensor = max((n for n in COMMUNICATION if n <= layout.tensor), default=1)
    overhead = COMMUNICATION[tensor] + (PIPELINE if layout.pipeline * layout.data > 1 else 0)
    overhead += CPU_RUNTIME if gpu.vendor == "cpu" else RUNTIME
    left = usable - weights - step - encoder - graphs - overhead
    return Memory(
        total=total,
        usable=usable,
        weights=weights,
        activations=step,
        encoder=encoder,
        graphs=graphs,
        overhead=overhead,
        kv=min(left, settings.kv_bytes) if settings.kv_bytes else left,
        stages=tuple(caches(shape, layout, settings, gpu.capability)),
        layout=layout,
        max_len=settings.max_len,
    )


def weight_bytes(
    shape: ModelShape, layout: Layout, settings: EngineSettings, known_checkpoint: float = 0
) -> float:
    """Return the bytes of weights on the fullest GPU, adapters and a draft model included.

    ``known_checkpoint`` is the size of the files in bytes, by which the computed size is scaled; 0 = unknown.
    The files include the layers for multi-token prediction, which are loaded only when they are used.
    """

    def on_rank(part: WeightPart) -> float:
        linear = part.name not in ("embedding", "head", "router", "norms", "encoder")
        online = settings.online_fp8 and linear and not shape.quantization.method
        each = 1.0 if online else shape.quantization.bytes_of(part.name, shape.dtype_bytes)
        return part.params / _shards(part, layout) * each

    scale = known_checkpoint / checkpoint_bytes(shape) if known_checkpoint else 1.0
    cut = stages(shape.layers, layout.pipeline)
    by_stage = [
        sum(
            number * (sum(map(on_rank, layer_parts(layer, shape.hidden))) + _absorbed(layer) / layout.tensor)
            for layer, number in layers.items()
        )
        for layers in cut
    ]
    embedding, head = embedding_and_head(shape)
    by_stage[0] += on_rank(embedding)
    if settings.images:
        by_stage[0] += on_rank(encoder_part(shape.encoder))
    by_stage[-1] += on_rank(head)
    found = scale * max(by_stage) + _adapters(shape, cut[0], layout, settings)
    draft = settings.draft
    if draft and draft.shape:
        alone = replace(settings, draft=None, adapters=0)
        found += weight_bytes(draft.shape, Layout(tensor=layout.tensor), alone, draft.checkpoint_bytes)
    elif draft and draft.is_mtp:
        found += sum(map(on_rank, mtp_parts(shape)))
    return found


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


def _activations(shape: ModelShape, layout: Layout, settings: EngineSettings) -> float:
    """Return the peak bytes of one step on one GPU."""
    tokens = settings.batched_tokens
    kinds = {layer for stage in stages(shape.layers, layout.pipeline) for layer in stage}
    peak = max(
        max(_mixer(layer, tokens, layout, settings), _feedforward(layer, tokens, layout)) for layer in kinds
    )
    residual = 2 * tokens * shape.hidden * ELEMENT
    sampler = settings.sequences * shape.vocab * SAMPLER
    sparse = INDEX_WORKSPACE if (latent := shape.latent) and latent.sparse else 0
    return max(residual + peak, sampler) + sparse


def _mixer(layer: Layer, tokens: int, layout: Layout, settings: EngineSettings) -> float:
    match layer.mixer:
        case Attention() as a:
            width = a.heads * (a.key_dim * (2 if a.gated else 1) + a.value_dim) / layout.tensor
            return tokens * (width + max(1, a.kv_heads / layout.tensor) * (a.key_dim + a.value_dim)) * ELEMENT
        case Latent() as m:
            heads = m.heads / layout.tensor
            own = tokens * heads * (m.nope_dim + m.rope_dim + m.nope_dim + 2 * m.value_dim)
            cached = 0 if m.sparse else min(8 * settings.max_len, MLA_WORKSPACE)
            return (own + cached * heads * (m.nope_dim + m.value_dim)) * ELEMENT
        case Recurrent() as r:
            return tokens * 3 * r.conv_width / layout.tensor * ELEMENT
    return 0


def _feedforward(layer: Layer, tokens: int, layout: Layout) -> float:
    """Return the bytes of the dense block and of the fused kernel's two buffers for each token and expert."""
    needed: float = 0
    if layer.mlp:
        needed += tokens * layer.mlp.matrices * layer.mlp.width / layout.tensor
    if layer.experts:
        e = layer.experts
        width = e.width if layout.expert else e.width / layout.tensor
        # data-parallel ranks gather each other's tokens
        gathered = tokens * layout.data if layout.expert else tokens
        needed += gathered * e.per_token * (max(2 * width, e.hidden) + width) + gathered * e.hidden
    return needed * ELEMENT


def _encoder(shape: ModelShape, settings: EngineSettings, step: float) -> float:
    """Return the bytes of the vision tower on its largest image, and of the cache of encoded images.

    The tower and a text step do not run at once, so only the excess over the peak of a ``step`` counts.
    """
    tower = shape.encoder
    if tower is None or not settings.images:
        return 0
    peak = tower.tokens * tower.merge * (4 * tower.hidden + 2 * tower.width) * ELEMENT
    cached = max(tower.tokens, settings.batched_tokens) * tower.output * ELEMENT
    return max(0.0, peak - step) + cached


def _graphs(shape: ModelShape, layout: Layout, settings: EngineSettings, gpu: Accelerator) -> float:
    """Return the bytes of CUDA graphs: piecewise for mixed steps, full for decode steps."""
    if settings.eager or gpu.vendor not in ("nvidia", "amd"):
        return 0
    largest = min(2 * settings.sequences, 1024 if gpu.capability // 10 == 10 else 512)
    captured = len(capture_sizes(largest)) + len(capture_sizes(min(settings.sequences, largest)))
    return captured * GRAPH * len(shape.layers) / layout.pipeline


def capture_sizes(largest: int) -> list[int]:
    """Return the batch sizes vLLM captures by default: 1, 2, 4, by 8 to 255, by 16 beyond."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]
