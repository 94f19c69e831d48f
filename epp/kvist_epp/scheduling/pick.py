"""The choice: candidates to endpoints, best first, or ``NoEndpoints``. Pure.

::

    eligible = in the gateway's subset, and ready, and of a role that takes requests
    full     = its batch is, or its backlog is too long: after all that are not. An endpoint whose KV cache is
               full keeps its place: elsewhere the prompt's blocks would fill the next cache; but when every
               endpoint is full one way or the other, all count as full, and the request waits
    best     = the least cost; near ties go to the fewest running requests, then in turn
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import Final, NamedTuple

import msgspec

from kvist_epp.endpoints.endpoint import Endpoint, canonical_ip, hostport
from kvist_epp.errors import NoEndpoints
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.cost import (
    DEFAULT,
    NO_MATCH,
    TERMS,
    TTFT_TERMS,
    CachedPrefix,
    EndpointCost,
    Policy,
    terms,
)
from kvist_epp.scheduling.tier_price import PricedPrefix, TierLoad, price_tiers

MAX_ENDPOINTS: Final = 3
_WAIT, _SLOT, _LOAD = map(list(TERMS).index, TTFT_TERMS)
NOT_IN_SUBSET: Final = "not in the gateway's subset, or does not serve the model"
ROLES_WITHOUT_REQUESTS: Final = frozenset({"prefill", "encode", "encode-prefill"})
"""Roles of pods that only help others (llm-d's role labels)."""


@dataclass(slots=True)
class Candidate:
    """One endpoint as picks read it."""

    endpoint: Endpoint
    load: EndpointLoad
    ready: bool = True
    reason: str = ""
    """Why it is not ready, in a word or two: clients see these counted."""
    refusal: str = field(init=False)
    """Why it cannot be picked, whatever the subset; empty when it can."""

    def update(self, endpoint: Endpoint, *, ready: bool, reason: str) -> None:
        """Replace the endpoint's description and whether it is ready."""
        self.endpoint, self.ready, self.reason = endpoint, ready, reason
        self.__post_init__()

    def __post_init__(self) -> None:
        role = self.endpoint.role
        helper = f"role {role}" if role in ROLES_WITHOUT_REQUESTS else ""
        self.refusal = helper if self.ready else self.reason or "not ready"


class Demand(msgspec.Struct):
    """One request, as the policy sees it."""

    tokens: int = 0
    """Number of tokens of its prompt, as far as known (``index.lookup``)."""
    hits: Mapping[str, CachedPrefix] = {}
    """By endpoint key; an absent endpoint has nothing of it cached."""
    uses: float = 0.0
    """How often its prefix was asked for in the last moments (``prefix_stats.recent_uses``)."""


class ScoredEndpoint(msgspec.Struct):
    """One endpoint as the policy sees it: a row of ``/debug/pick``, and what the load tracker gets."""

    endpoint: Endpoint
    matched_tokens: int
    matched_bytes: int
    uncached_tokens: int
    backlog_tokens: int
    running: int
    """Requests there, untracked ones included."""
    predicted_ttft_seconds: float
    seconds: tuple[float, ...]
    """By term, in the order of ``TERMS``; they add up to the cost."""
    full: bool = False
    """It has no capacity for one more; so the best of ``choose`` is full only when all are."""
    deferred: bool = False
    """It may not take up this prompt now: its sequences, or its KV cache, would suffer (TPOT target)."""
    refusal: str = ""
    """Why it cannot be picked; empty when it can."""
    loads: tuple[TierLoad, ...] = ()
    """What slower tiers there hold of the prompt, the quickest tier first."""

    @property
    def cost_seconds(self) -> float:
        """The cost by which endpoints are compared."""
        return sum(self.seconds)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by name of the term."""
        return dict(zip(TERMS, self.seconds, strict=True))

    @property
    def reason(self) -> str:
        """Why it cannot be picked, or what it costs."""
        if self.refusal:
            return self.refusal
        state = "full, " if self.full else "prefill deferred (TPOT target), " if self.deferred else ""
        return f"{state}cost {self.cost_seconds:.4f} s, {self.running} running"


def settle_roles(candidates: Sequence[Candidate]) -> None:
    """Let endpoints with the role ``prefill`` take requests while no other endpoint is ready, and only then.

    Sets ``refusal`` of these candidates; their engines can decode as well.
    """
    helpers = [c for c in candidates if c.endpoint.role in ROLES_WITHOUT_REQUESTS]
    if not helpers:
        return
    alone = not any(c.ready and c.endpoint.role not in ROLES_WITHOUT_REQUESTS for c in candidates)
    for candidate in helpers:
        candidate.__post_init__()
        if alone and candidate.ready and candidate.endpoint.can_prefill:
            candidate.refusal = ""


def ready_helpers(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the ready endpoints that compute prompts for others only."""
    return [c for c in candidates if c.ready and c.endpoint.can_prefill and not c.endpoint.can_decode]


def unrefused(candidate: Candidate) -> Candidate:
    """Return an endpoint as one that may be picked, whatever its role."""
    found = copy(candidate)
    found.refusal = ""
    return found


def choose(
    candidates: Sequence[Candidate],
    demand: Demand,
    subset: tuple[str, ...] | None = None,
    *,
    now: float,
    turn: int = 0,
    limit: int = MAX_ENDPOINTS,
    max_backlog: float = inf,
    policy: Policy = DEFAULT,
) -> list[ScoredEndpoint]:
    """Return the best endpoint and up to ``limit - 1`` to fall back to; those with capacity come first.

    ``subset``: the gateway's ``ip`` or ``ip:port`` strings; None: no hint; empty: nothing is allowed.
    ``turn``: a number that differs from request to request, so that equal endpoints take turns.
    ``max_backlog``: seconds of prefill from which an endpoint is full. Drains the loads to ``now``, changes
    nothing else.

    Raises NoEndpoints with the reason why none is eligible.
    """
    names = None if subset is None else canonical(subset)
    allowed = [c for c in candidates if not c.refusal and (names is None or named(names, c.endpoint))]
    if not allowed:
        raise NoEndpoints(why_none(candidates, subset))
    ranking = rank(allowed, demand, now, turn, max_backlog, policy)  # drains the loads
    all_full = all(c.load.full(max_backlog) for c in allowed)
    return ranking.best(limit, all_full=all_full)


def explain(
    candidates: Sequence[Candidate],
    demand: Demand,
    subset: tuple[str, ...] | None = None,
    *,
    now: float,
    turn: int = 0,
    max_backlog: float = inf,
    policy: Policy = DEFAULT,
) -> list[ScoredEndpoint]:
    """Return every candidate as ``choose`` sees it: the eligible, best first, then the others with the
    obstacle."""
    names = None if subset is None else canonical(subset)
    refusals = [obstacle(candidate, names) for candidate in candidates]
    able = [c for c, refusal in zip(candidates, refusals, strict=True) if not refusal]
    scored = rank(able, demand, now, turn, max_backlog, policy).best(len(able)) if able else []
    for candidate, refusal in zip(candidates, refusals, strict=True):
        if refusal:
            [row] = rank([candidate], demand, now, 0, max_backlog, policy).best(1)
            row.refusal = refusal
            scored.append(row)
    return scored


def obstacle(candidate: Candidate, names: frozenset[str] | None) -> str:
    """Return why this candidate cannot be picked; empty when it can. ``names``: the gateway's subset, in
    canonical text."""
    if names is not None and not named(names, candidate.endpoint):
        return NOT_IN_SUBSET
    return candidate.refusal


class Ranking(NamedTuple):
    """Candidates in the order in which they are picked, with all that the order follows from."""

    candidates: Sequence[Candidate]
    rows: list[EndpointCost]
    """Of each candidate."""
    columns: list[list[float]]
    """Of each term, the seconds of each candidate."""
    full: list[bool]
    """Whether the batch or the backlog of each candidate is full."""
    order: list[int]
    """Places of the candidates, best first."""

    def best(self, limit: int, *, all_full: bool = False) -> list[ScoredEndpoint]:
        """Return the best endpoints; ``all_full``: no candidate has capacity, so none of these has."""
        return [
            scored(
                self.candidates[i].endpoint,
                self.rows[i],
                tuple([column[i] for column in self.columns]),
                full=self.full[i] or all_full,
            )
            for i in self.order[:limit]
        ]


def rank(
    candidates: Sequence[Candidate],
    demand: Demand,
    now: float,
    turn: int,
    max_backlog: float,
    policy: Policy,
) -> Ranking:
    """Return the order in which these candidates are picked. There must be one."""
    rows = cost_rows(candidates, demand, now, policy)
    full = [row.load.batch_or_backlog_full(max_backlog) for row in rows]
    columns = terms(rows, demand.tokens, demand.uses, policy)
    costs = [sum(seconds) for seconds in zip(*columns, strict=False)]
    first = turn % len(rows)
    order = [*range(first, len(rows)), *range(first)]
    order.sort(key=costs.__getitem__)  # stable: equal costs stay in turn
    near = costs[order[0]] + policy.near_seconds
    tied = next((n for n, i in enumerate(order) if costs[i] > near), len(order))
    order[:tied] = sorted(order[:tied], key=lambda i: rows[i].running)
    if any(full):
        order.sort(key=full.__getitem__)
    return Ranking(candidates, rows, columns, full, order)


def cost_rows(
    candidates: Sequence[Candidate], demand: Demand, now: float, policy: Policy
) -> list[EndpointCost]:
    hits, tokens = demand.hits, demand.tokens
    least = min(tokens, 1)  # a prompt that is wholly cached still computes its last token
    rows = []
    for candidate in candidates:
        load = candidate.load
        load.drain(now)
        hit, loading = hits.get(candidate.endpoint.key, NO_MATCH), 0.0
        if hit.lower:
            hit = price_tiers(load, hit.tokens, hit.bytes, hit.lower, policy.load_rates, now)
            loading = hit.loading
        uncached = tokens - hit.tokens
        if uncached < least:
            uncached = least
        running = load.running
        row = EndpointCost(load, hit, uncached, uncached / load.rate, running, loading=loading)
        if (tpot := load.tpot) is not None:
            row.prefill_share = tpot.prefill_share
            row.deferred = not tpot.admits(load, uncached, now)
        rows.append(row)
    return rows


def scored(
    endpoint: Endpoint, row: EndpointCost, seconds: tuple[float, ...], *, full: bool
) -> ScoredEndpoint:
    """Return what is shown of an endpoint with these terms of the cost."""
    hit = row.hit
    return ScoredEndpoint(
        endpoint,
        hit.tokens,
        hit.bytes,
        row.uncached,
        round(row.load.backlog_tokens),
        row.running,
        seconds[_WAIT] + seconds[_SLOT] + seconds[_LOAD] + row.work,
        seconds,
        full,
        row.deferred,
        loads=hit.loads if isinstance(hit, PricedPrefix) else (),
    )


def named(names: frozenset[str], endpoint: Endpoint) -> bool:
    """Return whether the gateway's subset names this endpoint, by address alone (any port) or with its port.

    ``names``: the subset in canonical text.
    """
    return endpoint.hostport in names or endpoint.address in names


def members(names: frozenset[str], hostports: Iterable[str]) -> Iterator[str]:
    """Yield those of ``hostports`` that a subset in canonical text names, by address or with the port."""
    return (host for host in hostports if host in names or host.rpartition(":")[0].strip("[]") in names)


@lru_cache(maxsize=256)
def canonical(subset: tuple[str, ...]) -> frozenset[str]:
    """Return the subset with each address in its canonical text, without what is no address."""
    return frozenset(filter(None, map(_canonical_member, subset)))


@lru_cache(maxsize=8192)
def _canonical_member(member: str) -> str:
    """``ip``, ``ip:port``, ``v6``, ``[v6]`` or ``[v6]:port`` in canonical text; empty for anything else."""
    text = member.strip()
    address, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in address and not address.endswith("]")):
        address, port = text, ""
    try:
        ip = canonical_ip(address)
        return hostport(ip, int(port)) if port else ip
    except ValueError:
        return ""


def why_none(candidates: Sequence[Candidate], subset: tuple[str, ...] | None) -> str:
    """For clients: counts, never addresses."""
    if not candidates:
        return "no endpoints are known"
    names = None if subset is None else canonical(subset)
    within = [c for c in candidates if names is None or named(names, c.endpoint)]
    if subset is not None and not within:
        return f"none of the {len(candidates)} known endpoints is in the gateway's subset of {len(subset)}"
    reasons = Counter(c.refusal for c in within).most_common()
    return f"none of {len(within)} endpoints can be picked: " + ", ".join(f"{n} {why}" for why, n in reasons)
