"""The picker: what is asked, known and decided, put together. Only this module knows every part.

Free of I/O but for the clock: ``serving`` feeds it requests, events, scrapes and ended requests.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from kvist_epp.admin.routing_pages import pick_document
from kvist_epp.director.prompt_match import Thought, think
from kvist_epp.director.request_context import Asked
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.errors import NoEndpoints, PickError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.extproc.pick_request import Decision, DeferredResult, PickRequest, PickResult
from kvist_epp.flowcontrol.deficit_round_robin import Spot
from kvist_epp.flowcontrol.flow_controller import Queue
from kvist_epp.flowcontrol.priorities import Priorities, engine_priority
from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import History
from kvist_epp.kvevents.observed import Observed
from kvist_epp.load.in_flight import Flight, Flights
from kvist_epp.load.ledger import Ledger
from kvist_epp.names import (
    DATA_PARALLEL_RANK_HEADER,
    ENGINE_PRIORITY_HEADER,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
)
from kvist_epp.prefix_stats.cache_value import Savings
from kvist_epp.prefix_stats.divergence_histogram import Reuse
from kvist_epp.prefix_stats.hot_prefixes import Hot
from kvist_epp.prefix_stats.recent_uses import Uses
from kvist_epp.prompt.model import Model
from kvist_epp.scheduling.cost import DEFAULT, Policy, policy_among
from kvist_epp.scheduling.pick import ROLES_WITHOUT_REQUESTS, Candidate, Scored, choose, explain
from kvist_epp.telemetry.histogram import Stages
from kvist_epp.telemetry.picker_metrics import PickerMetrics
from kvist_epp.telemetry.request_log import RequestLine, RequestLog

CREDIT_SECONDS: Final = 2.0
"""After an engine told that a prefill is done its blocks may wait this long for a check; they are not evicted
while the request runs, so the credit may stay."""
TOLD_BY_GATEWAYS: Final = ("access-log", "response")


@dataclass(slots=True)
class Picker:
    """Decides, and remembers what it decided."""

    model: Model | None
    index: Index
    history: History
    lookup: Lookup
    ledger: Ledger
    flights: Flights
    metrics: PickerMetrics
    log: RequestLog
    max_endpoints: int = 3
    clock: Callable[[], float] = time.monotonic
    candidates: tuple[Candidate, ...] = ()
    """The fleet; swapped whole (``gather``) when it changes."""
    departed: Callable[[Flight], None] = lambda _flight: None
    """Told of each request that was routed."""
    truth: Callable[[Flight, int, float], None] = lambda _flight, _cached, _now: None
    """Told how many tokens of a request the engine really had cached."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that engines serve."""
    partly_served: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By name of a model or adapter that not all endpoints serve: the ``ip:port`` of those that do."""
    expect: Callable[[str, str], None] = lambda _session, _source: None
    """Told of a session id that clients chose, and may have used before, with the publisher it goes to."""
    stranger: Callable[[Observed], None] = lambda _seen: None
    """Told of an event whose request was not routed here."""
    elsewhere: Callable[[AccessLogEntry], None] = lambda _entry: None
    """Told of an ended request that was not routed here."""
    replica: str = field(default_factory=lambda: f"{os.uname().nodename[-20:]}-{secrets.token_hex(3)}")
    """Tells this picker's sessions from those of its peers."""
    queue: Queue | None = None
    """Where requests wait that find no room; None: they never wait."""
    priorities: Priorities = field(default_factory=Priorities)
    engine_priorities: bool = False
    """The engines run ``--scheduling-policy priority``."""
    turn: int = 0
    savings: Savings = field(default_factory=Savings)
    reuse: Reuse = field(default_factory=Reuse)
    uses: Uses = field(default_factory=Uses)
    policy: Policy = DEFAULT
    hot: Hot | None = None
    """Notes how far prompts were known, for warm hand-over; None: nobody asks for it."""

    @property
    def max_owed(self) -> float:
        """Seconds of prefill from which an endpoint is full."""
        return inf if self.queue is None else self.queue.bounds.max_owed

    def gather(self, candidates: Iterable[Candidate]) -> None:
        """From now on this is the fleet."""
        self.candidates = tuple(candidates)
        if self.queue is not None:
            self.queue.fleet_changed()

    def shared_with(self, peers: int) -> None:
        """So many other replicas route to the same endpoints."""
        self.policy = policy_among(peers, paced=self.ledger.paced)
        self.uses.replicas = 1 + peers

    def decide(self, ask: PickRequest) -> Decision | DeferredResult:
        """The answer to one request, or its place in the queue. Raises ``PickError``."""
        self.turn += 1
        asked = Asked.of(self, ask, f"{self.replica}.{self.turn}")
        try:
            thought = think(ask, asked.stages, self, self._unrendered)
            asked.understood(thought, self.priorities.of(ask.headers))
            if (only := self.partly_served.get(thought.model or "")) is not None:
                asked.narrow(only)
            chosen = self._choose_now(asked)
            return self._hold(asked, ask, chosen) if isinstance(chosen, Spot) else self._send(asked, chosen)
        except PickError as error:
            self.refused(asked, error)
            raise

    def resumed(self, asked: Asked) -> Decision | Spot:
        """It has waited; the cache is another one now."""
        self.turn += 1
        asked.stages.skip()
        asked.thought.resume(self.lookup)
        asked.stages.mark("match")
        try:
            chosen = self._choose(asked)
            if (spot := self._paced(chosen[0])) is not None:
                asked.thought.pause()
                return spot
            return self._send(asked, chosen)
        except PickError as error:
            self.refused(asked, error)
            return error

    def refused(self, asked: Asked, error: PickError) -> None:
        """It is not picked."""
        asked.line.outcome = error.reason
        self._account(asked, b"")

    def _choose_now(self, asked: Asked) -> list[Scored] | Spot:
        """The endpoints, best first, or where it has to wait. Raises ``NoEndpoints``."""
        queue = self.queue
        if queue is None or not asked.patient:
            return self._choose(asked)
        if queue.behind(asked.line.priority):
            return asked.spot()
        try:
            chosen = self._choose(asked)
        except NoEndpoints:
            if asked.subset is None and queue.expects_endpoints:
                return asked.spot()
            raise
        if chosen[0].full and queue.holds(asked.line.priority):
            return asked.spot()
        return self._paced(chosen[0], new=True) or chosen

    def _paced(self, best: Scored, *, new: bool = False) -> Spot | None:
        """Where a request waits for the best endpoint, which has room but may not take up more prefill."""
        load, need = self.ledger.load(best.endpoint.key), best.uncached_tokens
        if new:
            load.wanted(need, self.clock())
        waits = self.queue is not None and self.queue.paces and best.closed
        return Spot.bound(load, need) if waits else None

    def _choose(self, asked: Asked) -> list[Scored]:
        now = self.clock()
        return choose(
            self.candidates,
            asked.thought.demand(self.uses, now),
            asked.subset,
            now=now,
            turn=self.turn,
            limit=self.max_endpoints,
            max_owed=self.max_owed,
            policy=self.policy,
        )

    def _hold(self, asked: Asked, ask: PickRequest, spot: Spot) -> DeferredResult:
        assert self.queue is not None, "without a queue nobody waits"
        asked.thought.pause()
        return self.queue.hold(asked, (asked.line.priority, asked.tenant, spot), asked.cost(ask))

    def _send(self, asked: Asked, chosen: list[Scored]) -> PickResult:
        stages, thought = asked.stages, asked.thought
        stages.mark("pick")
        self._book(asked, chosen[0])
        picked = PickResult(
            tuple(row.endpoint.hostport for row in chosen),
            self._headers(asked, chosen[0]),
            session=asked.line.session,
        )
        stages.mark("book")
        _tell(asked.line, thought, chosen[0], len(self.candidates))
        self._account(asked, thought.prompts[0] if thought.prompts else b"")
        return picked

    def _unrendered(self, why: str) -> None:
        self.metrics.template_failures[why] += 1

    def _book(self, asked: Asked, best: Scored) -> None:
        """Everything that is remembered of a choice."""
        thought, session, now = asked.thought, asked.line.session, self.clock()
        key = best.endpoint.key
        holding = thought.found.hits.get(key)
        if SESSION_HEADER in asked.kept:
            for source in best.endpoint.sources:
                self.expect(session, source.publisher)
        self.ledger.routed(session, key, best.uncached_tokens, thought.found.tokens, now)
        flight = Flight(
            session,
            key,
            now,
            tokens=thought.found.tokens,
            indexed=holding.indexed if holding else 0,
            root=thought.root,
            prompt=thought.prompts[0] if len(thought.prompts) == 1 else None,
            handles=[self.history.note(key, thought.root, prompt) for prompt in thought.prompts],
            told=len(thought.prompts) != 1,
            hostport=best.endpoint.hostport,
            request_id=asked.line.id,
        )
        self.flights.departed(flight)
        self.departed(flight)
        self.metrics.predicted_cached[best.endpoint.hostport] += best.matched_tokens
        if thought.prompts:
            self.uses.note(thought.found.place, now)
            self.reuse.note(flight.tokens, best.matched_tokens, now)
            self.savings.picked(key, thought.found, self.lookup.members.get(key), now)
            if self.hot is not None:
                for place in thought.found.ends():
                    self.hot.note(place, asked.tenant, now)

    def _headers(self, asked: Asked, best: Scored) -> tuple[tuple[str, str], ...]:
        """What it carries on: our id as session and request id unless it had them, the rank that holds its
        prefix, and its priority as the engine has it."""
        headers = [
            (name, asked.own) for name in (SESSION_HEADER, REQUEST_ID_HEADER) if name not in asked.kept
        ]
        holding = asked.thought.found.hits.get(best.endpoint.key)
        if holding and holding.rank is not None and DATA_PARALLEL_RANK_HEADER not in asked.kept:
            headers.append((DATA_PARALLEL_RANK_HEADER, str(holding.rank)))
        if self.engine_priorities and asked.priority is not None:
            headers.append((ENGINE_PRIORITY_HEADER, engine_priority(asked.priority)))
        return tuple(headers)

    def _account(self, asked: Asked, prompt: bytes) -> None:
        stages, line = asked.stages, asked.line
        self.metrics.requests[line.outcome] += 1
        self.metrics.observe(stages)
        if self.log.enabled:
            line.us = stages.microseconds()
            self.log.write(line, prompt=prompt)

    def explain(self, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, object]:
        """The answer of ``/debug/pick``: as ``decide`` would, without a trace of it. Raises ``PickError``."""
        ask = PickRequest(method="POST", path=path, headers=headers, body=body, subset=None)
        thought = think(ask, Stages(), self, _unheard, learn=False)
        now, turn = self.clock(), self.turn + 1
        demand, only = thought.demand(self.uses, now), self.partly_served.get(thought.model or "")
        rows = explain(
            self.candidates, demand, only, now=now, turn=turn, max_owed=self.max_owed, policy=self.policy
        )
        return pick_document(thought.mode, thought.prompt_bytes, rows, limit=self.max_endpoints)

    def settled(
        self,
        sessions: Iterable[str],
        how: str,
        *,
        refused: bool = False,
        request_id: str = "",
        endpoint: str = "",
    ) -> None:
        """Requests have ended, ``refused`` without a prefill.

        ``how``: known by the ``access-log``, the ``response``, or the ledger, which has dropped it already:
        ``expired``, ``reconciled``, or its endpoint ``left``. ``request_id`` and the key of the ``endpoint``
        tell apart requests of one session.
        """
        now = self.clock()
        for session in sessions:
            flight = self.flights.landed(session, request_id, endpoint)
            if flight is None:
                continue
            self.metrics.ended[how] += 1
            if how in TOLD_BY_GATEWAYS:
                self.ledger.settled(session, now, flight.endpoint)
            self.arrived(flight, never=refused)

    def begins(self, source: str, endpoint: str, session: str) -> None:
        """An engine took a request up: what the index says at this moment is held against the truth.

        Whatever was stored or evicted since the pick is in both; so under any load a difference is the
        index's fault.
        """
        flight = self.flights.of(session, endpoint) or self._strayed(session, endpoint)
        prompt = None if flight is None else self.flights.release(flight)
        if flight is not None and prompt is not None:
            matches = self.index.match(flight.root, prompt)
            flight.indexed = matches.of(self.index.publisher(source)).tokens
            flight.compared = True

    def observed(self, seen: Observed) -> None:
        """An engine's event told of a request."""
        if not seen.session:
            return
        flight = self.flights.of(seen.session, seen.endpoint) or self._strayed(seen.session, seen.endpoint)
        if flight is None:
            self.stranger(seen)
            return
        now = self.clock()
        if seen.cached is not None and not flight.told:
            flight.told = True
            self.truth(flight, seen.cached, now)
        left = self.left(seen, flight.endpoint, flight.tokens)
        if not left:
            self.flights.prefilled(flight, now)
        self.ledger.progress(flight.session, left, now, computed=seen.prefilled)

    def left(self, seen: Observed, endpoint: str, tokens: int) -> int:
        """Tokens that a request of so many still has to prefill, by an event of its engine."""
        left = 0 if seen.born == "decode" else max(0, tokens - (seen.depth or 0))
        member = self.lookup.members.get(endpoint)
        return 0 if member is None or left < member.block_size else left

    def served(self, flight: Flight, endpoint: Endpoint) -> None:
        """Another endpoint than the picked one got the request: what is remembered of it moves there."""
        if flight.endpoint == endpoint.key:
            return
        self.metrics.served_elsewhere[flight.hostport] += 1
        found = flight.prompt and self.lookup.look(flight.root, [flight.prompt], learn=False)
        holding = found.hits.get(endpoint.key) if found else None
        tokens = found.tokens if found else flight.tokens
        uncached = max(tokens - (holding.tokens if holding else 0), 1)
        self.ledger.moved(flight.session, flight.endpoint, endpoint.key, uncached, self.clock())
        history, root = self.history, flight.root
        flight.handles = [history.moved(handle, root, endpoint.key) for handle in flight.handles]
        flight.endpoint, flight.hostport = endpoint.key, endpoint.hostport
        flight.indexed = holding.indexed if holding else 0

    def _strayed(self, session: str, key: str) -> Flight | None:
        """The flight of a session that an event shows on another endpoint than the one picked.

        Only our own session ids are never used twice; and a pod that only helps (prefill) serves nobody.
        """
        if not session.startswith(f"{self.replica}."):
            return None
        flight = self.flights.find(session)
        there = next((c.endpoint for c in self.candidates if c.endpoint.key == key), None)
        if flight is None or there is None or there.role in ROLES_WITHOUT_REQUESTS:
            return None
        self.served(flight, there)
        return flight

    def tick(self) -> None:
        """Now and then: credit ends for requests whose engines told of their prefill a while ago, and the
        queue is looked after."""
        for flight in self.flights.indexed_by(self.clock() - CREDIT_SECONDS):
            self.arrived(flight)
        if self.queue is not None:
            self.queue.tick(self.metrics.requests["picked"])

    def arrived(self, flight: Flight, *, never: bool = False) -> None:
        """Its prefix is in the index now, or never will be: the credit on the way ends.

        An endpoint without trusted events keeps it: the routing history is all that is known there.
        """
        member = self.lookup.members.get(flight.endpoint)
        if never or member is None or member.precise:
            for handle in flight.handles:
                self.history.drop(handle)
            flight.handles = []


def _tell(line: RequestLine, thought: Thought, best: Scored, candidates: int) -> None:
    line.endpoint = best.endpoint.hostport
    line.prompt_bytes = thought.prompt_bytes
    line.matched_bytes = best.matched_bytes
    line.matched_tokens = best.matched_tokens
    line.predicted_ttft_ms = round(best.predicted_ttft_seconds * 1000, 3)
    line.candidates = candidates


def _unheard(_why: str) -> None:
    pass
