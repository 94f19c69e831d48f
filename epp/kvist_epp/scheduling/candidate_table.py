"""The choice among many endpoints, over columns: the same as ``pick.choose``, at a fraction of its cost.

``pick.choose`` looks at each endpoint as an object, which takes 2 us for each. Here the figures of all loads
are columns, of which a pick writes again those that have changed. The costs of a few endpoints are computed
by a loop over numbers, those of many by a dozen operations on arrays, which hardly take longer for a thousand
endpoints than for fifty (``docs/decisions/0024``). Only the best endpoint, and those that hold something of
the prompt, are looked at one by one. Under a TPOT target each endpoint has a schedule of its own, and
``pick.choose`` does the work.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import nsmallest
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist_epp.errors import NoEndpoints
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.cost import (
    DEFAULT,
    NO_MATCH,
    CachedPrefix,
    EndpointCost,
    Policy,
    PoolCost,
    price_of_work,
    share_of_copy,
    slot_seconds,
    terms_in,
    work_seconds,
)
from kvist_epp.scheduling.pick import (
    MAX_ENDPOINTS,
    Candidate,
    Demand,
    ScoredEndpoint,
    allows,
    choose,
    scored,
    why_none,
)

Vector = NDArray[np.float64]

FEW: Final = 48
"""Endpoints up to which a loop is faster than operations on arrays."""
_LOOP: Final = 8
"""Holders of a prompt up to which a loop is faster than operations on arrays."""
_SUBSETS: Final = 64
"""Subsets of the gateway whose members are remembered."""


class PickedEndpoints(NamedTuple):
    """The result of a pick."""

    best: ScoredEndpoint
    hostports: tuple[str, ...]
    """Of the best endpoint, and of those to fall back to."""


class LoadColumns:
    """Figures of the loads that picks read: a list for each figure, a place in it for each endpoint.

    The lists are arrays where there are more than ``FEW`` endpoints.
    """

    __slots__ = (
        "batch_full",
        "candidates",
        "full",
        "kv_full",
        "many",
        "place",
        "rate",
        "running",
        "seconds",
        "slot",
        "wait",
        "waits_until",
    )

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = tuple(candidates)
        self.place = {one.endpoint.key: at for at, one in enumerate(candidates)}
        count = len(candidates)
        self.many = count > FEW
        columns: Any = np.zeros((9, count)) if self.many else [[0.0] * count for _ in range(9)]
        self.wait: Any
        """Seconds of backlog."""
        self.waits_until: Any
        """Time at which the backlog is computed without further events; infinite where it does not drain."""
        self.running: Any
        self.rate: Any
        self.seconds: Any
        """Of prefill for a token."""
        self.slot: Any
        """Seconds until a sequence slot is free."""
        self.batch_full: Any
        self.full: Any
        """Its batch or its KV cache is full."""
        self.kv_full: Any
        """Its KV cache was full at the last scrape."""
        self.wait, self.waits_until, self.running, self.rate, self.seconds, *flags = columns
        self.slot, self.batch_full, self.full, self.kv_full = flags
        for at in range(count):
            self.refresh(at)

    def refresh(self, at: int) -> None:
        """Copy the figures of the load at this place, which has changed."""
        load = self.candidates[at].load
        rate, running = load.rate, load.running
        self.wait[at] = wait = load.backlog_tokens / rate
        self.waits_until[at] = load.drains_from + wait
        self.running[at] = running
        self.rate[at] = rate
        self.seconds[at] = 1.0 / rate
        self.slot[at] = slot_seconds(running, load.slots, load.decode_seconds or 0.0)
        self.batch_full[at] = batch_full = load.counted_requests >= load.slot_limit
        self.full[at] = batch_full or load.kv_cache_full
        self.kv_full[at] = load.kv_full_at is not None

    def wait_at(self, now: float) -> Any:
        """Return the seconds until the backlogs are computed, drained to ``now`` as ``EndpointLoad.drain``
        does."""
        if self.many:
            left = self.waits_until - now
            np.minimum(left, self.wait, out=left)
            return np.maximum(left, 0.0, out=left)
        return [
            wait if until - now > wait else until - now if until > now else 0.0
            for wait, until in zip(self.wait, self.waits_until, strict=True)
        ]

    def total(self, column: Any) -> float:
        """Return the sum of a column."""
        return float(np.add.reduce(column)) if self.many else sum(column)

    def full_now(self, wait: Any, max_backlog: float) -> Any:
        """Return which endpoints have a full batch or more than ``max_backlog`` seconds to wait; None where
        none is full."""
        if not self.many:
            if max(self.batch_full) or max(wait) > max_backlog:
                return [bool(full) or w > max_backlog for full, w in zip(self.batch_full, wait, strict=True)]
            return None
        if self.batch_full[self.batch_full.argmax()] or wait[wait.argmax()] > max_backlog:
            return (self.batch_full > 0) | (wait > max_backlog)
        return None


class CandidateTable:
    """The endpoints of a pool; made anew when their set or their readiness changes."""

    def __init__(self, candidates: Sequence[Candidate], changed: set[EndpointLoad]) -> None:
        """``changed``: loads whose figures have changed since the last pick, which empties it."""
        self._candidates = tuple(candidates)
        self._changed = changed
        self._columns = LoadColumns([one for one in candidates if not one.refusal])
        self._place_of_load = {one.load: at for at, one in enumerate(self._columns.candidates)}
        self._members: Callable[[tuple[str, ...]], list[Candidate]] = lru_cache(_SUBSETS)(self._within)

    def choose(
        self,
        demand: Demand,
        subset: tuple[str, ...] | None = None,
        *,
        now: float,
        turn: int = 0,
        limit: int = MAX_ENDPOINTS,
        max_backlog: float = inf,
        policy: Policy = DEFAULT,
    ) -> PickedEndpoints:
        """Return the endpoints that ``pick.choose`` returns.

        Raises NoEndpoints with the reason why none is eligible.
        """
        columns = self._columns
        for load in self._changed:
            if (place := self._place_of_load.get(load)) is not None:
                columns.refresh(place)
        self._changed.clear()
        if subset is not None and len(within := self._members(subset)) < len(columns.candidates):
            columns = LoadColumns(within)
        able = columns.candidates
        if not able:
            raise NoEndpoints(why_none(self._candidates, subset))
        if able[0].load.tpot is None:
            return _picked(columns, demand, now, turn, limit, max_backlog, policy)
        rows = choose(able, demand, now=now, turn=turn, limit=limit, max_backlog=max_backlog, policy=policy)
        return PickedEndpoints(rows[0], tuple([row.endpoint.hostport for row in rows]))

    def _within(self, subset: tuple[str, ...]) -> list[Candidate]:
        return [one for one in self._columns.candidates if allows(subset, one.endpoint)]


def _picked(
    columns: LoadColumns,
    demand: Demand,
    now: float,
    turn: int,
    limit: int,
    max_backlog: float,
    policy: Policy,
) -> PickedEndpoints:
    place, tokens, able = columns.place, demand.tokens, columns.candidates
    holders = {place[key]: hit for key, hit in demand.hits.items() if key in place}
    pool, part = _pool_cost(columns, tokens, holders.values(), demand.uses, policy)
    wait = columns.wait_at(now)
    costs = _costs(columns, wait, tokens, holders, pool, part, policy)
    full = columns.full_now(wait, max_backlog)
    order = _best_of_many if columns.many else _best_of_few
    best = order(costs, columns.running, full, turn % len(able), limit, policy.near_seconds)
    first = best[0]
    is_full = full is not None and bool(full[first])
    load, hit = able[first].load, holders.get(first, NO_MATCH)
    load.drain(now)
    uncached = _uncached(tokens, hit)
    row = EndpointCost(load, hit, uncached, _work(load, uncached, hit, policy), load.running)
    row.own = pool.least_uncached + part * (uncached - pool.least_uncached)
    terms = tuple([term[0] for term in terms_in(pool, (row,), policy)])
    return PickedEndpoints(
        scored(able[first].endpoint, row, terms, full=is_full or _all_full(columns, full)),
        tuple([able[at].endpoint.hostport for at in best]),
    )


def _all_full(columns: LoadColumns, full: Any) -> bool:
    """Return whether each endpoint has a full batch, too much backlog, or a full KV cache."""
    if full is None:
        return all(columns.full)
    return all(here or other for here, other in zip(full, columns.full, strict=True))


def _uncached(tokens: int, hit: CachedPrefix) -> int:
    """A prompt that is wholly cached still computes its last token."""
    return max(tokens - hit.tokens, 1 if tokens else 0)


def _work(load: EndpointLoad, uncached: int, hit: CachedPrefix, policy: Policy) -> float:
    return work_seconds(uncached, load.rate, hit.lower, policy) if hit.lower else uncached / load.rate


def _pool_cost(
    columns: LoadColumns, tokens: int, hits: Iterable[CachedPrefix], uses: float, policy: Policy
) -> tuple[PoolCost, float]:
    """Return what the terms share, and the part of a copy's work that this request answers for."""
    count = len(columns.candidates)
    held = [hit.tokens for hit in hits]
    most = max(held, default=0)
    part = 1.0
    if uses and most:
        copied = policy.copy_share * most
        part = share_of_copy(uses, sum([cached >= copied for cached in held]), policy)
    pool = PoolCost(
        price_of_work(columns.total(columns.running) / count, columns.total(columns.kv_full) / count, policy),
        columns.total(columns.rate) / count,
        max(tokens - most, 1 if tokens else 0),
        policy.copy_seconds / max(tokens, 1),
    )
    return pool, part


