"""Which queued requests could be sent now: the pool as one poll of the queue sees it. Pure."""

from collections.abc import Sequence
from math import inf
from typing import Final

from kvist_epp.flowcontrol.deficit_round_robin import EndpointFlow, Subset
from kvist_epp.scheduling.pick import Candidate, named

TPOT_POLL_SECONDS: Final = 0.1
"""Time between polls for endpoints whose allowance grows: a few prompts' time."""


class Capacity:
    """Capacity of the endpoints during one poll, in which they only get fuller."""

    __slots__ = ("_candidates", "_exhausted", "_helpers", "_max_backlog", "_now", "_open")

    def __init__(self, candidates: Sequence[Candidate], now: float, max_backlog: float) -> None:
        """Drain the loads to ``now``; ``max_backlog``: seconds of prefill from which an endpoint is full."""
        self._max_backlog = max_backlog
        self._now = now
        self._candidates = {c.endpoint.key: c for c in candidates if not c.refusal}
        self._helpers = {
            c.endpoint.key: c for c in candidates if c.refusal and c.ready and c.endpoint.can_prefill
        }
        """Endpoints that only compute prompts for others; requests may wait for them, too."""
        for candidate in (*self._candidates.values(), *self._helpers.values()):
            candidate.load.drain(now)
        self._open = [c for c in self._candidates.values() if not c.load.full(max_backlog)]
        self._exhausted: set[frozenset[str] | None] = set()

    @property
    def pool_empty(self) -> bool:
        """True if no endpoint could be picked, full or not."""
        return not self._candidates

    def can_dispatch(self, subset: Subset, uncached: int = 0) -> bool:
        """Return whether a request of this subset with ``uncached`` tokens can be answered.

        It can if an endpoint has capacity for it; if no endpoint of its subset can be picked at all, so that
        it is rejected; or if the endpoint it waits for has left, so that another one has to be chosen.
        """
        if isinstance(subset, EndpointFlow):
            bound = self._candidates.get(subset.endpoint) or self._helpers.get(subset.endpoint)
            return bound is None or (
                not bound.load.batch_or_backlog_full(self._max_backlog)
                and bound.load.admits_queued(uncached, self._now)
            )
        if subset in self._exhausted:
            return False
        if self._has_open(subset) or (subset is not None and not self._has_any(subset)):
            return True
        self._exhausted.add(subset)
        return False

    def seconds_until_capacity(self) -> float:
        """Return the seconds until time alone gives a full endpoint capacity; infinite where it never
        does."""
        loads = [c.load for c in (*self._candidates.values(), *self._helpers.values())]
        full = [load for load in loads if load.full(self._max_backlog)]
        turns = [load.tpot.seconds_until_turn(self._now) for load in loads if load.tpot and load.tpot.queued]
        polls = [TPOT_POLL_SECONDS, *turns] if turns else []
        return min([inf, *polls, *(load.seconds_until_open(self._max_backlog) for load in full)])

    def _has_open(self, subset: frozenset[str] | None) -> bool:
        candidates = self._open
        if subset is not None:
            return any(named(subset, c.endpoint) and not c.load.full(self._max_backlog) for c in candidates)
        while candidates and candidates[-1].load.full(self._max_backlog):
            candidates.pop()
        return bool(candidates)

    def _has_any(self, subset: frozenset[str]) -> bool:
        return any(named(subset, c.endpoint) for c in self._candidates.values())
