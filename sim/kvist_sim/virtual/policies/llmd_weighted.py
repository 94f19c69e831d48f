"""llm-d's weighted scorers, the default of its guides until July 2026.

``guides/precise-prefix-cache-routing`` of llm-d: prefix 3, KV cache utilization 2, queue 2, no-hit LRU 2,
the greatest sum (``max-score-picker``, equal ones by lot), metrics scraped every 50 ms, prefixes from the
engines' events with speculative entries. ``optimized-baseline`` has the same weights on its own routing
history, which knows less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvist_sim.virtual.policy import Context, Pod, Quiet, Request

from .llmd_scorers import NoHitLru, kv_cache_utilization, prefix, queue
from .speculative import Speculative
from .ties import most

SCRAPE_SECONDS: Final = 0.050
"""Value of ``refresh-metrics-interval``."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the scorers in the sum."""

    prefix: float = 3.0
    kv_cache_utilization: float = 2.0
    queue: float = 2.0
    no_hit_lru: float = 2.0


DEFAULT: Final = Weights()


class Weighted(Quiet):
    """Filters nothing, adds scores."""

    def __init__(self, context: Context, weights: Weights = DEFAULT) -> None:
        self._random = context.random
        self._weights = weights
        self._index = Speculative(context.overlaps)
        self._lru = NoHitLru()
        self._cold = False

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        held = self._index.match(request.blocks, pods, now)
        self._cold = not any(held)
        lru = self._lru.scores([pod.number for pod in pods], cold=self._cold)
        return most(blend(pods, prefix(held, len(request.blocks)), lru, self._weights), self._random)

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        self._index.routed(request.blocks, pod, now)
        if self._cold:
            self._lru.routed(pod.number)

    def left(self, pod: Pod, now: float) -> None:
        self._index.left(pod)


def blend(
    pods: Sequence[Pod], prefixes: Sequence[float], lru: Sequence[float], weights: Weights = DEFAULT
) -> list[float]:
    """The weighted sums."""
    free = kv_cache_utilization([pod.sample.cache_usage for pod in pods])
    queues = queue([pod.sample.waiting for pod in pods])
    return [
        weights.prefix * prefixes[i]
        + weights.kv_cache_utilization * free[i]
        + weights.queue * queues[i]
        + weights.no_hit_lru * lru[i]
        for i in range(len(pods))
    ]
