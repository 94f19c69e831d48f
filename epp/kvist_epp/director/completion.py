"""Reports of gateways after a pick: which endpoint served a request, what it used, that it has ended.

There are two sources: Envoy's access log, and the response itself where it is observed. A gateway may have
both; by its request id a request ends once, also when a client uses one session for many requests.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvist_epp.director.director import Director
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.response import FirstToken, ObservedResponse
from kvist_epp.load.in_flight import InFlightRequest

PREFILLED_STATUS: Final = range(200, 400)
"""HTTP statuses of requests that the engine computed; others were refused without a prefill."""
ANSWERED_STATUS: Final = range(200, 300)
"""HTTP statuses of responses that are output of the model."""


class CompletionHandler:
    """Ends requests in the director's account."""

    def __init__(
        self,
        director: Director,
        clock: Callable[[], float],
        forward: Callable[[AccessLogEntry], None] | None = None,
    ) -> None:
        """``forward`` gets ended requests that this replica did not route; None: there are no others."""
        self._director = director
        self._clock = clock
        self._forward = forward

    def on_access_log(self, entries: Sequence[AccessLogEntry]) -> None:
        """End the requests of these entries; entries of other replicas' requests are forwarded."""
        for entry in entries:
            if not entry.session:
                continue
            self._director.tracker.end_reports.on_report()
            request = self._director.table.find(entry.session, entry.request_id or "")
            if request is not None:
                if entry.seconds is not None:
                    self._note_delay(request, entry.seconds)
                self._end(request, "access-log", entry.upstream, entry.status)
            elif self._forward is not None:
                self._forward(entry)

    def on_first_token(self, seen: FirstToken) -> None:
        """Observe the time to the first token, and compare it with its prediction."""
        if seen.status not in ANSWERED_STATUS:
            return
        director, now = self._director, self._clock()
        request = director.table.find(seen.session, seen.request_id)
        ids = seen.request_id, "" if request is None else request.trace_id
        director.metrics.first_token.observe(seen.seconds, *ids)
        if request is None:
            return
        request.first_token_seconds = seen.seconds
        attempt, predicted = request.attempt, request.predicted_ttft_seconds
        if predicted > 0 and seen.served in (None, attempt.hostport):
            ratio = (now - attempt.routed_at) / predicted
            director.metrics.first_token_ratio.observe(ratio, *ids)
        director.tracker.on_first_token(request, seen.seconds, now)

    def on_response(self, seen: ObservedResponse) -> None:
        """Update a request from its observed response: endpoint, cached tokens, usage, end."""
        director = self._director
        usage = seen.usage
        director.metrics.responses["usage" if usage.known else "none" if seen.complete else "cut"] += 1
        for kind in ("prompt", "completion", "cached"):
            director.metrics.usage[kind] += getattr(usage, kind) or 0
        director.tracker.end_reports.on_report()
        request = director.table.find(seen.session, seen.request_id)
        self._observe_output(seen, "" if request is None else request.trace_id)
        if request is None:
            return
        if usage.cached is not None:  # engines that name no sessions in their events may report it here
            director.tracker.on_cache_truth(request, usage.cached, self._clock())
        director.tracker.end_reports.on_delay(0.0)
        self._end(request, "response", seen.served, seen.status)

    def _observe_output(self, seen: ObservedResponse, trace_id: str) -> None:
        """Observe the mean time of an output token; of the first one alone there is none."""
        first, tokens = seen.first_token_seconds, seen.usage.completion or 0
        if seen.complete and first is not None and tokens > 1 and seen.status in ANSWERED_STATUS:
            mean = (seen.seconds - first) / (tokens - 1)
            self._director.metrics.output_token.observe(mean, seen.request_id, trace_id)

    def _note_delay(self, request: InFlightRequest, seconds: float) -> None:
        """Note how late the gateway reports the end of a request that has taken ``seconds`` there; call it
        before ``_end``, which may give the request a new time of being sent."""
        delay = self._clock() - request.attempts[-1].routed_at - seconds
        self._director.tracker.end_reports.on_delay(delay)

    def _end(self, request: InFlightRequest, how: str, served: str | None, status: int) -> None:
        director, now = self._director, self._clock()
        if served and served != request.attempts[-1].hostport:
            self._move(request, served, now)
        refused = status not in PREFILLED_STATUS and (status != 0 or how == "access-log")
        director.progress.on_ended(request, how, now, without_prefill=refused, status=status)

    def _move(self, request: InFlightRequest, address: str, now: float) -> None:
        """Move a request to the endpoint that served it; the address of a proxy, which is no endpoint's, is
        ignored."""
        served = self._director.candidate_table.at(address)
        if served is not None:
            self._director.progress.on_served_elsewhere(request, served.endpoint, now)
