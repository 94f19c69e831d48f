"""Greedy time to first token: the pod that is predicted to answer this request first.

Mooncake's Conductor, "KVCache-centric scheduling" (arXiv:2407.00079, algorithm 1, without transfers between
pods): the instance with the least ``TTFT = T_queue + T_prefill(uncached)``, where ``T_queue`` is the prefill
time of all requests queued there. Both are tokens over the prefill rate here.
"""

from collections.abc import Sequence

from kvist_sim.virtual.policy import Context, Pod, Request

from .counts import Prefill
from .ties import least


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
