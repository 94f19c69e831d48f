"""Policies of llm-d's endpoint picker: weighted scorers, and the affinity filter.

llm-d's scorers: numbers from 0 to 1 per pod, more is better. Pure.

llm-d-router, ``pkg/epp/framework/plugins/scheduling/scorer/``: ``queuedepth``, ``kvcacheutilization``,
``prefix``, ``nohitlru``, ``tokenload``, each with its defaults.

llm-d's affinity filter and token load, "sticky until saturated": its guides' default since July 2026.

llm-d-router, ``filter/prefixcacheaffinity``: only pods that hold at least 0.80 of the prompt's blocks, if
there are any; all pods when the best of those is predicted to be more than 18 s slower than the best of the
others, prediction = tokens in flight / ``peakPrefillThroughput``. Then ``token-load-scorer`` and the greatest
score, equal ones by lot. Tokens in flight are the uncached ones of requests whose first token is not out
(``inflight-load-producer``). Prefixes from the engines' events with speculative entries.

llm-d's weighted scorers, the default of its guides until July 2026.

``guides/precise-prefix-cache-routing`` of llm-d: prefix 3, KV cache utilization 2, queue 2, no-hit LRU 2,
the greatest sum (``max-score-picker``, equal ones by lot), metrics scraped every 50 ms, prefixes from the
engines' events with speculative entries. ``optimized-baseline`` has the same weights on its own routing
history, which knows less.

llm-d's speculative entries: what was just routed counts as held until the engine's events say so.

``speculativeIndexing`` and ``speculativeTTL`` of the precise prefix cache producer (llm-d-router,
``docs``: "recommended for production"; two seconds by default).
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvist_sim.engine.tiers import HOST
from kvist_sim.virtual.policy import Context, Overlaps, Pod, Quiet, Request

from .counters import Prefill, depth, most

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


def prefix(held: Sequence[float], total: int) -> list[float]:
    """``prefix-cache-scorer`` with ``matchLengthWeight`` 0: the share of the prompt's blocks held."""
    return [blocks / total if total else 0.0 for blocks in held]


HOST_WEIGHT: Final = 0.8
"""Weight of a block in memory in the prefix score; that of all other media is 1."""


def with_lower(held: Sequence[int], lower: Sequence[Mapping[str, int]]) -> list[float]:
    """Return the blocks of each pod, those in slower places by their weight."""
    weights = {HOST: HOST_WEIGHT}
    return [
        blocks + sum(weights.get(medium, 1.0) * number for medium, number in below.items())
        for blocks, below in zip(held, lower, strict=True)
    ]


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


TTL_SECONDS: Final = 2.0


class Speculative:
    """A precise index, and the prompts that this replica has routed within the last ``ttl`` seconds."""

    def __init__(self, overlaps: Overlaps, ttl: float = TTL_SECONDS) -> None:
        self._overlaps = overlaps
        self._ttl = ttl
        self._until: defaultdict[Pod, dict[int, float]] = defaultdict(dict)
        self._entries: deque[tuple[float, Pod, Sequence[int]]] = deque()

    def match(self, blocks: Sequence[int], pods: Sequence[Pod], now: float) -> list[int]:
        """Return the number of leading blocks that each pod holds or will hold."""
        self._forget(now)
        held = self._overlaps.match(blocks, pods)
        return [max(sure, depth(blocks, self._until[pod])) for sure, pod in zip(held, pods, strict=True)]

    def weighted(self, blocks: Sequence[int], pods: Sequence[Pod], held: Sequence[int]) -> list[float]:
        """Return the blocks of each pod with those in slower places, by their weight."""
        return with_lower(held, self._overlaps.lower(blocks, pods, held))

    def routed(self, blocks: Sequence[int], pod: Pod, now: float) -> None:
        """The pod will hold all of these."""
        until = now + self._ttl
        self._until[pod].update(dict.fromkeys(blocks, until))
        self._entries.append((until, pod, blocks))

    def left(self, pod: Pod) -> None:
        """A pod that is gone holds nothing."""
        self._until.pop(pod, None)

    def _forget(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now:
            _, pod, blocks = self._entries.popleft()
            entries = self._until.get(pod, {})
            for block in blocks:
                if entries.get(block, now + 1) <= now:
                    del entries[block]


@dataclass(frozen=True, slots=True)
class Affinity:
    """Parameters of ``prefix-cache-affinity-filter``; ``explorationProbability`` is 0."""

    threshold: float = 0.80
    """``affinityThreshold``: share of the prompt that makes a pod sticky."""
    max_penalty_seconds: float = 18.0
    """Value of ``maxTTFTPenaltyMs``, in seconds."""


DEFAULT_AFFINITY: Final = Affinity()


class Sticky(Prefill):
    """Filter, then score."""

    def __init__(self, context: Context, affinity: Affinity = DEFAULT_AFFINITY) -> None:
        super().__init__()
        self._context = context
        self._affinity = affinity
        self._index = Speculative(context.overlaps)

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        held = self._index.match(request.blocks, pods, now)
        uncached = [request.tokens - blocks * self._context.block_size for blocks in held]
        loads = [self.tokens[pod] for pod in pods]
        shares = prefix(self._index.weighted(request.blocks, pods, held), len(request.blocks))
        kept = keep(shares, [load / self._context.prefill_rate for load in loads], self._affinity)
        scores = token_load([loads[i] + uncached[i] for i in kept])
        return self.expect(uncached, kept[most(scores, self._context.random)])

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        super().routed(request, pod, now)
        self._index.routed(request.blocks, pod, now)

    def left(self, pod: Pod, now: float) -> None:
        super().left(pod, now)
        self._index.left(pod)


def keep(shares: Sequence[float], ttfts: Sequence[float], affinity: Affinity = DEFAULT_AFFINITY) -> list[int]:
    """Positions the filter lets through. ``shares`` of the prompt held; ``ttfts`` predicted, in seconds."""
    every = list(range(len(shares)))
    sticky = [i for i in every if shares[i] >= affinity.threshold]
    others = [i for i in every if shares[i] < affinity.threshold]
    if not sticky or not others:
        return every
    penalty = min(ttfts[i] for i in sticky) - min(ttfts[i] for i in others)
    return every if penalty > affinity.max_penalty_seconds else sticky


SCRAPE_SECONDS: Final = 0.050
"""Value of ``refresh-metrics-interval``."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the scorers in the sum."""

    prefix: float = 3.0
    kv_cache_utilization: float = 2.0
    queue: float = 2.0
    no_hit_lru: float = 2.0


DEFAULT_WEIGHTS: Final = Weights()


class Weighted(Quiet):
    """Filters nothing, adds scores."""

    def __init__(self, context: Context, weights: Weights = DEFAULT_WEIGHTS) -> None:
        self._random = context.random
        self._weights = weights
        self._index = Speculative(context.overlaps)
        self._lru = NoHitLru()
        self._cold = False

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        held = self._index.match(request.blocks, pods, now)
        weighted = self._index.weighted(request.blocks, pods, held)
        self._cold = not any(weighted)
        lru = self._lru.scores([pod.number for pod in pods], cold=self._cold)
        shares = prefix(weighted, len(request.blocks))
        return most(blend(pods, shares, lru, self._weights), self._random)

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        self._index.routed(request.blocks, pod, now)
        if self._cold:
            self._lru.routed(pod.number)

    def left(self, pod: Pod, now: float) -> None:
        self._index.left(pod)


def blend(
    pods: Sequence[Pod], prefixes: Sequence[float], lru: Sequence[float], weights: Weights = DEFAULT_WEIGHTS
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
