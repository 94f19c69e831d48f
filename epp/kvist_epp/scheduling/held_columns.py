"""The parts of a prompt that many endpoints hold, as columns, with the price of loading them. Pure.

Where endpoints share a storage, a thousand of them hold the same prompt there. The price of loading it
(``tier_price``) takes 2.4 us for each of them, and some twenty operations on arrays for all.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import msgspec
import numpy as np

from kvist_epp.load.endpoint_load import EndpointLoad, lane
from kvist_epp.scheduling.best_endpoints import Flags, Places, Vector
from kvist_epp.scheduling.cost import NO_MATCH, CachedPrefix, Policy, PoolCost, pool_cost
from kvist_epp.scheduling.tier_price import PricedPrefix, price_tiers

_NOWHERE: Final[Places] = np.empty(0, np.intp)
_NOTHING: Final[Vector] = np.empty(0)
FEW_HOLDERS: Final = 8
"""Endpoints up to which a loop is faster than operations on arrays."""


class TierColumns:
    """The figures that the price of loading reads: columns by medium, with a place for each endpoint."""

    __slots__ = ("_limits", "_loads", "_media", "_until")

    def __init__(self, loads: Sequence[EndpointLoad], limits: Flags | None = None) -> None:
        """``limits``: whether each engine can be kept from loading; None: it is read."""
        self._loads = loads
        self._media: dict[str, tuple[Vector, Flags]] = {}
        """Tokens/s loaded (0: not measured), and whether it is skipped; of the media asked for so far."""
        self._until: dict[str, Vector] = {}
        """By lane: when the loads that were sent will be done."""
        self._limits = np.array([load.limits_loads for load in loads]) if limits is None else limits

    def refresh(self, at: int) -> None:
        """Copy the figures of the load at this place, which has changed."""
        load = self._loads[at]
        self._limits[at] = load.limits_loads
        for medium, (rates, skipped) in self._media.items():
            rates[at] = load.tier_rates.get(medium) or 0.0
            skipped[at] = medium in load.skipped_media
        for way, until in self._until.items():
            until[at] = load.loading_until.get(way, -inf)

    def take(self, places: Places) -> "TierColumns":
        """Return the columns of a part of the endpoints."""
        found = TierColumns([self._loads[at] for at in places.tolist()], self._limits[places])
        for medium, (rates, skipped) in self._media.items():
            found._media[medium] = rates[places], skipped[places]
        found._until = {way: until[places] for way, until in self._until.items()}
        return found

    def _add(self, medium: str) -> None:
        if medium in self._media:
            return
        rates = [load.tier_rates.get(medium) or 0.0 for load in self._loads]
        skipped = [medium in load.skipped_media for load in self._loads]
        self._media[medium] = np.array(rates), np.array(skipped)
        if (way := lane(medium)) not in self._until:
            self._until[way] = np.array([load.loading_until.get(way, -inf) for load in self._loads])

    def alone(self, at: int, held: CachedPrefix, policy: Policy, now: float) -> PricedPrefix:
        """Return the price of what the endpoint at this place holds."""
        return price_tiers(self._loads[at], held.tokens, held.bytes, held.lower, policy.load_rates, now)

    def price(
        self,
        places: Places,
        cached: Vector,
        lower: Mapping[str, Vector],
        seconds: Vector,
        policy: Policy,
        now: float,
    ) -> tuple[Vector, Vector]:
        """Return the cached tokens and the seconds of loading that ``price_tiers`` returns of each endpoint.

        ``cached``: tokens, ``lower``: those by slower medium, ``seconds``: of prefill for a token; all at
        these places.
        """
        defaults, limits = policy.load_rates, self._limits[places]
        slowest = min(defaults.values())
        rates: dict[str, Vector] = {}
        own: dict[str, Vector] = {}  # seconds of loading less those of computing, by lane
        wait: dict[str, Vector] = {}
        for medium, tokens in lower.items():
            self._add(medium)
            measured, way = self._media[medium][0][places], lane(medium)
            rate = rates[medium] = np.where(measured > 0.0, measured, defaults.get(medium, slowest))
            own[way] = own.get(way, 0.0) + tokens * (1.0 / rate - seconds)
            wait[way] = np.maximum(0.0, self._until[way][places] - now)
        refused: dict[str, Flags] = {}
        for medium in lower:
            way = lane(medium)
            late = limits & (wait[way] > 0.0) & (wait[way] + own[way] > 0.0)
            refused[medium] = late | self._media[medium][1][places]
        loading, loads = np.zeros(len(places)), dict.fromkeys(wait, np.zeros(len(places), np.bool_))
        for medium, tokens in lower.items():
            skipped, rate = refused[medium], rates[medium]
            for other, quicker in rates.items():  # what follows a skipped part cannot be used
                if other != medium:
                    before = quicker >= rate if other > medium else quicker > rate
                    skipped = skipped | (refused[other] & before)
            cached = cached - np.where(skipped, tokens, 0.0)
            loading += np.where(skipped, 0.0, tokens / rate)
            loads[lane(medium)] = loads[lane(medium)] | ~skipped
        for way, some in loads.items():
            loading += np.where(some, wait[way], 0.0)
        return np.maximum(0.0, cached), loading


class HeldColumns(msgspec.Struct):
    """The endpoints of a pool that hold something of a prompt, and how much of it."""

    hits: dict[int, CachedPrefix]
    """By place, without the price of loading."""
    places: Places
    """The same places."""
    tokens: Vector
    """Cached tokens, without those that are computed although a slower tier holds them."""
    tiers: TierColumns
    loading: Vector | None = None
    """Seconds of loading from slower tiers; None: nothing is loaded."""

    @classmethod
    def of(
        cls,
        hits: Mapping[str, CachedPrefix],
        place: Mapping[str, int],
        tiers: TierColumns,
        seconds: Vector,
        policy: Policy,
        now: float,
    ) -> "HeldColumns":
        """Return what these endpoints hold; those without a place are left out.

        ``seconds``: of prefill for a token on each endpoint.
        """
        if not hits:
            return cls({}, _NOWHERE, _NOTHING, tiers)
        held = {place[key]: hit for key, hit in hits.items() if key in place}
        places = np.fromiter(held, np.intp, len(held))
        tokens = np.fromiter([hit.tokens for hit in held.values()], np.float64, len(held))
        found = cls(held, places, tokens, tiers)
        tiered: dict[tuple[str, ...], list[int]] = {}
        before, numbers = None, list[int]()
        for number, hit in enumerate(held.values()):
            if hit is not before:  # of a popular prompt, hundreds hold the same
                before, numbers = hit, tiered.setdefault(tuple(hit.lower), [])
            numbers.append(number)
        tiered.pop((), None)
        if tiered:
            found.loading = np.zeros(len(held))
        for numbers in tiered.values():
            found._price(numbers, seconds, policy, now)
        return found

    def _price(self, numbers: list[int], seconds: Vector, policy: Policy, now: float) -> None:
        """Set the price where endpoints load from the same media; ``numbers``: among the holders."""
        assert self.loading is not None
        at = np.array(numbers)
        places = self.places[at]
        hits = [self.hits[place] for place in places.tolist()]
        if len(numbers) <= FEW_HOLDERS:
            for number, place, hit in zip(numbers, places.tolist(), hits, strict=True):
                priced = self.tiers.alone(place, hit, policy, now)
                self.tokens[number], self.loading[number] = priced.tokens, priced.loading
            return
        lower = {
            medium: np.fromiter([hit.lower[medium] for hit in hits], np.float64, len(hits))
            for medium in hits[0].lower
        }
        self.tokens[at], self.loading[at] = self.tiers.price(
            places, self.tokens[at], lower, seconds[places], policy, now
        )

    def uncached(self, count: int, tokens: int) -> Vector:
        """Return the tokens of a prompt that each of ``count`` endpoints would compute."""
        found = np.full(count, float(tokens))
        if tokens:  # one that is wholly cached still computes its last token
            found[self.places] = np.maximum(tokens - self.tokens, 1.0)
        return found

    def pool_cost(
        self, running: float, kv_full: float, mean_rate: float, tokens: int, uses: float, policy: Policy
    ) -> tuple[PoolCost, float]:
        """Return what ``cost.pool_cost`` returns."""
        held = self.tokens.tolist()
        # a prompt that is wholly cached still computes its last token
        least = max(tokens - int(max(held, default=0)), min(tokens, 1))
        return pool_cost(running, kv_full, mean_rate, least, held, tokens, uses, policy)

    def priced(self, at: int, policy: Policy, now: float) -> CachedPrefix:
        """Return what the endpoint at this place holds, with the price of loading."""
        hit = self.hits.get(at, NO_MATCH)
        return self.tiers.alone(at, hit, policy, now) if hit.lower else hit
