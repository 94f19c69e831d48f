"""The choice among many endpoints, by operations on arrays. Pure.

Both ways to pick return what ``pick.choose`` finds by looking at each endpoint: the best endpoint with its
terms, the addresses of the answer, and the record of the pick (None: picks are not recorded).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvist_epp.scheduling.best_endpoints import best_of_many, cheapest
from kvist_epp.scheduling.cost import (
    CachedPrefix,
    EndpointCost,
    Policy,
    PoolCost,
    complete,
    terms_in,
    terms_of_one,
    uncached_tokens,
)
from kvist_epp.scheduling.held_columns import FEW_HOLDERS, HeldColumns
from kvist_epp.scheduling.load_columns import LoadColumns
from kvist_epp.scheduling.pick import Demand, Ranking, ScoredEndpoint, cost_rows, scored
from kvist_epp.scheduling.pick_record import KEPT, ColumnRecord, PickRecord, RankingRecord
from kvist_epp.scheduling.tier_price import PricedPrefix
from kvist_epp.scheduling.tpot_columns import TpotColumns

Picked = tuple[ScoredEndpoint, tuple[str, ...], PickRecord | None]


def pick_of_many(
    columns: LoadColumns,
    demand: Demand,
    now: float,
    turn: int,
    limit: int,
    max_backlog: float,
    policy: Policy,
) -> Picked:
    """Return the pick among endpoints without a TPOT target."""
    tokens, able = demand.tokens, columns.candidates
    held = columns.held(demand.hits, policy, now)
    pool, part = _pool_cost(columns, held, demand, policy)
    costs = _costs(columns, held, tokens, pool, part, policy, now)
    full = columns.full_now(now, max_backlog)
    best = best_of_many(costs, columns.running, full, turn % len(able), limit, policy.near_seconds)
    hit = held.priced(best[0], policy, now)
    shown = scored_best(columns, best[0], hit, tokens, pool, part, full, policy, now)
    record = None
    if columns.pool is not None:
        kept = _kept(columns, costs, best, held)
        places, hits = np.array(kept), {at: held.priced(at, policy, now) for at in kept if at in held.hits}
        record = ColumnRecord.of(
            columns.pool,
            places,
            columns.figures(places),
            best,
            hits,
            tokens,
            pool,
            part,
            policy,
            now,
            max_backlog,
        )
    return shown, tuple([able[at].endpoint.hostport for at in best]), record


def pick_under_target(
    columns: LoadColumns,
    tpot: TpotColumns,
    demand: Demand,
    now: float,
    turn: int,
    limit: int,
    max_backlog: float,
    policy: Policy,
) -> Picked:
    """Return the pick among endpoints with a TPOT target each."""
    tokens, able = demand.tokens, columns.candidates
    held = columns.held(demand.hits, policy, now)
    pool, part = _pool_cost(columns, held, demand, policy)
    columns.price_running(policy.running_seconds)
    uncached = held.uncached(len(able), tokens)
    costs = tpot.costs(uncached, columns.seconds, columns.wait_at(now), now, pool, part, policy)
    costs += columns.standing
    if held.loading is not None:
        costs[held.places] += held.loading
    full = columns.full_now(now, max_backlog)
    best = best_of_many(costs, columns.running, full, turn % len(able), limit, policy.near_seconds)
    kept = best if columns.pool is None else _kept(columns, costs, best, held)
    shown = [able[at] for at in kept]
    rows = cost_rows(shown, demand, now, policy)
    complete(rows, pool, part, tpot.lean(policy))
    is_full = [row.load.batch_or_backlog_full(max_backlog) for row in rows]
    ranking = Ranking(shown, rows, terms_in(pool, rows, policy), is_full, list(range(len(rows))))
    [first] = ranking.best(1, all_full=is_full[0] or all_full(columns, full))
    record = None if columns.pool is None else RankingRecord.of(columns.pool, ranking, tokens, kept)
    return first, tuple([able[at].endpoint.hostport for at in best]), record


def scored_best(
    columns: LoadColumns,
    at: int,
    hit: CachedPrefix,
    tokens: int,
    pool: PoolCost,
    part: float,
    full: Any,
    policy: Policy,
    now: float,
) -> ScoredEndpoint:
    """Return what is shown of the best endpoint, which is at this place; ``hit``: what it holds, priced."""
    candidate = columns.candidates[at]
    load = candidate.load
    load.drain(now)
    uncached = uncached_tokens(tokens, hit)
    row = EndpointCost(load, hit, uncached, uncached / load.rate, load.running)
    row.loading = hit.loading if isinstance(hit, PricedPrefix) else 0.0
    row.own = pool.least_uncached + part * (uncached - pool.least_uncached)
    terms = terms_of_one(pool, row, float(columns.slot[at]), policy)
    is_full = full is not None and bool(full[at])
    return scored(candidate.endpoint, row, terms, full=is_full or all_full(columns, full))


def all_full(columns: LoadColumns, full: Any) -> bool:
    """Return whether each endpoint has a full batch, too much backlog, or a full KV cache.

    ``full``: what ``LoadColumns.full_now`` has returned.
    """
    if columns.many:
        return bool((columns.full > 0.0 if full is None else full | (columns.full > 0.0)).all())
    if full is None:
        return all(columns.full)
    return all(here or other for here, other in zip(full, columns.full, strict=True))


def _pool_cost(
    columns: LoadColumns, held: HeldColumns, demand: Demand, policy: Policy
) -> tuple[PoolCost, float]:
    count = len(columns.candidates)
    running, kv_full = columns.total_running / count, columns.total_kv_full / count
    return held.pool_cost(running, kv_full, columns.total_rate / count, demand.tokens, demand.uses, policy)


def _costs(
    columns: LoadColumns,
    held: HeldColumns,
    tokens: int,
    pool: PoolCost,
    part: float,
    policy: Policy,
    now: float,
) -> Any:
    """Return the costs, without what is the same for all.

    With what an endpoint holds, it saves work, evicted blocks and a copy, all in proportion to the tokens.
    """
    seconds, price = columns.seconds, pool.price
    columns.price_running(policy.running_seconds)
    costs = seconds * (price * (pool.least_uncached + part * (tokens - pool.least_uncached)))
    costs += columns.wait_at(now)
    costs += columns.standing
    at = held.places
    if held.loading is not None:
        costs[at] += held.loading
    if not (tokens and len(at)):
        return costs
    # saved seconds per cached token: so much times those of prefill, and so much anyway
    by_rate, anyway = part * price, part * policy.evicted / pool.mean_rate + pool.copy_seconds
    last = tokens - 1  # one that is wholly cached still computes its last token
    if len(at) > FEW_HOLDERS:
        costs[at] -= np.minimum(held.tokens, last) * (by_rate * seconds[at] + anyway)
    else:
        for place, cached in zip(held.hits, held.tokens.tolist(), strict=True):
            costs[place] -= min(cached, last) * (by_rate * seconds[place] + anyway)
    return costs


def _kept(columns: LoadColumns, costs: Any, best: Sequence[int], held: HeldColumns) -> list[int]:
    """Return the places that a record keeps, the best first."""
    few = len(held.hits) <= KEPT
    cheap = cheapest(costs, columns.parts, KEPT)
    return list(dict.fromkeys([*best, *sorted(cheap, key=costs.__getitem__), *(held.hits if few else ())]))