def _costs(
    columns: LoadColumns,
    wait: Any,
    tokens: int,
    holders: dict[int, CachedPrefix],
    pool: PoolCost,
    part: float,
    policy: Policy,
) -> Any:
    """Return the costs, without what is the same for all.

    With what an endpoint holds, it saves work, evicted blocks and a copy, all in proportion to the tokens.
    """
    price, each = pool.price, policy.running_seconds
    cold = price * (pool.least_uncached + part * (tokens - pool.least_uncached))
    if columns.many:
        costs = columns.seconds * cold
        costs += wait
        costs += columns.running * each
        costs += columns.slot
    else:
        rows = zip(columns.seconds, wait, columns.running, columns.slot, strict=True)
        costs = [seconds * cold + waiting + each * running + slot for seconds, waiting, running, slot in rows]
    evicted = policy.evicted / pool.mean_rate
    if columns.many and len(holders) > _LOOP:
        at = list(holders)
        saved = tokens - np.array([_uncached(tokens, hit) for hit in holders.values()])
        costs[at] -= saved * (part * (price * columns.seconds[at] + evicted) + pool.copy_seconds)
    else:
        for place, hit in holders.items():
            saving = part * (price * columns.seconds[place] + evicted) + pool.copy_seconds
            costs[place] -= (tokens - _uncached(tokens, hit)) * saving
    for place, hit in holders.items():
        if hit.lower and tokens:  # loading takes less than prefill
            uncached, load = _uncached(tokens, hit), columns.candidates[place].load
            own = pool.least_uncached + part * (uncached - pool.least_uncached)
            loading = _work(load, uncached, hit, policy)
            costs[place] += price * own / uncached * (loading - uncached * columns.seconds[place])
    return costs


