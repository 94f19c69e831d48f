"""The choice among many endpoints, over columns: the same as ``pick.choose``, at a fraction of its cost.

``pick.choose`` looks at each endpoint as an object, which takes 2 us for each. Here the figures of all loads
are columns, of which a pick writes again those that have changed. The costs of a few endpoints are computed
by a loop over numbers, those of many by a dozen operations on arrays, which hardly take longer for a thousand
endpoints than for fifty (``docs/decisions/0024``). Only the best endpoint, and those that hold something of
the prompt, are looked at one by one. Under a TPOT target each endpoint has a schedule of its own: among many,
columns find the best ones and ``pick`` computes the terms of these, among few ``pick`` does all.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from math import inf
from operator import add
from types import MappingProxyType
from typing import Final

import msgspec

from kvist_epp.errors import NoEndpoints
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.best_endpoints import best_of_few
from kvist_epp.scheduling.cost import DEFAULT, NO_MATCH, CachedPrefix, Policy, PoolCost, pool_cost
from kvist_epp.scheduling.leg_table import LegTable
from kvist_epp.scheduling.load_columns import EndpointSubset, LoadColumns
from kvist_epp.scheduling.many_endpoints import Picked, pick_of_many, pick_under_target, scored_best
from kvist_epp.scheduling.pick import (
    MAX_ENDPOINTS,
    Candidate,
    Demand,
    ScoredEndpoint,
    canonical,
    named,
    rank,
    why_none,
)
from kvist_epp.scheduling.pick_record import ColumnRecord, PickRecord, RankingRecord, RecordedPool
from kvist_epp.scheduling.split_decision import SplitDecision
from kvist_epp.scheduling.tier_price import price_tiers

_NO_LOADING: Final[Mapping[int, float]] = MappingProxyType({})
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
        able = [one for one in candidates if not one.refusal]
        self._columns = LoadColumns(EndpointSubset.of(able, RecordedPool.of(candidates) if record else None))
        self._place_of_load = {one.load: at for at, one in enumerate(self._columns.candidates)}
        self._legs: LegTable | None = None
        # a cache that knows this table would keep it until the collector finds the cycle
        find = partial(_within, self._candidates, self._columns.candidates, record)
        self._members: Callable[[frozenset[str]], EndpointSubset] = lru_cache(_SUBSETS)(find)

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
            members = self._members(canonical(subset))
            if len(members.candidates) < len(columns.candidates):
                columns = columns.part(members, policy.running_seconds)
        able = columns.candidates
        if not able:
            raise NoEndpoints(why_none(self._candidates, subset))
        if able[0].load.tpot is None:
            choose = pick_of_many if columns.many else _pick_of_few
            return PickedEndpoints(*choose(columns, demand, now, turn, limit, max_backlog, policy))
        if columns.tpot is not None:
            return PickedEndpoints(
                *pick_under_target(columns, columns.tpot, demand, now, turn, limit, max_backlog, policy)
            )
        ranking = rank(able, demand, now, turn, max_backlog, policy)  # drains the loads
        all_full = all(one.load.full(max_backlog) for one in able)
        rows = ranking.best(limit, all_full=all_full)
        return PickedEndpoints(
            rows[0],
            tuple([row.endpoint.hostport for row in rows]),
            None if columns.pool is None else RankingRecord.of(columns.pool, ranking, demand.tokens),
        )

    @cached_property
    def by_key(self) -> Mapping[str, Candidate]:
        """All candidates by the key of their endpoint, whether they may be picked or not."""
        return {one.endpoint.key: one for one in self._candidates}

    def at(self, address: str) -> Candidate | None:
        """Return the candidate at an address with or without its port; None: there is none."""
        [name] = canonical((address,)) or [""]
        return self._by_address.get(name)

    @cached_property
    def _by_address(self) -> Mapping[str, Candidate]:
        found: dict[str, Candidate] = {}
        for one in self._candidates:  # the first one counts, as everywhere
            found.setdefault(one.endpoint.hostport, one)
            found.setdefault(one.endpoint.address, one)
        return found

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


def _within(
    candidates: Sequence[Candidate], able: Sequence[Candidate], record: bool, names: frozenset[str]
) -> EndpointSubset:
    places = [at for at, one in enumerate(able) if named(names, one.endpoint)]
    return EndpointSubset.of(able, RecordedPool.of(candidates, names) if record else None, places)


def _pick_of_few(
    columns: LoadColumns,
    demand: Demand,
    now: float,
    turn: int,
    limit: int,
    max_backlog: float,
    policy: Policy,
) -> Picked:
    tokens, able = demand.tokens, columns.candidates
    holders, loading, pool, part = _prices(columns, demand, policy, now)
    costs = _costs(columns, now, tokens, holders, pool, part, policy)
    for at, seconds in loading.items():
        costs[at] += seconds
    full = columns.full_now(now, max_backlog)
    best = best_of_few(costs, columns.running, full, turn % len(able), limit, policy.near_seconds)
    hit = holders.get(best[0], NO_MATCH)
    shown = scored_best(columns, best[0], hit, tokens, pool, part, full, policy, now)
    record = None
    if columns.pool is not None:
        record = ColumnRecord.of(
            columns.pool,
            None,
            columns.figures(None),
            best,
            holders,
            tokens,
            pool,
            part,
            policy,
            now,
            max_backlog,
        )
    return shown, tuple([able[at].endpoint.hostport for at in best]), record


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
) -> list[float]:
    """Return the costs, without what is the same for all.

    With what an endpoint holds, it saves work, evicted blocks and a copy, all in proportion to the tokens.
    """
    price, seconds = pool.price, columns.seconds
    cold = price * (pool.least_uncached + part * (tokens - pool.least_uncached))
    columns.price_running(policy.running_seconds)
    wait = columns.wait_at(now)
    if columns.uniform:  # then the work of a prompt of which nothing is cached is the same for all
        costs = columns.standing.copy() if wait is columns.none else list(map(add, wait, columns.standing))
    else:
        rows = zip(seconds, wait, columns.standing, strict=True)
        costs = [second * cold + waiting + standing for second, waiting, standing in rows]
    if not tokens:
        return costs
    # saved seconds per cached token: so much times those of prefill, and so much anyway
    by_rate, anyway = part * price, part * policy.evicted / pool.mean_rate + pool.copy_seconds
    last = tokens - 1  # a prompt that is wholly cached still computes its last token
    before, second, saving = None, 0.0, 0.0
    for place, hit in holders.items():
        if hit is not before or seconds[place] != second:  # most hold the same, at the same rate
            before, second, cached = hit, seconds[place], hit.tokens
            saved = cached if cached < last else last  # noqa: FURB136  (min takes twice as long)
            saving = saved * (by_rate * second + anyway)
        costs[place] -= saving
    return costs
