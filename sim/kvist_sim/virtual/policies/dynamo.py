"""NVIDIA Dynamo's KV router, its default selector.

``lib/kv-router/src/scheduling/selector/default.rs`` of ai-dynamo/dynamo, and "Routing concepts" of its
documentation (1.6); in KV blocks, least wins::

    prefill = max((active prefill tokens + prompt tokens) / block size - overlap credit x blocks held, 0)
    decode  = distinct blocks of the requests running there, this one included
    cost    = prefill load scale x prefill + decode + active request weight x requests running there

Active prefill tokens are the uncached tokens of requests whose first token is not out. Temperature 0 takes
the least, equal ones by lot; above 0, softmax of the negative costs, min-max normalised, over the
temperature. Defaults as ai-dynamo-runtime 1.6.1 prints them; generated tokens are not tracked
(``router_track_output_blocks`` false), and the decay of the credit is off (0). Blocks that follow those on
the device and are in a slower place have a smaller credit: ``--router-host-cache-hit-weight``,
``--router-disk-cache-hit-weight`` and ``--shared-cache-multiplier``. The real router takes no shared pool
from vLLM's own tiers (locality ``REMOTE`` is dropped); here it has its credit, which is kinder.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Final

from kvist_sim.engine.tiers import DISK, HOST, SHARED
from kvist_sim.virtual.policy import Context, Pod, Request

from .counters import Prefill, depth, least


@dataclass(frozen=True, slots=True)
class Weights:
    """``KvRouterConfig``, what of it counts here."""

    overlap_score_credit: float = 1.0
    """Credit for a block held on the device."""
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.5
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    """Blocks a running request counts for besides its own."""
    router_temperature: float = 0.0


DEFAULT: Final = Weights()


class Dynamo(Prefill):
    """One router; replicas do not sync (``router_replica_sync`` false)."""

    def __init__(self, context: Context, weights: Weights = DEFAULT) -> None:
        super().__init__()
        self._context = context
        self._weights = weights
        self._active: defaultdict[Pod, Counter[int]] = defaultdict(Counter)

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int | None:
        held = self._context.overlaps.match(request.blocks, pods)
        lower = self._context.overlaps.lower(request.blocks, pods, held)
        credited = [blocks + credit(below, self._weights) for blocks, below in zip(held, lower, strict=True)]
        costs = [self._cost(request, pod, blocks) for pod, blocks in zip(pods, credited, strict=True)]
        uncached = [request.tokens - blocks * self._context.block_size for blocks in held]
        return self.expect(uncached, pick(costs, self._weights.router_temperature, self._context.random))

    def _cost(self, request: Request, pod: Pod, held: float) -> float:
        raw = (self.tokens[pod] + request.tokens) / self._context.block_size
        active = self._active[pod]
        decode = len(active) + len(request.blocks) - depth(request.blocks, active)
        return cost(raw, held, decode, self.requests[pod], self._weights)

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """Count the request's blocks as active."""
        super().routed(request, pod, now)
        self._active[pod].update(request.blocks)

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """Stop counting the request's blocks, except those that other requests share."""
        super().finished(request, pod, now)
        active = self._active.get(pod, Counter())
        for block in request.blocks:
            if active[block] > 1:
                active[block] -= 1
            else:
                del active[block]

    def left(self, pod: Pod, now: float) -> None:
        super().left(pod, now)
        self._active.pop(pod, None)


def credit(lower: Mapping[str, int], weights: Weights = DEFAULT) -> float:
    """Return the credit for blocks in slower places, in blocks on the device."""
    each = {
        HOST: weights.host_cache_hit_weight,
        DISK: weights.disk_cache_hit_weight,
        SHARED: weights.shared_cache_multiplier,
    }
    return sum(each[medium] * blocks for medium, blocks in lower.items())


def cost(raw_prefill: float, held: float, decode: int, requests: int, weights: Weights = DEFAULT) -> float:
    """Return the cost of one pod, in blocks."""
    prefill = max(raw_prefill - weights.overlap_score_credit * held, 0.0)
    waiting = weights.prefill_load_scale * prefill
    return waiting + decode + weights.decode_active_request_weight * requests


def pick(costs: Sequence[float], temperature: float, random: Random) -> int:
    """Position of the chosen cost."""
    if temperature == 0.0:
        return least(costs, random)
    return random.choices(range(len(costs)), softmax(costs, temperature))[0]


def softmax(costs: Sequence[float], temperature: float) -> list[float]:
    """Probabilities, in the order of the costs; all alike when the costs are."""
    low, high = min(costs), max(costs)
    spread = (high - low) or 1.0
    weights = [exp(-(cost - low) / (spread * temperature)) for cost in costs]
    total = sum(weights)
    return [weight / total for weight in weights]
