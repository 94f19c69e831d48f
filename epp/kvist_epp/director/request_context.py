"""One request in the picker before it is sent: its headers, its rendered prompt, and what is cached of it.

``understand`` parses and renders, ``PromptMatch.look`` matches. The parsed body is released between them: a
queued request keeps only its prompt, and is matched again when it is dispatched.
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Self

import msgspec

from kvist_epp.errors import NoEndpoints
from kvist_epp.extproc.load_filter import without_loads
from kvist_epp.extproc.pick_request import PickRequest
from kvist_epp.flowcontrol.deficit_round_robin import FlowKey
from kvist_epp.flowcontrol.priorities import engine_priority, tenant
from kvist_epp.index.byte_index import Root
from kvist_epp.index.cached_part import CachedPart
from kvist_epp.index.lookup import Found, Lookup
from kvist_epp.names import (
    DATA_PARALLEL_RANK_HEADER,
    ENGINE_PRIORITY_HEADER,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    SUBSET_KEY,
)
from kvist_epp.prefix_stats.recent_uses import RecentUses
from kvist_epp.prompt.media_texts import MediaPrompt
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.plain_text import plain_texts
from kvist_epp.prompt.request import Kind, Request, parse
from kvist_epp.scheduling.pick import Demand, canonical, members
from kvist_epp.scheduling.split_record import SplitRecord
from kvist_epp.scheduling.tier_price import TierLoad
from kvist_epp.telemetry.counters import Stages, TimedStages
from kvist_epp.telemetry.request_log import RequestLine
from kvist_epp.tracing.trace_context import TraceContext

QUEUED_BYTES: Final = 4_000
"""Memory of a queued request besides its body and its prompt (3,300 bytes in ``kvist bench queue``)."""

_NO_REQUEST: Final = Request(kind=Kind.OTHER)
_UNRENDERED: Final = (Kind.OTHER, Kind.POOLING)  # look-ups in an Enum take 1,500 instructions each
_KIND_NAMES: Final = MappingProxyType({id(kind): kind.value for kind in Kind})
"""By the identity of the kind: an Enum computes its hash and its value in Python."""
_LOADING_KINDS: Final = frozenset({Kind.CHAT.value, Kind.COMPLETION.value})
"""Requests whose bodies may have parameters of KV transfer."""
_NO_HITS: Final[dict[str, CachedPart]] = {}


class PromptMatch(msgspec.Struct):
    """A request's prompts, and which endpoints have how much of them cached."""

    kind: str
    model: str | None
    """The served model or adapter that the request names."""
    session: str | None
    """The session id that its body names."""
    prompts: Sequence[bytes]
    root: Root
    found: Found
    mode: str
    """Basis of the choice: ``precise``, ``approximate`` or ``load``."""
    unindexed: bool = False
    """No index has all of the prompts, but the routing history does: they are plain texts, since none could
    be rendered, or have a medium that no engine has shown, or of which only a URL is known."""

    def demand(self, uses: RecentUses, now: float) -> Demand:
        """Return the request as the policy sees it."""
        return Demand(self.found.tokens, self.found.hits, uses.decayed_count(self.found.place, now))

    @property
    def only_prompt(self) -> bytes | None:
        """The prompt; None if there are several or none."""
        return self.prompts[0] if len(self.prompts) == 1 else None

    @property
    def prompt_bytes(self) -> int:
        """Bytes of all prompts; 0 where none is understood."""
        return self.found.size if self.prompts else 0

    def release(self) -> None:
        """Drop the hits of a request that has to wait: they will have changed."""
        self.found.hits, self.found.matches = _NO_HITS, ()

    def look(self, lookup: Lookup, *, learn: bool = True) -> None:
        """Match the prompts, perhaps again. ``learn``: the match may update estimates."""
        if self.prompts:
            self.found = lookup.look(self.root, self.prompts, learn=learn)


_NOT_FOUND: Final = Found(0, 0, {})
NOT_MATCHED: Final = PromptMatch("other", None, None, (), (None, None), _NOT_FOUND, "")


