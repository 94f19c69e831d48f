"""llm-d's affinity filter and token load, "sticky until saturated": its guides' default since July 2026.

llm-d-router, ``filter/prefixcacheaffinity``: only pods that hold at least 0.80 of the prompt's blocks, if
there are any; all pods when the best of those is predicted to be more than 18 s slower than the best of the
others, prediction = tokens in flight / ``peakPrefillThroughput``. Then ``token-load-scorer`` and the greatest
score, equal ones by lot. Tokens in flight are the uncached ones of requests whose first token is not out
(``inflight-load-producer``). Prefixes from the engines' events with speculative entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvist_sim.virtual.policy import Context, Pod, Request

from .counts import Prefill
from .llmd_scorers import prefix, token_load
from .speculative import Speculative
from .ties import most


@dataclass(frozen=True, slots=True)
class Affinity:
    """Parameters of ``prefix-cache-affinity-filter``; ``explorationProbability`` is 0."""

    threshold: float = 0.80
    """``affinityThreshold``: share of the prompt that makes a pod sticky."""
    max_penalty_seconds: float = 18.0
    """Value of ``maxTTFTPenaltyMs``, in seconds."""


DEFAULT: Final = Affinity()


class Sticky(Prefill):
    """Filter, then score."""

    def __init__(self, context: Context, affinity: Affinity = DEFAULT) -> None:
        super().__init__()
        self._context = context
        self._affinity = affinity
        self._index = Speculative(context.overlaps)

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        held = self._index.match(request.blocks, pods, now)
        uncached = [request.tokens - blocks * self._context.block_size for blocks in held]
        loads = [self.tokens[pod] for pod in pods]
        shares = prefix(held, len(request.blocks))
        kept = keep(shares, [load / self._context.prefill_rate for load in loads], self._affinity)
        scores = token_load([loads[i] + uncached[i] for i in kept])
        return self.expect(uncached, kept[most(scores, self._context.random)])

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        super().routed(request, pod, now)
        self._index.routed(request.blocks, pod, now)

    def left(self, pod: Pod, now: float) -> None:
        super().left(pod, now)
        self._index.left(pod)


def keep(shares: Sequence[float], ttfts: Sequence[float], affinity: Affinity = DEFAULT) -> list[int]:
    """Positions the filter lets through. ``shares`` of the prompt held; ``ttfts`` predicted, in seconds."""
    every = list(range(len(shares)))
    sticky = [i for i in every if shares[i] >= affinity.threshold]
    others = [i for i in every if shares[i] < affinity.threshold]
    if not sticky or not others:
        return every
    penalty = min(ttfts[i] for i in sticky) - min(ttfts[i] for i in others)
    return every if penalty > affinity.max_penalty_seconds else sticky
