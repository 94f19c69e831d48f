"""All of one GPU's memory, item by item: what is left is the KV cache. Pure."""

from dataclasses import dataclass

from kvist_operator.hardware import Accelerator
from kvist_operator.models.shape import SizedModel

from .kv_cache import Cache, caches
from .layout import GIB, EngineSettings, Layout
from .transient import activations, communication, encoder, graphs, runtime
from .weight_memory import weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU; tokens and concurrency of the whole replica."""

    total: float
    usable: float
    """The share vLLM may take."""
    weights: float
    activations: float
    encoder: float
    """What a picture needs beyond the peak of a text step."""
    graphs: float
    overhead: float
    """Context, libraries, communication."""
    kv: float
    """May be negative: by so much does it not fit."""
    stages: tuple[Cache, ...]
    layout: Layout
    max_len: int

    def concurrency(self, length: int) -> float:
        """Sequences of this many tokens at once, all data-parallel ranks together."""
        return self.layout.data * min(cache.concurrency(self.kv, length) for cache in self.stages)

    @property
    def max_concurrency(self) -> float:
        return self.concurrency(self.max_len)

    @property
    def kv_tokens(self) -> int:
        return int(self.max_concurrency * self.max_len)

    @property
    def bytes_per_token(self) -> float:
        """Cache of one token of a sequence as long as allowed, on the fullest GPU."""
        return self.request_bytes(self.max_len) / self.max_len

    def request_bytes(self, length: int) -> float:
        """Cache of one sequence on the fullest GPU."""
        return max(cache.request_bytes(length) for cache in self.stages)

    def missing(self, length: int, sequences: int) -> float:
        """Bytes a GPU lacks for so many sequences of so many tokens; 0 when they fit."""
        each = -(-sequences // self.layout.data)
        need = max(cache.request_bytes(length) * each for cache in self.stages)
        return max(0.0, need - self.kv)

    def fits(self, length: int, sequences: float = 1) -> bool:
        return self.concurrency(length) >= sequences


def budget(model: SizedModel, gpu: Accelerator, layout: Layout, settings: EngineSettings) -> Memory:
    """The sum; ``kv`` is what is left of the share."""
    shape = model.shape
    total = gpu.memory_gib * GIB
    usable = total * settings.share / 100
    weights = weight_bytes(shape, layout, settings, model.checkpoint_bytes)
    step = activations(shape, layout, settings)
    tower = encoder(shape, settings, step)
    captured = graphs(shape, layout, settings, gpu)
    overhead = communication(layout) + runtime(gpu)
    left = usable - weights - step - tower - captured - overhead
    return Memory(
        total=total,
        usable=usable,
        weights=weights,
        activations=step,
        encoder=tower,
        graphs=captured,
        overhead=overhead,
        kv=min(left, settings.kv_bytes) if settings.kv_bytes else left,
        stages=tuple(caches(shape, layout, settings, gpu.capability)),
        layout=layout,
        max_len=settings.max_len,
    )
