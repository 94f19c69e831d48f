"""What a step needs besides weights and cache: activations, encoder, CUDA graphs, communication. Pure.

Estimates, not copies of vLLM's profile: each is the largest set of tensors that live at once in a dummy
step of ``batched_tokens``. The constants were set against start-up logs of vLLM in public issues.
"""

from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.models.layers import Attention, Experts, Latent, Layer, Mlp, Recurrent
from kvist_operator.models.shape import ModelShape

from .layout import GIB, EngineSettings, Layout, stages

ELEMENT: Final = 2
"""Activations are 16 bits wide."""
SAMPLER: Final = 24
"""Bytes a logit costs while a token is drawn: 16-bit, 32-bit, sorted values and their positions."""
MLA_WORKSPACE: Final = 65_536
"""Most cached tokens that chunked prefill of MLA expands at once (``mla_attention.py``)."""
INDEX_WORKSPACE: Final = GIB
"""Logits and gathered keys of the sparse indexer."""
GRAPH: Final = 0.22 * (1 << 20)
"""One layer in one captured graph. Logs: 86 graphs of a 36-layer model 0.64 to 0.78 GiB, 54 graphs 0.37,
15 graphs of a 64-layer model 0.22."""
RUNTIME: Final = 1.5 * GIB
"""CUDA context, library workspaces, fragmentation."""
COMMUNICATION: Final = {1: 0.0, 2: 0.7 * GIB, 4: 1.0 * GIB, 8: 1.4 * GIB}
"""NCCL, custom all-reduce and symmetric memory, by tensor-parallel size."""
PIPELINE: Final = 0.4 * GIB
CPU_RUNTIME: Final = 4 * GIB
"""Python, torch and its thread buffers in the memory of a CPU engine."""


def activations(shape: ModelShape, layout: Layout, settings: EngineSettings) -> float:
    """Peak bytes of one step on one GPU."""
    tokens = settings.batched_tokens
    residual = 2 * tokens * shape.hidden * ELEMENT
    kinds = {layer for stage in stages(shape, layout.pipeline) for layer in stage}
    stage = max(max(_mixer(k, tokens, layout, settings), _forward(k, tokens, layout)) for k in kinds)
    sampler = settings.sequences * shape.vocab * SAMPLER
    sparse = INDEX_WORKSPACE if (latent := shape.latent) and latent.sparse else 0
    return max(residual + stage, sampler) + sparse


def _mixer(layer: Layer, tokens: int, layout: Layout, settings: EngineSettings) -> float:
    match layer.mixer:
        case Attention() as a:
            width = a.heads * (a.key_dim * (2 if a.gated else 1) + a.value_dim) / layout.tensor
            return tokens * (width + max(1, a.kv_heads / layout.tensor) * (a.key_dim + a.value_dim)) * ELEMENT
        case Latent() as m:
            return _latent(m, tokens, layout, settings)
        case Recurrent() as r:
            return tokens * 3 * r.conv_width / layout.tensor * ELEMENT
    return 0


def _latent(m: Latent, tokens: int, layout: Layout, settings: EngineSettings) -> float:
    heads = m.heads / layout.tensor
    own = tokens * heads * (m.nope_dim + m.rope_dim + m.nope_dim + 2 * m.value_dim)
    expanded = (
        0 if m.sparse else min(8 * settings.max_len, MLA_WORKSPACE) * heads * (m.nope_dim + m.value_dim)
    )
    return (own + expanded) * ELEMENT


def _forward(layer: Layer, tokens: int, layout: Layout) -> float:
    dense = _dense(layer.mlp, tokens, layout) if layer.mlp else 0
    return dense + (_routed(layer.experts, tokens, layout) if layer.experts else 0)


def _dense(mlp: Mlp, tokens: int, layout: Layout) -> float:
    return tokens * mlp.matrices * mlp.width / layout.tensor * ELEMENT


def _routed(experts: Experts, tokens: int, layout: Layout) -> float:
    """Two buffers of the fused kernel, for every token and expert; data-parallel ranks gather tokens."""
    width = experts.width if layout.expert else experts.width / layout.tensor
    inner = experts.hidden
    gathered = tokens * layout.data if layout.expert else tokens
    return (
        gathered * experts.per_token * (max(2 * width, inner) + width) * ELEMENT + gathered * inner * ELEMENT
    )


def encoder(shape: ModelShape, settings: EngineSettings, step: float = 0) -> float:
    """The vision tower on its largest picture, beyond the peak of a text step (they do not run at once).

    The cache of encoded pictures comes on top.
    """
    tower = shape.encoder
    if tower is None or not settings.pictures:
        return 0
    budget = max(tower.tokens, settings.batched_tokens)
    patches = tower.tokens * tower.merge
    peak = patches * (4 * tower.hidden + 2 * tower.width) * ELEMENT
    return max(0.0, peak - step) + budget * tower.output * ELEMENT


def graphs(shape: ModelShape, layout: Layout, settings: EngineSettings, gpu: Accelerator) -> float:
    """CUDA graphs: piecewise ones for mixed steps, full ones for decode steps up to the sequences."""
    if settings.eager or gpu.vendor not in ("nvidia", "amd"):
        return 0
    largest = min(2 * settings.sequences, 1024 if gpu.capability // 10 == 10 else 512)
    captured = len(capture_sizes(largest)) + len(capture_sizes(min(settings.sequences, largest)))
    return captured * GRAPH * len(shape.layers) / layout.pipeline


def capture_sizes(largest: int) -> list[int]:
    """The batch sizes vLLM captures by default: 1, 2, 4, by 8 to 255, by 16 beyond."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]


def communication(layout: Layout) -> float:
    """Return the bytes that collectives take outside torch."""
    tensor = max((n for n in COMMUNICATION if n <= layout.tensor), default=1)
    return COMMUNICATION[tensor] + (PIPELINE if layout.pipeline * layout.data > 1 else 0)


def runtime(gpu: Accelerator) -> float:
    """Return the bytes that an engine takes before it loads anything."""
    return CPU_RUNTIME if gpu.vendor == "cpu" else RUNTIME
