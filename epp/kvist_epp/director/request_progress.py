"""The course of requests after the pick: prefill, the endpoint that serves them, and their end. Sans I/O.

Engines report through their KV events, gateways through the access log or the response (``completion``), and
time alone ends what no report mentions. Every clock is a parameter.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.engines.vllm.kv_events import CPU
from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.kvevents.observation import Observation
from kvist_epp.load.in_flight import Attempt, InFlightRequest, Leg, RequestState
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.prompt.media_texts import MediaPrompt
from kvist_epp.scheduling.pick import ROLES_WITHOUT_REQUESTS, Candidate
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.tracing.trace_context import PickTracer

CREDIT_SECONDS: Final = 2.0
"""After an engine reported that a prefill is done its blocks may wait this long for a check; they are not
evicted while the request runs, so the credit may stay."""


_WHOLE: Final = sys.maxsize
"""Bytes of the text of a chain: all of it."""

SERVED_ENDS: Final = frozenset({"access-log", "estimated", "reconciled", "response"})
"""Ends of requests that an engine has served; of the others it is not known."""


def before_promotion(at_pick: Mapping[str, int], now: Mapping[str, int]) -> Mapping[str, int]:
    """Return the tokens that a request loads from slower media, ``now`` that its engine has taken it up, by
    the medium that held them before.

    An engine reads storage into host memory and reports that, before it reports the blocks on the GPU. What
    was on storage at the pick and is in host memory now is taken for read from storage.
    """
    found = dict(now)
    for medium, tokens in at_pick.items():
        moved = min(found.get(CPU, 0), tokens - found.get(medium, 0))
        if medium != CPU and moved > 0:
            found[CPU] -= moved
            found[medium] = found.get(medium, 0) + moved
    return {medium: tokens for medium, tokens in found.items() if tokens}


class RequestProgress:
    """Keeps the account of each request of a director up to date until it ends."""

    def __init__(
        self,
        *,
        index: Index,
        history: RoutingHistory,
        lookup: Lookup,
        tracker: LoadTracker,
        metrics: PickerMetrics,
        replica: str,
        endpoints: Callable[[], Sequence[Candidate]],
        decisions: DecisionLog | None = None,
        tracer: PickTracer | None = None,
    ) -> None:
        """``replica``: prefix of the session ids that this replica makes. ``endpoints``: as they are now.
        ``decisions`` keeps how requests end; None: no log does.
        ``tracer`` records the ends of recorded requests."""
        self._index = index
        self._history = history
        self._lookup = lookup
        self._tracker = tracker
        self._table = tracker.table
        self._metrics = metrics
        self._own_sessions = f"{replica}."
        self._endpoints = endpoints
        self._decisions = decisions
        self._tracer = tracer
        self.on_remote_prompt_computed: Callable[[Attempt], None] = lambda _attempt: None
        """Called when the prompt of another replica's request is in the index; may be called again."""

    def on_prefill_started(self, source: str, endpoint: str, session: str, now: float) -> None:
        """Record what the index holds of a request when its engine starts prefill, to compare it with the
        engine's cache hits.

        Blocks stored or evicted since the pick are in both figures, so that a difference is an error of the
        index, whatever the load.
        """
        request = self._request_at(session, endpoint, now, first_event=True)
        prompt = None if request is None else request.prompt
        if request is not None and not isinstance(prompt, MediaPrompt):  # which waits to be learned from
            self._table.take_prompt(request)
        if request is not None and prompt is not None and not request.unindexed:
            matches, publisher = self._index.match(request.root, prompt), self._index.publisher(source)
            self._note_rank(request, endpoint, publisher)
            hit = self._lookup.usable(endpoint, matches, matches.of(publisher))
            request.indexed_otherwise = self._lookup.other_hit(publisher, request.root, prompt)
            before, request.indexed_lower = request.indexed_lower, hit.lower or None
            if before and hit.lower:
                request.indexed_lower = before_promotion(before, hit.lower)
            request.indexed_tokens = hit.tokens
            request.index_compared = True

    def _note_rank(self, request: InFlightRequest, endpoint: str, publisher: int) -> None:
        """Note which data-parallel rank has taken a request up, where none was named."""
        member = self._lookup.members.get(endpoint)
        if member is not None and publisher in member.publishers and len(member.publishers) > 1:
            request.attempt.rank = member.publishers.index(publisher)

    def on_observation(self, seen: Observation, now: float) -> None:
        """Apply an engine's event about a request of any replica."""
        if not seen.session:
            return
        request = self._request_at(seen.session, seen.endpoint, now, first_event=seen.cached is not None)
        if request is None:
            request = self._table.at(seen.session, seen.endpoint, remote=True)
            if request is None:
                return
        else:
            if seen.loaded:
                request.loaded_tokens += seen.loaded
                self._metrics.on_loaded(request.attempt.hostport, seen.loaded, request.attempt.load.rate)
            if seen.cached is not None:
                self._tracker.on_cache_truth(request, seen.cached, now)
            if isinstance(request.prompt, MediaPrompt):
                self._learn_media(request, request.prompt, seen)
        attempt = request.attempt
        backlog = self._backlog_after(seen, attempt.endpoint, request.tokens)
        if not backlog and seen.phase == "prefill":
            self._observe_prefill(request, now)
        self._tracker.on_progress(attempt, backlog, now, computed=seen.prefilled)
        if not backlog and attempt.leg is Leg.SERVE:
            self._on_prompt_computed(request, seen)

    def _on_prompt_computed(self, request: InFlightRequest, seen: Observation) -> None:
        """End the credit of a prompt whose blocks are in the index: it knows better from now on. Engines of
        models with windows keep less of a prompt than its text."""
        if request.origin:
            member = self._lookup.members.get(seen.endpoint)
            if member is not None and member.precise:
                self.on_remote_prompt_computed(request.attempt)
        elif request.cache_credit and self._is_only_one(request) and self._is_indexed(seen):
            self._end_credit(request)

    def _is_only_one(self, request: InFlightRequest) -> bool:
        """Return False if its session has other requests: events do not say to which of them they belong."""
        return len(self._table.of_session(request.session)) < 2

    def _is_indexed(self, seen: Observation) -> bool:
        """Return whether the index has the blocks up to the last one of an event; it may wait for a check."""
        if seen.last_block is None:
            return False
        return self._index.depth(seen.last_block, self._index.publisher(seen.publisher)) is not None

    def _learn_media(self, request: InFlightRequest, prompt: MediaPrompt, seen: Observation) -> None:
        """Learn from the blocks that the engine has of a prompt what it makes of the media in it."""
        if seen.last_block is None or not self._is_only_one(request):
            return
        publisher = self._index.publisher(seen.publisher)
        engine = self._index.tail(seen.last_block, _WHOLE, publisher)
        if engine and prompt.texts.learn(prompt, engine):
            self._table.take_prompt(request)

    def _observe_prefill(self, request: InFlightRequest, now: float) -> None:
        """Compare the time at which a prompt was computed with its prediction, once."""
        predicted = request.predicted_ttft_seconds
        if predicted > 0 and request.state is not RequestState.DECODING:
            ratio = (now - request.attempt.routed_at) / predicted
            self._metrics.prefill_ratio.observe(ratio, request.request_id, request.trace_id)

    def _backlog_after(self, seen: Observation, endpoint: str, tokens: int) -> int:
        """Return how many of a prompt's ``tokens`` are left to prefill; events report whole blocks only."""
        if seen.phase == "decode":
            return 0
        left = max(0, tokens - (seen.depth or 0))
        member = self._lookup.members.get(endpoint)
        return 0 if member is None or left < member.block_size else left

    def _request_at(
        self, session: str, endpoint: str, now: float, *, first_event: bool
    ) -> InFlightRequest | None:
        """This replica's request that an event belongs to, also if another endpoint serves it than the one
        picked.

        Only session ids of our own making are never used twice; and an endpoint that only helps (prefill)
        serves no request.
        """
        request = self._table.at(session, endpoint, first_event=first_event)
        if request is not None or not session.startswith(self._own_sessions):
            return request
        request = self._table.find(session)
        if request is not None and any(one.endpoint == endpoint for one in request.attempts[:-1]):
            return None  # a late event of the endpoint that computed its prompt for another one
        served = next((c.endpoint for c in self._endpoints() if c.endpoint.key == endpoint), None)
        if request is None or served is None or served.role in ROLES_WITHOUT_REQUESTS:
            return None
        self.on_served_elsewhere(request, served, now)
        return request

    def on_served_elsewhere(self, request: InFlightRequest, endpoint: Endpoint, now: float) -> None:
        """Move the record of a request to the endpoint that served it instead of the picked one."""
        if request.endpoint == endpoint.key:
            return
        if (place := request.decode_place) is not None and place.endpoint == endpoint.key:
            self._tracker.begin_decode(request, place, 0, now, leg=Leg.DECODE)  # a sidecar has sent leg 1
            return
        self._metrics.served_elsewhere[request.attempt.hostport] += 1
        found = request.prompt and self._lookup.look(request.root, [request.prompt], learn=False)
        holding = found.hits.get(endpoint.key) if found else None
        tokens = found.tokens if found else request.tokens
        uncached = max(tokens - (holding.tokens if holding else 0), 1)
        self._tracker.move(request, endpoint.key, uncached, now, hostport=endpoint.hostport)
        request.cache_credit = [
            self._history.moved(note, request.root, endpoint.key) for note in request.cache_credit
        ]
        request.indexed_tokens = holding.indexed if holding else 0
        request.indexed_lower = holding.indexed_lower if holding else None
        request.predicted_tokens = holding.tokens if holding else 0
        request.predicted_ttft_seconds = 0.0

    def on_ended(
        self,
        request: InFlightRequest,
        how: str,
        now: float,
        *,
        without_prefill: bool = False,
        status: int = 0,
    ) -> None:
        """A request of this replica has ended.

        ``how`` is the label of the metric: ``access-log``, ``response``, ``expired``, ``reconciled``,
        ``websocket`` (it is not followed), or its endpoint ``left``. ``without_prefill``: the engine refused
        it. ``status``: of the response; 0: not known.
        """
        self._metrics.ended[how] += 1
        if how in SERVED_ENDS and not (request.saving_counted or without_prefill):
            request.saving_counted = True
            self._metrics.on_saved(request.predicted_tokens, request.attempts[-1].load.rate)
        if self._decisions is not None:
            self._decisions.on_request_ended(request, how, status)
        if request.trace_id and self._tracer is not None:
            self._tracer.on_request_ended(request, how, status)
        self._tracker.end(request, now)
        self._end_credit(request, without_prefill=without_prefill)

    def _end_credit(self, request: InFlightRequest, *, without_prefill: bool = False) -> None:
        """End the cache credit of a request: its prefix is in the index now, or never will be.

        It is kept where the routing history is all that is known: on an endpoint without trusted events, and
        of a plain text.
        """
        member = self._lookup.members.get(request.attempts[-1].load.key)
        if without_prefill or member is None or (member.precise and not request.unindexed):
            for note in request.cache_credit:
                self._history.drop(note)
            request.cache_credit = []

    def end_overdue(self, now: float) -> None:
        """End requests that must have ended, where no gateway reports ends."""
        for request in self._tracker.end_overdue(now):
            self.on_ended(request, "estimated", now)

    def expire(self, now: float) -> None:
        """End requests without reported progress, and the cache credit of those whose prefill is done."""
        for request in self._tracker.expire(now):
            self.on_ended(request, "expired", now)
        self.end_overdue(now)
        for request in self._table.decoding_before(now - CREDIT_SECONDS):
            self._end_credit(request)
