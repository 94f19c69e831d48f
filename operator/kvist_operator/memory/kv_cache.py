"""The KV cache as vLLM lays it out: pages, groups, blocks a request takes. Pure.

``v1/kv_cache_interface.py`` (page sizes, per-request limits) and the hybrid cache manager: layers of one
kind form groups of equal size, all groups share one pool of equal pages, a request takes blocks of every
group.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvist_operator.models.layers import DTYPE_BYTES, Attention, Latent, Layer, Mixer, Recurrent
from kvist_operator.models.shape import ModelShape

from .layout import EngineSettings, Layout, stages
from .weight_memory import is_mtp

SCALES: Final = 8
"""Bytes of the two scales of per-token-head quantisation."""
SPARSE_ROW: Final = 656
"""One token in the packed 8-bit layout of sparse MLA (``fp8_ds_mla``): 512 values, scales, 64 × 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """Layers whose caches are alike."""

    token_bytes: float
    """One layer, one token, one GPU; 0 for a recurrent state."""
    window: int = 0
    state_bytes: float = 0
    """One layer, one sequence, one GPU."""

    @property
    def grows(self) -> bool:
        return not self.window and not self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The cache of one GPU, before its size is known."""

    block_bytes: float
    """One block of the shared pool."""
    kinds: tuple[tuple[CacheKind, int, int], ...]
    """Kind, number of groups, tokens a block of it holds."""
    settings: EngineSettings
    in_flight: int
    """Tokens that may be computed while a window's blocks are still held."""

    def request_blocks(self, length: int) -> int:
        """Blocks that one sequence of this many tokens takes at most."""
        return sum(groups * self._blocks(kind, tokens, length) for kind, groups, tokens in self.kinds)

    def _blocks(self, kind: CacheKind, tokens: int, length: int) -> int:
        if kind.state_bytes:
            spare = self.settings.draft.tokens if self.settings.draft else 0
            return (2 if self.settings.prefix_caching else 1) + spare
        if kind.window:
            return math.ceil(min(kind.window - 1 + self.in_flight, length) / tokens) + 1
        return math.ceil(length / tokens)

    def request_bytes(self, length: int) -> float:
        """Bytes on one GPU of one sequence."""
        return self.request_blocks(length) * self.block_bytes

    def concurrency(self, kv_bytes: float, length: int) -> float:
        """Sequences of this many tokens that fit at once (``get_max_concurrency_for_kv_cache_config``)."""
        if kv_bytes <= 0 or not self.block_bytes:
            return 0.0
        return int(kv_bytes // self.block_bytes) / self.request_blocks(length)

    def tokens(self, kv_bytes: float, length: int) -> int:
        """``kv_cache_size_tokens`` of vLLM's cache_config_info."""
        return int(self.concurrency(kv_bytes, length) * length)


def caches(shape: ModelShape, layout: Layout, settings: EngineSettings, capability: int = 90) -> list[Cache]:
    """One per pipeline stage: the smallest decides."""
    cut = stages(shape, layout.pipeline)
    extra = _draft_layers(shape, settings)
    held = [*cut[:-1], cut[-1] + Counter(extra)]
    return [_cache(layers, shape, layout, settings, capability) for layers in held]


def _cache(
    layers: Counter[Layer], shape: ModelShape, layout: Layout, settings: EngineSettings, capability: int
) -> Cache:
    counted: Counter[CacheKind] = Counter()
    for layer, number in layers.items():
        kind = _kind(layer.mixer, shape, layout, settings, capability)
        counted += Counter({kind: number}) if kind else Counter()
    in_flight = (layout.pipeline + 1 if layout.pipeline > 1 else 2) * settings.batched_tokens
    if len({(kind.window, bool(kind.state_bytes)) for kind in counted}) <= 1:
        return _uniform(counted, settings, in_flight)
    return _mixed(_merged(counted), settings, in_flight)


def _uniform(counted: Counter[CacheKind], settings: EngineSettings, in_flight: int) -> Cache:
    """One group: a block holds its tokens in every layer."""
    if not counted:
        return Cache(block_bytes=0, kinds=(), settings=settings, in_flight=in_flight)
    first = next(iter(counted))
    if first.state_bytes:
        return Cache(
            block_bytes=sum(k.state_bytes * n for k, n in counted.items()),
            kinds=((first, 1, 1),),
            settings=settings,
            in_flight=in_flight,
        )
    together = sum(k.token_bytes * n for k, n in counted.items())
    return Cache(
        block_bytes=together * settings.block,
        kinds=((first, 1, settings.block),),
        settings=settings,
        in_flight=in_flight,
    )


def _merged(counted: Counter[CacheKind]) -> Counter[CacheKind]:
    """Growing layers of different widths (an MLA row and its indexer) share blocks: one kind, mean width."""
    grown = {kind: n for kind, n in counted.items() if kind.grows}
    if len(grown) <= 1:
        return counted
    number = max(grown.values())
    width = sum(kind.token_bytes * n for kind, n in grown.items()) / number
    rest = {kind: n for kind, n in counted.items() if not kind.grows}
    return Counter({CacheKind(token_bytes=width): number, **rest})


def _mixed(counted: Counter[CacheKind], settings: EngineSettings, in_flight: int) -> Cache:
    """Several kinds: equal pages, groups of as many layers as the rarest kind has."""
    page = _page(counted, settings.block)
    size = _group_size(list(counted.values()))
    kinds = tuple(
        (kind, math.ceil(n / size), _tokens_per_page(kind, page, settings.block))
        for kind, n in counted.items()
    )
    return Cache(block_bytes=page * size, kinds=kinds, settings=settings, in_flight=in_flight)


def _page(counted: Counter[CacheKind], block: int) -> float:
    """Bytes of a page: attention blocks are enlarged until a recurrent state fits in one."""
    widest = max((kind.token_bytes for kind in counted if not kind.state_bytes), default=0.0)
    state = max((kind.state_bytes for kind in counted), default=0.0)
    if not widest:
        return state
    return widest * block * max(1, math.ceil(state / (widest * block)))


def _tokens_per_page(kind: CacheKind, page: float, block: int) -> int:
    if not kind.token_bytes:
        return 1
    return max(block, int(page // kind.token_bytes) // block * block)


def _group_size(numbers: Sequence[int]) -> int:
    least, most = min(numbers), max(numbers)
    return most if most < 1.5 * least else least


def _kind(
    mixer: Mixer | None, shape: ModelShape, layout: Layout, settings: EngineSettings, capability: int
) -> CacheKind | None:
    match mixer:
        case Attention(shared=False):
            return CacheKind(token_bytes=_attention(mixer, shape, layout, settings), window=mixer.window)
        case Latent():
            return CacheKind(token_bytes=_latent(mixer, shape, settings, capability))
        case Recurrent():
            return CacheKind(token_bytes=0, state_bytes=_state(mixer, shape, layout, settings))
    return None


def _attention(mixer: Attention, shape: ModelShape, layout: Layout, settings: EngineSettings) -> float:
    heads = max(1, mixer.kv_heads // layout.tensor)
    both = mixer.key_dim + mixer.value_dim
    return heads * head_bytes(both, settings.kv_dtype, shape.dtype)


def head_bytes(elements: int, kv_dtype: str, dtype: str) -> float:
    """Key and value of one head and token, in each of vLLM's KV dtypes."""
    if kv_dtype in ("fp8_per_token_head", "int8_per_token_head"):
        return elements + SCALES
    if kv_dtype == "int4_per_token_head":
        return elements / 2 + SCALES
    if kv_dtype.startswith("nvfp4"):
        return elements / 2 + elements / 16
    return elements * kv_element_bytes(kv_dtype, dtype)


def kv_element_bytes(kv_dtype: str, dtype: str) -> int:
    """One element, where there are no scales."""
    return 1 if kv_dtype.startswith("fp8") else DTYPE_BYTES[dtype]


def _latent(mixer: Latent, shape: ModelShape, settings: EngineSettings, capability: int) -> float:
    """Every tensor-parallel rank keeps the whole row."""
    row: float = (mixer.kv_rank + mixer.rope_dim) * kv_element_bytes(settings.kv_dtype, shape.dtype)
    if mixer.sparse and settings.kv_dtype.startswith("fp8") and capability // 10 != 10:
        row = SPARSE_ROW  # SM100 prefers FLASHINFER_MLA_SPARSE, which keeps plain 8-bit rows
    return row + (_index_row(mixer.indexer.dim) if mixer.indexer else 0)


def _index_row(dim: int) -> int:
    """8-bit keys and a 32-bit scale per 128 of them."""
    return dim + 4 * math.ceil(dim / 128)


def _state(mixer: Recurrent, shape: ModelShape, layout: Layout, settings: EngineSettings) -> float:
    spare = settings.draft.tokens if settings.draft else 0
    conv = mixer.conv_width * (mixer.conv_kernel - 1 + spare) * shape.dtype_bytes
    return (conv + mixer.state * DTYPE_BYTES[mixer.state_dtype or shape.dtype]) / layout.tensor


def _draft_layers(shape: ModelShape, settings: EngineSettings) -> tuple[Layer, ...]:
    """Layers of the proposer that have a cache of their own."""
    if settings.draft is None:
        return ()
    if settings.draft.shape is not None:
        return settings.draft.shape.layers
    if not is_mtp(settings.draft):
        return ()
    grown = [layer for layer in shape.layers if layer.mixer and not isinstance(layer.mixer, Recurrent)]
    return tuple(grown[-1:]) * max(1, shape.mtp_layers)
