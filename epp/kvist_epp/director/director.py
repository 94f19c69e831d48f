"""The director: one request from its arrival to its endpoint, and what is kept of it to its end. Sans I/O.

Every clock is a parameter. A request is offered (``offer``), and is answered at once or has to wait; the flow
controller's ``poll`` answers those that wait. Engines, gateways and replicas report through the ``on_…``
methods. ``FlowDriver`` and ``app`` drive it with sockets and a real clock, ``kvist_sim.virtual`` in virtual
time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import inf

from kvist_epp.director.answered_requests import AnsweredRequests
from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.director.rank_naming import name_ranks
from kvist_epp.director.request_context import (
    PromptMatch,
    RequestContext,
    new_replica_id,
    understand,
)
from kvist_epp.director.request_progress import RequestProgress
from kvist_epp.disaggregation.legs import Splitter
from kvist_epp.errors import NoEndpoints, PickError
from kvist_epp.extproc.pick_request import Effect, PickRequest, PickResult
from kvist_epp.flowcontrol.deficit_round_robin import FlowKey
from kvist_epp.flowcontrol.flow_controller import Dispatcher, FlowController, FlowLimits, QueuedRequest
from kvist_epp.flowcontrol.priorities import Priorities
from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.load.in_flight import InFlightRequest, Leg
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.names import SESSION_HEADER
from kvist_epp.prefix_stats.cache_value import CacheValue
from kvist_epp.prefix_stats.divergence_histogram import DivergenceHistogram
from kvist_epp.prefix_stats.hot_prefixes import HotPrefixes
from kvist_epp.prefix_stats.recent_uses import RecentUses
from kvist_epp.prompt.model import Model
from kvist_epp.scheduling.candidate_table import CandidateTable, PickedEndpoints
from kvist_epp.scheduling.cost import DEFAULT, policy_among
from kvist_epp.scheduling.pick import Candidate, ScoredEndpoint, settle_roles
from kvist_epp.scheduling.tier_price import note_loads
from kvist_epp.telemetry.counters import Stages
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import RequestLog
from kvist_epp.tracing.trace_context import PickTracer, read_trace_context

Answer = PickResult | Effect
"""What follows from a pick: the answer to the gateway, or what has to be carried out before it."""


class Director(Dispatcher):
    """Decides where each request goes, and keeps account of it until it ends."""

    def __init__(
        self,
        *,
        index: Index,
        history: RoutingHistory,
        lookup: Lookup,
        tracker: LoadTracker,
        metrics: PickerMetrics,
        log: RequestLog,
        now: float,
        limits: FlowLimits | None = None,
        on_due: Callable[[], None] = lambda: None,
        model: Model | None = None,
        priorities: Priorities | None = None,
        engine_priorities: bool = False,
        max_endpoints: int = 3,
        hot: HotPrefixes | None = None,
        replica: str = "",
        by_prefix: bool = True,
        tracer: PickTracer | None = None,
        decisions: DecisionLog | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        """Make a director without endpoints.

        Args:
            limits: Bounds of flow control; None: requests never wait.
            on_due: Called when ``flow.poll`` should be, at once.
            model: Renders prompts; None until ``activate``: approximate mode.
            engine_priorities: The engines run ``--scheduling-policy priority``.
            hot: Notes how far prompts were cached, for prewarming; None: prewarming is off.
            replica: Prefix of this replica's own session ids; empty: made up.
            by_prefix: Requests go where their prefix is cached; False: by load alone.
            tracer: Records traces of picks; None: a request's trace is only logged.
            decisions: Keeps the last decisions; None: they are not kept.
            splitter: Decides which requests are disaggregated; None: none are.
        """
        self.index, self.history, self.lookup = index, history, lookup
        self.tracker, self.table = tracker, tracker.table
        self.metrics, self.log, self.model = metrics, log, model
        self.ingestor: Ingestor | None = None
        self.candidates: tuple[Candidate, ...] = ()
        """The endpoints; replaced as a whole by ``set_endpoints``."""
        self.adapters: frozenset[str] = frozenset()
        self.partly_served: Mapping[str, tuple[str, ...]] = {}
        self.replica = replica or new_replica_id()
        self.priorities = priorities or Priorities()
        self.request_count = 0
        """Requests and retries so far; makes ids, and has equal endpoints take turns."""
        self.policy = DEFAULT
        self.cache_value, self.divergence = stats = CacheValue(), DivergenceHistogram()
        self.recent_uses = RecentUses()
        self.progress = RequestProgress(
            index=index,
            history=history,
            lookup=lookup,
            tracker=tracker,
            metrics=metrics,
            replica=self.replica,
            endpoints=lambda: self.candidates,
            decisions=decisions,
            tracer=tracer,
        )
        self.hot, self.limits_loads = hot, False  # until an engine is known to have slower tiers
        self._begin_trace = read_trace_context if tracer is None else tracer.begin
        self.decisions, self.splitter = decisions, splitter
        if decisions is not None:
            tracker.add_listener(decisions)
        self._answered = AnsweredRequests(metrics, log, lookup, *stats, tracer, decisions)
        self._by_prefix, self.max_endpoints = by_prefix, max_endpoints
        self.max_backlog = inf if limits is None else limits.max_backlog
        """Seconds of prefill from which an endpoint is full."""
        self.engine_priorities = engine_priorities
        self.flow: FlowController | None = None
        """Where requests wait that find no capacity; None: they never wait."""
        if limits is not None:
            self.flow = FlowController(
                limits, lambda: self.candidates, self, now=now, waits=metrics.queue_waits, on_due=on_due
            )

    def activate(self, model: Model, ingestor: Ingestor | None) -> None:
        """Render prompts by this model from now on; ``ingestor`` applies KV events, if there are any."""
        self.model, self.ingestor = model, ingestor
        self.table.drop_prompts()

    def set_endpoints(self, candidates: Iterable[Candidate], now: float) -> None:
        """Replace the endpoints."""
        self.candidates = tuple(candidates)
        vars(self).pop("candidate_table", None)
        settle_roles(self.candidates)
        if self.flow is not None:
            self.flow.on_pool_changed(now)

    def set_models(self, adapters: frozenset[str], partly_served: Mapping[str, tuple[str, ...]]) -> None:
        """Set the names of LoRA adapters, and the endpoints (``ip:port``) of names that not all serve."""
        self.adapters, self.partly_served = adapters, partly_served

    def set_other_replicas(self, count: int) -> None:
        """Set how many other replicas route to the same endpoints."""
        self.policy = policy_among(count, tpot=self.tracker.tpot_seconds > 0)
        self.recent_uses.replicas = 1 + count

    def offer(self, ask: PickRequest, now: float) -> Answer | QueuedRequest:
        """Answer a request, or queue it. Raises PickError."""
        [answer] = self.offer_all((ask,), now)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def offer_all(self, asks: Sequence[PickRequest], now: float) -> list[Answer | QueuedRequest | Exception]:
        """Answer requests that came together, in their order, or queue them.

        An exception stands for a request that is rejected (PickError), or that met a bug. Each step is made
        for all of them before the next one, while its code and data are in the processor's caches
        (``docs/decisions/0027``). Picks are made one by one: each is known to the next.
        """
        understood = [self._understand(ask) for ask in asks]
        answers = [self._answer(context, problem, now) for context, problem in understood]
        self._answered.write()
        return answers

    def offer_matched(self, context: RequestContext, now: float) -> Answer | QueuedRequest:
        """Answer or queue a request that is understood and matched already. Raises PickError."""
        try:
            return self._offer(context, now)
        except PickError as error:
            self._answered.add_rejected(context, error, now)
            raise
        finally:
            self._answered.write()

    def dispatch(self, request: QueuedRequest, now: float) -> Answer | PickError | FlowKey:
        """Choose an endpoint for a request that has waited; see ``Dispatcher``."""
        context: RequestContext = request.context
        self.request_count += 1
        context.turn = self.request_count
        context.line.waited_ms = round((now - request.since) * 1000, 3)
        self._look(context)
        try:
            picked = self.choose(context, now)
            if (key := self._deferred(picked.first)) is not None:
                context.match.release()
                return key
            return self._send(context, picked, now)
        except PickError as error:
            self._answered.add_rejected(context, error, now)
            return error
        finally:
            self._answered.write()

    def on_poll(self, now: float) -> None:
        """See ``Dispatcher``: endpoints may have capacity again."""
        self.progress.end_overdue(now)

    def on_rejected(self, request: QueuedRequest, error: PickError, now: float) -> None:
        """Account for a request that left the queue without being dispatched; see ``Dispatcher``."""
        context: RequestContext = request.context
        context.line.waited_ms = round((now - request.since) * 1000, 3)
        self.reject(context, error, now)

    def _understand(self, ask: PickRequest) -> tuple[RequestContext, Exception | None]:
        """Return the context of a request, and why it cannot be answered."""
        self.request_count += 1
        trace, own_id = self._begin_trace(ask.headers), f"{self.replica}.{self.request_count}"
        context = RequestContext.of(ask, own_id, self.request_count, trace)
        try:
            match = self.understood(ask, context.stages, self._on_render_failure)
            context.set_match(match, self.priorities.of(ask.headers))
        except Exception as problem:  # noqa: BLE001  a bug must not cost the requests that came with it
            return context, problem
        return context, None

    def understood(
        self, ask: PickRequest, stages: Stages, on_render_failure: Callable[[str], None]
    ) -> PromptMatch:
        """Parse and render a request; see ``request_context.understand``. Raises BadRequest."""
        return understand(
            ask,
            stages,
            model=self.model,
            lookup=self.lookup,
            adapters=self.adapters,
            on_render_failure=on_render_failure,
            by_prefix=self._by_prefix,
        )

    def _answer(
        self, context: RequestContext, problem: Exception | None, now: float
    ) -> Answer | QueuedRequest | Exception:
        answer: Answer | QueuedRequest | Exception
        try:
            if problem is None:
                self._look(context)
            answer = problem or self._offer(context, now)
        except Exception as error:  # noqa: BLE001  as above
            answer = error
        if isinstance(answer, PickError):
            self._answered.add_rejected(context, answer, now)
        return answer

    def _look(self, context: RequestContext) -> None:
        context.stages.skip()
        context.match.look(self.lookup)
        context.stages.mark("match")

    def _on_render_failure(self, why: str) -> None:
        self.metrics.template_failures[why] += 1

    def _offer(self, context: RequestContext, now: float) -> Answer | QueuedRequest:
        if self.partly_served:
            context.restrict(self.partly_served)
        flow = self.flow
        if flow is None or not context.may_wait:
            return self._send(context, self.choose(context, now), now)
        priority = context.line.priority
        if flow.has_queued(priority):
            return self._queue(flow, context, context.any_endpoint(), now)
        try:
            picked = self.choose(context, now)
        except NoEndpoints:
            if context.subset is None and flow.can_wait_for_endpoints:
                return self._queue(flow, context, context.any_endpoint(), now)
            raise
        best = picked.first
        if (best.full and flow.must_wait(priority)) or flow.has_queued_for(best.endpoint, priority):
            return self._queue(flow, context, context.any_endpoint(), now)
        load = self.tracker.load(best.endpoint.key)
        if load.tpot is not None:
            load.on_new_request(best.uncached_tokens, now)
            if (key := self._deferred(best)) is not None:
                return self._queue(flow, context, key, now)
        return self._send(context, picked, now)

    def _queue(
        self, flow: FlowController, context: RequestContext, key: FlowKey, now: float
    ) -> QueuedRequest:
        context.release(keep_for_split=self.splitter is not None, keep_for_loads=self.limits_loads)
        priority, cost = context.line.priority, context.queue_cost()
        request = QueuedRequest(context, priority, context.tenant, key, cost, context.exemplar)
        flow.offer(request, now)
        return request

    def _deferred(self, best: ScoredEndpoint) -> FlowKey | None:
        """Return the flow for requests that their best endpoint defers (TPOT target); None if it does not."""
        if self.flow is None or not self.flow.can_wait or not best.deferred:
            return None
        return FlowKey.for_endpoint(self.tracker.load(best.endpoint.key), best.uncached_tokens)

    @cached_property
    def candidate_table(self) -> CandidateTable:
        """The endpoints as picks read them; made by the first pick after ``set_endpoints``."""
        return CandidateTable(self.candidates, self.tracker.changed, record=self.decisions is not None)

    def choose(self, context: RequestContext, now: float) -> PickedEndpoints:
        """Return the endpoints of a request, best first. Raises NoEndpoints."""
        picked = self.candidate_table.choose(
            *(context.match.demand(self.recent_uses, now), context.subset),
            now=now,
            turn=context.turn,
            limit=self.max_endpoints,
            max_backlog=self.max_backlog,
            policy=self.policy,
        )
        if self.splitter is not None:
            picked = self.splitter.plan(self, context, picked, now)
        return picked if picked.best.endpoint.ranks == 1 else name_ranks(self, context, picked, now)

    def _send(self, context: RequestContext, picked: PickedEndpoints, now: float) -> Answer:
        context.stages.mark("pick")
        if self.splitter is not None:
            return self.splitter.send(self, context, picked, now)
        return self.send_whole(context, picked, now)

    def send_whole(self, context: RequestContext, picked: PickedEndpoints, now: float) -> PickResult:
        """Answer a request that one endpoint computes and answers."""
        request, loads = self.remember(context, picked.best, now), picked.best.loads
        body = context.body_for(loads) if loads else None
        if loads:
            request.skipped_media = note_loads(request.attempt.load, loads, limited=bool(body), now=now)
        answer = self.answer(context, picked, request, now, body)
        if context.websocket:  # may be idle for hours; what it computes is in what engines report
            self.progress.on_ended(request, "websocket", now, without_prefill=True)
        return answer

    def answer(
        self,
        context: RequestContext,
        picked: PickedEndpoints,
        request: InFlightRequest,
        now: float,
        body: bytes | None,
    ) -> PickResult:
        """Return the answer to a request that is in the books; ``body``: a new one, None: as it is."""
        key = picked.best.endpoint.key
        if context.ranks:
            request.attempt.rank = context.ranks.get(key)
        headers = context.added_headers(key, engine_priorities=self.engine_priorities)
        context.stages.mark("book")
        self._answered.add_picked(context, picked, request, len(self.candidates), now)
        return PickResult(picked.hostports, headers, body, context.line.session)

    def reject(self, context: RequestContext, error: PickError, now: float) -> None:
        """Account for a request that goes nowhere after its pick."""
        self._answered.add_rejected(context, error, now)
        self._answered.write()

    def remember(
        self, context: RequestContext, best: ScoredEndpoint, now: float, leg: Leg = Leg.SERVE
    ) -> InFlightRequest:
        """Store everything that is known of a request that is sent, and return its record."""
        match, session, key = context.match, context.line.session, best.endpoint.key
        found, holding = match.found, match.found.hits.get(key)
        if self.ingestor is not None and SESSION_HEADER in context.kept_headers:
            for source in best.endpoint.sources:
                self.ingestor.expect(session, source.publisher)
        request = InFlightRequest(
            session,
            found.tokens,
            context.line.id,
            root=match.root,
            prompt=match.only_prompt,
            cache_credit=[self.history.note(key, match.root, prompt) for prompt in match.prompts],
            indexed_tokens=holding.indexed if holding else 0,
            indexed_lower=holding.indexed_lower if holding else None,
            unindexed=match.unindexed or not match.prompts,
            predicted_tokens=best.matched_tokens,
            predicted_ttft_seconds=best.predicted_ttft_seconds,
            trace_id=context.exemplar[1],
            truth_known=match.only_prompt is None,
            reported=not context.websocket,
        )
        self.tracker.add(request, key, best.uncached_tokens, now, hostport=best.endpoint.hostport, leg=leg)
        if match.prompts:
            self.recent_uses.record(found.place, now)
            if self.hot is not None:
                for place in found.ends():
                    self.hot.record(place, context.tenant, now)
        return request

    def on_tick(self, now: float) -> None:
        """Expire requests and look after the queue; called several times a second."""
        self.progress.expire(now)
        if self.flow is not None:
            self.flow.on_tick(self.metrics.requests["picked"], now)
