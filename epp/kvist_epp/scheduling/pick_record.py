"""Records of picks: what each has read, so that the cost of each endpoint can be shown later. Pure.

A pick over columns (``candidate_table``) computes the terms of the best endpoint only. Its record keeps what
it read instead, and computes the terms of all endpoints when it is asked: those that ``pick.explain`` would
have shown at that moment. Of few endpoints (``load_columns.FEW``) the figures of all loads are kept. Of many,
those of the ``KEPT`` least costs, of the endpoints in the answer, and of the endpoints that hold something of
the prompt, unless these are more than ``KEPT``. A record is a few objects of plain numbers: thousands of
records of forty small objects each would fill the processor's caches.

Under a TPOT target the pick has computed the terms of all, or of those kept, and the record keeps them.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.cost import (
    NO_MATCH,
    TERMS,
    TTFT_TERMS,
    CachedPrefix,
    EndpointCost,
    Policy,
    PoolCost,
    terms_in,
    uncached_tokens,
)
from kvist_epp.scheduling.pick import Candidate, Ranking, ScoredEndpoint, obstacle, scored
from kvist_epp.scheduling.tier_price import PricedPrefix

KEPT: Final = 16
"""Endpoints with the least costs that the record of a pick among many keeps."""
MAX_OTHERS: Final = 32
"""Endpoints that could not be picked and are kept with the reason; the others are counted."""
RECORDED_COLUMNS: Final = 6
FIGURES: Final = Struct("6d")
"""Of one load: seconds of backlog, time at which it is computed without events, running requests, prefill
tokens/s, seconds until a sequence slot is free, and whether the batch is full (0 or 1)."""
_NUMBERS: Final = Struct("8d")
"""Those of ``PoolCost``, the prompt's tokens, the part, the time, the longest backlog."""
_pack_numbers: Final = _NUMBERS.pack
_WAIT, _SLOT, _LOAD = map(list(TERMS).index, TTFT_TERMS)


class RecordedPool(NamedTuple):
    """The endpoints of a pool as picks found them; shared by all picks until an endpoint changes."""

    endpoints: tuple[Endpoint, ...]
    """Those that could be picked."""
    others: tuple[tuple[Endpoint, str], ...]
    """At most ``MAX_OTHERS`` of those that could not, each with the reason."""
    other_count: int
    """Number of those that could not."""

    @classmethod
    def of(cls, candidates: Iterable[Candidate], names: frozenset[str] | None = None) -> "RecordedPool":
        """Return the endpoints of these candidates; ``names``: the gateway's subset, in canonical text."""
        endpoints: list[Endpoint] = []
        others: list[tuple[Endpoint, str]] = []
        count = 0
        for candidate in candidates:
            if not (reason := obstacle(candidate, names)):
                endpoints.append(candidate.endpoint)
                continue
            count += 1
            if count <= MAX_OTHERS:
                others.append((candidate.endpoint, reason))
        return cls(tuple(endpoints), tuple(others), count)


class ColumnRecord(msgspec.Struct, frozen=True, gc=False):
    """The record of a pick over columns."""

    pool: RecordedPool
    places: Any
    """Array of the places in ``pool.endpoints`` that are kept; None: all."""
    figures: Any
    """``FIGURES`` of all places as bytes, or an array with a row for each figure and a column for each kept
    place."""
    numbers: bytes
    """``_NUMBERS`` as one object, which takes less memory and time than eight."""
    best: tuple[int, ...]
    """Places of the endpoints of the answer, best first."""
    held: tuple[int, ...]
    """Places that hold something of the prompt."""
    hits: tuple[CachedPrefix, ...]
    """What each of them holds; most hold the same."""
    policy: Policy

    @classmethod
    def of(
        cls,
        pool: RecordedPool,
        places: Any,
        figures: Any,
        best: Sequence[int],
        held: Mapping[int, CachedPrefix],
        tokens: int,
        cost: PoolCost,
        part: float,
        policy: Policy,
        now: float,
        max_backlog: float,
    ) -> "ColumnRecord":
        """Return the record of a pick.

        ``best``: places of the endpoints of the answer, best first; ``held``: what places hold of the
        prompt; ``tokens``: of the prompt; ``part``: of a copy's work that the request answers for.
        """
        numbers = _pack_numbers(
            cost.price,
            cost.mean_rate,
            cost.least_uncached,
            cost.copy_seconds,
            tokens,
            part,
            now,
            max_backlog,
        )
        return cls(pool, places, figures, numbers, tuple(best), tuple(held), tuple(held.values()), policy)

    def rows(self) -> list[ScoredEndpoint]:
        """Compute the terms of each kept endpoint; the endpoints of the answer come first, then the others by
        their cost, full ones last."""
        policy, hits = self.policy, dict(zip(self.held, self.hits, strict=True))
        price, mean_rate, fewest, copying, size, part, now, max_backlog = _NUMBERS.unpack(self.numbers)
        tokens, least = int(size), int(fewest)
        cost = PoolCost(price, mean_rate, least, copying)
        places = range(len(self.pool.endpoints)) if self.places is None else self.places.tolist()
        figures = FIGURES.iter_unpack(self.figures) if self.places is None else self.figures.T.tolist()
        rows: list[EndpointCost] = []
        slots: list[float] = []
        full: list[bool] = []
        for place, (wait, until, running, rate, slot, batch_full) in zip(places, figures, strict=True):
            left = min(wait, max(until - now, 0.0))
            hit = hits.get(place, NO_MATCH)
            uncached = uncached_tokens(tokens, hit)
            load = EndpointLoad(self.pool.endpoints[place].key, rate=rate, backlog_tokens=left * rate)
            row = EndpointCost(load, hit, uncached, uncached / rate, int(running))
            row.loading = hit.loading if isinstance(hit, PricedPrefix) else 0.0
            row.own = least + part * (uncached - least)
            rows.append(row)
            slots.append(slot)
            full.append(bool(batch_full) or left > max_backlog)
        columns = terms_in(cost, rows, policy)
        columns[_SLOT] = slots  # as it was: the number of slots is not kept
        found = [
            scored(self.pool.endpoints[place], row, tuple([column[at] for column in columns]), full=full[at])
            for at, (place, row) in enumerate(zip(places, rows, strict=True))
        ]
        turn = {place: at for at, place in enumerate(self.best)}
        last = len(turn)
        order = sorted(
            range(len(found)),
            key=lambda at: (turn.get(places[at], last), found[at].full, found[at].cost_seconds),
        )
        return [found[at] for at in order]


