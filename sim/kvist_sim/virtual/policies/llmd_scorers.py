"""llm-d's scorers: numbers from 0 to 1 per pod, more is better. Pure.

llm-d-router, ``pkg/epp/framework/plugins/scheduling/scorer/``: ``queuedepth``, ``kvcacheutilization``,
``prefix``, ``nohitlru``, ``tokenload``, each with its defaults.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

QUEUE_THRESHOLD_TOKENS: Final = 4_194_304
"""``queueThresholdTokens``: 128 requests of 32k tokens."""
LRU_SIZE: Final = 1_024
"""``lruSize``: pods whose last cold request is remembered."""
NEUTRAL: Final = 0.5


def queue(waiting: Sequence[int]) -> list[float]:
    """``queue-scorer``: the shortest queue has 1, the longest 0; all 1 when they are equal."""
    low, high = min(waiting), max(waiting)
    return [(high - size) / (high - low) if high > low else 1.0 for size in waiting]


def kv_cache_utilization(usage: Sequence[float]) -> list[float]:
    """``kv-cache-utilization-scorer``: the free share of the cache."""
    return [1.0 - share for share in usage]


def prefix(held: Sequence[int], total: int) -> list[float]:
    """``prefix-cache-scorer`` with ``matchLengthWeight`` 0: the share of the prompt's blocks held."""
    return [blocks / total if total else 0.0 for blocks in held]


def token_load(tokens: Sequence[int], threshold: int = QUEUE_THRESHOLD_TOKENS) -> list[float]:
    """``token-load-scorer``: ``tokens`` are those in flight and this request's uncached ones."""
    return [1.0 - min(1.0, max(load, 0) / threshold) for load in tokens]


class NoHitLru:
    """Scorer ``no-hit-lru-scorer``: requests without a cache hit anywhere rotate over the pods, so that
    caches grow evenly. Pods by number."""

    def __init__(self, size: int = LRU_SIZE) -> None:
        self._size = size
        self._used: OrderedDict[int, None] = OrderedDict()

    def scores(self, pods: Sequence[int], *, cold: bool) -> list[float]:
        """Prefer pods that were never used, in order, then the least recently used; neutral when a pod
        has a hit."""
        if not cold:
            return [NEUTRAL] * len(pods)
        if len(pods) == 1:
            return [1.0]
        never = [pod for pod in pods if pod not in self._used]
        ranks = {pod: rank for rank, pod in enumerate([*never, *self._used])}
        return [max(0.0, 1.0 - ranks[pod] / (len(pods) - 1)) for pod in pods]

    def routed(self, pod: int) -> None:
        """A cold request went there."""
        self._used[pod] = None
        self._used.move_to_end(pod)
        if len(self._used) > self._size:
            self._used.popitem(last=False)
