"""Requests in flight: one record per request, one table of all of them. Pure.

A request is in the table from the moment it is sent to an endpoint until it ends. Requests that other
replicas of the picker routed are in the same table and name their replica as ``origin``; what that replica
already knew of their progress decides the state in which they enter.

::

    QUEUED ──sent──▶ SENT ──first KV event──▶ PREFILLING ──prompt computed──▶ DECODING ──▶ ENDED

A record is QUEUED only until its first attempt is added. A request that waits in flow control has no record:
it is a ``flowcontrol.flow_controller.QueuedRequest``. Every other state may go to ENDED: by the access
log, the response, a scrape, expiry, or an endpoint that leaves.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvist_epp.index.byte_index import Root
from kvist_epp.index.routing_history import RoutedPrompt

if TYPE_CHECKING:
    from kvist_epp.load.endpoint_load import EndpointLoad


_Key = TypeVar("_Key")


class RequestState(Enum):
    """State of a request, as far as the picker knows."""

    QUEUED = "queued"
    SENT = "sent"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


_ENDED: Final = RequestState.ENDED  # a look-up in an Enum takes 1,500 instructions


class Leg(Enum):
    """The part of a request that an attempt carries out."""

    SERVE = "serve"
    PREFILL = "prefill"
    """The picker's own request that computes the prompt of a request for another endpoint."""
    DECODE = "decode"
    """A request whose prompt another endpoint computes: its blocks are transferred."""
    PREWARM = "prewarm"
    """The picker's own request that computes a prefix before it is needed."""


class Attempt(msgspec.Struct, eq=False):
    """One endpoint's part in a request: where it was sent, and the prefill that is left there."""

    request: "InFlightRequest"
    load: "EndpointLoad"
    uncached: float
    """Tokens to prefill when it was routed."""
    routed_at: float
    last_event_at: float
    """Time at which it was routed, or at which the engine's events last showed progress."""
    backlog: float = 0.0
    """Tokens still to prefill, as far as known; from 0 to ``uncached``."""
    number: int = 0
    """Counts the attempts of the replica that routed it; names the attempt between replicas."""
    progressed: bool = False
    """The engine's events have shown progress: what scrapes suggest does not count any more."""
    leg: Leg = Leg.SERVE
    hostport: str = ""
    """``ip:port`` of the endpoint."""
    transferred: float = 0.0
    """Tokens of the prompt that are transferred there from another endpoint."""
    rank: int | None = None
    """Data-parallel rank behind the endpoint's port that has it; None: not known, or there is one."""

    @property
    def open(self) -> bool:
        """True while the endpoint's load counts it."""
        return self in self.load.attempts

    @property
    def endpoint(self) -> str:
        """Key of the endpoint."""
        return self.load.key


class DecodePlace(msgspec.Struct, frozen=True):
    """The endpoint that will answer a request whose prompt another one computes."""

    endpoint: str
    """Its key."""
    hostport: str
    transferred: int
    """Tokens that it gets from the other one."""
    indexed: int
    """Tokens that it has cached by the index alone, when the request was routed …"""
    indexed_lower: Mapping[str, int] | None
    """… and those among them on slower tiers."""


