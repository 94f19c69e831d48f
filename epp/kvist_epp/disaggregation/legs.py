"""Starts leg 1 of a disaggregated request, and answers the request when leg 1 has ended. Sans I/O.

``Splitter`` decides with each pick (the director asks it), ``SecondLeg`` continues when an engine has
answered. Between them a ``PrefillLeg`` is carried out: by ``leg_driver`` with sockets, in virtual time by a
simulator.

vLLM 0.32 does not enforce the lease of transferred blocks where they are fetched: an engine that fetches them
too late gets the blocks of whatever prompt was computed there since, and answers 200. So the picker has a
deadline of its own (``SecondLeg``), past which the decode endpoint computes the prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from kvist_epp.director.request_context import RequestContext
from kvist_epp.disaggregation import leg_bodies
from kvist_epp.disaggregation.engine_pairs import EnginePairs, can_pair
from kvist_epp.disaggregation.leg_bodies import Prefilled
from kvist_epp.disaggregation.prefill_outcome import PrefillFailure
from kvist_epp.endpoints.endpoint import Endpoint, same_engine
from kvist_epp.errors import Cancelled, PickError
from kvist_epp.extproc.pick_request import Effect, PickResult
from kvist_epp.load.in_flight import DecodePlace, InFlightRequest, Leg, RequestState
from kvist_epp.names import PREFILLER_HEADER, REQUEST_ID_HEADER, SESSION_HEADER
from kvist_epp.scheduling.candidate_table import PickedEndpoints
from kvist_epp.scheduling.leg_costs import RULES, DisaggregationPolicy
from kvist_epp.scheduling.pick import ScoredEndpoint
from kvist_epp.scheduling.split_decision import SplitDecision, Undecided, weigh
from kvist_epp.scheduling.split_record import SplitRecord
from kvist_epp.settings.validation import DISAGGREGATION
from kvist_epp.telemetry.counters import DisaggregationStats

if TYPE_CHECKING:
    from kvist_epp.director.director import Director

OFF, ON, SIDECAR = DISAGGREGATION
MARGIN: Final = 1 / 3
"""Share of the lease that is left when leg 2 is released: for the way to the decode endpoint, retries of the
gateway included (Envoy's connect timeout is 5 s). From its arrival there the engine extends the lease
itself."""
LIMITS: Final = (20.0, 120.0)
"""Shortest and longest time limit of leg 1 …"""
PATIENCE: Final = 4.0
"""… which is this multiple of its predicted time."""


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillLeg(Effect):
    """Leg 1 of a request: an engine is to be asked, and its answer goes to ``SecondLeg``."""

    context: RequestContext
    picked: PickedEndpoints
    split: SplitDecision
    request: InFlightRequest
    body: bytes
    """The client's body."""
    headers: Mapping[str, str]
    seconds: float
    """Time limit."""
    started_at: float

    @property
    def hostport(self) -> str:
        """``ip:port`` of the endpoint to ask."""
        return self.split.prefill.endpoint.hostport

    @property
    def path(self) -> str:
        """Path of the request."""
        return self.context.line.path

    @property
    def prefill_body(self) -> bytes:
        """Body of the request."""
        return leg_bodies.prefill_body(self.path, self.body, self.context.match.found.tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Splitter:
    """Decides which requests are computed at one endpoint and answered by another one."""

    sidecar: bool = False
    """A sidecar of llm-d in the decode pods sends leg 1, not the picker."""
    rules: DisaggregationPolicy = RULES
    pairs: EnginePairs = field(default_factory=EnginePairs)
    stats: DisaggregationStats = field(default_factory=DisaggregationStats)

    def plan(
        self, director: "Director", context: RequestContext, picked: PickedEndpoints, now: float
    ) -> PickedEndpoints:
        """Return an ordinary pick with both legs, or with the endpoint that is best for both of them."""
        found = self.weigh(director, context, picked.best, now)
        why = self._obstacle(context, found)
        if not why and isinstance(found, SplitDecision):
            return msgspec.structs.replace(picked, split=found)
        return msgspec.structs.replace(picked.moved(found.whole), whole_reason=why)

    def weigh(
        self,
        director: "Director",
        context: RequestContext,
        best: ScoredEndpoint,
        now: float,
    ) -> SplitDecision | Undecided:
        """Return the best pair of endpoints beside ``best``, whether it is chosen or not, if there is one."""
        return weigh(
            director.candidate_table.legs().among(context.subset, self.pairs.resting(now)),
            context.match.demand(director.recent_uses, now),
            best,
            now=now,
            warm=None if self.sidecar else self.pairs.warm,
            max_backlog=director.max_backlog,
            policy=director.policy,
            rules=self.rules,
        )

    def _obstacle(self, context: RequestContext, found: SplitDecision | Undecided) -> str:
        """Return why a request is not split: the label of the metric; empty if it is."""
        if isinstance(found, Undecided):
            return found.label
        if not found.chosen:
            return "cost"
        if len(context.match.prompts) != 1:
            return "prompt"
        if self.sidecar:  # a gateway that sends no path passes no header on
            return "" if context.line.path else "api"
        if (found.prefill.endpoint.key, found.decode.endpoint.key) not in self.pairs.warm:
            return "new-pair"
        if context.obstacle is None:  # a queued request is planned several times
            context.obstacle = leg_bodies.obstacle(context.line.path, context.body)
        return context.obstacle

    def send(
        self, director: "Director", context: RequestContext, picked: PickedEndpoints, now: float
    ) -> PickResult | PrefillLeg:
        """Answer a request, or return its first leg."""
        split = picked.split
        self.stats.decisions[picked.whole_reason if split is None else "split"] += 1
        if split is None:
            answer = director.send_whole(context, picked, now)
            return _for_sidecar(answer, None) if self.sidecar else answer
        context.split = SplitRecord(split)
        request = director.remember(context, split.prefill, now, Leg.PREFILL)
        place = decode_place(context, split.decode.endpoint, split.transferred_tokens)
        director.tracker.keep_place(request, place)
        request.attempt.rank = context.ranks.get(split.prefill.endpoint.key)
        if not self.sidecar:
            return self._first_leg(director, context, picked, split, request, now)
        hostports = (split.decode.endpoint.hostport,)
        picked = msgspec.structs.replace(picked, best=split.decode, hostports=hostports)
        return _for_sidecar(director.answer(context, picked, request, now, None), split)

    def _first_leg(
        self,
        director: "Director",
        context: RequestContext,
        picked: PickedEndpoints,
        split: SplitDecision,
        request: InFlightRequest,
        now: float,
    ) -> PrefillLeg:
        endpoint = split.prefill.endpoint
        priorities = director.engine_priorities
        headers = dict(context.added_headers(endpoint.key, engine_priorities=priorities))
        headers |= {SESSION_HEADER: context.line.session, REQUEST_ID_HEADER: context.line.id}
        shortest, longest = LIMITS
        return PrefillLeg(
            context=context,
            picked=picked,
            split=split,
            request=request,
            body=context.body,
            headers={name: value.encode("latin-1", "replace").decode() for name, value in headers.items()},
            seconds=min(max(shortest, PATIENCE * split.prefill.predicted_ttft_seconds), longest),
            started_at=now,
        )


def decode_place(context: RequestContext, endpoint: Endpoint, transferred: int) -> DecodePlace:
    """Return what the books keep of the endpoint that will answer."""
    holding = context.match.found.hits.get(endpoint.key)
    indexed, lower = (holding.indexed, holding.indexed_lower) if holding else (0, None)
    return DecodePlace(endpoint.key, endpoint.hostport, transferred, indexed, lower)


class SecondLeg:
    """Answers requests whose leg 1 has ended."""

    def __init__(self, director: "Director", splitter: Splitter, lease_seconds: float) -> None:
        """``lease_seconds``: how long a prefill endpoint keeps blocks that are not fetched
        (``kv_lease_duration`` of vLLM's NixlConnector)."""
        self._director = director
        self.splitter = splitter
        self.usable_seconds = lease_seconds * (1 - MARGIN)
        """Time from the end of leg 1 in which leg 2 may be released with the description of the blocks."""

    def on_prefilled(
        self, leg: PrefillLeg, outcome: Prefilled | PrefillFailure, ended_at: float, now: float
    ) -> PickResult | PickError:
        """Return the answer to a request: where it goes, and the body of leg 2.

        ``ended_at``: a time at which leg 1 had surely not ended yet, as late as is known.
        """
        director, context, split = self._director, leg.context, leg.split
        stats, pairs, prefill = self.splitter.stats, self.splitter.pairs, split.prefill.endpoint.key
        stats.prefill_seconds.observe(now - leg.started_at)
        context.stages.skip()
        if isinstance(outcome, Prefilled):
            pairs.on_prefilled(prefill, outcome.engine)
            fallback = "lease" if now - ended_at > self.usable_seconds else ""
        else:
            fallback = outcome.value
            if outcome not in (PrefillFailure.REFUSED, PrefillFailure.NOTHING):
                pairs.on_failed(prefill, now)
        director.tracker.release_place(leg.request)
        try:
            best, hostports, fallback = self._place(leg, fallback, now)
        except PickError as error:
            director.reject(context, error, now)
            self._end(leg, now)
            return error
        if fallback:
            stats.fallbacks[fallback] += 1
        if context.split is not None:
            context.split.prefill_seconds, context.split.fallback = now - leg.started_at, fallback
        self._account(leg, best, now, computes=bool(fallback))
        body = context.body_for(best.loads) if best.loads else None
        if not fallback and isinstance(outcome, Prefilled):
            body = leg_bodies.decode_body(leg.path, leg.body, outcome)
        picked = msgspec.structs.replace(leg.picked, best=best, hostports=hostports)
        return director.answer(context, picked, leg.request, now, body)

    def on_cancelled(self, leg: PrefillLeg, now: float) -> None:
        """The client has left during leg 1."""
        self._director.tracker.release_place(leg.request)
        self._director.reject(leg.context, Cancelled("the client cancelled the request"), now)
        self._end(leg, now)

    def _end(self, leg: PrefillLeg, now: float) -> None:
        if leg.request.state is not RequestState.ENDED:
            self._director.progress.on_ended(leg.request, "cancelled", now)

    def _place(
        self, leg: PrefillLeg, fallback: str, now: float
    ) -> tuple[ScoredEndpoint, tuple[str, ...], str]:
        """Return where leg 2 goes, what the gateway may fall back to, and why the blocks are not used."""
        director, decode = self._director, leg.split.decode
        table = director.candidate_table
        candidates = table.by_key
        prefill = candidates.get(leg.split.prefill.endpoint.key)
        chosen = candidates.get(decode.endpoint.key)
        if chosen is None or chosen.refusal or not same_engine(chosen.endpoint, decode.endpoint):
            leg.context.match.look(director.lookup)
            picked = director.choose(leg.context, now)
            if not fallback:
                new = candidates.get(picked.best.endpoint.key)
                paired = prefill is not None and new is not None and can_pair(prefill, new)
                fallback = "" if paired else "decode-left"
            return picked.best, picked.hostports, fallback
        others = leg.picked.hostports
        if not fallback and prefill is not None:
            others = tuple([host for host in others if (one := table.at(host)) and can_pair(prefill, one)])
        mine = chosen.endpoint.hostport
        limit = max(1, len(leg.picked.hostports))
        return decode, (mine, *[one for one in others if one != mine])[:limit], fallback

    def _account(self, leg: PrefillLeg, best: ScoredEndpoint, now: float, *, computes: bool) -> None:
        """Move the request to the books of the endpoint that answers; ``computes``: the prompt, too."""
        director, context, request = self._director, leg.context, leg.request
        endpoint = best.endpoint
        place = decode_place(context, endpoint, leg.split.transferred_tokens)
        uncached = best.uncached_tokens if computes else 0
        director.tracker.begin_decode(
            request, place, uncached, now, leg=Leg.SERVE if computes else Leg.DECODE
        )
        root = context.match.root
        request.cache_credit = request.cache_credit + [
            director.history.note(endpoint.key, root, prompt) for prompt in context.match.prompts
        ]


def _for_sidecar(answer: PickResult, split: SplitDecision | None) -> PickResult:
    """Return an answer for gateways whose decode pods have llm-d's sidecar, which sends leg 1 to the endpoint
    that the header names; a client's own header is removed."""
    if split is None:
        remove = (*answer.remove, PREFILLER_HEADER)
        return PickResult(answer.endpoints, answer.headers, answer.body, answer.session, remove)
    header = (PREFILLER_HEADER, split.prefill.endpoint.hostport)
    return PickResult(answer.endpoints, (*answer.headers, header), answer.body, answer.session)
