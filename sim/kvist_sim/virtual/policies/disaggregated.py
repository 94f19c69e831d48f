"""Disaggregation as others publish it: which requests two engines share, with fixed roles.

llm-d: ``disagg-profile-handler`` with ``prefix-based-pd-decider`` (llm-d-router,
``pkg/epp/framework/plugins/scheduling/profilehandler/disagg``): the decode pod is picked first, and the
prompt is computed by a prefill pod if at least ``nonCachedTokens`` of it are not cached at the decode pod;
16 in its guide, since the default of 0 turns it off. Both profiles: prefix 2, queue 1, greatest sum, equal
ones by lot (``guides/pd-disaggregation``).

Dynamo: conditional disaggregation (``lib/kv-router/src/conditional_disagg.rs``, policy ``isl_or_load``). The
prompt is computed on the decode worker if fewer than 2,048 tokens and less than 0.7 of it are uncached there,
or if the chosen prefill worker is busy; here it is busy with more prompt tokens than a step of its engine
computes, since the threshold has no default. Prefill workers by the ordinary cost without decode blocks,
decode workers by their active blocks without overlap ("Disaggregated Serving" of its documentation).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvist_sim.virtual.policy import Context, Pod, Quiet, Request

from .counters import least, most
from .dynamo import Dynamo, cost
from .llmd import Speculative, prefix, queue

NON_CACHED_TOKENS: Final = 16
PREFIX_WEIGHT: Final = 2.0
QUEUE_WEIGHT: Final = 1.0
EFFECTIVE_TOKENS: Final = 2_048
EFFECTIVE_SHARE: Final = 0.7
BUSY_TOKENS: Final = 8_192
"""Prompt tokens from which a prefill worker is busy: ``--max-num-batched-tokens`` of the engines."""


def _of(role: str, pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods of a role; all where none has it."""
    return [pod for pod in pods if pod.role == role] or list(pods)


class ThresholdDecider(Quiet):
    """The decider of llm-d, by a threshold."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._index = Speculative(context.overlaps)

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int | None:
        decode, held = self._best(request, _of("decode", pods), now)
        if request.tokens - held < NON_CACHED_TOKENS:
            return pods.index(decode)
        first, _ = self._best(request, _of("prefill", pods), now)
        if first is decode:
            return pods.index(decode)
        self._index.routed(request.blocks, first, now)
        self._context.split(request, first, decode)
        return None

    def _best(self, request: Request, pods: Sequence[Pod], now: float) -> tuple[Pod, int]:
        """Return the pod with the greatest score, and its cached tokens."""
        held = self._index.match(request.blocks, pods, now)
        shares, queues = prefix(held, len(request.blocks)), queue([pod.sample.waiting for pod in pods])
        scores = [
            PREFIX_WEIGHT * share + QUEUE_WEIGHT * waiting
            for share, waiting in zip(shares, queues, strict=True)
        ]
        at = most(scores, self._context.random)
        return pods[at], held[at] * self._context.block_size

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        self._index.routed(request.blocks, pod, now)

    def left(self, pod: Pod, now: float) -> None:
        self._index.left(pod)


class ConditionalDisaggregation(Dynamo):
    """The conditional rule of Dynamo."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._split: dict[Request, tuple[Pod, int]] = {}
        self._prefilling: Counter[Pod] = Counter()
        """Prompt tokens under way on prefill workers."""

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int | None:
        context, size = self._context, self._context.block_size
        helpers, servers = _of("prefill", pods), _of("decode", pods)
        held = context.overlaps.match(request.blocks, servers)
        local = least(
            [self._cost(request, pod, blocks) for pod, blocks in zip(servers, held, strict=True)],
            context.random,
        )
        effective = request.tokens - held[local] * size
        there = context.overlaps.match(request.blocks, helpers)
        costs = [
            cost((self._prefilling[pod] + request.tokens) / size, blocks, 0, 0)
            for pod, blocks in zip(helpers, there, strict=True)
        ]
        at = least(costs, context.random)
        first = helpers[at]
        small = effective < EFFECTIVE_TOKENS and effective / max(1, request.tokens) < EFFECTIVE_SHARE
        if small or self._prefilling[first] > BUSY_TOKENS:
            self.expect([effective], 0)
            return pods.index(servers[local])
        blocks = [self._cost(request, pod, len(request.blocks)) for pod in servers]
        second = servers[least(blocks, context.random)]
        uncached = request.tokens - there[at] * size
        self._split[request] = first, uncached
        self._prefilling[first] += uncached
        self.expect([0], 0)
        context.split(request, first, second)
        return None

    def prefilled(self, request: Request, pod: Pod, now: float, *, lost: bool) -> None:
        first, tokens = self._split.pop(request)
        self._prefilling[first] -= tokens
