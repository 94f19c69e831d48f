"""The KV cache as vLLM lays it out: pages, groups, blocks a request takes. Pure.

``v1/kv_cache_interface.py`` (page sizes, per-request limits) and the hybrid cache manager: layers of one kind
form groups of equal size, all groups share one pool of equal pages, a request takes blocks of every group.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvist_operator.models.layers import DTYPE_BYTES, Attention, Latent, Layer, Mixer, Recurrent
from kvist_operator.models.shape import ModelShape

from .layout import EngineSettings, Layout, stages

SCALES: Final = 8
"""Bytes of the two scales of per-token-head quantization."""
STEPS_IN_FLIGHT: Final = (0, 26)
"""Version from which windows keep the tokens of all steps in flight (``max_in_flight_tokens``)."""
SPARSE_ROW: Final = 656
"""One token in the packed 8-bit layout of sparse MLA (``fp8_ds_mla``): 512 values, scales, 64 × 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """Kind of layer, by its cache on one GPU."""

    token_bytes: float
    """Bytes of one layer and token; 0 for a recurrent state."""
    window: int = 0
    """Tokens of a sliding window; 0 = all tokens are kept."""
    state_bytes: float = 0
    """Bytes of one layer and sequence, for a recurrent state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The KV cache of one GPU, before its size is known."""

    block_bytes: float
    """Bytes of one block of the shared pool."""
    kinds: tuple[tuple[CacheKind, int, int], ...]
    """Each kind with its number of groups and the tokens of one of its blocks."""
    settings: EngineSettings
    in_flight: int
    """Tokens that may be computed while a window's blocks are still held."""
    ranks: int = 1
    """Ranks that split the tokens of a sequence (``AttentionSpec.max_num_blocks_per_req``)."""

    def request_blocks(self, length: int) -> int:
        """Return the maximum number of blocks of one sequence of this many tokens."""
        return sum(groups * self._blocks(kind, tokens, length) for kind, groups, tokens in self.kinds)

    def _blocks(self, kind: CacheKind, tokens: int, length: int) -> int:
        if kind.state_bytes:
            return (2 if self.settings.prefix_caching else 1) + _draft_tokens(self.settings)
        if kind.window:
            return math.ceil(min(kind.window - 1 + self.in_flight, length) / tokens) + 1
        return math.ceil(length / (tokens * self.ranks))

    def request_bytes(self, length: int) -> float:
        """Return the bytes of one sequence of this many tokens."""
        return self.request_blocks(length) * self.block_bytes

    def concurrency(self, kv_bytes: float, length: int) -> float:
        """Return how many sequences of this many tokens fit at once; of an encoder, in one step.

        vLLM: ``get_max_concurrency_for_kv_cache_config``.
        """
        settings = self.settings
        if settings.pooling and settings.pooling.whole_prompts and length > settings.batched_tokens:
            return 0.0
        if settings.pooling and not settings.pooling.causal:
            # nothing is kept after a step: as many as one step computes
            fit = min(settings.sequences, settings.batched_tokens // length)
            return float(fit) if kv_bytes >= 0 else 0.0
        if kv_bytes <= 0 or not self.block_bytes:
            return 0.0
        return int(kv_bytes // self.block_bytes) / self.request_blocks(length)

    def tokens(self, kv_bytes: float, length: int) -> int:
        """Return ``kv_cache_size_tokens`` of vLLM's cache_config_info."""
        return int(self.concurrency(kv_bytes, length) * length)


def caches(shape: ModelShape, layout: Layout, settings: EngineSettings, capability: int = 90) -> list[Cache]:
    """Return the cache of each pipeline stage; encoders have none."""
    if settings.pooling and not settings.pooling.causal:
        none = Cache(block_bytes=0, kinds=(), settings=settings, in_flight=settings.batched_tokens)
        return [none] * layout.pipeline
    cut = stages(shape.layers, layout.pipeline)
    last = cut[-1] + Counter(_draft_layers(shape, settings))
    return [_cache(layers, shape, layout, settings, capability) for layers in (*cut[:-1], last)]


def _draft_layers(shape: ModelShape, settings: EngineSettings) -> tuple[Layer, ...]:
    """Return the layers of the proposer that have a cache of their own."""
    draft = settings.draft
    if draft and draft.shape:
        return draft.shape.layers
    if not draft or not draft.is_mtp:
        return ()
    grown = [layer for layer in shape.layers if layer.mixer and not isinstance(layer.mixer, Recurrent)]
    return tuple(grown[-1:]) * max(1, shape.mtp_layers)


def _draft_tokens(settings: EngineSettings) -> int:
    return settings.draft.tokens if settings.draft else 0


def _cache(
    layers: Counter[Layer], shape: ModelShape, layout: Layout, settings: EngineSettings, capability: int
) -> Cache:
    counted: Counter[CacheKind] = Counter()
    for layer, number in layers.items():
        kind = _kind(layer.mixer, shape, layout, settings, capability)
        if kind:
            counted[kind] += number
    block_bytes, kinds = _blocks_of_kinds(counted, settings.block)
    steps = 1
    if settings.version >= STEPS_IN_FLIGHT:
        steps = layout.pipeline + 1 if layout.pipeline > 1 else 2
    in_flight = steps * settings.batched_tokens
    return Cache(
        block_bytes=block_bytes, kinds=kinds, settings=settings, in_flight=in_flight, ranks=layout.context
    )


def _blocks_of_kinds(
    counted: Counter[CacheKind], block: int
) -> tuple[float, tuple[tuple[CacheKind, int, int], ...]]:
    if not counted:
        return 0, ()
    if len({(kind.window, bool(kind.state_bytes)) for kind in counted}) == 1:
        # one group: a block holds its tokens in every layer
        first = next(iter(counted))
        if first.state_bytes:
            return sum(kind.state_bytes * n for kind, n in counted.items()), ((first, 1, 1),)
        return sum(kind.token_bytes * n for kind, n in counted.items()) * block, ((first, 1, block),)
    # several kinds: equal pages, groups of as many layers as the rarest kind has
    counted = _merged(counted)
    page = _page(counted, block)
    least, most = min(counted.values()), max(counted.values())
    size = most if most < 1.5 * least else least
    kinds = []
    for kind, n in counted.items():
        tokens = max(block, int(page // kind.token_bytes) // block * block) if kind.token_bytes else 1
        kinds.append((kind, math.ceil(n / size), tokens))
    return page * size, tuple(kinds)


def _merged(counted: Counter[CacheKind]) -> Counter[CacheKind]:
    """Merge growing layers of different widths (an MLA row and its indexer) into one kind of mean width.

    Such layers share blocks.
    """
    grown = {kind: n for kind, n in counted.items() if not kind.window and not kind.state_bytes}
    if len(grown) <= 1:
        return counted
    number = max(grown.values())
    width = sum(kind.token_bytes * n for kind, n in grown.items()) / number
    rest = {kind: n for kind, n in counted.items() if kind not in grown}
    return Counter({CacheKind(token_bytes=width): number, **rest})


def _page(counted: Counter[CacheKind], block: int) -> float:
    """Return the bytes of a page: attention blocks are enlarged until a recurrent state fits in one."""
    widest = max((kind.token_bytes for kind in counted if not kind.state_bytes), default=0.0)
    state = max((kind.state_bytes for kind in counted), default=0.0)
    return widest * block * max(1, math.ceil(state / (widest * block))) if widest else state


def _kind(
    mixer: Mixer | None, shape: ModelShape, layout: Layout, settings: EngineSettings, capability: int
) -> CacheKind | None:
    match mixer:
        case Attention(shared=False) as a:
            heads = max(1, a.kv_heads // layout.tensor)
            dtype = "auto" if a.window and settings.plain_windows else settings.kv_dtype
            each = head_bytes(a.key_dim + a.value_dim, dtype, shape.dtype)
            return CacheKind(token_bytes=heads * each, window=a.window)
        case Latent() as m:
            return CacheKind(token_bytes=_latent_row(m, shape, settings, capability))
        case Recurrent() as r:
            conv = r.conv_width * (r.conv_kernel - 1 + _draft_tokens(settings)) * shape.dtype_bytes
            state = conv + r.state * DTYPE_BYTES[r.state_dtype or shape.dtype]
            return CacheKind(token_bytes=0, state_bytes=state / layout.tensor)
    return None


def head_bytes(elements: int, kv_dtype: str, dtype: str) -> float:
    """Return the bytes of ``elements`` of keys and values of one head and token, in each KV dtype of vLLM."""
    if kv_dtype in ("fp8_per_token_head", "int8_per_token_head"):
        return elements + SCALES
    if kv_dtype == "int4_per_token_head":
        return elements / 2 + SCALES
    if kv_dtype.startswith("nvfp4"):
        return elements / 2 + elements / 16
    return elements * (1 if kv_dtype.startswith("fp8") else DTYPE_BYTES[dtype])


def _latent_row(mixer: Latent, shape: ModelShape, settings: EngineSettings, capability: int) -> float:
    """Return the bytes of one MLA row, which every tensor-parallel rank keeps whole."""
    fp8 = settings.kv_dtype.startswith("fp8")
    row = (mixer.kv_rank + mixer.rope_dim) * (1 if fp8 else shape.dtype_bytes)
    if mixer.sparse and fp8 and capability // 10 != 10:
        row = SPARSE_ROW  # SM100 prefers FLASHINFER_MLA_SPARSE, which keeps plain 8-bit rows
    if mixer.indexer:
        row += mixer.indexer.dim + 4 * math.ceil(mixer.indexer.dim / 128)  # 8-bit keys, a scale per 128
    return row
