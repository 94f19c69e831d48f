"""The endpoints that may take a leg of a request, with the figures that decisions read. Pure.

Among many endpoints these figures are columns, of which only those of loads that have changed are written
again, as for picks (``load_columns``). What depends on the endpoints alone is found once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from kvist_epp.load.endpoint_load import DEFAULT_TRANSFER_RATE, EndpointLoad
from kvist_epp.load.prefill_share import MEMORY_SECONDS
from kvist_epp.scheduling.best_endpoints import Places, Vector
from kvist_epp.scheduling.cost import CachedPrefix, Policy, slot_seconds
from kvist_epp.scheduling.held_columns import HeldColumns, TierColumns
from kvist_epp.scheduling.pick import Candidate, canonical, named
from kvist_epp.scheduling.tpot_columns import TpotColumns

NONE_RESTS: Final[frozenset[str]] = frozenset()
FEW_LEGS: Final = 24
"""Endpoints up to which looking at each is faster than operations on arrays."""
_PARTS: Final = 64
"""Parts of a pool whose endpoints are remembered."""


class LegFigures:
    """The figures of loads that decisions about legs read: a column each, with a place for each endpoint."""

    __slots__ = (
        "_columns",
        "backlog",
        "computed_at",
        "counted",
        "decode_seconds",
        "first_done_at",
        "kv_full_at",
        "promised",
        "rate",
        "receives_until",
        "running",
        "seconds",
        "share_at",
        "share_seconds",
        "slot",
        "slot_limit",
        "tiers",
        "tpot",
        "transfer_rate",
        "waiting",
    )

    def __init__(self, columns: Vector, tpot: TpotColumns | None, tiers: TierColumns) -> None:
        """``columns``: one for each of the names below, in their order."""
        self._columns = columns
        self.rate: Vector
        """Prefill tokens/s."""
        self.seconds: Vector
        """Of prefill for a token."""
        self.backlog: Vector
        """Seconds of it, as of the last change."""
        self.computed_at: Vector
        """Time at which it is computed without further events; infinite where it does not drain."""
        self.first_done_at: Vector
        """Time at which the oldest prompt is."""
        self.waiting: Vector
        """Requests whose prompts are not computed yet."""
        self.running: Vector
        self.counted: Vector
        """Of these, the requests that take a slot."""
        self.slot_limit: Vector
        """Requests from which the batch is full."""
        self.slot: Vector
        """Seconds until a sequence slot is free."""
        self.kv_full_at: Vector
        """Sequences with which the KV cache was full; infinite where it was not."""
        self.decode_seconds: Vector
        """Mean time from first to last token; 0: not learned."""
        self.share_seconds: Vector
        """Seconds of prefill that were sent in the last moments, as of …"""
        self.share_at: Vector
        """… this time."""
        self.transfer_rate: Vector
        """Tokens/s received from other endpoints."""
        self.promised: Vector
        """Tokens that will be transferred."""
        self.receives_until: Vector
        """Time at which the tokens on their way will have arrived."""
        (
            self.rate,
            self.seconds,
            self.backlog,
            self.computed_at,
            self.first_done_at,
            self.waiting,
            self.running,
            self.counted,
            self.slot_limit,
            self.slot,
            self.kv_full_at,
            self.decode_seconds,
            self.share_seconds,
            self.share_at,
            self.transfer_rate,
            self.promised,
            self.receives_until,
        ) = columns
        self.tpot = tpot
        """Figures of their TPOT targets; None: there is no target."""
        self.tiers = tiers

    @classmethod
    def of(cls, loads: Sequence[EndpointLoad]) -> "LegFigures":
        """Return the figures of these loads."""
        tpot = None if loads[0].tpot is None else TpotColumns.of(loads)  # of all endpoints, or of none
        return cls(np.array([_figures(load) for load in loads]).T, tpot, TierColumns(loads))

    def refresh(self, at: int, load: EndpointLoad) -> None:
        """Copy the figures of the load at this place, which has changed."""
        self._columns[:, at] = _figures(load)
        self.tiers.refresh(at)
        if self.tpot is not None:
            self.tpot.refresh(at, load)

    def take(self, places: Places) -> "LegFigures":
        """Return the figures of a part of the endpoints."""
        tpot = None if self.tpot is None else self.tpot.take(places)
        return LegFigures(self._columns[:, places], tpot, self.tiers.take(places))

    def held(
        self, hits: Mapping[str, CachedPrefix], place: Mapping[str, int], policy: Policy, now: float
    ) -> HeldColumns:
        """Return what the endpoints at these places hold of a prompt."""
        return HeldColumns.of(hits, place, self.tiers, self.seconds, policy, now)

    def share_of_prompts(self, now: float) -> Vector:
        """Return the part of each endpoint's time that goes to prompts (``PrefillShare.at``)."""
        faded = np.minimum(0.0, self.share_at - now)
        faded /= MEMORY_SECONDS
        np.exp(faded, out=faded)
        faded *= self.share_seconds
        faded /= MEMORY_SECONDS
        return faded


