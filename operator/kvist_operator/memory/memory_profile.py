"""Estimates what vLLM's memory profile finds besides the weights: a step, pictures, graphs, overhead. Pure.

Before it sizes the KV cache, vLLM runs one step of ``max_num_batched_tokens``, samples for ``max_num_seqs``
sequences and encodes as many pictures as its budget holds (``v1/worker/gpu_model_runner.py``:
``profile_run``, ``_dummy_sampler_run``; ``gpu_worker.py``: ``determine_available_memory``). Each function
returns the largest set of tensors that live at once in one of these. Constants that no source gives were set
by start-up logs that people published (``tests/operator/published_logs.yaml``).
"""

import math
from typing import Final

from kvist_operator.flag_table import Version
from kvist_operator.hardware import Accelerator
from kvist_operator.models.layers import Attention, Latent, Layer, Recurrent
from kvist_operator.models.shape import ModelShape

from .layout import GIB, EngineSettings, Layout, stages

ELEMENT: Final = 2
"""Bytes of an element of the activations."""
POOLED_ELEMENT: Final = 4
"""Bytes of an element of the hidden states that a pooler takes (vLLM 0.33: ``config/model.py``)."""
LIVE_ROWS: Final = 3
"""Rows of the hidden size that live beside the widest operation of a layer: residual, input, output."""

SORTED_LOGIT: Final = 38.5
"""Bytes per logit where top-k and top-p sort: logits in 16 and 32 bits, sorted values, positions, and the
sort's own copies (``v1/sample/ops/topk_topp_sampler.py`` up to 0.16, and on a CPU). Logs: 5.58 GiB for
1,024 × 151,936 logits on H200, 1.40 GiB for 256 × 151,936 on a card of 24 GB."""
FUSED_LOGIT: Final = 16.0
"""Bytes per logit with a fused kernel, Triton's from 0.17, FlashInfer's from 0.20: logits in 16 and 32
bits, probabilities and a masked copy. Log: 0.85 GiB for 256 × 248,320 logits on gfx1151."""
SAMPLER_STATE: Final = 4.125
"""Bytes per logit that model runner V2 keeps for penalties: a 32-bit count and a bit
(``v1/worker/gpu/sample/penalties.py``)."""
FUSED_SAMPLER: Final = (0, 17)
RUNNER_V2: Final = (0, 27)
"""Version from which model runner V2 serves most models, and vLLM counts all memory consumed since its start
(``utils/mem_utils.py``: ``total_consumed``)."""
GRAPHS_COUNTED: Final = (0, 21)
"""Version from which vLLM subtracts its estimate of CUDA graphs (``VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS``
is 1)."""

MLA_WORKSPACE: Final = 65_536
"""Maximum cached tokens that chunked prefill of MLA expands at once (``mla_attention.py``)."""
SPARSE_ROWS: Final = 5
"""Rows of 576 × 16 bits that the sparse prefill's workspace has per token of ``max_model_len``; the indexer's
gathered keys fill the same workspace (``v1/attention/backends/mla/flashmla_sparse.py``, ``indexer.py``)."""
FEW_SPARSE_ROWS: Final = 2
"""The same for more than ``SHORT_CONTEXT`` tokens (``config/vllm.py``), from the version ``FEWER_ROWS``."""
SHORT_CONTEXT: Final = 256 * 1024
FEWER_ROWS: Final = (0, 32)
INDEX_LOGITS: Final = GIB // 2
"""Logits of the sparse indexer (``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``)."""

GROUP: Final = 128
"""Rows and columns of a block of FP8 weights; DeepGEMM makes each expert's rows a multiple of them."""
PACKED_GROUPS: Final = (0, 31)
"""Version from which the first of DeepGEMM's buffers is 8-bit."""

MIB: Final = 1 << 20
GRAPH: Final = 0.25 * MIB
"""Bytes of one layer in one captured graph, as vLLM estimates them. Logs: 0.53 GiB for 86 graphs of 28
layers, 0.78 for 86 of 32, 0.13 for 13 of 60."""
EXPERT_GRAPH: Final = 0.6 * MIB
"""The same for a layer with experts. Logs: 4.99 GiB for 102 graphs of 78 layers, 1.97 for 54 of 60."""
ROCM_GRAPH: Final = 0.3 * MIB
"""The same on AMD GPUs. Log: 1.55 GiB for 86 graphs of 64 layers."""
WIDE_GRAPHS: Final = (0, 27)
"""Version from which graphs on Blackwell hold up to 1,024 tokens (``config/vllm.py``)."""
FLASHINFER_WORKSPACE: Final = 394 * MIB
"""``VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE``: the first captured graph allocates it."""

