"""The costs of both legs at many endpoints at once, to find the few that ``split_decision`` compares. Pure.

A ``LegCosts`` of each endpoint takes 14 us, which is 14 ms for a thousand. Here the same terms are columns;
the endpoints that are the best for one leg or for both become ``LegCosts``, whose figures are shown. The
formulas are those of ``leg_costs``, ``cost`` and ``split_decision`` (``docs/decisions/0066``).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from math import inf
from typing import Final

import numpy as np

from kvist_epp.load.prefill_share import MEMORY_SECONDS
from kvist_epp.load.tpot_admission import LEAST_SHARE, STEP_SECONDS
from kvist_epp.scheduling.best_endpoints import Flags, Places, Vector, least
from kvist_epp.scheduling.cost import (
    Policy,
    complete,
    terms_in,
)
from kvist_epp.scheduling.leg_costs import (
    DisaggregationPolicy,
    LegCosts,
    pressure,
)
from kvist_epp.scheduling.leg_table import LegFigures, LegTable, WarmPairs
from kvist_epp.scheduling.load_columns import drained
from kvist_epp.scheduling.pick import Demand, cost_rows

PAIRED: Final = 4
"""Of each set of compatible endpoints, the cheapest for either leg that are paired with each other, or each
with so many that it has met."""


class LegColumns:
    """All endpoints for one request, column by column."""

    def __init__(
        self,
        table: LegTable,
        figures: LegFigures,
        demand: Demand,
        now: float,
        policy: Policy,
        rules: DisaggregationPolicy,
        max_backlog: float,
    ) -> None:
        """``figures``: those of the table, as of the last ``LegTable.drain``."""
        self.table, self.figures, self.demand, self.now = table, figures, demand, now
        self.policy, self.rules, self.max_backlog = policy, rules, max_backlog
        self.count = len(table.candidates)
        self.rate, self.seconds, self.running = figures.rate, figures.seconds, figures.running
        self.slot, self.tpot = figures.slot, figures.tpot
        self.backlog = drained(figures.backlog, figures.computed_at, now)
        self.share = figures.share_of_prompts(now)
        held = figures.held(demand.hits, table.place, policy, now)
        self.uncached = held.uncached(self.count, demand.tokens)
        self.loading = np.zeros(self.count)
        if held.loading is not None:
            self.loading[held.places] = held.loading
        running, rate = float(self.running.mean()), float(figures.rate.mean())
        kv_full = float((figures.kv_full_at < inf).mean())
        self.pool, self.part = held.pool_cost(running, kv_full, rate, demand.tokens, demand.uses, policy)
        self.own = self.pool.least_uncached + self.part * (self.uncached - self.pool.least_uncached)
        slowest = float((figures.decode_seconds * table.decoders).max())
        self.answer_seconds = slowest or rules.decode_seconds
        """How long answers take (``leg_costs.decode_seconds``)."""
        self.per_sequence = 0.0 if self.tpot is None else self.tpot.seconds_per_sequence()

    # Terms of the ordinary cost

    @cached_property
    def wait(self) -> Vector:
        """Seconds of backlog, and a part of what is queued in the picker."""
        if self.tpot is None:
            return self.backlog
        found: Vector = self.backlog + self.policy.queued_share * self.tpot.queued_seconds
        return found

    @cached_property
    def tightness(self) -> Vector:
        """Factor by which prefill takes longer than on the mean endpoint."""
        return np.ones(self.count) if self.tpot is None else self.tpot.tightness(self.policy)

    @cached_property
    def deferred(self) -> Flags:
        """Whose TPOT target defers the prompt."""
        if self.tpot is None:
            return np.zeros(self.count, dtype=np.bool_)
        return self.tpot.deferred(self.uncached, self.seconds, self.backlog, self.now)

    @cached_property
    def eviction(self) -> Vector:
        """Seconds that others compute again because of evicted blocks."""
        found: Vector = self.policy.evicted * self.own / self.pool.mean_rate
        return found

    # What the legs add

    @cached_property
    def closed(self) -> Flags:
        """Whose batch, backlog or KV cache is full, or which has no blocks for the prompt."""
        counted = self.figures.counted
        full: Flags = (counted >= self.figures.slot_limit) | (counted >= self.figures.kv_full_at)
        full |= self.backlog > self.max_backlog
        return full if self.tpot is None else full | self.tpot.no_room(self.uncached)

    @cached_property
    def deferral(self) -> Vector:
        """Seconds until the TPOT target lets an endpoint take up the prompt."""
        if self.tpot is None:
            return np.zeros(self.count)
        lacking = np.minimum(STEP_SECONDS, self.uncached * self.seconds) - self.tpot.allowance(self.now)
        until = (np.maximum(0.0, lacking) + self.tpot.queued_seconds) / self.tpot.prefill_share
        usual = self.policy.deferred_seconds * self.tightness
        return np.where(self.deferred, np.maximum(usual, until), 0.0)

    @cached_property
    def allowed(self) -> Vector:
        """Part of the time of each endpoint that prompts may take, with the sequences that it has now."""
        if self.tpot is None:
            return np.ones(self.count)
        return self.tpot.share_with(self.decoding, self.per_sequence)

    @cached_property
    def decoding(self) -> Vector:
        """Sequences that decode."""
        return np.maximum(0.0, self.running - self.figures.waiting)

    @cached_property
    def pressure(self) -> float:
        """Pressure of prompts on the endpoints, 0..1."""
        return pressure(float(self.share.mean()), float(self.allowed.mean()), self.rules)

    @cached_property
    def opening(self) -> Vector:
        """Price of a sequence where there are few."""
        found: Vector = (
            self.rules.opening_seconds * self.pressure / (1.0 + (self.decoding / self.rules.opened) ** 2)
        )
        return found

    @cached_property
    def interference(self) -> Vector:
        """Price of what prompts to come will do to a sequence."""
        rules = self.rules
        if self.tpot is None:
            found: Vector = self.policy.price_running * self.answer_seconds * self._odds(self.share)
            return found
        crowd = np.clip((rules.crowded - self.allowed) / (rules.crowded - LEAST_SHARE), 0.0, 1.0)
        return np.maximum(self._slow(self.share), crowd) * rules.slow_seconds

    @cached_property
    def prefill_seconds(self) -> Vector:
        """The work that the request answers for, times its price at each endpoint."""
        rules, own, work = self.rules, self.own * self.seconds, self.uncached * self.seconds
        price = self.policy.price_running
        if self.tpot is None:
            return own * (1.0 + price * self.decoding)
        passing = max(1.0, MEMORY_SECONDS / self.answer_seconds)
        slower = self._slow(self.share + work / MEMORY_SECONDS) - self._slow(self.share)
        return (
            own + np.minimum(rules.slow_seconds * passing * slower, rules.most_price * work) * self.decoding
        )

    def _odds(self, share: Vector) -> Vector:
        share = np.minimum(share, self.rules.most_share)
        return share / (1.0 - share)

    def _slow(self, share: Vector) -> Vector:
        allowed = np.where(self.allowed >= 1.0, self.rules.usual_share, self.allowed)
        ratio = self._odds(share) / np.maximum(self._odds(allowed), 0.01)
        cube = ratio * ratio * ratio  # ten times as fast as a power
        return cube / (1.0 + cube)

    @cached_property
    def decode(self) -> Vector:
        """A little per sequence."""
        return self.policy.running_seconds * self.running

    @cached_property
    def whole_cost(self) -> Vector:
        """Cost of both legs, by which endpoints for both are compared."""
        work = self.pool.price * self.own * self.seconds * self.tightness
        copy = self.pool.copy_seconds * (self.uncached - self.pool.least_uncached)
        ordinary = self.wait + self.slot + work + self.loading + self.decode + self.eviction + copy
        found: Vector = ordinary + self.deferral + self.interference + self.opening
        return found

    @cached_property
    def prefill_wait(self) -> Vector:
        """Seconds until the prefill begins, loads from slower tiers included."""
        return self.wait + self.slot + self.deferral + self.loading

    @cached_property
    def prefill_cost(self) -> Vector:
        """Cost of the first leg."""
        return self.prefill_wait + self.prefill_seconds + self.eviction

    @cached_property
    def queue_seconds(self) -> Vector:
        """Seconds until what is on its way and what is promised has arrived."""
        figures = self.figures
        until: Vector = np.maximum(0.0, figures.receives_until - self.now)
        return until + figures.promised / figures.transfer_rate

    @cached_property
    def transfer_seconds(self) -> Vector:
        """Seconds of receiving what an endpoint does not hold of the prompt."""
        return self.rules.leg_seconds + self.uncached / self.figures.transfer_rate

    @cached_property
    def room_seconds(self) -> Vector:
        """Seconds until there are a slot and blocks for the request."""
        if self.tpot is None:
            return self.slot
        return self.slot + self.tpot.no_room(self.uncached) * self.policy.deferred_seconds

    @cached_property
    def decode_cost(self) -> Vector:
        """Cost of the second leg, without its wait behind prompts."""
        fixed = self.queue_seconds + self.transfer_seconds + self.room_seconds + self.decode
        return fixed + self.interference + self.opening

    def pair_cost(self, prefill: Places, decode: Places, cold: Flags) -> Vector:
        """Return the costs of pairs, the sums of what ``split_decision`` shows of each.

        ``cold``: which of the pairs have not met.
        """
        handshake = self.rules.handshake_seconds * cold
        computed = self.prefill_wait[prefill] + self.uncached[prefill] * self.seconds[prefill]
        transfer = self.transfer_seconds[decode]
        transfer += np.maximum(0.0, self.queue_seconds[decode] - computed)
        transfer += handshake
        waits = np.maximum(0.0, self.wait[decode] - (computed + transfer))
        copy = self.policy.copy_seconds * self.uncached[decode] / max(1, self.demand.tokens)
        answer = self.room_seconds + self.decode + self.interference + self.opening
        found: Vector = self.prefill_cost[prefill] + transfer + waits + answer[decode] + copy
        return found

    # The best

    def cheapest_whole(self) -> int | None:
        """Return the place of the cheapest endpoint for both legs; None: all are full or defer the prompt."""
        costs = np.where(self.closed | self.deferred | ~self.table.takers, inf, self.whole_cost)
        at = int(costs.argmin())
        return None if costs[at] == inf else at

    def cheapest_pair(self, warm: WarmPairs | None) -> tuple[int, int] | None:
        """Return the places of the cheapest pair for the two legs; None: there is none.

        Pairs that have met come first, then those of which no endpoint is closed. The cheapest endpoints for
        either leg are compared with each other and, if some of them have not met, each of them with the
        cheapest that it has met.
        """
        pairs: list[tuple[int, int]] = []
        for group in self.table.groups:
            first = self._cheapest(self.prefill_cost, group.prefills)
            second = self._cheapest(self.decode_cost, group.decodes)
            here = list(product(first, second))
            pairs += here
            if warm is None or all(one == other or self._met((one, other), warm) for one, other in here):
                continue
            for one in first:
                met = self._places(warm.decodes_of(self._key(one)), group.can_decode)
                pairs += [(one, other) for other in self._cheapest(self.decode_cost, met)]
            for other in second:
                met = self._places(warm.prefills_of(self._key(other)), group.can_prefill)
                pairs += [(one, other) for one in self._cheapest(self.prefill_cost, met)]
        pairs = [(one, other) for one, other in pairs if one != other]
        if not pairs:
            return None
        prefill, decode = np.array(pairs).T
        cold = np.array([warm is not None and not self._met(pair, warm) for pair in pairs])
        costs = self.pair_cost(prefill, decode, cold)
        order = np.lexsort((costs, self.closed[prefill] | self.closed[decode], cold))
        return pairs[int(order[0])]

    def _cheapest(self, costs: Vector, places: Places) -> list[int]:
        """Return the ``PAIRED`` of these places with the least costs, those that are not closed first."""
        if len(places) <= PAIRED:
            found: list[int] = places.tolist()
            return found
        costs, closed = costs[places], self.closed[places]
        found = least(np.where(closed, inf, costs), places, PAIRED)
        if len(found) < PAIRED:
            found += least(np.where(closed, costs, inf), places, PAIRED - len(found))
        return found

    def _met(self, pair: tuple[int, int], warm: WarmPairs) -> bool:
        return (self._key(pair[0]), self._key(pair[1])) in warm

    def _key(self, at: int) -> str:
        return self.table.candidates[at].endpoint.key

    def _places(self, keys: Iterable[str], able: frozenset[int]) -> Places:
        """Return the places of these endpoints that can take a leg, in order."""
        known = {self.table.place.get(key) for key in keys}
        return np.array(sorted(able.intersection(known)), np.intp)

    def legs(self, places: Sequence[int]) -> list[LegCosts]:
        """Return the costs at these places, as objects."""
        if not places:
            return []
        chosen = [self.table.candidates[at] for at in places]
        rows = cost_rows(chosen, self.demand, self.now, self.policy)
        complete(rows, self.pool, self.part, 0.0 if self.tpot is None else self.tpot.lean(self.policy))
        terms = zip(*terms_in(self.pool, rows, self.policy), strict=True)
        found = [
            LegCosts(candidate, row, seconds, self.now, self.policy, self.rules, self.max_backlog)
            for candidate, row, seconds in zip(chosen, rows, terms, strict=True)
        ]
        for one in found:
            one.set_allowed(self.per_sequence)
            one.set_prices(self.answer_seconds, self.pressure)
        return found
