"""Policy ``cache_aware`` of SGLang's router and vllm-router.

``src/policies/cache_aware.rs`` of vllm-project/router and of SGLang's model gateway, load = requests in
flight: the least loaded when max - min > 64 and max > 1.5 x min; else the worker of the best match in the
approximate tree when more than 0.3 of the prompt matches; else the least loaded. Every request is added to
the tree for its worker; every 120 s, least recently used leaves beyond 2^26 characters a worker go.
Defaults of both command lines. Older versions took the worker with the smallest tree when nothing matched
(sglang#14305).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvist_sim.virtual.policy import BYTES_PER_TOKEN, Context, Pod, Request

from .approximate import Found, Tree
from .counters import InFlight


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters with the names of ``CacheAwareConfig``."""

    cache_threshold: float = 0.3
    """Share of the prompt from which a match counts."""
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_secs: float = 120.0
    max_tree_size: int = 1 << 26
    """Characters a worker."""


DEFAULT: Final = Settings()


class CacheAware(InFlight):
    """The least loaded is the first of equal ones, as published."""

    def __init__(self, context: Context, settings: Settings = DEFAULT) -> None:
        super().__init__()
        self._settings = settings
        self._tree = Tree()
        self._block_bytes = context.block_size * BYTES_PER_TOKEN
        self._evict_at = settings.eviction_interval_secs

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        self._evict(now)
        loads = [self.requests[pod] for pod in pods]
        if not imbalanced(loads, self._settings):
            found = self._tree.find(request.blocks)
            if matches(found, len(request.blocks), self._settings):
                return next(i for i, pod in enumerate(pods) if pod.number == found.worker)
        return loads.index(min(loads))

    def _evict(self, now: float) -> None:
        if now >= self._evict_at:
            self._tree.evict(self._settings.max_tree_size // self._block_bytes)
            self._evict_at = now + self._settings.eviction_interval_secs

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        super().routed(request, pod, now)
        self._tree.insert(request.blocks, pod.number)

    def joined(self, pod: Pod, now: float) -> None:
        self._tree.add(pod.number)

    def left(self, pod: Pod, now: float) -> None:
        super().left(pod, now)
        self._tree.remove(pod.number)


def imbalanced(loads: Sequence[int], settings: Settings = DEFAULT) -> bool:
    """Whether load decides, whatever is cached."""
    low, high = min(loads), max(loads)
    apart = high - low > settings.balance_abs_threshold
    return apart and high > settings.balance_rel_threshold * low


def matches(found: Found, blocks: int, settings: Settings = DEFAULT) -> bool:
    """Whether enough of a prompt of so many blocks is in the tree."""
    return found.worker is not None and blocks > 0 and found.blocks / blocks > settings.cache_threshold