def understand(
    ask: PickRequest,
    stages: Stages,
    *,
    model: Model | None,
    lookup: Lookup,
    adapters: frozenset[str],
    on_render_failure: Callable[[str], None],
    by_prefix: bool = True,
) -> PromptMatch:
    """Parse and render a request; ``PromptMatch.look`` then finds its prompts. Raises BadRequest.

    Where no prompt can be rendered, for which ``on_render_failure`` gets the reason, and without a model the
    plain text of the request is matched: a chat and its next turn begin alike in either form. ``by_prefix``:
    endpoints cache prefixes; without, no prompt is rendered, and the estimate of its tokens is all that is
    known.
    """
    request = _NO_REQUEST if ask.partial else parse(ask.path, ask.body, method=ask.method)
    stages.mark("parse")
    prompts: Sequence[bytes] = ()
    unindexed = False
    if by_prefix and request.kind not in _UNRENDERED:
        prompts = () if model is None else model.prompts(request, on_render_failure)
        if not prompts:
            prompts, unindexed = plain_texts(request, ask.body), True
        elif isinstance(prompts[0], MediaPrompt):
            unindexed = not (prompts[0].complete and prompts[0].lasting)
    stages.mark("render")
    adapter = request.model if request.model in adapters else None
    root = (adapter, request.salt)
    if prompts:
        precise = model is not None and model.faithful and request.exact and not unindexed
        found, mode = _NOT_FOUND, "precise" if precise else "approximate"
    else:
        size = request.work or len(ask.body)
        found, mode = Found(size, lookup.tokens(size), {}), "load"
    kind = _KIND_NAMES[id(request.kind)]
    return PromptMatch(kind, request.model, request.session, prompts, root, found, mode, unindexed)


def new_replica_id() -> str:
    """Return an id for a replica of the picker, with which the ids that it gives requests begin."""
    return f"{os.uname().nodename[-20:]}-{secrets.token_hex(3)}"