RUNTIME: Final = {"nvidia": 0.5 * GIB, "amd": 0.8 * GIB, "cpu": 4.0 * GIB}
"""Libraries, kernels and buffers of the runner, by vendor; for a CPU Python and the buffers of its threads.
The CUDA context itself is outside of the share. Logs: 0.30 to 0.56 GiB consumed beyond the weights."""
OLD_RUNTIME: Final = {"nvidia": 0.15 * GIB, "amd": 0.8 * GIB, "cpu": 4.0 * GIB}
"""The same before ``RUNNER_V2``, when only memory outside torch was counted. Logs: 0.02 to 0.07 GiB."""
SWITCHED: Final = {1: 0.0, 2: 1.0 * GIB, 4: 1.4 * GIB, 8: 1.8 * GIB}
"""NCCL, custom all-reduce and symmetric memory, by tensor-parallel size, on GPUs of NVSwitch systems. Logs:
0.95 GiB on 4 × GB200, 1.63 on 4 × B300."""
OLD_SWITCHED: Final = {1: 0.0, 2: 1.3 * GIB, 4: 1.8 * GIB, 8: 2.0 * GIB}
"""The same with the NCCL of vLLM before ``GRAPHS_COUNTED``, and on AMD GPUs. Logs: 1.38 GiB on 2 × H200, 1.84
on 4 × H100."""
BUS: Final = {1: 0.0, 2: 0.3 * GIB, 4: 0.5 * GIB, 8: 0.9 * GIB}
"""The same on other GPUs. Log: 0.2 GiB on 2 × L40S."""
PIPELINE: Final = 0.4 * GIB
CONTEXT: Final = 0.6 * GIB
"""CUDA context, which lies outside of the share. Logs: 0.4 to 0.6 GiB."""


def activations(shape: ModelShape, layout: Layout, settings: EngineSettings, gpu: Accelerator) -> float:
    """Return the peak bytes of one step on one GPU, sampling included."""
    tokens = settings.batched_tokens
    kinds = {layer for stage in stages(shape.layers, layout.pipeline) for layer in stage}
    grouped = _groups_experts(shape, gpu)
    widest = max(
        max(_mixer(layer, tokens, layout, settings), _feedforward(layer, layout, settings, grouped))
        for layer in kinds
    )
    rows = LIVE_ROWS + (1 if shape.encoder and settings.images else 0)  # pictures enter as embeddings
    if _is_sparse(shape):
        widest = max(widest, INDEX_LOGITS)
    step = rows * tokens * shape.hidden * ELEMENT + widest
    if settings.pooling:
        # no sampling: the pooler takes the last hidden states, in 32 bits (``_get_head_dtype``)
        return step + tokens * shape.hidden * POOLED_ELEMENT + _sparse_workspace(shape, settings)
    logits = min(settings.sequences, tokens) * shape.vocab
    fused = settings.version >= FUSED_SAMPLER and gpu.vendor != "cpu"
    sampler = logits * (FUSED_LOGIT if fused else SORTED_LOGIT)
    return max(step, sampler) + _sparse_workspace(shape, settings)


def _is_sparse(shape: ModelShape) -> bool:
    return shape.latent is not None and shape.latent.sparse


def _sparse_workspace(shape: ModelShape, settings: EngineSettings) -> float:
    """Return the bytes of the workspace that sparse prefill and its indexer share."""
    latent = shape.latent
    if not latent or not latent.sparse:
        return 0
    short = settings.max_len <= SHORT_CONTEXT or settings.version < FEWER_ROWS
    row = (latent.kv_rank + latent.rope_dim) * ELEMENT
    return (SPARSE_ROWS if short else FEW_SPARSE_ROWS) * settings.max_len * row


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


def _groups_experts(shape: ModelShape, gpu: Accelerator) -> bool:
    """Return whether DeepGEMM multiplies the experts: FP8 in blocks of 128 from Hopper on."""
    q = shape.quantization
    return q.fp8 and q.block == GROUP and gpu.vendor == "nvidia" and gpu.capability >= 90


def _feedforward(layer: Layer, layout: Layout, settings: EngineSettings, grouped: bool) -> float:
    """Return the bytes of the dense block, and of the two buffers for tokens of experts.

    ``grouped``: each expert's rows are rounded up to a block, and both buffers have rows as wide as the
    hidden size (``deep_gemm_moe.py``: ``workspace_shapes``).
    """
    needed: float = 0
    tokens = settings.batched_tokens
    if layer.mlp:
        needed += tokens * layer.mlp.matrices * layer.mlp.width / layout.tensor
    if layer.experts:
        e = layer.experts
        width = e.width if layout.expert else e.width / layout.tensor
        # data-parallel ranks gather each other's tokens
        gathered = tokens * layout.data if layout.expert else tokens
        rows: float = gathered * e.per_token
        second = width
        if grouped:
            rows += e.count / layout.expert_size * (GROUP - 1)
            second = max(width, e.hidden) * (1 if settings.version < PACKED_GROUPS else 0.5)
        needed += rows * (max(2 * width, e.hidden) + second) + gathered * e.hidden
    return needed * ELEMENT


