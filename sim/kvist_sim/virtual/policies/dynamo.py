"""NVIDIA Dynamo's KV router, its default selector.

``lib/kv-router/src/scheduling/selector/default.rs`` of ai-dynamo/dynamo, and "Routing concepts" of its
documentation (1.6); in KV blocks, least wins::

    prefill = max((active prefill tokens + prompt tokens) / block size - overlap credit x blocks held, 0)
    decode  = distinct blocks of the requests running there, this one included
    cost    = prefill load scale x prefill + decode + active request weight x requests running there

Active prefill tokens are the uncached tokens of requests whose first token is not out. Temperature 0 takes
the least, equal ones by lot; above 0, softmax of the negative costs, min-max normalised, over the
temperature. Defaults as ai-dynamo-runtime 1.6.1 prints them; generated tokens are not tracked
(``router_track_output_blocks`` false), the decay of the credit is off (0), and there are no tiers here but
the device.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Final

from kvist_sim.virtual.policy import Context, Pod, Request

from .counters import Prefill, depth, least


@dataclass(frozen=True, slots=True)
class Weights:
    """``KvRouterConfig``, what of it counts here."""

    overlap_score_credit: float = 1.0
    """Credit for a block held on the device."""
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

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        held = self._context.overlaps.match(request.blocks, pods)
        costs = [self._cost(request, pod, blocks) for pod, blocks in zip(pods, held, strict=True)]
        uncached = [request.tokens - blocks * self._context.block_size for blocks in held]
        return self.expect(uncached, pick(costs, self._weights.router_temperature, self._context.random))

    def _cost(self, request: Request, pod: Pod, held: int) -> float:
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


def cost(raw_prefill: float, held: int, decode: int, requests: int, weights: Weights = DEFAULT) -> float:
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