def _figures(load: EndpointLoad) -> tuple[float, ...]:
    rate, slots, running = load.rate, load.slots, load.running
    decode, kv_full_at = load.decode_seconds or 0.0, load.kv_full_at
    backlog, share = load.backlog_tokens / rate, load.prefill_share
    return (
        rate,
        1.0 / rate,
        backlog,
        load.drains_from + backlog,
        load.first_done_at,
        len(load.prefill_queue),
        running,
        load.counted_requests,
        load.slot_limit,
        slot_seconds(running, slots, decode),
        inf if kv_full_at is None else kv_full_at,
        decode,
        share.seconds,
        share.noted_at,
        load.transfer_rate or DEFAULT_TRANSFER_RATE,
        load.promised_tokens,
        load.receives_until,
    )


class WarmPairs:
    """Pairs of engines whose handshake is done; NIXL connects two engines at their first transfer."""

    def __init__(self) -> None:
        self._decodes: dict[str, set[str]] = {}
        self._prefills: dict[str, set[str]] = {}

    def add(self, prefill: str, decode: str) -> None:
        """Note that blocks were transferred from one endpoint to another (keys)."""
        self._decodes.setdefault(prefill, set()).add(decode)
        self._prefills.setdefault(decode, set()).add(prefill)

    def remove_endpoint(self, key: str) -> None:
        """Forget the pairs of an endpoint that has left or restarted."""
        for decode in self._decodes.pop(key, ()):
            self._prefills.get(decode, set()).discard(key)
        for prefill in self._prefills.pop(key, ()):
            self._decodes.get(prefill, set()).discard(key)

    def decodes_of(self, prefill: str) -> Collection[str]:
        """Return the endpoints to which an endpoint has transferred blocks."""
        return self._decodes.get(prefill, ())

    def prefills_of(self, decode: str) -> Collection[str]:
        """Return the endpoints from which an endpoint has got blocks."""
        return self._prefills.get(decode, ())

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return pair[1] in self._decodes.get(pair[0], ())

    def __len__(self) -> int:
        return sum(map(len, self._decodes.values()))


class LegGroup(NamedTuple):
    """Endpoints that can exchange blocks, by their places."""

    prefills: Places
    decodes: Places
    can_prefill: frozenset[int]
    can_decode: frozenset[int]


class LegTable:
    """The endpoints of a pool that may take a leg; made anew when their set or their readiness changes."""

    def __init__(self, candidates: Iterable[Candidate], few: int = FEW_LEGS) -> None:
        """``few``: endpoints up to which there are no columns, since each is looked at."""
        self.candidates = tuple([one for one in candidates if one.ready])
        self.figures: LegFigures | None = None
        """None: there are few endpoints."""
        self._place_of_load: dict[EndpointLoad, int] = {}
        self.place: dict[str, int] = {}
        """By key of the endpoint."""
        self.groups: list[LegGroup] = []
        self.takers: Any = None
        """Flags of the endpoints that take requests."""
        self.decoders: Any = None
        """Flags of those that may answer."""
        # a cache that knows this table would keep it until the collector finds the cycle
        self._part = lru_cache(_PARTS)(partial(_find_part, self.candidates, few))
        if len(self.candidates) > few:
            self._index()
            self.figures = LegFigures.of(list(self._place_of_load))

    def _index(self) -> None:
        places: dict[str, tuple[list[int], list[int]]] = {}
        for at, candidate in enumerate(self.candidates):
            endpoint = candidate.endpoint
            self.place[endpoint.key] = self._place_of_load[candidate.load] = at
            first, second = places.setdefault(endpoint.kv_compatibility, ([], []))
            if endpoint.can_prefill:
                first.append(at)
            if endpoint.can_decode:
                second.append(at)
        self.groups = [
            LegGroup(np.array(first, np.intp), np.array(second, np.intp), frozenset(first), frozenset(second))
            for first, second in places.values()
        ]
        self.takers = np.array([not one.refusal for one in self.candidates])
        self.decoders = np.array([one.endpoint.can_decode for one in self.candidates])

    def refresh(self, load: EndpointLoad) -> None:
        """Copy the figures of a load that has changed."""
        if self.figures is not None and (at := self._place_of_load.get(load)) is not None:
            self.figures.refresh(at, load)

    def drain(self, now: float) -> None:
        """Drain the loads of which time has computed a prompt by now, and copy their figures."""
        if self.figures is None:
            return
        for at in (self.figures.first_done_at <= now).nonzero()[0].tolist():
            load = self.candidates[at].load
            load.drain(now)
            self.figures.refresh(at, load)

    def among(self, subset: tuple[str, ...] | None, resting: frozenset[str] = NONE_RESTS) -> "LegTable":
        """Return the endpoints of the gateway's subset (None: all) without those that rest (keys)."""
        if subset is None and not resting:
            return self
        part, places = self._part(None if subset is None else canonical(subset), resting)
        if part.figures is not None and self.figures is not None:
            part.figures = self.figures.take(places)
        return part


def _find_part(
    candidates: Sequence[Candidate], few: int, names: frozenset[str] | None, resting: frozenset[str]
) -> tuple[LegTable, Places]:
    places = [
        at
        for at, one in enumerate(candidates)
        if one.endpoint.key not in resting and (names is None or named(names, one.endpoint))
    ]
    return LegTable([candidates[at] for at in places], few), np.array(places, np.intp)
