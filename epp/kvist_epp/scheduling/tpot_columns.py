"""The cost under a TPOT target, over columns: what ``cost.terms`` adds up, for many endpoints at once. Pure.

An endpoint's schedule (``load.tpot_admission``) is a few figures, which change with events and when time has
computed a prompt; the rest follows from the clock. So whether it defers a prompt is a handful of comparisons
of columns, which hardly take longer for a thousand endpoints than for fifty (``docs/decisions/0066``).
"""

from collections.abc import Sequence

import numpy as np

from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.tpot_admission import (
    FRESH_SECONDS,
    LEAST_SHARE,
    LIGHT_TOKENS,
    STEP_SECONDS,
    AdmissionFigures,
)
from kvist_epp.scheduling.best_endpoints import Flags, Places, Vector
from kvist_epp.scheduling.cost import Policy, PoolCost

_FIELDS = len(AdmissionFigures._fields)
_SHARE, _ALLOWANCE, _AT, _FREE, _MOST, _FRESH_SINCE, _QUEUED, _FIRST_DONE, *_TOKEN = range(_FIELDS)
_TARGET, _TOKEN_SECONDS, _TOKEN_SEQUENCES, _SLOWDOWN = _TOKEN


class TpotColumns:
    """``AdmissionFigures`` of the loads of a pool: a column for each, with a place for each endpoint."""

    __slots__ = ("_columns",)

    def __init__(self, count: int) -> None:
        """``count``: endpoints, whose places are refreshed before the first pick."""
        self._columns: Vector = np.zeros((_FIELDS, count))

    @classmethod
    def of(cls, loads: Sequence[EndpointLoad]) -> "TpotColumns":
        """Return the columns of these loads, all of which have a target."""
        found = cls(0)
        found._columns = np.array([load.tpot.figures(load) for load in loads if load.tpot is not None]).T
        return found

    def take(self, places: Places) -> "TpotColumns":
        """Return the columns of a part of the endpoints."""
        found = TpotColumns(0)
        found._columns = self._columns[:, places]
        return found

    def refresh(self, at: int, load: EndpointLoad) -> None:
        """Copy the figures of the load at this place, which has changed."""
        if load.tpot is not None:
            self._columns[:, at] = load.tpot.figures(load)

    def outdated(self, now: float) -> list[int]:
        """Return the places of endpoints that have computed a prompt by now without an event.

        Their loads have to be drained, and their figures to be read again.
        """
        found: list[int] = (self._columns[_FIRST_DONE] <= now).nonzero()[0].tolist()
        return found

    @property
    def prefill_share(self) -> Vector:
        """Part of the time of each endpoint that prefill may take."""
        share: Vector = self._columns[_SHARE]
        return share

    @property
    def queued_seconds(self) -> Vector:
        """Seconds of prefill of the requests that wait in the picker for each endpoint."""
        queued: Vector = self._columns[_QUEUED]
        return queued

    def seconds_per_sequence(self) -> float:
        """Return by how many seconds a sequence prolongs a token (``leg_costs.seconds_per_sequence``)."""
        slowdown = self._columns[_SLOWDOWN]
        learned = slowdown.nonzero()[0]
        sequences = float(self._columns[_TOKEN_SEQUENCES][learned].sum())
        return float(slowdown[learned].sum()) / sequences if sequences else 0.0

    def share_with(self, sequences: Vector, per_sequence: float) -> Vector:
        """Return ``prefill_share`` as it will be with so many sequences (``TpotAdmission.share_with``)."""
        target, seconds, before = self._columns[_TARGET:_SLOWDOWN]
        token = seconds + per_sequence * (sequences - before)
        share = np.clip(1.0 - token / target, LEAST_SHARE, 1.0)
        return np.where(self.prefill_share >= 1.0, 1.0, share)

    def lean(self, policy: Policy) -> float:
        """Return the part of its time for prompts below which an endpoint is tight."""
        return policy.tight * float(self.prefill_share.mean())

    def costs(
        self,
        uncached: Vector,
        seconds: Vector,
        wait: Vector,
        now: float,
        pool: PoolCost,
        part: float,
        policy: Policy,
    ) -> Vector:
        """Return the costs, without those of running requests, slots and loading.

        ``uncached``: tokens of the prompt that each endpoint would compute, ``seconds``: of prefill for a
        token, ``wait``: seconds of backlog at ``now``, ``part``: of a copy's work that the request answers
        for.
        """
        tightness, least = self.tightness(policy), pool.least_uncached
        own = least + part * (uncached - least)
        costs: Vector = own * seconds
        costs *= pool.price * tightness
        costs += wait
        costs += policy.queued_share * self.queued_seconds
        deferred = self.deferred(uncached, seconds, wait, now)
        costs += np.where(deferred, policy.deferred_seconds * tightness, 0.0)
        costs += policy.evicted / pool.mean_rate * own
        costs += pool.copy_seconds * (uncached - least)
        return costs

    def tightness(self, policy: Policy) -> Vector:
        """Return the factors by which prefill takes longer than on the mean endpoint; at least 1."""
        share, lean = self.prefill_share, self.lean(policy)
        return np.where(share < lean, lean / share, 1.0)

    def deferred(self, uncached: Vector, seconds: Vector, wait: Vector, now: float) -> Flags:
        """Return which endpoints may not take up the prompt now: those that do not ``admit`` it."""
        enough = np.minimum(STEP_SECONDS, uncached * seconds)
        held_back = (uncached > LIGHT_TOKENS) & (self.prefill_share < 1.0) & (self.allowance(now) < enough)
        held_back &= now - self._columns[_FRESH_SINCE] > FRESH_SECONDS
        found: Flags = (wait > STEP_SECONDS) | self.no_room(uncached) | held_back
        return found

    def no_room(self, uncached: Vector) -> Flags:
        """Return whose KV caches have no blocks for so many tokens."""
        free, most = self._columns[_FREE], self._columns[_MOST]
        lacking: Flags = (free < uncached) & (free < most)
        return lacking

    def allowance(self, now: float) -> Vector:
        """Return the seconds of prefill that each endpoint may take up."""
        share, allowance, at = self._columns[:_FREE]
        found: Vector = np.minimum(STEP_SECONDS, allowance + share * np.maximum(0.0, now - at))
        return found
