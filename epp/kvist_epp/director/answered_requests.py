"""Figures, log lines, decisions and recorded traces of answered requests, written after their batch.

Nothing here decides where a request goes, so it is done for all requests of a batch at the end.
"""

from time import perf_counter
from typing import Final

from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.director.request_context import RequestContext
from kvist_epp.errors import PickError
from kvist_epp.index.lookup import Lookup
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.prefix_stats.cache_value import CacheValue
from kvist_epp.prefix_stats.divergence_histogram import DivergenceHistogram
from kvist_epp.scheduling.candidate_table import PickedEndpoints
from kvist_epp.scheduling.cost import TERMS
from kvist_epp.scheduling.pick import ScoredEndpoint
from kvist_epp.telemetry.counters import TimedStages
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import RequestLog
from kvist_epp.tracing.trace_context import PickTracer, RecordedPick

SERVER_ERROR: Final = 500
"""The first HTTP status that is an error of a server's span."""


class AnsweredRequests:
    """Answered requests whose figures and log lines are not written yet."""

    def __init__(
        self,
        metrics: PickerMetrics,
        log: RequestLog,
        lookup: Lookup,
        cache_value: CacheValue,
        divergence: DivergenceHistogram,
        tracer: PickTracer | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._lookup = lookup
        self._cache_value = cache_value
        self._divergence = divergence
        self._tracer = tracer
        self._decisions = decisions
        self._unwritten: list[tuple[RequestContext, ScoredEndpoint | None, int, float]] = []

    def add_picked(
        self,
        context: RequestContext,
        picked: PickedEndpoints,
        request: InFlightRequest,
        candidates: int,
        now: float,
    ) -> None:
        """Add a request that goes to the best of these endpoints, one of so many candidates."""
        if self._decisions is not None:
            self._decisions.add_picked(context, picked, request, now)
        if request.trace_id and self._tracer is not None and context.trace is not None:
            self._tracer.on_sent(request, context.trace)
        self._unwritten.append((context, picked.best, candidates, now))

    def add_rejected(self, context: RequestContext, error: PickError, now: float) -> None:
        """Add a request that goes nowhere."""
        context.line.outcome = error.reason
        if context.trace is not None:
            context.trace.failed = error.status >= SERVER_ERROR
        if self._decisions is not None:
            self._decisions.add_rejected(context, error, now)
        self._unwritten.append((context, None, 0, 0.0))

    def write(self) -> None:
        """Count them, write their log lines, and pass on those that are recorded."""
        metrics, logs = self._metrics, self._log.enabled
        for context, best, candidates, now in self._unwritten:
            stages, line, exemplar = context.stages, context.line, context.exemplar
            metrics.requests[line.outcome] += 1
            metrics.observe(stages, *exemplar)
            if best is not None:
                metrics.predicted_first_token.observe(best.predicted_ttft_seconds, *exemplar)
                self._count(context, best, now)
                line.candidates = candidates
            recorded = context.trace is not None and context.trace.recorded
            if logs or recorded:
                self._fill_line(context, best)
            if logs:
                prompts = () if best is None else context.match.prompts
                self._log.write(line, prompt=prompts[0] if prompts else b"")
            if recorded:
                self._record(context)
        self._unwritten.clear()

    def _count(self, context: RequestContext, best: ScoredEndpoint, now: float) -> None:
        metrics, endpoint, match = self._metrics, best.endpoint, context.match
        if match.prompts:
            found = match.found
            metrics.predicted_cached[endpoint.hostport] += best.matched_tokens
            metrics.prompt_tokens[endpoint.hostport] += found.tokens
            self._divergence.record(found.tokens, best.matched_tokens, now)
            self._cache_value.record(endpoint.key, found, self._lookup.members.get(endpoint.key), now)

    def _fill_line(self, context: RequestContext, best: ScoredEndpoint | None) -> None:
        line = context.line
        if best is not None:
            line.endpoint = best.endpoint.hostport
            line.prompt_bytes = context.match.prompt_bytes
            line.matched_bytes = best.matched_bytes
            line.matched_tokens = best.matched_tokens
            line.predicted_ttft_ms = int(best.predicted_ttft_seconds * 1e6 + 0.5) / 1000
            # to a microsecond; round() takes six times as long
            line.cost = dict(zip(TERMS, [int(each * 1e6 + 0.5) / 1e6 for each in best.seconds], strict=True))
        line.us = context.stages.microseconds()

    def _record(self, context: RequestContext) -> None:
        """Pass a recorded request on to the exporter; its prompt is not kept."""
        trace, stages = context.trace, context.stages
        if self._tracer is not None and trace is not None and isinstance(stages, TimedStages):
            tokens = context.match.found.tokens
            self._tracer.add(RecordedPick(trace, context.line, stages, tokens, perf_counter()))
