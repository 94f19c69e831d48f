"""Which of those who wait could go this moment: the pool as one slice of work sees it. Pure."""

from collections.abc import Sequence
from math import inf

from kvist_epp.schedule.pick import Candidate, named
from kvist_epp.schedule.rounds import Subset


class Room:
    """Made anew for each slice of work; in its life pods only get fuller."""

    __slots__ = ("_candidates", "_closed", "_max_owed", "_open")

    def __init__(self, candidates: Sequence[Candidate], now: float, max_owed: float) -> None:
        """Drains the loads to ``now``; ``max_owed``: seconds of prefill from which a pod is full."""
        self._max_owed = max_owed
        self._candidates = [candidate for candidate in candidates if not candidate.refusal]
        for candidate in self._candidates:
            candidate.load.drain(now)
        self._open = [c for c in self._candidates if not c.load.closed(max_owed)]
        self._closed: set[Subset] = set()

    @property
    def empty(self) -> bool:
        """The pool has no endpoint at all that could be picked."""
        return not self._candidates

    def may_go(self, subset: Subset) -> bool:
        """Whether a request of this subset can be answered: by a pod with room, or by saying that none of a
        given subset can be picked at all."""
        if subset in self._closed:
            return False
        if self._has_open(subset) or (subset is not None and not self._knows(subset)):
            return True
        self._closed.add(subset)
        return False

    def relieved_in(self) -> float:
        """Seconds until time alone gives a full pod room; infinite where it never does."""
        full = [c.load for c in self._candidates if c.load.closed(self._max_owed)]
        return min((load.relieved_in(self._max_owed) for load in full), default=inf)

    def _has_open(self, subset: Subset) -> bool:
        pods = self._open
        if subset is not None:
            return any(named(subset, c.endpoint) and not c.load.closed(self._max_owed) for c in pods)
        while pods and pods[-1].load.closed(self._max_owed):
            pods.pop()
        return bool(pods)

    def _knows(self, subset: frozenset[str]) -> bool:
        return any(named(subset, c.endpoint) for c in self._candidates)
