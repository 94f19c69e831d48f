"""The choice among many endpoints, over columns: the same as ``pick.choose``, at a fraction of its cost.

``pick.choose`` looks at each endpoint as an object, which takes 2 us for each. Here the figures of all loads
are columns, of which a pick writes again those that have changed. The costs of a few endpoints are computed
by a loop over numbers, those of many by a dozen operations on arrays, which hardly take longer for a thousand
endpoints than for fifty (``docs/decisions/0024``). Only the best endpoint, and those that hold something of
the prompt, are looked at one by one. Under a TPOT target each endpoint has a schedule of its own: among many,
columns find the best ones and ``pick`` computes the terms of these, among few ``pick`` does all.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import inf
from operator import add
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from kvist_epp.errors import NoEndpoints
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.best_endpoints import best_of_few, best_of_many, cheapest
from kvist_epp.scheduling.cost import (
    DEFAULT,
    NO_MATCH,
    CachedPrefix,
    EndpointCost,
    Policy,
    PoolCost,
    complete,
    pool_cost,
    terms_in,
    terms_of_one,
    uncached_tokens,
)
from kvist_epp.scheduling.leg_table import LegTable
from kvist_epp.scheduling.load_columns import LoadColumns
from kvist_epp.scheduling.pick import (
    MAX_ENDPOINTS,
    Candidate,
    Demand,
    Ranking,
    ScoredEndpoint,
    allows,
    cost_rows,
    rank,
    scored,
    why_none,
)
from kvist_epp.scheduling.pick_record import KEPT, ColumnRecord, PickRecord, RankingRecord, RecordedPool
from kvist_epp.scheduling.split_decision import SplitDecision
from kvist_epp.scheduling.tier_price import price_tiers
from kvist_epp.scheduling.tpot_columns import TpotColumns, uncached_of_all

_NO_LOADING: Final[Mapping[int, float]] = MappingProxyType({})
_LOOP: Final = 8
"""Holders of a prompt up to which a loop is faster than operations on arrays."""
_SUBSETS: Final = 64
"""Subsets of the gateway whose members are remembered."""


class PickedEndpoints(msgspec.Struct, frozen=True):
    """The result of a pick."""

    best: ScoredEndpoint
    hostports: tuple[str, ...]
    """Of the best endpoint, and of those to fall back to."""
    record: PickRecord | None = None
    """What the pick has read; None: picks are not recorded."""
    split: SplitDecision | None = None
    """The two endpoints of a request whose prompt is computed elsewhere; None: ``best`` does all."""
    whole_reason: str = ""
    """Why it is not computed elsewhere, as a label; empty: nothing was decided about it."""

    @property
    def first(self) -> ScoredEndpoint:
        """The endpoint that computes the prompt: the one that has to have capacity for it."""
        return self.best if self.split is None else self.split.prefill

    def moved(self, row: ScoredEndpoint) -> "PickedEndpoints":
        """Return the same with another best endpoint."""
        first = row.endpoint.hostport
        hosts = (first, *[host for host in self.hostports if host != first])
        return msgspec.structs.replace(self, best=row, hostports=hosts[: len(self.hostports)])


class CandidateTable:
    """The endpoints of a pool; made anew when their set or their readiness changes."""

    def __init__(
        self, candidates: Sequence[Candidate], changed: set[EndpointLoad], *, record: bool = False
    ) -> None:
        """``changed``: loads whose figures have changed since the last pick, which empties it. ``record``:
        picks are recorded."""
        self._candidates = tuple(candidates)
        self._changed = changed
        self._record = record
        self._columns = LoadColumns(
            [one for one in candidates if not one.refusal], RecordedPool.of(candidates) if record else None
        )
        self._place_of_load = {one.load: at for at, one in enumerate(self._columns.candidates)}
        self._legs: LegTable | None = None
        self._members: Callable[[tuple[str, ...]], _SubsetEndpoints] = lru_cache(_SUBSETS)(self._within)

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
        self._copy_changed()
        if columns.tpot is not None and (outdated := columns.tpot.outdated(now)):
            for place in outdated:
                columns.candidates[place].load.drain(now)
            self._copy_changed()
        if subset is not None:
            members = self._members(subset)
            if len(members.candidates) < len(columns.candidates):
                columns = LoadColumns(members.candidates, members.pool)
        able = columns.candidates
        if not able:
            raise NoEndpoints(why_none(self._candidates, subset))
        if able[0].load.tpot is None:
            return _picked(columns, demand, now, turn, limit, max_backlog, policy)
        if columns.tpot is not None:
            return _picked_under_target(columns, columns.tpot, demand, now, turn, limit, max_backlog, policy)
        all_full = all(one.load.full(max_backlog) for one in able)
        ranking = rank(able, demand, now, turn, max_backlog, policy)
        rows = ranking.best(limit, all_full=all_full)
        return PickedEndpoints(
            rows[0],
            tuple([row.endpoint.hostport for row in rows]),
            None if columns.pool is None else RankingRecord.of(columns.pool, ranking, demand.tokens),
        )

    def legs(self) -> LegTable:
        """Return the endpoints that may take a leg, with the figures of now."""
        if self._legs is None:
            self._legs = LegTable(self._candidates)
        self._copy_changed()
        return self._legs

    def _copy_changed(self) -> None:
        for load in self._changed:
            if (place := self._place_of_load.get(load)) is not None:
                self._columns.refresh(place)
            if self._legs is not None:
                self._legs.refresh(load)
        self._changed.clear()

    def _within(self, subset: tuple[str, ...]) -> "_SubsetEndpoints":
        found = [one for one in self._columns.candidates if allows(subset, one.endpoint)]
        return _SubsetEndpoints(found, RecordedPool.of(self._candidates, subset) if self._record else None)


class _SubsetEndpoints(NamedTuple):
    """The endpoints of a subset."""

    candidates: list[Candidate]
    pool: RecordedPool | None


def _picked(
    columns: LoadColumns,
    demand: Demand,
    now: float,
    turn: int,
    limit: int,
    max_backlog: float,
    policy: Policy,
) -> PickedEndpoints:
    tokens, able = demand.tokens, columns.candidates
    holders, loading, pool, part = _prices(columns, demand, policy, now)
    costs = _costs(columns, now, tokens, holders, pool, part, policy)
    for at, seconds in loading.items():
        costs[at] += seconds
    full = columns.full_now(now, max_backlog)
    order = best_of_many if columns.many else best_of_few
    best = order(costs, columns.running, full, turn % len(able), limit, policy.near_seconds)
    first = best[0]
    is_full = full is not None and bool(full[first])
    load, hit = able[first].load, holders.get(first, NO_MATCH)
    load.drain(now)
    uncached = uncached_tokens(tokens, hit)
    row = EndpointCost(load, hit, uncached, uncached / load.rate, load.running)
    row.loading = loading.get(first, 0.0)
    row.own = pool.least_uncached + part * (uncached - pool.least_uncached)
    terms = terms_of_one(pool, row, float(columns.slot[first]), policy)
    return PickedEndpoints(
        scored(able[first].endpoint, row, terms, full=is_full or _all_full(columns, full)),
        tuple([able[at].endpoint.hostport for at in best]),
        None
        if columns.pool is None
        else _record(
            columns, columns.pool, holders, tokens, costs, best, pool, part, policy, now, max_backlog
        ),
    )


def _picked_under_target(
    columns: LoadColumns,
    tpot: TpotColumns,
    demand: Demand,
    now: float,
    turn: int,
    limit: int,
    max_backlog: float,
    policy: Policy,
) -> PickedEndpoints:
    """Return the pick among many endpoints with a TPOT target each."""
    tokens, able = demand.tokens, columns.candidates
    holders, loading, pool, part = _prices(columns, demand, policy, now)
    uncached = uncached_of_all(len(able), tokens, holders)
    columns.price_running(policy.running_seconds)
    costs = tpot.costs(uncached, columns.seconds, columns.wait_at(now), now, pool, part, policy)
    costs += columns.standing
    for at, seconds in loading.items():
        costs[at] += seconds
    full = columns.full_now(now, max_backlog)
    best = best_of_many(costs, columns.running, full, turn % len(able), limit, policy.near_seconds)
    kept = best if columns.pool is None else _kept(columns, costs, best, holders)
    shown = [able[at] for at in kept]
    rows = cost_rows(shown, demand, now, policy)
    complete(rows, pool, part, tpot.lean(policy))
    is_full = [row.load.batch_or_backlog_full(max_backlog) for row in rows]
    ranking = Ranking(shown, rows, terms_in(pool, rows, policy), is_full, list(range(len(rows))))
    [first] = ranking.best(1, all_full=is_full[0] or _all_full(columns, full))
    record = None if columns.pool is None else RankingRecord.of(columns.pool, ranking, tokens, kept)
    return PickedEndpoints(first, tuple([able[at].endpoint.hostport for at in best]), record)


def _kept(
    columns: LoadColumns, costs: Any, best: Sequence[int], holders: Mapping[int, CachedPrefix]
) -> list[int]:
    """Return the places among many that a record keeps, the best first."""
    few = len(holders) <= KEPT
    cheap = cheapest(costs, columns.parts, KEPT)
    return list(dict.fromkeys([*best, *sorted(cheap, key=costs.__getitem__), *(holders if few else ())]))


def _record(
    columns: LoadColumns,
    recorded: RecordedPool,
    holders: dict[int, CachedPrefix],
    tokens: int,
    costs: Any,
    best: list[int],
    pool: PoolCost,
    part: float,
    policy: Policy,
    now: float,
    max_backlog: float,
) -> ColumnRecord:
    """Return the record of a pick; see ``pick_record`` for the endpoints that it keeps."""
    places, held = None, holders
    if columns.many:
        few = len(holders) <= KEPT
        kept = _kept(columns, costs, best, holders)
        places = np.array(kept)
        held = holders if few else {at: holders[at] for at in kept if at in holders}
    return ColumnRecord.of(
        recorded,
        places,
        columns.figures(places),
        best,
        held,
        tokens,
        pool,
        part,
        policy,
        now,
        max_backlog,
    )


def _all_full(columns: LoadColumns, full: Any) -> bool:
    """Return whether each endpoint has a full batch, too much backlog, or a full KV cache."""
    if full is None:
        return all(columns.full)
    return all(here or other for here, other in zip(full, columns.full, strict=True))


def _price_tiers(
    columns: LoadColumns, holders: dict[int, CachedPrefix], policy: Policy, now: float
) -> Mapping[int, float]:
    """Replace what slower tiers hold by its price; return the seconds of loading by place."""
    lower = [place for place, hit in holders.items() if hit.lower]
    if not lower:
        return _NO_LOADING
    loading: dict[int, float] = {}
    for place in lower:
        load, hit = columns.candidates[place].load, holders[place]
        priced = price_tiers(load, hit.tokens, hit.bytes, hit.lower, policy.load_rates, now)
        holders[place] = priced
        loading[place] = priced.loading
    return loading


def _prices(
    columns: LoadColumns, demand: Demand, policy: Policy, now: float
) -> tuple[dict[int, CachedPrefix], Mapping[int, float], PoolCost, float]:
    """Return what endpoints hold of the prompt, and the seconds of loading it from slower tiers, by place;
    what the terms share; and the part of a copy's work that the request answers for."""
    place, count, tokens = columns.place, len(columns.candidates), demand.tokens
    holders: dict[int, CachedPrefix] = {place[key]: hit for key, hit in demand.hits.items() if key in place}
    loading = _price_tiers(columns, holders, policy, now)
    held = [hit.tokens for hit in holders.values()]
    # a prompt that is wholly cached still computes its last token
    least = max(tokens - max(held), min(tokens, 1)) if held else tokens
    pool, part = pool_cost(
        columns.total_running / count,
        columns.total_kv_full / count,
        columns.total_rate / count,
        least,
        held,
        tokens,
        demand.uses,
        policy,
    )
    return holders, loading, pool, part