def pictures(shape: ModelShape, settings: EngineSettings) -> int:
    """Return the number of pictures of the largest size that the profile encodes at once.

    ``multimodal/encoder_budget.py``: as many as the encoder's budget holds, which is the larger of the tokens
    of a step and of one picture, and no more than ``--limit-mm-per-prompt`` lets the sequences have.
    """
    tower = shape.encoder
    if tower is None or not settings.images:
        return 0
    budget = max(settings.batched_tokens, tower.tokens)
    per_prompt = max(1, settings.max_len // tower.tokens)
    if settings.pictures:
        per_prompt = min(per_prompt, settings.pictures)
    return max(1, min(budget // tower.tokens, settings.sequences * per_prompt))


def encoder(shape: ModelShape, settings: EngineSettings, step: float) -> float:
    """Return the bytes of the vision tower on its pictures beyond a ``step``, and of the encoded pictures.

    The tower and a text step do not run at once, so only the excess over the peak of the step counts.
    """
    tower, number = shape.encoder, pictures(shape, settings)
    if tower is None or not number:
        return 0
    peak = number * tower.patches_each * (4 * tower.hidden + 2 * tower.width) * ELEMENT
    cached = number * tower.tokens * tower.output * ELEMENT
    return max(0.0, peak - step) + cached


def graphs(shape: ModelShape, layout: Layout, settings: EngineSettings, gpu: Accelerator) -> float:
    """Return the bytes of CUDA graphs: piecewise for mixed steps, full for decode steps."""
    if settings.eager or gpu.vendor not in ("nvidia", "amd"):
        return 0
    wide = gpu.capability // 10 == 10 and settings.version >= WIDE_GRAPHS
    largest = min(2 * settings.sequences, 1024 if wide else 512)
    captured = len(capture_sizes(largest))
    if not settings.pooling:  # these have no decode steps (``config/vllm.py``: PIECEWISE)
        captured += len(capture_sizes(min(settings.sequences, largest)))
    each = ROCM_GRAPH if gpu.vendor == "amd" else GRAPH
    sparse = sum(layer.experts is not None for layer in shape.layers)
    layers = each * (len(shape.layers) - sparse) + max(each, EXPERT_GRAPH) * sparse
    workspace = FLASHINFER_WORKSPACE if _uses_flashinfer(shape, settings, gpu) else 0
    return captured * layers / layout.pipeline + workspace


def _uses_flashinfer(shape: ModelShape, settings: EngineSettings, gpu: Accelerator) -> bool:
    """Return whether FlashInfer computes attention (``platforms/cuda.py``).

    It is preferred on Blackwell, and it alone reads FP8 caches on Ampere, Ada and SM120.
    """
    if gpu.vendor != "nvidia":
        return False
    blackwell = gpu.capability // 10 == 10
    return blackwell or (settings.kv_dtype != "auto" and gpu.capability // 10 != 9 and shape.latent is None)


def capture_sizes(largest: int) -> list[int]:
    """Return the batch sizes vLLM captures by default: 1, 2, 4, by 8 to 255, by 16 beyond."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]


def graphs_are_counted(version: Version) -> bool:
    """Return whether this version subtracts CUDA graphs from the share before it sizes the KV cache."""
    return version >= GRAPHS_COUNTED


def communication(layout: Layout, gpu: Accelerator, version: Version) -> float:
    """Return the bytes of NCCL and all-reduce buffers of one rank."""
    switched = gpu.vendor == "nvidia" and gpu.capability // 10 in (9, 10)
    if gpu.vendor == "amd" or (switched and version < GRAPHS_COUNTED):
        table = OLD_SWITCHED
    else:
        table = SWITCHED if switched else BUS
    if gpu.vendor == "cpu":
        return 0
    # experts of data-parallel ranks are one group too
    ranks = max(layout.tensor, layout.expert_size)
    size = max(n for n in table if n <= ranks)
    return table[size] + (PIPELINE if layout.pipeline * layout.data > 1 else 0)


def runtime(shape: ModelShape, settings: EngineSettings, gpu: Accelerator) -> float:
    """Return the bytes of libraries, kernels, and what the model runner keeps for each sequence."""
    current = settings.version >= RUNNER_V2
    found = (RUNTIME if current else OLD_RUNTIME).get(gpu.vendor, RUNTIME["nvidia"])
    if current and gpu.vendor != "cpu" and not settings.pooling:
        found += settings.sequences * shape.vocab * SAMPLER_STATE
    return found


def beyond_share(total: float, outside: float) -> float:
    """Return the bytes that are left for the share when the context and ``outside`` have theirs."""
    return math.floor(total - CONTEXT - outside)
