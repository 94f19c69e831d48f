"""Which of those who wait could go this moment: the pool as one slice of work sees it. Pure."""

from collections.abc import Sequence
from math import inf
from typing import Final

from kvist_epp.flowcontrol.deficit_round_robin import Bound, Subset
from kvist_epp.scheduling.pick import Candidate, named

PACED_SECONDS: Final = 0.1
"""Between two looks at pods that requests wait for while their allowance grows: a few prompts' worth."""


class Room:
    """Made anew for each slice of work; in its life pods only get fuller."""

    __slots__ = ("_candidates", "_closed", "_max_owed", "_now", "_open")

    def __init__(self, candidates: Sequence[Candidate], now: float, max_owed: float) -> None:
        """Drains the loads to ``now``; ``max_owed``: seconds of prefill from which a pod is full."""
        self._max_owed = max_owed
        self._now = now
        self._candidates = {c.endpoint.key: c for c in candidates if not c.refusal}
        for candidate in self._candidates.values():
            candidate.load.drain(now)
        self._open = [c for c in self._candidates.values() if not c.load.closed(max_owed)]
        self._closed: set[frozenset[str] | None] = set()

    @property
    def empty(self) -> bool:
        """The pool has no endpoint at all that could be picked."""
        return not self._candidates

    def may_go(self, subset: Subset, need: int = 0) -> bool:
        """Whether a request of this subset with so many new tokens can be answered: by a pod with room, or by
        saying that none of a given subset can be picked at all. Whose endpoint has gone has to look for
        another one."""
        if isinstance(subset, Bound):
            bound = self._candidates.get(subset.endpoint)
            return bound is None or (
                not bound.load.full(self._max_owed) and bound.load.opens(need, self._now)
            )
        if subset in self._closed:
            return False
        if self._has_open(subset) or (subset is not None and not self._knows(subset)):
            return True
        self._closed.add(subset)
        return False

    def relieved_in(self) -> float:
        """Seconds until time alone gives a full pod room; infinite where it never does."""
        loads = [c.load for c in self._candidates.values()]
        full = [load for load in loads if load.closed(self._max_owed)]
        paced = [load.pacing.opens_in(self._now) for load in loads if load.pacing and load.pacing.held]
        looks = [PACED_SECONDS, *paced] if paced else []
        return min([inf, *looks, *(load.relieved_in(self._max_owed) for load in full)])

    def _has_open(self, subset: frozenset[str] | None) -> bool:
        pods = self._open
        if subset is not None:
            return any(named(subset, c.endpoint) and not c.load.closed(self._max_owed) for c in pods)
        while pods and pods[-1].load.closed(self._max_owed):
            pods.pop()
        return bool(pods)

    def _knows(self, subset: frozenset[str]) -> bool:
        return any(named(subset, c.endpoint) for c in self._candidates.values())
