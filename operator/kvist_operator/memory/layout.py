"""How a replica is spread over GPUs, and how an engine runs: the two things the arithmetic depends on."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Final, Self

from kvist_operator.models.layers import Layer
from kvist_operator.models.shape import ModelShape

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallelism of one replica."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    """Experts are spread whole over ranks instead of split."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_size(self) -> int:
        """Ranks over which the experts of a layer are spread; 1 = no expert parallelism."""
        return self.tensor * self.data if self.expert else 1

    @property
    def expert_split(self) -> int:
        """By how many a rank's share of routed experts is smaller than all of them."""
        return self.tensor * self.data if self.expert else self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Speculative decoding: what it loads and caches besides the model."""

    method: str
    tokens: int
    """Tokens proposed at a time."""
    shape: ModelShape | None = None
    """The draft model; None for MTP (layers of the model itself) and for n-grams (nothing)."""
    checkpoint_bytes: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine that decide its memory."""

    share: int = 92
    """Percent of a GPU's memory that vLLM may take."""
    batched_tokens: int = 8192
    """Tokens computed in one step at most."""
    sequences: int = 256
    """Sequences computed in one step at most."""
    max_len: int = 32_768
    kv_dtype: str = "auto"
    block: int = 16
    prefix_caching: bool = True
    eager: bool = False
    """No CUDA graphs."""
    pictures: bool = True
    """Loads the vision tower of a model that has one."""
    online_fp8: bool = False
    """Quantises a 16-bit checkpoint to FP8 while loading."""
    adapters: int = 0
    adapter_rank: int = 16
    draft: Draft | None = None
    kv_bytes: int = 0
    """The cache is given instead of what is left (the CPU engine)."""

    def but(self, **changes: object) -> Self:
        return replace(self, **changes)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _cut(layers: tuple[Layer, ...], pipeline: int) -> tuple[Counter[Layer], ...]:
    base, rest = divmod(len(layers), pipeline)
    sizes = [base] * pipeline
    for i in range(rest):
        sizes[max(0, pipeline - 2 - i)] += 1
    ends = accumulate(sizes)
    return tuple(Counter(layers[end - size : end]) for end, size in zip(ends, sizes, strict=True))


def stages(shape: ModelShape, pipeline: int) -> tuple[Counter[Layer], ...]:
    """The layers of each pipeline stage with their numbers, as ``distributed/utils.py: get_pp_indices`` cuts.

    A remainder goes to the stages before the last, from behind.
    """
    return _cut(shape.layers, pipeline)
