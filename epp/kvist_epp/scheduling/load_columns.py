"""Figures of the loads of a pool, column by column, for picks among many endpoints. Pure."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from kvist_epp.scheduling.best_endpoints import Places, Vector
from kvist_epp.scheduling.cost import CachedPrefix, Policy, slot_seconds
from kvist_epp.scheduling.held_columns import HeldColumns, TierColumns
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.scheduling.pick_record import FIGURES, RECORDED_COLUMNS, RecordedPool
from kvist_epp.scheduling.tpot_columns import TpotColumns

_pack_figures: Final = FIGURES.pack_into

FEW: Final = 48
"""Endpoints up to which a loop is faster than operations on arrays."""


def drained(wait: Vector, until: Vector, now: float) -> Vector:
    """Return backlogs in seconds as ``EndpointLoad.drain`` to ``now`` would leave them.

    ``wait``: seconds as of the last change, ``until``: when they are computed without further events.
    """
    left = until - now
    np.minimum(left, wait, out=left)
    return np.maximum(left, 0.0, out=left)


class EndpointSubset(NamedTuple):
    """A part of the endpoints of a pool."""

    candidates: tuple[Candidate, ...]
    place: Mapping[str, int]
    """By key: place among ``candidates``."""
    places: Places
    """Their places in the pool."""
    pool: RecordedPool | None
    """The same endpoints for the records of picks; None: picks are not recorded."""

    @classmethod
    def of(
        cls, candidates: Sequence[Candidate], pool: RecordedPool | None, places: Sequence[int] | None = None
    ) -> "EndpointSubset":
        """Return a part of a pool: the endpoints at these places; None: all of them."""
        places = range(len(candidates)) if places is None else places
        some = tuple([candidates[at] for at in places])
        place = {one.endpoint.key: at for at, one in enumerate(some)}
        return cls(some, place, np.array(places, np.intp), pool)


class LoadColumns:
    """Figures of the loads that picks read: a list for each figure, a place in it for each endpoint.

    The lists are arrays where there are more than ``FEW`` endpoints.
    """

    __slots__ = (
        "_columns",
        "batch_full",
        "candidates",
        "full",
        "full_batches",
        "kv_full",
        "many",
        "none",
        "packed",
        "parts",
        "place",
        "pool",
        "rate",
        "recorded",
        "running",
        "running_seconds",
        "seconds",
        "slot",
        "standing",
        "tiers",
        "total_kv_full",
        "total_rate",
        "total_running",
        "tpot",
        "uniform",
        "wait",
        "waiting_until",
        "waits_until",
    )

    def __init__(self, endpoints: EndpointSubset, whole: "LoadColumns | None" = None) -> None:
        """``whole``: columns of the pool of which these endpoints are a part; None: the loads are read."""
        self.candidates, self.place, places, self.pool = endpoints
        count = len(self.candidates)
        self.many = count > FEW
        columns: Any = np.zeros((11, count)) if self.many else [[0.0] * count for _ in range(11)]
        self._columns = columns
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
        self.wait, self.waits_until, self.running, self.rate, self.slot, self.batch_full, *more = columns
        self.seconds, self.full, self.kv_full, self.standing, self.none = more
        """``standing``: cost of the running requests and of the wait for a slot, which only an event changes.
        ``none``: zeros."""
        self.running_seconds = 0.0
        """Cost of a running request in ``standing``."""
        self.uniform = True
        """All endpoints prefill at one rate."""
        self.parts: Any = np.arange(0, count, max(1, count // 32)) if self.many else None
        """Starts of some 32 equal parts of the columns; for arrays only."""
        self.recorded: Any = columns[:RECORDED_COLUMNS]
        """The columns that records of picks take their figures from, in the order of ``FIGURES``."""
        self.packed = bytearray(FIGURES.size * count) if self.pool and not self.many else None
        """The same of few endpoints: ``FIGURES`` of each, which records copy as a whole."""
        self.tiers: TierColumns | None = None
        """Figures of their slower tiers, once a prompt is there; for arrays only."""
        self.tpot: TpotColumns | None = None
        """Figures of their TPOT targets; for arrays only."""
        if self.many and self.candidates[0].load.tpot is not None:  # of all endpoints, or of none
            self.tpot = TpotColumns(count)
        self.total_running = self.total_kv_full = self.total_rate = self.full_batches = 0.0
        self.waiting_until = 0.0
        """No endpoint has a backlog from this time on, unless one gets another."""
        if whole is not None:
            self._copy(whole, places)
            return
        for at in range(count):
            self.refresh(at)

    def _copy(self, whole: "LoadColumns", places: Places) -> None:
        """Copy the figures of the endpoints at these places of a pool."""
        self.running_seconds, self.waiting_until = whole.running_seconds, whole.waiting_until
        if self.many:
            self._columns[:] = whole._columns[:, places]
            totals = [float(each.sum()) for each in (self.running, self.kv_full, self.rate, self.batch_full)]
            self.uniform = False
            self.tpot = None if whole.tpot is None else whole.tpot.take(places)
            self.tiers = None if whole.tiers is None else whole.tiers.take(places)
        else:
            at = places.tolist()
            taken = (
                whole._columns[:, places].tolist()
                if whole.many
                else [[values[n] for n in at] for values in whole._columns]
            )
            for column, values in zip(self._columns, taken, strict=True):
                column[:] = values
            totals = [sum(each) for each in (self.running, self.kv_full, self.rate, self.batch_full)]
            self.uniform = self.rate.count(self.rate[0]) == len(at) if at else True
            if self.packed is not None:
                self.packed[:] = b"".join(map(FIGURES.pack, *self.recorded))
        self.total_running, self.total_kv_full, self.total_rate, self.full_batches = totals

    def refresh(self, at: int) -> None:
        """Copy the figures of the load at this place, which has changed."""
        load = self.candidates[at].load
        rate, slots, kv_full = load.rate, load.slots, load.kv_full_at is not None
        running = len(load.attempts) + load.untracked_requests + load.reserved
        wait, until = load.backlog_tokens / rate, inf
        if wait:
            until = load.drains_from + wait
            if wait > 0.0 and until > self.waiting_until:
                self.waiting_until = until
        self.wait[at], self.waits_until[at] = wait, until
        slot, batch_full = 0.0, False
        if slots is not None and running >= slots:  # no batch is full with fewer
            slot = slot_seconds(running, slots, load.decode_seconds or 0.0)
            batch_full = load.counted_requests >= load.slot_limit
        self.total_running += running - self.running[at]
        self.running[at], self.slot[at] = running, slot
        self.standing[at] = self.running_seconds * running + slot
        self.full_batches += batch_full - self.batch_full[at]
        self.batch_full[at] = batch_full
        self.full[at] = batch_full or (kv_full and load.kv_cache_full)
        self.total_kv_full += kv_full - self.kv_full[at]
        self.kv_full[at] = kv_full
        if rate != self.rate[at]:
            self.total_rate += rate - self.rate[at]
            self.rate[at] = rate
            self.seconds[at] = 1.0 / rate
            self.uniform = self.rate.count(rate) == len(self.rate) if not self.many else False
        if self.many:  # numbers of numpy would get into what is shown
            self.total_running, self.total_rate = float(self.total_running), float(self.total_rate)
            self.total_kv_full = float(self.total_kv_full)
        if self.tpot is not None:
            self.tpot.refresh(at, load)
        if self.tiers is not None:
            self.tiers.refresh(at)
        if self.packed is not None:
            _pack_figures(self.packed, at * FIGURES.size, wait, until, running, rate, slot, batch_full)

    def price_running(self, seconds: float) -> None:
        """Set the cost of a running request in ``standing``."""
        if seconds != self.running_seconds:
            self.running_seconds = seconds
            for at in range(len(self.candidates)):
                self.standing[at] = seconds * self.running[at] + self.slot[at]

    def part(self, endpoints: EndpointSubset, running_seconds: float) -> "LoadColumns":
        """Return the columns of a part of the endpoints, as of now.

        ``running_seconds``: cost of a running request.
        """
        self.price_running(running_seconds)
        return LoadColumns(endpoints, self)

    def held(self, hits: Mapping[str, CachedPrefix], policy: Policy, now: float) -> HeldColumns:
        """Return what many endpoints hold of a prompt, by keys of endpoints."""
        if self.tiers is None:
            self.tiers = TierColumns([one.load for one in self.candidates])
        return HeldColumns.of(hits, self.place, self.tiers, self.seconds, policy, now)

    def figures(self, places: Any) -> Any:
        """Return the ``FIGURES`` of the endpoints at these places for a record: packed those of all for None,
        else an array."""
        return bytes(self.packed or b"") if places is None else self.recorded.take(places, axis=1)

    def wait_at(self, now: float) -> Any:
        """Return the seconds until the backlogs are computed, drained to ``now`` as ``EndpointLoad.drain``
        does; the caller changes none."""
        if now >= self.waiting_until:
            return self.none
        if self.many:
            return drained(self.wait, self.waits_until, now)
        return [
            wait if until - now > wait else until - now if until > now else 0.0
            for wait, until in zip(self.wait, self.waits_until, strict=True)
        ]

    def full_now(self, now: float, max_backlog: float) -> Any:
        """Return which endpoints have a full batch or more than ``max_backlog`` seconds to wait; None where
        none is full."""
        wait = self.wait
        if not self.full_batches and (wait[wait.argmax()] if self.many else max(wait)) <= max_backlog:
            return None  # a backlog only drains
        wait = self.wait_at(now)
        if self.many:
            full = (self.batch_full > 0) | (wait > max_backlog)
            return full if full.any() else None
        found = [bool(full) or w > max_backlog for full, w in zip(self.batch_full, wait, strict=True)]
        return found if True in found else None
