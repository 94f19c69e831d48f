"""The costs of both legs at many endpoints at once, to find the few that ``split_decision`` compares. Pure.

A ``LegCosts`` of each endpoint takes 14 us, which is 14 ms for a thousand. Here the same terms are columns;
the endpoints that can be the best for one leg or for both become ``LegCosts``, whose figures decide and are
shown. The formulas are those of ``leg_costs`` and ``cost`` (``docs/decisions/0066``).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvist_epp.load.endpoint_load import DEFAULT_TRANSFER_RATE
from kvist_epp.load.prefill_share import MEMORY_SECONDS, PrefillShare
from kvist_epp.load.tpot_admission import LEAST_SHARE, STEP_SECONDS
from kvist_epp.scheduling.cost import (
    CachedPrefix,
    Policy,
    complete,
    pool_cost,
    terms_in,
)
from kvist_epp.scheduling.leg_costs import (
    DisaggregationPolicy,
    LegCosts,
    decode_seconds,
    pressure,
    seconds_per_sequence,
)
from kvist_epp.scheduling.pick import Candidate, Demand, cost_rows
from kvist_epp.scheduling.tier_price import price_tiers
from kvist_epp.scheduling.tpot_columns import TpotColumns, uncached_of_all

Vector = NDArray[np.float64]
Flags = NDArray[np.bool_]


class LegColumns:
    """All endpoints for one request, column by column."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        demand: Demand,
        now: float,
        policy: Policy,
        rules: DisaggregationPolicy,
        max_backlog: float,
    ) -> None:
        """``candidates``: those that may take a leg; drains the loads that have computed a prompt by now."""
        self.candidates, self.demand, self.now = candidates, demand, now
        self.policy, self.rules, self.max_backlog = policy, rules, max_backlog
        loads = self.loads = [candidate.load for candidate in candidates]
        for load in loads:
            if load.prefill_queue and load.first_done_at <= now:
                load.drain(now)
        self.rate = _column([load.rate for load in loads])
        self.seconds = 1.0 / self.rate
        self.backlog = _column([load.backlog_tokens for load in loads]) * self.seconds
        """Seconds, as ``EndpointLoad.drain`` to ``now`` would leave them."""
        if waiting := self.backlog.nonzero()[0].tolist():
            since = _column([loads[at].drains_from for at in waiting]) - now
            self.backlog[waiting] = np.clip(since + self.backlog[waiting], 0.0, self.backlog[waiting])
        self.running = _column([load.running for load in loads])
        ended = [max(load.unseen_requests, load.late_ends) for load in loads]
        self.counted = np.maximum(0.0, self.running - _column(ended))
        self.slots = _column([inf if load.slots is None else load.slots for load in loads])
        self.kv_full_at = _column([inf if load.kv_full_at is None else load.kv_full_at for load in loads])
        self.waiting = _column([len(load.prefill_queue) for load in loads])
        self.transfer_rate = _column([load.transfer_rate or DEFAULT_TRANSFER_RATE for load in loads])
        self.promised = _column([load.promised_tokens for load in loads])
        self.receiving = np.maximum(0.0, _column([load.receives_until for load in loads]) - now)
        self.share = PrefillShare.of_all([load.prefill_share for load in loads], now)
        self.tpot = None if loads[0].tpot is None else TpotColumns.of(loads)  # of all endpoints, or of none
        self.loading = np.zeros(len(loads))
        holders: dict[int, CachedPrefix] = {}
        for at, candidate in enumerate(candidates):
            if (hit := demand.hits.get(candidate.endpoint.key)) is None:
                continue
            if hit.lower:
                hit = price_tiers(loads[at], hit.tokens, hit.bytes, hit.lower, policy.load_rates, now)
                self.loading[at] = hit.loading
            holders[at] = hit
        self.uncached = uncached_of_all(len(loads), demand.tokens, holders)
        self.pool, self.part = pool_cost(
            float(self.running.mean()),
            float((self.kv_full_at < inf).mean()),
            float(self.rate.mean()),
            int(self.uncached.min()),
            [hit.tokens for hit in holders.values()],
            demand.tokens,
            demand.uses,
            policy,
        )
        self.own = self.pool.least_uncached + self.part * (self.uncached - self.pool.least_uncached)
        self.answer_seconds = decode_seconds(candidates, rules)
        self.per_sequence = seconds_per_sequence(loads)

    # Terms of the ordinary cost

    @cached_property
    def wait(self) -> Vector:
        """Seconds of backlog, and a part of what is queued in the picker."""
        if self.tpot is None:
            return self.backlog
        found: Vector = self.backlog + self.policy.queued_share * self.tpot.queued_seconds
        return found

    @cached_property
    def slot(self) -> Vector:
        """Seconds until a sequence slot is free."""
        decode = _column([load.decode_seconds or 0.0 for load in self.loads])
        with np.errstate(invalid="ignore"):  # of unknown, infinite slots
            until = (self.running - self.slots + 1) * decode / self.slots
        return np.where(self.running >= self.slots, until, 0.0)

    @cached_property
    def tightness(self) -> Vector:
        """Factor by which prefill takes longer than on the mean endpoint."""
        return np.ones(len(self.loads)) if self.tpot is None else self.tpot.tightness(self.policy)

    @cached_property
    def deferred(self) -> Flags:
        """Whose TPOT target defers the prompt."""
        if self.tpot is None:
            return np.zeros(len(self.loads), dtype=np.bool_)
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
        batch = self.counted >= _column([load.slot_limit for load in self.loads])
        full: Flags = batch | (self.backlog > self.max_backlog) | (self.counted >= self.kv_full_at)
        return full if self.tpot is None else full | self.tpot.no_room(self.uncached)

    @cached_property
    def deferral(self) -> Vector:
        """Seconds until the TPOT target lets an endpoint take up the prompt."""
        if self.tpot is None:
            return np.zeros(len(self.loads))
        lacking = np.minimum(STEP_SECONDS, self.uncached * self.seconds) - self.tpot.allowance(self.now)
        until = (np.maximum(0.0, lacking) + self.tpot.queued_seconds) / self.tpot.prefill_share
        usual = self.policy.deferred_seconds * self.tightness
        return np.where(self.deferred, np.maximum(usual, until), 0.0)

    @cached_property
    def allowed(self) -> Vector:
        """Part of the time of each endpoint that prompts may take, with the sequences that it has now."""
        if self.tpot is None:
            return np.ones(len(self.loads))
        found = zip(self.loads, self.decoding.tolist(), strict=True)
        shares = [load.tpot.share_with(number, self.per_sequence) for load, number in found if load.tpot]
        return _column(shares)

    @cached_property
    def decoding(self) -> Vector:
        """Sequences that decode."""
        return np.maximum(0.0, self.running - self.waiting)

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
        cube = (self._odds(share) / np.maximum(self._odds(allowed), 0.01)) ** 3
        return cube / (1.0 + cube)

    @cached_property
    def whole_cost(self) -> Vector:
        """Cost of both legs, by which endpoints for both are compared."""
        work = self.pool.price * self.own * self.seconds * self.tightness
        decode = self.policy.running_seconds * self.running
        copy = self.pool.copy_seconds * (self.uncached - self.pool.least_uncached)
        ordinary = self.wait + self.slot + work + self.loading + decode + self.eviction + copy
        found: Vector = ordinary + self.deferral + self.interference + self.opening
        return found

    @cached_property
    def prefill_cost(self) -> Vector:
        """Cost of the first leg."""
        return self.wait + self.slot + self.deferral + self.loading + self.prefill_seconds + self.eviction

    @cached_property
    def decode_cost(self) -> Vector:
        """Cost of the second leg, without its wait behind prompts."""
        received = self.receiving + (self.promised + self.uncached) / self.transfer_rate
        no_room = (
            0.0 if self.tpot is None else self.tpot.no_room(self.uncached) * self.policy.deferred_seconds
        )
        decode = self.policy.running_seconds * self.running
        fixed = self.rules.leg_seconds + self.slot + no_room + decode
        return received + fixed + self.interference + self.opening

    def cheapest(self, costs: Vector, places: Sequence[int], number: int) -> list[int]:
        """Return the ``number`` of these places with the least costs, those that are not closed first."""
        if len(places) <= number:
            return list(places)
        at = np.array(places)
        order = np.lexsort((costs[at], self.closed[at]))  # stable, as nsmallest is
        return [places[n] for n in order[:number].tolist()]

    def legs(self, places: Iterable[int]) -> list[LegCosts]:
        """Return the costs at these places, in the order of the candidates."""
        if not (chosen := [self.candidates[at] for at in sorted(places)]):
            return []
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


def _column(values: Sequence[float]) -> Vector:
    return np.array(values, dtype=np.float64)
