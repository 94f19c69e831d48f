"""The policy on one page: candidates → endpoints, best first, or ``NoEndpoints``. Pure.

::

    eligible = in the gateway's subset, and ready, and of a role that takes requests
    full     = its batch is, or it owes too many seconds of prefill: after all that are not. One whose KV
               cache is full keeps its place: elsewhere the prompt's blocks would fill the next cache; but
               when every pod is full one way or the other, all are, and the request waits
    best     = the least cost; near ties go to the fewest running requests, then in turn
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from operator import attrgetter
from typing import Final

import msgspec

from kvist_epp.endpoints.endpoint import Endpoint, canonical_ip, hostport
from kvist_epp.errors import NoEndpoints
from kvist_epp.load.endpoint_load import Load
from kvist_epp.scheduling.cost import (
    DEFAULT,
    NO_MATCH,
    Hit,
    Policy,
    copy_share,
    cost,
    price,
    room_seconds,
    slot_seconds,
    work_seconds,
)

MAX_ENDPOINTS: Final = 3
COPY: Final = 0.9
"""Who holds this share of the longest match has a copy."""
NOT_IN_SUBSET: Final = "not in the gateway's subset, or does not serve the model"
ROLES_WITHOUT_REQUESTS: Final = frozenset({"prefill", "encode", "encode-prefill"})
"""Pods that only help others (llm-d's role labels)."""


@dataclass(slots=True)
class Candidate:
    """How one endpoint stands: made when the fleet or a state changes, read by every pick."""

    endpoint: Endpoint
    load: Load
    ready: bool = True
    reason: str = ""
    """Why it is not ready, in a word or two: clients see these counted."""
    refusal: str = field(init=False)
    """Why it cannot be picked, whatever the subset; empty when it can."""

    def __post_init__(self) -> None:
        role = self.endpoint.role
        helper = f"role {role}" if role in ROLES_WITHOUT_REQUESTS else ""
        self.refusal = helper if self.ready else self.reason or "not ready"


class Demand(msgspec.Struct):
    """What is asked for: one request."""

    tokens: int = 0
    """Of its prompt, as far as known (``cache.lookup.Found``)."""
    hits: Mapping[str, Hit] = {}
    """By endpoint key; absent: nothing of it is cached there."""
    uses: float = 0.0
    """How often its beginning was asked for in the last moments (``cache.uses``)."""


class Scored(msgspec.Struct):
    """One endpoint as the policy sees it: a row of ``/debug/pick``, and what the ledger is told."""

    endpoint: Endpoint
    eligible: bool
    matched_tokens: int
    matched_bytes: int
    uncached_tokens: int
    owed_tokens: int
    predicted_ttft_seconds: float
    reason: str
    full: bool = False
    """It has no room for one more; so the best of ``choose`` is full only when all are."""
    closed: bool = False
    """It may not take up this prompt now: its sequences, or its KV cache, would suffer (``fleet.pacing``)."""


class _Row(msgspec.Struct):
    candidate: Candidate
    hit: Hit
    uncached: int
    wait: float
    work: float
    running: int
    full: bool
    closed: bool
    share: float
    """Of its time that prompts may take."""
    cost: float = 0.0

    def scored(self, refusal: str = "") -> Scored:
        return Scored(
            self.candidate.endpoint,
            not refusal,
            self.hit.tokens,
            self.hit.bytes,
            self.uncached,
            round(self.candidate.load.owed),
            self.wait + self.work,
            refusal or f"{self._state()}cost {self.cost:.4f} s, {self.running} running",
            self.full,
            self.closed,
        )

    def _state(self) -> str:
        return "full, " if self.full else "takes up no such prompt now, " if self.closed else ""


_BY_COST = attrgetter("cost")
_BY_RUNNING = attrgetter("running")
_BY_ROOM = attrgetter("full")


def choose(
    candidates: Sequence[Candidate],
    demand: Demand,
    subset: tuple[str, ...] | None = None,
    *,
    now: float,
    turn: int = 0,
    limit: int = MAX_ENDPOINTS,
    max_owed: float = inf,
    policy: Policy = DEFAULT,
) -> list[Scored]:
    """The best endpoint and up to ``limit - 1`` to fall back to; those with room before those without.

    ``subset``: the gateway's ``ip`` or ``ip:port`` strings; None: no hint; empty: nothing is allowed.
    ``turn``: a number that differs from request to request, so that equal pods take turns. ``max_owed``:
    seconds of prefill from which a pod is full. Drains the loads to ``now``, changes nothing else.

    Raises ``NoEndpoints`` saying why nobody is eligible.
    """
    allowed = [c for c in candidates if not c.refusal and (subset is None or allows(subset, c.endpoint))]
    if not allowed:
        raise NoEndpoints(_why_none(candidates, subset))
    rows = _rows(allowed, demand, now, max_owed, policy)
    best = _ranked(rows, turn, policy, demand.uses)[:limit]
    if all(c.load.closed(max_owed) for c in allowed):
        for row in best:
            row.full = True
    return [row.scored() for row in best]


def explain(
    candidates: Sequence[Candidate],
    demand: Demand,
    subset: tuple[str, ...] | None = None,
    *,
    now: float,
    turn: int = 0,
    max_owed: float = inf,
    policy: Policy = DEFAULT,
) -> list[Scored]:
    """Every candidate as ``choose`` sees it: the eligible, best first, then the others with what stands in
    the way."""
    every = _rows(candidates, demand, now, max_owed, policy)
    rows = [(row, obstacle(row.candidate, subset)) for row in every]
    ranked = _ranked([row for row, refusal in rows if not refusal], turn, policy, demand.uses)
    return [row.scored() for row in ranked] + [row.scored(refusal) for row, refusal in rows if refusal]


def obstacle(candidate: Candidate, subset: tuple[str, ...] | None) -> str:
    """Why this candidate cannot be picked; empty when it can."""
    if subset is not None and not allows(subset, candidate.endpoint):
        return NOT_IN_SUBSET
    return candidate.refusal


def _rows(
    candidates: Sequence[Candidate], demand: Demand, now: float, max_owed: float, policy: Policy
) -> list[_Row]:
    hits, nothing = demand.hits, _uncached(demand, NO_MATCH)
    rows = []
    for candidate in candidates:
        load = candidate.load
        hit = hits.get(candidate.endpoint.key)
        uncached = nothing if hit is None else _uncached(demand, hit)
        lower = hit.lower if hit else None
        work = work_seconds(uncached, load.rate, lower, policy) if lower else uncached / load.rate
        wait = load.drain(now) / load.rate
        closed, share = False, 1.0
        if (pacing := load.pacing) is not None:
            share = pacing.share
            closed = not pacing.has_room(load, uncached, now)
            if pacing.held_tokens:
                wait += policy.held_share * pacing.held_tokens / load.rate
        running = load.running
        if load.slots is not None:
            wait += slot_seconds(running, load.slots, load.decode_seconds or policy.decode_seconds)
        full = load.full(max_owed)
        rows.append(_Row(candidate, hit or NO_MATCH, uncached, wait, work, running, full, closed, share))
    return rows


def _ranked(rows: list[_Row], turn: int, policy: Policy, uses: float) -> list[_Row]:
    if not rows:
        return rows
    _set_costs(rows, policy, uses)
    first = turn % len(rows)
    rows = sorted(rows[first:] + rows[:first], key=_BY_COST)  # stable: equal costs stay in turn
    near = rows[0].cost + policy.near_seconds
    tied = next((i for i, row in enumerate(rows) if row.cost > near), len(rows))
    rows = sorted(rows[:tied], key=_BY_RUNNING) + rows[tied:]
    return sorted(rows, key=_BY_ROOM) if any(map(_BY_ROOM, rows)) else rows


def _set_costs(rows: list[_Row], policy: Policy, uses: float) -> None:
    least = min(row.uncached for row in rows)
    most = max(row.hit.tokens for row in rows)
    share = copy_share(uses, sum(row.hit.tokens >= COPY * most for row in rows)) if most else 1.0
    copied = policy.copy_seconds / max(rows[0].uncached + rows[0].hit.tokens, 1)
    work_price, mean_rate, mean_share = _of_the_pool(rows, policy)
    lean = policy.tight * mean_share
    for row in rows:
        copy = row.uncached - least
        own = least + share * copy
        work = row.work * own / row.uncached if copy else row.work
        tightness = lean / row.share if row.share < lean else 1.0
        work *= tightness
        wait = row.wait + policy.closed_seconds * tightness if row.closed else row.wait
        room = room_seconds(own, mean_rate, policy)
        row.cost = cost(wait, work, row.running, work_price, policy) + room + copied * copy


def _of_the_pool(rows: list[_Row], policy: Policy) -> tuple[float, float, float]:
    """The price of work, the mean prefill rate, and the mean share of the time that prompts may take."""
    running = crowded = 0
    rate = share = 0.0
    for row in rows:
        load = row.candidate.load
        running += row.running
        crowded += load.crowd is not None
        rate += load.rate
        share += row.share
    count = len(rows)
    return price(running / count, crowded / count, policy), rate / count, share / count


def _uncached(demand: Demand, hit: Hit) -> int:
    """Tokens to prefill; a prompt wholly matched still computes its last token."""
    return max(demand.tokens - hit.tokens, min(demand.tokens, 1))


def allows(subset: tuple[str, ...], endpoint: Endpoint) -> bool:
    """Whether the gateway's subset names this endpoint, by address alone (any port) or with its port."""
    return named(canonical(subset), endpoint)


def named(names: frozenset[str], endpoint: Endpoint) -> bool:
    """The same for a subset in canonical text."""
    return endpoint.hostport in names or endpoint.address in names


def members(names: frozenset[str], hostports: Iterable[str]) -> Iterator[str]:
    """Those of ``hostports`` that a subset in canonical text names, by address or with the port."""
    return (host for host in hostports if host in names or host.rpartition(":")[0].strip("[]") in names)


@lru_cache(maxsize=256)
def canonical(subset: tuple[str, ...]) -> frozenset[str]:
    """The subset with each address in its canonical text, without what is no address."""
    return frozenset(filter(None, map(_canonical_member, subset)))


def _canonical_member(member: str) -> str:
    """``ip``, ``ip:port``, ``v6``, ``[v6]`` or ``[v6]:port`` in canonical text; empty for what is neither."""
    text = member.strip()
    address, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in address and not address.endswith("]")):
        address, port = text, ""
    try:
        ip = canonical_ip(address)
        return hostport(ip, int(port)) if port else ip
    except ValueError:
        return ""


def _why_none(candidates: Sequence[Candidate], subset: tuple[str, ...] | None) -> str:
    """For clients: counts, never addresses."""
    if not candidates:
        return "no endpoints are known"
    if subset is not None and not any(allows(subset, c.endpoint) for c in candidates):
        return f"none of the {len(candidates)} known endpoints is in the gateway's subset of {len(subset)}"
    within = [c for c in candidates if subset is None or allows(subset, c.endpoint)]
    reasons = Counter(c.refusal for c in within).most_common()
    return f"none of {len(within)} endpoints can be picked: " + ", ".join(f"{n} {why}" for why, n in reasons)
