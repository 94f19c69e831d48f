"""LMetric: a product instead of a sum.

Zhang et al., "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling", OSDI 2026
(arXiv:2603.15202), section 5.1: the least ``P-token x BS``. ``P-token`` is what the pod has to prefill if it
gets the request: tokens of prefills it has not finished, and the uncached ones of this. ``BS`` is its batch,
running and queued, this request included. No parameters.
"""

from collections.abc import Sequence

from kvist_sim.virtual.policy import Context, Pod, Request

from .counts import Prefill
from .ties import least


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
