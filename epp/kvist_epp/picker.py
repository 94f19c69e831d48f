"""The picker: what is asked, known and decided, put together. Only this module knows every part.

Free of I/O but for the clock: ``serving`` feeds it requests, events, scrapes and ended requests.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvist_epp.admin.describe import pick_document
from kvist_epp.admin.histogram import Stages
from kvist_epp.admin.log import RequestLine, RequestLog
from kvist_epp.admin.metrics import Metrics
from kvist_epp.cache.history import History
from kvist_epp.cache.index import Index, Root
from kvist_epp.cache.learn.observed import Observed
from kvist_epp.cache.lookup import Found, Lookup
from kvist_epp.errors import PickError
from kvist_epp.fleet.ledger import Ledger
from kvist_epp.flights import Flight, Flights
from kvist_epp.names import DATA_PARALLEL_RANK_HEADER, REQUEST_ID_HEADER, SESSION_HEADER
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import Kind, Request, parse
from kvist_epp.schedule.pick import Candidate, Demand, Scored, choose, explain
from kvist_epp.wire.exchange import Ask, Decision, Picked

CREDIT_SECONDS: Final = 2.0
"""After an engine told that a prefill is done its blocks may wait this long for a check; they are not evicted
while the request runs, so the credit may stay."""
NO_REQUEST: Final = Request(kind=Kind.OTHER)


class Thought(msgspec.Struct):
    """One request as the picker understands it, before and after the choice."""

    request: Request
    prompts: Sequence[bytes]
    root: Root
    found: Found
    mode: str
    """``precise``, ``approximate`` or ``load``: what the choice rests on."""

    @property
    def demand(self) -> Demand:
        """As the policy sees it."""
        return Demand(prompt_bytes=self.found.size, hits=self.found.hits, tokens=self.found.tokens)


@dataclass(slots=True)
class Picker:
    """Decides, and remembers what it decided."""

    model: Model | None
    index: Index
    history: History
    lookup: Lookup
    ledger: Ledger
    flights: Flights
    metrics: Metrics
    log: RequestLog
    max_endpoints: int = 3
    clock: Callable[[], float] = time.monotonic
    candidates: tuple[Candidate, ...] = ()
    """The fleet; swapped whole when it changes."""
    departed: Callable[[Flight], None] = lambda _flight: None
    """Told of each request that was routed."""
    truth: Callable[[Flight, int, float], None] = lambda _flight, _cached, _now: None
    """Told how many tokens of a request the engine really had cached."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that engines serve."""
    expect: Callable[[str, str], None] = lambda _session, _source: None
    """Told of a session id that clients chose, and may have used before, with the publisher it goes to."""
    replica: str = field(default_factory=lambda: f"{os.uname().nodename[-20:]}-{secrets.token_hex(3)}")
    """Tells this picker's sessions from those of its peers."""
    turn: int = 0

    def decide(self, ask: Ask) -> Decision:
        """The answer to one request. Raises ``PickError``."""
        stages = Stages()
        self.turn += 1
        own = f"{self.replica}.{self.turn}"
        line = RequestLine(
            id=ask.headers.get(REQUEST_ID_HEADER) or own,
            session=ask.headers.get(SESSION_HEADER, ""),
            path=ask.path,
            kind=Kind.OTHER.value,
            outcome="picked",
        )
        try:
            picked = self._decide(ask, own, stages, line)
        except PickError as error:
            line.outcome = error.reason
            self._account(stages, line, b"")
            raise
        return picked

    def _decide(self, ask: Ask, own: str, stages: Stages, line: RequestLine) -> Picked:
        thought = self._understand(ask, stages)
        request = thought.request
        theirs = line.session or request.session
        session = line.session = theirs or own
        line.kind, line.model, line.mode = request.kind.value, request.model, thought.mode
        now = self.clock()
        chosen = choose(
            self.candidates,
            thought.demand,
            ask.subset,
            now=now,
            turn=self.turn,
            limit=self.max_endpoints,
        )
        stages.mark("pick")
        self._book(thought, chosen[0], session, now, reused=theirs is not None)
        picked = Picked(
            tuple(row.endpoint.hostport for row in chosen),
            self._headers(thought, chosen[0], ask, None if theirs else own),
        )
        stages.mark("book")
        _tell(line, thought, chosen[0], len(self.candidates))
        self._account(stages, line, thought.prompts[0] if thought.prompts else b"")
        return picked

    def _understand(self, ask: Ask, stages: Stages, *, learn: bool = True) -> Thought:
        request = NO_REQUEST if ask.partial else parse(ask.path, ask.body, method=ask.method)
        stages.mark("parse")
        prompts = self._prompts(request, ask.body, self._unrendered if learn else _unheard)
        stages.mark("render")
        adapter = request.model if request.model in self.adapters else None
        root = (adapter, request.salt)
        if prompts:
            found, mode = self.lookup.look(root, prompts, learn=learn), self._mode(request)
        else:
            size = len(ask.body)
            found, mode = Found(size, self.lookup.tokens(size), {}), "load"
        stages.mark("match")
        return Thought(request, prompts, root, found, mode)

    def _prompts(self, request: Request, body: bytes, failed: Callable[[str], None]) -> Sequence[bytes]:
        if request.kind is Kind.OTHER:
            return ()
        if self.model is None:
            return (_bare(body),)
        return self.model.prompts(request, failed)

    def _unrendered(self, why: str) -> None:
        self.metrics.template_failures[why] += 1

    def _mode(self, request: Request) -> str:
        faithful = self.model is not None and self.model.faithful
        return "precise" if faithful and request.exact else "approximate"

    def _book(self, thought: Thought, best: Scored, session: str, now: float, *, reused: bool) -> None:
        """Everything that is remembered of a choice."""
        key = best.endpoint.key
        holding = thought.found.hits.get(key)
        if reused:
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
        )
        self.flights.departed(flight)
        self.departed(flight)
        self.metrics.predicted_cached[best.endpoint.hostport] += best.matched_tokens

    def _headers(
        self, thought: Thought, best: Scored, ask: Ask, session: str | None
    ) -> tuple[tuple[str, str], ...]:
        """What it carries on: our session id unless it had one, and the rank that holds its prefix."""
        headers = () if session is None else ((SESSION_HEADER, session),)
        holding = thought.found.hits.get(best.endpoint.key)
        if holding and holding.rank is not None and DATA_PARALLEL_RANK_HEADER not in ask.headers:
            headers = (*headers, (DATA_PARALLEL_RANK_HEADER, str(holding.rank)))
        return headers

    def _account(self, stages: Stages, line: RequestLine, prompt: bytes) -> None:
        self.metrics.requests[line.outcome] += 1
        self.metrics.observe(stages)
        if self.log.enabled:
            line.us = stages.microseconds()
            self.log.write(line, prompt=prompt)

    def explain(self, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, object]:
        """The answer of ``/debug/pick``: as ``decide`` would, without a trace of it. Raises ``PickError``."""
        ask = Ask(method="POST", path=path, headers=headers, body=body, subset=None)
        thought = self._understand(ask, Stages(), learn=False)
        rows = explain(self.candidates, thought.demand, now=self.clock(), turn=self.turn + 1)
        size = thought.found.size if thought.prompts else 0
        return pick_document(thought.mode, size, rows, limit=self.max_endpoints)

    def settled(self, sessions: Iterable[str], how: str, *, refused: bool = False) -> None:
        """Requests have ended, ``refused`` without a prefill.

        ``how``: known by the ``access-log``, ``expired``, ``reconciled``, or their endpoint ``left``.
        """
        now = self.clock()
        for session in sessions:
            flight = self.flights.landed(session)
            if flight is None:
                continue
            self.metrics.ended[how] += 1
            self.ledger.settled(session, now)
            self.arrived(flight, never=refused)

    def begins(self, source: str, endpoint: str, session: str) -> None:
        """An engine took a request up: what the index says at this moment is held against the truth.

        Whatever was stored or evicted since the pick is in both; so under any load a difference is the
        index's fault.
        """
        flight = self.flights.of(session, endpoint)
        prompt = None if flight is None else self.flights.release(flight)
        if flight is not None and prompt is not None:
            matches = self.index.match(flight.root, prompt)
            flight.indexed = matches.of(self.index.publisher(source)).tokens
            flight.compared = True

    def observed(self, seen: Observed) -> None:
        """An engine's event told of a request."""
        flight = seen.session and self.flights.of(seen.session, seen.endpoint)
        if not flight:
            return
        now = self.clock()
        if seen.cached is not None and not flight.told:
            flight.told = True
            self.truth(flight, seen.cached, now)
        left = 0 if seen.born == "decode" else max(0, flight.tokens - (seen.depth or 0))
        member = self.lookup.members.get(flight.endpoint)
        if member is None or left < member.block_size:
            left = 0
            self.flights.prefilled(flight, now)
        self.ledger.progress(flight.session, left, now)

    def tick(self) -> None:
        """Now and then: credit ends for requests whose engines told of their prefill a while ago."""
        for flight in self.flights.indexed_by(self.clock() - CREDIT_SECONDS):
            self.arrived(flight)

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
    line.prompt_bytes = thought.found.size if thought.prompts else 0
    line.matched_bytes = best.matched_bytes
    line.matched_tokens = best.matched_tokens
    line.predicted_ttft_ms = round(best.predicted_ttft_seconds * 1000, 3)
    line.candidates = candidates


def _unheard(_why: str) -> None:
    pass


def _bare(body: bytes) -> bytes:
    """Without a template: the body from its messages or prompt on, so that what clients vary comes later."""
    starts = [at for name in (b'"messages"', b'"prompt"', b'"input"') if (at := body.find(name)) >= 0]
    return body[min(starts) :] if starts else body