def _costs(
    columns: LoadColumns,
    now: float,
    tokens: int,
    holders: dict[int, CachedPrefix],
    pool: PoolCost,
    part: float,
    policy: Policy,
) -> Any:
    """Return the costs, without what is the same for all.

    With what an endpoint holds, it saves work, evicted blocks and a copy, all in proportion to the tokens.
    """
    price, seconds = pool.price, columns.seconds
    cold = price * (pool.least_uncached + part * (tokens - pool.least_uncached))
    columns.price_running(policy.running_seconds)
    wait = columns.wait_at(now)
    if columns.many:
        costs = seconds * cold
        costs += wait
        costs += columns.standing
    elif columns.uniform:  # then the work of a prompt of which nothing is cached is the same for all
        costs = columns.standing.copy() if wait is columns.none else list(map(add, wait, columns.standing))
    else:
        rows = zip(seconds, wait, columns.standing, strict=True)
        costs = [second * cold + waiting + standing for second, waiting, standing in rows]
    if not tokens:
        return costs
    # saved seconds per cached token: so much times those of prefill, and so much anyway
    by_rate, anyway = part * price, part * policy.evicted / pool.mean_rate + pool.copy_seconds
    last = tokens - 1  # a prompt that is wholly cached still computes its last token
    if columns.many and len(holders) > _LOOP:
        at = list(holders)
        saved = np.minimum([hit.tokens for hit in holders.values()], last)
        costs[at] -= saved * (by_rate * seconds[at] + anyway)
    else:
        before, second, saving = None, 0.0, 0.0
        for place, hit in holders.items():
            if hit is not before or seconds[place] != second:  # most hold the same, at the same rate
                before, second, cached = hit, seconds[place], hit.tokens
                saved = cached if cached < last else last  # noqa: FURB136  (min takes twice as long)
                saving = saved * (by_rate * second + anyway)
            costs[place] -= saving
    return costs
