"""Figures and log lines of answered requests, written after the answers of their batch.

Nothing here decides where a request goes, so it is done for all requests of a batch at the end.
"""

from kvist_epp.director.request_context import RequestContext
from kvist_epp.errors import PickError
from kvist_epp.index.lookup import Lookup
from kvist_epp.prefix_stats.cache_value import CacheValue
from kvist_epp.prefix_stats.divergence_histogram import DivergenceHistogram
from kvist_epp.scheduling.cost import TERMS
from kvist_epp.scheduling.pick import ScoredEndpoint
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import RequestLog


class AnsweredRequests:
    """Answered requests whose figures and log lines are not written yet."""

    def __init__(
        self,
        metrics: PickerMetrics,
        log: RequestLog,
        lookup: Lookup,
        cache_value: CacheValue,
        divergence: DivergenceHistogram,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._lookup = lookup
        self._cache_value = cache_value
        self._divergence = divergence
        self._unwritten: list[tuple[RequestContext, ScoredEndpoint | None, int, float]] = []

    def add_picked(self, context: RequestContext, best: ScoredEndpoint, candidates: int, now: float) -> None:
        """Add a request that goes to ``best``, one of so many candidates."""
        self._unwritten.append((context, best, candidates, now))

    def add_rejected(self, context: RequestContext, error: PickError) -> None:
        """Add a request that goes nowhere."""
        context.line.outcome = error.reason
        self._unwritten.append((context, None, 0, 0.0))

    def write(self) -> None:
        """Count them and write their log lines."""
        metrics, logs = self._metrics, self._log.enabled
        for context, best, candidates, now in self._unwritten:
            stages, line = context.stages, context.line
            metrics.requests[line.outcome] += 1
            metrics.observe(stages)
            if best is not None:
                self._count(context, best, now)
                line.candidates = candidates
            if logs:
                self._write_line(context, best)
        self._unwritten.clear()

    def _count(self, context: RequestContext, best: ScoredEndpoint, now: float) -> None:
        endpoint, match = best.endpoint, context.match
        self._metrics.predicted_cached[endpoint.hostport] += best.matched_tokens
        if match.prompts:
            found = match.found
            self._divergence.record(found.tokens, best.matched_tokens, now)
            self._cache_value.record(endpoint.key, found, self._lookup.members.get(endpoint.key), now)

    def _write_line(self, context: RequestContext, best: ScoredEndpoint | None) -> None:
        line, match, prompt = context.line, context.match, b""
        if best is not None:
            line.endpoint = best.endpoint.hostport
            line.prompt_bytes = match.prompt_bytes
            line.matched_bytes = best.matched_bytes
            line.matched_tokens = best.matched_tokens
            line.predicted_ttft_ms = round(best.predicted_ttft_seconds * 1000, 3)
            line.cost = dict(zip(TERMS, [round(seconds, 6) for seconds in best.seconds], strict=True))
            prompt = match.prompts[0] if match.prompts else b""
        line.us = context.stages.microseconds()
        self._log.write(line, prompt=prompt)