class InFlightRequest(msgspec.Struct, eq=False):
    """One request, from its arrival to its end."""

    session: str
    tokens: int
    """Tokens of the prompt, cached ones included, as far as known."""
    request_id: str = ""
    """``x-request-id``: tells the requests of one session apart; empty where the gateway gives none."""
    origin: str = ""
    """Replica that routed it and will report its end; empty: this one."""
    state: RequestState = RequestState.QUEUED
    attempts: list[Attempt] = []
    """None before it is sent; usually one; one on another endpoint replaces it. A disaggregated request has
    the one that computed its prompt, and then the one that answers."""
    decode_place: DecodePlace | None = None
    """While another endpoint computes its prompt: where it will be answered, with a place kept for it."""
    root: Root = (None, None)
    prompt: bytes | None = None
    """Kept until the engine takes the request up, to match it with the index at that moment."""
    cache_credit: list[RoutedPrompt] = []
    """Its prompts in the routing history: they count as cached where it went until events show the blocks,
    or as long as history keeps them if it is ``unindexed``."""
    indexed_tokens: int = 0
    """Cached tokens by the index alone: when it was routed, then when the engine took it up."""
    indexed_lower: Mapping[str, int] | None = None
    """Of ``indexed_tokens``: those on slower tiers, by medium, at the same moment; None: none are. What was
    on storage at the pick and has moved to host memory on its way to the GPU counts as on storage."""
    skipped_media: frozenset[str] = frozenset()
    """Media from which its body keeps the engine from loading: what they hold of it is no promise."""
    unindexed: bool = False
    """Its prompt is not known, or only as a plain text: ``indexed_tokens`` says nothing of it."""
    indexed_otherwise: int | None = None
    """``indexed_tokens`` if the endpoint computed the last block of hits again, or if it no longer did; None:
    a block less or more."""
    index_compared: bool = False
    """``indexed_tokens`` is of the moment when the engine took the request up."""
    predicted_tokens: int = 0
    """Tokens that were predicted to be cached where it went."""
    predicted_ttft_seconds: float = 0.0
    """Predicted time from the pick to its first token; 0: none, or another endpoint serves it."""
    trace_id: str = ""
    """Empty: it belongs to no trace."""
    reported: bool = True
    """A gateway may report its end; False for a WebSocket, which is not followed."""
    saving_counted: bool = False
    """The metrics have the tokens that its engine did not compute."""
    truth_known: bool = False
    """The engine has reported how much was cached, or cannot (several prompts under one session)."""
    cached_tokens: int | None = None
    """What the engine had cached of it, by its own report; None: not reported."""
    first_token_seconds: float | None = None
    """Time to the first token, where the response is observed."""
    loaded_tokens: int = 0
    """Tokens that the engine has loaded from slower tiers, as far as its events tell."""
    content: Hashable = None
    """Equal for equal prompts, where several replicas route; None: unknown, or hardly anything is
    uncached."""
    orphan: bool = False
    """Its replica has left and will not report its end."""

    @property
    def attempt(self) -> Attempt:
        """The attempt under way. Raises IndexError before the request is sent."""
        return self.attempts[-1]

    @property
    def endpoint(self) -> str:
        """Key of the endpoint that serves it. Raises IndexError before the request is sent."""
        return self.attempts[-1].load.key

    @property
    def indexed_on_gpu(self) -> int:
        """Tokens of ``indexed_tokens`` that are on the GPU."""
        lower = self.indexed_lower
        return self.indexed_tokens if lower is None else max(0, self.indexed_tokens - sum(lower.values()))

    def matches(self, request_id: str, endpoint: str) -> bool:
        """True if it can be the request with this id on this endpoint; an empty argument matches all."""
        same_id = not request_id or not self.request_id or self.request_id == request_id
        return same_id and (not endpoint or (bool(self.attempts) and self.endpoint == endpoint))


class RequestListener:
    """Base of those who want to hear of requests; each method is a notification and does nothing here."""

    def on_routed(self, attempt: Attempt) -> None:
        """A request of this replica was sent to an endpoint for the first time."""

    def on_moved(self, old: Attempt, new: Attempt) -> None:
        """Another endpoint than the chosen one serves a request of this replica."""

    def on_progress(self, attempt: Attempt) -> None:
        """Events of the engine have shown progress of a request of any replica."""

    def on_cache_truth(self, request: InFlightRequest, cached: int, now: float) -> None:
        """The engine has reported how many tokens of a request it had cached."""

    def on_first_token(self, request: InFlightRequest, seconds: float, now: float) -> None:
        """The first token of a streamed response passed, ``seconds`` after the request had arrived; only
        where responses are observed."""

    def on_ended(self, attempt: Attempt) -> None:
        """A request of this replica has ended."""


