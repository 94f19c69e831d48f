"""The last decisions: where each request went and why, who came second, and what came true.

A decision is a few numbers and names, never prompt text. The terms of the cost are computed when a decision
is shown (``scheduling.pick_record``), so that a pick pays little for its place in the log.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from kvist_epp.director.request_context import RequestContext
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.errors import PickError
from kvist_epp.load.in_flight import InFlightRequest, RequestListener, RequestState
from kvist_epp.scheduling.candidate_table import PickedEndpoints
from kvist_epp.scheduling.pick import ScoredEndpoint
from kvist_epp.scheduling.pick_record import PickRecord
from kvist_epp.scheduling.split_record import SplitRecord
from kvist_epp.scheduling.tier_price import TierLoad

MAX_ID: Final = 200
"""Characters of an id, a session or a model's name that are kept; clients choose them."""
SHOWN_MANY: Final = 32
"""Endpoints of a decision that are shown where a pool has more than its record keeps of each pick."""


class Decision(msgspec.Struct, gc=False):
    """One request: what was asked, what was decided, and what came true."""

    id: str
    """``x-request-id``, or an id that the picker made."""
    session: str
    kind: str
    model: str | None
    mode: str
    outcome: str
    """``picked``, or the reason of a PickError."""
    priority: int
    prompt_tokens: int
    prompt_bytes: int
    decided_at: float
    """By the director's clock."""
    waited_seconds: float
    picked: tuple[str, ...] = ()
    """``ip:port`` of the endpoints in the answer, best first."""
    record: PickRecord | None = None
    request: InFlightRequest | None = None
    """Until it ends."""
    message: str = ""
    """Why it went nowhere."""
    cached_tokens: int | None = None
    """By the engine; None: it did not say, or has not yet."""
    ttft_seconds: float | None = None
    """From the arrival of the request, its wait included; None: not observed."""
    served: str | None = None
    """``ip:port`` of the endpoint that served it; None: not known."""
    status: int = 0
    """HTTP status of its response; 0: not known."""
    ended: str | None = None
    """How its end became known (``RequestProgress.on_ended``)."""
    split: SplitRecord | None = None
    """How it was disaggregated; None: it was not."""


