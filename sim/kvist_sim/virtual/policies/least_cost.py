"""Policies that minimise one predicted cost: Mooncake's greedy TTFT, and LMetric.

Greedy time to first token: the pod that is predicted to answer this request first.

Mooncake's Conductor, "KVCache-centric scheduling" (arXiv:2407.00079, algorithm 1, without transfers between
pods): the instance with the least ``TTFT = T_queue + T_prefill(uncached)``, where ``T_queue`` is the prefill
time of all requests queued there. Both are tokens over the prefill rate here.

LMetric: a product instead of a sum.

Zhang et al., "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling", OSDI 2026
(arXiv:2603.15202), section 5.1: the least ``P-token x BS``. ``P-token`` is what the pod has to prefill if it
gets the request: tokens of prefills it has not finished, and the uncached ones of this. ``BS`` is its batch,
running and queued, this request included. No parameters.
"""

from collections.abc import Sequence

from kvist_sim.virtual.policy import Context, Pod, Request

from .counters import Prefill, least


class Greedy(Prefill):
    """Equal predictions are settled by lot."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        context = self._context
        held = context.overlaps.match(request.blocks, pods)
        uncached = [request.tokens - blocks * context.block_size for blocks in held]
        predicted = [
            ttft(self.tokens[pod], tokens, context.prefill_rate)
            for pod, tokens in zip(pods, uncached, strict=True)
        ]
        return self.expect(uncached, least(predicted, context.random))


def ttft(queued: int, uncached: int, rate: float) -> float:
    """Seconds to the first token behind ``queued`` tokens, at ``rate`` tokens/s."""
    return (queued + uncached) / rate


class LMetric(Prefill):
    """Equal products are settled by lot."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        context = self._context
        held = context.overlaps.match(request.blocks, pods)
        uncached = [request.tokens - blocks * context.block_size for blocks in held]
        products = [
            score(self.tokens[pod] + tokens, self.requests[pod] + 1)
            for pod, tokens in zip(pods, uncached, strict=True)
        ]
        return self.expect(uncached, least(products, context.random))


def score(prefill_tokens: int, batch: int) -> int:
    """``P-token x BS``."""
    return prefill_tokens * batch