def named_subset(headers: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the subset that a header names for ``/debug/pick``; gateways send it as metadata. None: all."""
    hint = headers.get(SUBSET_KEY)
    return None if hint is None else tuple([part.strip() for part in hint.split(",") if part.strip()])


class RequestContext(msgspec.Struct):
    """One request from its arrival to its answer, at once or after it has waited."""

    own_id: str
    """The id that the picker gives it; unique among all replicas."""
    tenant: str
    """Empty: the request names none."""
    subset: tuple[str, ...] | None
    line: RequestLine
    stages: Stages
    kept_headers: tuple[str, ...]
    """Headers it brought of those that the picker would set."""
    may_wait: bool
    """It has a body, so it wants something computed."""
    size: int
    """Bytes of its body."""
    match: PromptMatch
    turn: int = 0
    """Counts the picks, so that equal endpoints take turns."""
    priority: int | None = None
    """None: the request names none."""
    trace: TraceContext | None = None
    """None: it belongs to no trace."""
    exemplar: tuple[str, str] = ("", "")
    """The id of the request, and that of its trace if it is sampled: for the metrics."""
    body: bytes = b""
    """Empty where it was not seen whole, and after the request had to wait if it is not needed then."""
    split: SplitRecord | None = None
    """How it is disaggregated; None: it is not."""
    websocket: bool = False
    """It opens a WebSocket: see ``PickRequest.websocket``."""
    ranks: Mapping[str, int | None] = MappingProxyType({})
    """By key of an endpoint with data-parallel ranks behind its port: the one to name; None: none."""
    obstacle: str | None = None
    """Why its body cannot be sent in two legs, in a word or two, empty if it can; None: not looked at yet."""

    @classmethod
    def of(cls, ask: PickRequest, own_id: str, turn: int = 0, trace: TraceContext | None = None) -> Self:
        """Return the context of a request that is not understood yet."""
        headers = ask.headers
        line = RequestLine(
            id=headers.get(REQUEST_ID_HEADER) or own_id,
            session=headers.get(SESSION_HEADER, ""),
            path=ask.path,
            kind=NOT_MATCHED.kind,
            outcome="picked",
        )
        kept = tuple([name for name in (REQUEST_ID_HEADER, DATA_PARALLEL_RANK_HEADER) if name in headers])
        may_wait, size = ask.partial or len(ask.body) > 0, len(ask.body)
        found = cls(
            own_id, tenant(headers), ask.subset, line, Stages(), kept, may_wait, size, NOT_MATCHED, turn
        )
        found.exemplar, found.websocket = (line.id, ""), ask.websocket
        if not ask.partial:
            found.body = ask.body
        if trace is not None:
            found._join(trace)
        return found

    def _join(self, trace: TraceContext) -> None:
        """Store the trace that the request belongs to."""
        self.trace, line = trace, self.line
        line.trace_id, line.span_id = trace.trace_id, trace.span_id or trace.parent_id
        if trace.sampled:
            self.exemplar = line.id, trace.trace_id
        if trace.recorded:
            self.stages = TimedStages()

    def set_match(self, match: PromptMatch, priority: int | None) -> None:
        """Store the match, the priority and what the log line shows of them."""
        self.match, self.priority = match, priority
        line = self.line
        if theirs := line.session or match.session:
            self.kept_headers += (SESSION_HEADER,)
        line.session = theirs or self.own_id
        line.kind, line.model, line.mode = match.kind, match.model, match.mode
        line.priority = priority or 0

    def restrict(self, partly_served: Mapping[str, tuple[str, ...]]) -> None:
        """Allow only the endpoints (``ip:port``) that serve its model, if not all do. Raises NoEndpoints: the
        gateway allows none of them."""
        hostports = partly_served.get(self.match.model or "")
        if hostports is None:
            return
        allowed = None if self.subset is None else canonical(self.subset)
        self.subset = hostports if allowed is None else tuple(members(allowed, hostports))
        if not self.subset:
            raise NoEndpoints("no endpoint in the gateway's subset serves this model")

    def added_headers(self, endpoint: str, *, engine_priorities: bool) -> tuple[tuple[str, str], ...]:
        """Return the headers to add where the request goes to this endpoint: our id as session and request id
        unless it had them, the data-parallel rank for it, its priority as the engine has it, and
        the trace if it begins here."""
        kept = self.kept_headers
        headers = [(name, self.own_id) for name in (SESSION_HEADER, REQUEST_ID_HEADER) if name not in kept]
        if (rank := self.ranks.get(endpoint)) is not None:
            headers.append((DATA_PARALLEL_RANK_HEADER, str(rank)))
        if engine_priorities and self.priority is not None:
            headers.append((ENGINE_PRIORITY_HEADER, engine_priority(self.priority)))
        if self.trace is not None:
            headers += self.trace.request_headers()
        return tuple(headers)

    def release(self, *, keep_for_split: bool = False, keep_for_loads: bool = False) -> None:
        """Drop what a request that has to wait does not need.

        The body stays if it may be changed when the request is dispatched: for two legs, or to keep an engine
        from loading from slower tiers. Its bytes are those that its stream keeps to send them on, in most
        modes of a gateway, and ``queue_cost`` counts them in any case.
        """
        self.match.release()
        if not keep_for_split and not (keep_for_loads and self.match.kind in _LOADING_KINDS):
            self.body = b""

    def body_for(self, loads: Sequence[TierLoad]) -> bytes | None:
        """Return the body that keeps the engine from loading what it computes sooner; None: as it is."""
        skipped = [load.medium for load in loads if load.skipped]
        if not (skipped and self.body and self.match.kind in _LOADING_KINDS):
            return None
        return without_loads(self.body, skipped)

    def any_endpoint(self) -> FlowKey:
        """Return the flow of requests that may go to any allowed endpoint with capacity."""
        return FlowKey(None if self.subset is None else canonical(self.subset))

    def queue_cost(self) -> tuple[int, int]:
        """Return its tokens, and the bytes it holds while it waits."""
        match = self.match
        return match.found.tokens, QUEUED_BYTES + self.size + sum(map(len, match.prompts))