class InFlightTable:
    """All requests in flight, found by session and endpoint or by session and request id.

    Clients may use one session id for several requests, even at once, so each look-up names what else is
    known of the request.
    """

    MAX_PROMPT_BYTES: Final = 256 << 20
    """Bytes of prompts kept at most; further requests are not compared with the engine's cache hits."""

    def __init__(self) -> None:
        self.prompt_bytes = 0
        """Bytes of prompts that wait for their engine to take them up."""
        self._by_session: dict[str, dict[InFlightRequest, None]] = {}
        self._by_endpoint: dict[tuple[str, str], dict[InFlightRequest, None]] = {}
        self._decoding: deque[tuple[float, InFlightRequest]] = deque()
        self._own = 0

    def __len__(self) -> int:
        """Requests of this replica that are sent and have not ended."""
        return self._own

    def __iter__(self) -> Iterator[InFlightRequest]:
        return (request for requests in self._by_session.values() for request in requests)

    def add(self, request: InFlightRequest) -> None:
        """Add a request that was sent to an endpoint."""
        if request.prompt is not None:
            self.prompt_bytes += len(request.prompt)
            if self.prompt_bytes > self.MAX_PROMPT_BYTES:
                self.take_prompt(request)
        session, key = request.session, (request.session, request.attempts[-1].load.key)
        if (requests := self._by_session.get(session)) is None:
            self._by_session[session] = {request: None}
        else:
            requests[request] = None
        if (requests := self._by_endpoint.get(key)) is None:
            self._by_endpoint[key] = {request: None}
        else:
            requests[request] = None
        if not request.origin:
            self._own += 1

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request that has ended; no effect if it is not in the table."""
        if not _discard(self._by_session, request.session, request):
            return
        _discard(self._by_endpoint, (request.session, request.attempts[-1].load.key), request)
        self.take_prompt(request)
        request.state = _ENDED
        self._own -= not request.origin

    def move(self, request: InFlightRequest, attempt: Attempt) -> None:
        """Replace the request's attempt: another endpoint serves it."""
        _discard(self._by_endpoint, (request.session, request.endpoint), request)
        request.attempts[-1] = attempt
        self._by_endpoint.setdefault((request.session, request.endpoint), {})[request] = None

    def take_prompt(self, request: InFlightRequest) -> bytes | None:
        """Return the prompt and keep it no longer; None if it was not kept."""
        prompt, request.prompt = request.prompt, None
        self.prompt_bytes -= len(prompt or b"")
        return prompt

    def drop_prompts(self) -> None:
        """Keep no prompt any longer."""
        for request in self:
            self.take_prompt(request)

    def find(
        self, session: str, request_id: str = "", endpoint: str = "", *, origin: str | None = ""
    ) -> InFlightRequest | None:
        """Return the oldest request of the session that fits what else is known; ``origin`` None: any."""
        for request in self._by_session.get(session, ()):
            if (origin is None or request.origin == origin) and request.matches(request_id, endpoint):
                return request
        return None

    def of_session(self, session: str) -> list[InFlightRequest]:
        """Return the requests of a session, oldest first, those of other replicas included."""
        return list(self._by_session.get(session, ()))

    def at(
        self, session: str, endpoint: str, *, first_event: bool = False, remote: bool = False
    ) -> InFlightRequest | None:
        """Return the request that an event of this session on this endpoint belongs to; None if unknown.

        The first event of a request is of the oldest one whose cache hits are not known. Others are of the
        oldest with a backlog, since engines compute prompts in order of arrival, or of the oldest if none has
        a backlog. ``remote``: only requests of other replicas, else only this replica's.
        """
        requests = [
            request
            for request in self._by_endpoint.get((session, endpoint), ())
            if bool(request.origin) is remote
        ]
        if len(requests) < 2:
            return requests[0] if requests else None
        if first_event:
            for request in requests:
                if not request.truth_known:
                    return request
        for request in requests:
            if request.attempt.backlog > 0:
                return request
        return requests[0]

    def on_decoding(self, request: InFlightRequest, now: float) -> None:
        """Note that the engine has computed the whole prompt."""
        if request.state is not RequestState.DECODING:
            request.state = RequestState.DECODING
            self._decoding.append((now, request))

    def decoding_before(self, then: float) -> Iterator[InFlightRequest]:
        """Take out and yield the requests whose prompts were computed before ``then``."""
        while self._decoding and self._decoding[0][0] < then:
            yield self._decoding.popleft()[1]


def _discard(index: dict[_Key, dict[InFlightRequest, None]], key: _Key, request: InFlightRequest) -> bool:
    requests = index.get(key)
    if requests is None or request not in requests:
        return False
    del requests[request]
    if not requests:
        del index[key]
    return True
