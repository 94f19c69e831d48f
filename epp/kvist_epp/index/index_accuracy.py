"""Accuracy of the index: predicted cached tokens against true ones, per endpoint, all the time.

Wrong salts, sizes, encodings or lost events make an index silently wrong. An endpoint whose predictions
differ from what its engine really hit falls back to approximate mode, and comes back when they agree again:
predictions are compared in both modes. Pure; the clock is a parameter.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AccuracyLimits:
    """Thresholds of approximate mode: when it begins and when it ends."""

    enter: float = 0.05
    """Error above which an endpoint becomes approximate."""
    leave: float = 0.02
    """Error below which it becomes precise again."""
    requests: int = 200
    seconds: float = 60.0
    """The window: the last 200 requests of the last 60 s …"""
    least: int = 20
    """… but at least the last 20, however old; fewer say nothing."""
    floor_tokens: int = 1024
    """Errors are measured against at least so many tokens, so that a cold cache is not an alarm."""
    counter_tokens: int = 20_000
    """Tokens the engine must have looked up before its counters are compared."""


@dataclass(frozen=True, slots=True)
class _Sample:
    off: int
    total: int
    at: float


@dataclass(frozen=True, slots=True)
class HitSums:
    """Sums at one moment: the engine's prefix cache counters beside what was predicted for it."""

    hits: int
    """``vllm:prefix_cache_hits_total``, tokens."""
    queries: int
    """``vllm:prefix_cache_queries_total``, tokens."""
    predicted: int
    """Tokens predicted to be on the GPU, of all requests routed there."""
    routed: int
    """Tokens of all requests routed there."""
    unknown: int = 0
    """Requests among them of which the index knows nothing."""
    unsettled: int = 0
    """Of ``predicted``: tokens of requests that the engine may not have looked up yet."""

    def least_hits_since(self, first: "HitSums") -> int:
        """Return the hits that were predicted between two moments, if the engine had looked up all requests
        that were unsettled at the first and none that are unsettled now."""
        return self.predicted - self.unsettled - first.predicted

    def most_hits_since(self, first: "HitSums") -> int:
        """Return the same, if it was the other way round."""
        return self.predicted - first.predicted + first.unsettled


class AccuracyMonitor:
    """The accuracy of one endpoint. A new endpoint is precise."""

    def __init__(self, limits: AccuracyLimits = AccuracyLimits()) -> None:
        self.precise = True
        """Whether the index is trusted for the endpoint."""
        self.error = 0.0
        """Share of tokens by which predictions were off, each request by itself, in the last window."""
        self.sent = 0
        """Requests routed there."""
        self.sums = (0, 0, 0)
        """Of the requests routed there: tokens predicted to be on the GPU, all tokens, and how many requests
        the index knows nothing of."""
        self._limits = limits
        self._samples: deque[_Sample] = deque()
        self._off = 0
        self._total = 0
        self._counted: deque[tuple[float, HitSums]] = deque()

    @property
    def why_not(self) -> str:
        """Why the endpoint's index is not trusted; empty when it is."""
        return "" if self.precise else f"predictions are off by {self.error:.1%}"

    def silent(self, messages: int, requests: int = 20) -> bool:
        """Return whether it was sent requests and published no message: its index would stay empty
        unnoticed."""
        return messages == 0 and self.sent >= requests

    def on_routed(self, predicted: int, tokens: int, *, known: bool = True) -> None:
        """Note a request of ``tokens`` that was sent there, ``predicted`` of them on the GPU by the index
        alone, also in approximate mode; or one that the index cannot know."""
        self.sent += 1
        sums = self.sums
        self.sums = (sums[0] + predicted, sums[1] + tokens, sums[2] + (not known))

    def on_cache_truth(self, predicted: int, true: int, now: float) -> None:
        """Compare a request's predicted and true tokens on the GPU; errors of opposite sign do not cancel.

        What slower tiers hold is compared by ``tier_accuracy``: after a load, an engine's first event of the
        request covers the loaded prefix as if it had been computed.
        """
        self._add(_Sample(abs(predicted - true), max(predicted, true), now))
        while self._is_stale(now):
            self._drop_oldest()
        if len(self._samples) >= self._limits.least:
            self._judge(self._off / max(self._total, self._limits.floor_tokens))

    def on_counters(self, queries: int, hits: int, now: float, *, unsettled: int = 0) -> None:
        """Compare the counters ``vllm:prefix_cache_queries_total`` and ``…hits_total`` of a scrape, in
        tokens, with the predictions over the window: the hits themselves and the hit ratios, of which the
        better match counts. Hits that are equal prove the index right however wrong the lengths of prompts
        are, which are estimated from their bytes; ratios that are equal do so where an engine has other
        clients, too. ``unsettled``: tokens predicted for requests that wait, so that the counters may have
        them or not; any number of hits between is equal. Hits beyond say nothing of the index if the window
        has requests that it does not know.

        For engines whose events have no sessions, such as those of blocks that were transferred. Ignored
        while requests are compared one by one, which is sharper. Counters that fell begin anew: the engine
        restarted.
        """
        counted = HitSums(hits, queries, *self.sums, unsettled=unsettled)
        if self._counted and counted.queries < self._counted[-1][1].queries:
            self._counted.clear()
        self._counted.append((now, counted))
        while len(self._counted) > 2 and self._counted[1][0] <= now - self._limits.seconds:
            self._counted.popleft()
        if not self._samples or now - self._samples[-1].at > self._limits.seconds:
            self._compare(self._counted[0][1], counted)

    def on_engine_restart(self) -> None:
        """Forget the comparisons: they say nothing of the engine after its restart."""
        self._samples.clear()
        self._off = self._total = 0
        self._counted.clear()

    def _add(self, sample: _Sample) -> None:
        self._samples.append(sample)
        self._off += sample.off
        self._total += sample.total

    def _drop_oldest(self) -> None:
        sample = self._samples.popleft()
        self._off -= sample.off
        self._total -= sample.total

    def _is_stale(self, now: float) -> bool:
        many = len(self._samples)
        old = now - self._samples[0].at > self._limits.seconds
        return many > self._limits.requests or (old and many > self._limits.least)

    def _compare(self, first: HitSums, last: HitSums) -> None:
        queries, routed = last.queries - first.queries, last.routed - first.routed
        if min(queries, routed) < self._limits.counter_tokens:
            return
        true, least, most = last.hits - first.hits, last.least_hits_since(first), last.most_hits_since(first)
        if last.unknown > first.unknown:
            most = max(most, true)
        predicted = min(max(true, least), most)
        floor = self._limits.floor_tokens
        self._judge(
            min(
                abs(predicted - true) / max(predicted, true, floor),
                abs(predicted / routed - true / queries)
                / max(predicted / routed, true / queries, floor / queries),
            )
        )

    def _judge(self, error: float) -> None:
        self.error = error
        self.precise = error <= self._limits.enter if self.precise else error < self._limits.leave