def _best_of_few(
    costs: list[float], running: list[float], full: list[bool] | None, first: int, limit: int, near: float
) -> list[int]:
    """Return the places of the best endpoints, at most ``limit``: those that are not full first.

    Endpoints within ``near`` seconds of the least cost are a tie, which goes to the fewest running requests,
    then to the least cost. What is equal then is taken from the place ``first`` on, around.

    Example: costs 1.0, 1.0005, 1.2 with 5, 2 and 0 running and ``near`` 0.001: the order is 1, 0, 2.
    """
    count, tie = len(costs), min(costs) + near
    tied = [at for at, cost in enumerate(costs) if cost <= tie]
    if full is None and len(tied) == 1:
        return _cheapest(costs, first, limit)
    keys = [
        (
            full is not None and full[at],
            cost > tie,
            running[at] if cost <= tie else 0.0,
            cost,
            (at - first) % count,
            at,
        )
        for at, cost in enumerate(costs)
    ]
    return [key[-1] for key in nsmallest(limit, keys)]


def _cheapest(costs: list[float], first: int, limit: int) -> list[int]:
    """Return the places of the least costs, in order; of equal ones that next to ``first``."""
    left, found = costs[first:] + costs[:first], list[int]()
    for _ in range(min(limit, len(costs))):
        at = left.index(min(left))
        left[at] = inf
        found.append((at + first) % len(costs))
    return found


def _best_of_many(
    costs: Vector, running: Vector, full: NDArray[np.bool_] | None, first: int, limit: int, near: float
) -> list[int]:
    """Return what ``_best_of_few`` returns, of arrays."""
    count = len(costs)
    costs = np.concatenate((costs[first:], costs[:first]))
    least = costs[costs.argmin()]
    tied = (costs <= least + near).nonzero()[0]
    # running requests are whole numbers, and costs of a tie differ by less than 1
    keys = running[(tied + first) % count] + (costs[tied] - least)
    if full is None:
        found = _least(keys, tied, limit)
        if len(found) < limit:
            costs[tied] = inf
            found += _least(costs, None, limit - len(found))
    else:
        full = np.concatenate((full[first:], full[:first]))
        costs[tied] = inf
        found = _least(np.where(full[tied], inf, keys), tied, limit)
        found += _least(np.where(full, inf, costs), None, limit - len(found))
        found += _least(np.where(full[tied], keys, inf), tied, limit - len(found))
        found += _least(np.where(full, costs, inf), None, limit - len(found))
    return [(at + first) % count for at in found]


def _least(keys: Vector, places: NDArray[np.intp] | None, limit: int) -> list[int]:
    """Return the places of the least keys, in order and without infinite ones; overwrites ``keys``."""
    found: list[int] = []
    while len(found) < limit:
        at = int(keys.argmin())
        if keys[at] == inf:
            break
        keys[at] = inf
        found.append(at if places is None else int(places[at]))
    return found