_WORK, _BACKLOG, _RUNNING = range(len(TERMS), len(TERMS) + 3)


class RankingRecord(msgspec.Struct, frozen=True, gc=False):
    """The record of a pick that has computed the terms of each endpoint that is kept (TPOT target)."""

    pool: RecordedPool
    places: "array[int]"
    """Places in ``pool.endpoints`` that are kept, best first."""
    whole: bool
    """All endpoints are kept, and stored in the order of ``pool.endpoints`` without sorting them, which would
    take as long as the rest; else in that of ``places``."""
    columns: "array[float]"
    """Of each kept endpoint the terms, then its work, its backlog and its running requests: column by
    column."""
    full: int
    """Bit n: the n-th stored endpoint is full."""
    deferred: int
    """Bit n: the n-th stored endpoint defers the prefill."""
    held: tuple[int, ...]
    hits: tuple[CachedPrefix, ...]
    tokens: int

    @classmethod
    def of(
        cls, pool: RecordedPool, ranking: Ranking, tokens: int, places: Sequence[int] | None = None
    ) -> "RankingRecord":
        """Return the record of a ranking of all endpoints of a pool, or of those at ``places``, best first.

        ``tokens``: of the prompt.
        """
        rows, columns = ranking.rows, array("d")
        for column in ranking.columns:
            columns.extend(column)
        columns.extend([row.work for row in rows])
        columns.extend([row.load.backlog_tokens for row in rows])
        columns.extend([row.running for row in rows])
        stored = range(len(rows)) if places is None else places
        hits = {at: row.hit for at, row in zip(stored, rows, strict=True) if row.hit is not NO_MATCH}
        return cls(
            pool,
            array("I", ranking.order if places is None else places),
            places is None,
            columns,
            _bits(ranking.full),
            _bits([row.deferred for row in rows]),
            tuple(hits),
            tuple(hits.values()),
            tokens,
        )

    def rows(self) -> list[ScoredEndpoint]:
        """Return each kept endpoint with its terms, best first."""
        hits = dict(zip(self.held, self.hits, strict=True))
        count = len(self.places)
        found = []
        for n, place in enumerate(self.places):
            at = place if self.whole else n
            values = self.columns[at::count]
            seconds, hit = tuple(values[: len(TERMS)]), hits.get(place, NO_MATCH)
            found.append(
                ScoredEndpoint(
                    self.pool.endpoints[place],
                    hit.tokens,
                    hit.bytes,
                    uncached_tokens(self.tokens, hit),
                    round(values[_BACKLOG]),
                    int(values[_RUNNING]),
                    seconds[_WAIT] + seconds[_SLOT] + seconds[_LOAD] + values[_WORK],
                    seconds,
                    full=bool(self.full >> at & 1),
                    deferred=bool(self.deferred >> at & 1),
                    loads=hit.loads if isinstance(hit, PricedPrefix) else (),
                )
            )
        return found


def _bits(flags: list[bool]) -> int:
    """Return a number whose n-th bit is the n-th flag."""
    return sum([1 << n for n, flag in enumerate(flags) if flag]) if True in flags else 0


PickRecord = ColumnRecord | RankingRecord
