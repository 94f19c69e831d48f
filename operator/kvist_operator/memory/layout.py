"""Parallelism of a replica and settings of an engine: the inputs of the memory arithmetic. Pure."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

from kvist_operator.flag_table import LATEST, Version
from kvist_operator.models.layers import Layer
from kvist_operator.models.pooling import Pooling
from kvist_operator.models.shape import ModelShape

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallelism of one replica."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    """Decode context parallelism: tensor-parallel ranks that split the tokens of a sequence's KV cache."""
    expert: bool = False
    """Each rank holds some experts whole, instead of a shard of each."""

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.data

    @property
    def expert_size(self) -> int:
        """Ranks among which the experts of a layer are distributed; 1 = no expert parallelism."""
        return self.tensor * self.data if self.expert else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Speculative decoding: weights and KV cache besides those of the model."""

    method: str
    tokens: int
    """Number of tokens of one proposal."""
    shape: ModelShape | None = None
    """The draft model; None for MTP (layers of the model itself) and for n-grams (no weights)."""
    checkpoint_bytes: float = 0

    @property
    def is_mtp(self) -> bool:
        """Whether the proposer consists of layers of the model's own checkpoint."""
        return self.method.lower().endswith("mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine that decide its memory."""

    version: Version = LATEST
    """Version of vLLM, whose profile decides what is left for the KV cache."""
    share: int = 92
    """Percent of a GPU's memory that vLLM may use."""
    batched_tokens: int = 8192
    """Maximum number of tokens computed in one step."""
    sequences: int = 256
    """Maximum number of sequences computed in one step."""
    max_len: int = 32_768
    kv_dtype: str = "auto"
    plain_windows: bool = False
    """Layers with a sliding window cache in the model's dtype, whatever ``kv_dtype`` is."""
    block: int = 16
    """Tokens per block of the KV cache."""
    prefix_caching: bool = True
    eager: bool = False
    """No CUDA graphs."""
    images: bool = True
    """Loads the vision tower of a model that has one."""
    pictures: int = 0
    """Maximum number of pictures of one prompt; 0 = as many as fit."""
    online_fp8: bool = False
    """Quantizes a 16-bit checkpoint to FP8 while loading."""
    adapters: int = 0
    adapter_rank: int = 16
    draft: Draft | None = None
    pooling: Pooling | None = None
    """vLLM's pooling runner serves the model; None for one that generates text."""
    kv_bytes: int = 0
    """Size of the KV cache where it is fixed (the CPU engine); 0 = what is left."""

    @property
    def routes_by_prefix(self) -> bool:
        """Whether the picker sends requests where their prefixes are cached, not by load alone."""
        return self.pooling is None and self.prefix_caching


@lru_cache(maxsize=256)
def stages(layers: tuple[Layer, ...], pipeline: int) -> tuple[Counter[Layer], ...]:
    """Return how often each layer occurs in each pipeline stage.

    The layers are distributed as by ``distributed/utils.py: get_pp_indices``: a remainder goes to the stages
    before the last, from the back.
    """
    base, rest = divmod(len(layers), pipeline)
    sizes = [base] * pipeline
    for i in range(rest):
        sizes[max(0, pipeline - 2 - i)] += 1
    ends = accumulate(sizes)
    return tuple(Counter(layers[end - size : end]) for end, size in zip(ends, sizes, strict=True))