class DecisionLog(RequestListener):
    """Keeps a number of decisions in order.

    There is no index of their ids: people who ask for one request can wait the millisecond that a search
    takes.
    """

    def __init__(
        self, limit: int, replica: str, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """``limit``: decisions kept, at least 1. ``replica``: id of this one. ``clock`` is the director's,
        ``wall`` returns Unix seconds."""
        self.limit = limit
        self.replica = replica
        self._clock = clock
        self._wall = wall
        self._decisions: deque[Decision] = deque(maxlen=limit)
        self._open: dict[InFlightRequest, Decision] = {}

    # What happens

    def add_picked(
        self, context: RequestContext, picked: PickedEndpoints, request: InFlightRequest, now: float
    ) -> None:
        """Add a request that was sent to the best of these endpoints."""
        line, match, model = context.line, context.match, context.line.model
        decision = self._open[request] = Decision(
            line.id[:MAX_ID],
            line.session[:MAX_ID],
            line.kind,
            model and model[:MAX_ID],
            line.mode,
            line.outcome,
            line.priority,
            match.found.tokens,
            match.prompt_bytes,
            now,
            line.waited_ms / 1000,
            picked.hostports,
            picked.record,
            request,
            split=context.split,
        )
        self._decisions.append(decision)

    def add_rejected(self, context: RequestContext, error: PickError, now: float) -> None:
        """Add a request that went nowhere."""
        line, match, model = context.line, context.match, context.line.model
        self._decisions.append(
            Decision(
                line.id[:MAX_ID],
                line.session[:MAX_ID],
                line.kind,
                model and model[:MAX_ID],
                line.mode,
                line.outcome,
                line.priority,
                match.found.tokens,
                match.prompt_bytes,
                now,
                line.waited_ms / 1000,
                message=error.message,
            )
        )

    def on_cache_truth(self, request: InFlightRequest, cached: int, now: float) -> None:  # noqa: ARG002
        """Keep the engine's figure; see ``RequestListener``."""
        if (decision := self._open.get(request)) is not None:
            decision.cached_tokens = cached

    def on_first_token(self, request: InFlightRequest, seconds: float, now: float) -> None:  # noqa: ARG002
        """Keep the time to the first token of an observed response; see ``RequestListener``."""
        if (decision := self._open.get(request)) is not None:
            decision.ttft_seconds = seconds

    def on_request_ended(self, request: InFlightRequest, how: str, status: int) -> None:
        """Keep where a request was served and how its end became known; ``status``: 0 if it is not known."""
        if (decision := self._open.pop(request, None)) is not None:
            decision.served, decision.status = request.attempts[-1].hostport, status
            decision.ended, decision.request = how, None

    # What is shown

    def kept(self) -> dict[str, Any]:
        """Return what is kept: the limit, the number of decisions, and when the oldest was made."""
        oldest = self._decisions[0] if self._decisions else None
        return {
            "limit": self.limit,
            "decisions": len(self._decisions),
            "oldest_at": None if oldest is None else self._at(oldest),
        }

    def latest(self, count: int) -> list[dict[str, Any]]:
        """Return the documents of the last decisions, newest first."""
        return [self.document(decision) for decision in self.newest(count)]

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """Return the documents of the decisions with this request id or, if there is none, with this session
        id; newest first."""
        return [self.document(decision) for decision in self.of_id(request_id)]

    def newest(self, count: int) -> Iterator[Decision]:
        """Return the last decisions, newest first."""
        return iter(list(islice(reversed(self._decisions), count)))

    def of_id(self, request_id: str) -> list[Decision]:
        """Return the decisions that ``find`` shows."""
        wanted = request_id[:MAX_ID]
        found = [decision for decision in self._decisions if decision.id == wanted]
        if not found:
            found = [decision for decision in self._decisions if decision.session == wanted]
        return found[::-1]

    def document(self, decision: Decision) -> dict[str, Any]:
        """Return a decision as the pages show it, with the terms of each endpoint that its record keeps."""
        record = decision.record
        rows = [] if record is None else record.rows()
        considered = 0 if record is None else len(record.pool.endpoints)
        if considered > len(rows):
            rows = rows[:SHOWN_MANY]
        shown = [endpoint_document(row) for row in rows]
        others = () if record is None else record.pool.others
        best = rows[0] if rows else None
        return {
            "id": _encodable(decision.id),
            "session": _encodable(decision.session),
            "at": self._at(decision),
            "replica": self.replica,
            "kind": decision.kind,
            "model": None if decision.model is None else _encodable(decision.model),
            "mode": decision.mode,
            "outcome": decision.outcome,
            "message": decision.message,
            "priority": decision.priority,
            "prompt_tokens": decision.prompt_tokens,
            "prompt_bytes": decision.prompt_bytes,
            "waited_seconds": round(decision.waited_seconds, 6),
            "candidates": considered,
            "endpoints": [*shown, *(_other(endpoint, reason) for endpoint, reason in others)],
            "not_shown": considered - len(shown),
            "ineligible": 0 if record is None else record.pool.other_count,
            "picked": list(decision.picked),
            "predicted_ttft_seconds": None if best is None else round(best.predicted_ttft_seconds, 6),
            "predicted_cached_tokens": None if best is None else best.matched_tokens,
            **({} if decision.split is None else {"disaggregation": decision.split.document()}),
            "actual": {
                "cached_tokens": decision.cached_tokens,
                "ttft_seconds": decision.ttft_seconds,
                "endpoint": _served(decision),
                "status": decision.status or None,
                "ended": decision.ended,
            },
        }

    def _at(self, decision: Decision) -> float:
        return round(self._wall() - (self._clock() - decision.decided_at), 3)


def endpoint_document(row: ScoredEndpoint) -> dict[str, Any]:
    """Return one endpoint as ``/debug/pick`` and the decisions show it."""
    return {
        "endpoint": row.endpoint.hostport,
        "name": row.endpoint.key,
        "eligible": not row.refusal,
        "matched_tokens": row.matched_tokens,
        "matched_bytes": row.matched_bytes,
        "uncached_tokens": row.uncached_tokens,
        "owed_tokens": row.backlog_tokens,
        "backlog_tokens": row.backlog_tokens,
        "predicted_ttft_seconds": round(row.predicted_ttft_seconds, 6),
        "reason": row.reason,
        "cost_seconds": round(row.cost_seconds, 6),
        "terms": {name: round(seconds, 6) for name, seconds in row.terms.items()},
        **({"tiers": [_tier(load) for load in row.loads]} if row.loads else {}),
    }


def _tier(load: TierLoad) -> dict[str, Any]:
    """Return what a slower tier holds of a prompt; ``skipped``: it is computed instead."""
    return {
        "medium": load.medium,
        "tokens": load.tokens,
        "load_seconds": round(load.seconds, 6),
        "queue_seconds": round(load.queue_seconds, 6),
        "compute_seconds": round(load.compute_seconds, 6),
        "skipped": load.skipped,
    }


def _other(endpoint: Endpoint, reason: str) -> dict[str, Any]:
    """Return an endpoint that could not be picked; its figures are not kept."""
    return {"endpoint": endpoint.hostport, "name": endpoint.key, "eligible": False, "reason": reason}


def _served(decision: Decision) -> str | None:
    """Return the endpoint that served a request, or that has begun to; None if no engine has reported it."""
    request = decision.request
    if request is None or request.state is RequestState.SENT:
        return decision.served
    return request.attempt.hostport


def _encodable(text: str) -> str:
    """Return a text that a client chose without lone surrogates, which JSON cannot hold."""
    return text.encode(errors="replace").decode()
