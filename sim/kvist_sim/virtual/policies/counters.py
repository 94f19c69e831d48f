"""Base classes of policies: counters of the work that a router has sent and not yet seen completed.

The best of several, by lot among equals; and how deep a chain of blocks is held.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Sequence
from random import Random

from kvist_sim.virtual.policy import Pod, Quiet, Request


class InFlight(Quiet):
    """Requests on each pod, from ``routed`` to ``finished``, as this replica knows them."""

    def __init__(self) -> None:
        self.requests: Counter[Pod] = Counter()

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """Count a request on its pod."""
        self.requests[pod] += 1

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """One less; the pod may have left before."""
        if self.requests[pod]:
            self.requests[pod] -= 1

    def left(self, pod: Pod, now: float) -> None:
        """Nothing is on a pod that is gone."""
        del self.requests[pod]


class Prefill(InFlight):
    """Count requests and the prompt tokens each pod still has to compute: all uncached tokens of a request,
    until its first token is seen.

    ``expect`` is called by ``choose``, as only it knows what is cached where.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Counter[Pod] = Counter()
        self._expected = 0
        self._owed: dict[Request, int] = {}

    def expect(self, uncached: Sequence[int], position: int) -> int:
        """Record that the request adds its share of ``uncached`` at ``position`` to the backlog."""
        self._expected = uncached[position]
        return position

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """Add the expected tokens to the pod's backlog."""
        super().routed(request, pod, now)
        self._owed[request] = self._expected
        self.tokens[pod] += self._owed[request]

    def first_token(self, request: Request, pod: Pod, now: float) -> None:
        """Remove the prompt from the backlog."""
        owed = self._owed.pop(request, 0)
        if pod in self.tokens:
            self.tokens[pod] -= owed

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """Remove what remains of the request from the backlog."""
        self.first_token(request, pod, now)
        super().finished(request, pod, now)

    def left(self, pod: Pod, now: float) -> None:
        """Drop the backlog of a removed pod."""
        super().left(pod, now)
        del self.tokens[pod]


def least(values: Sequence[float], random: Random) -> int:
    """Position of the least value; among equal ones by lot."""
    best = min(values)
    ties = [position for position, value in enumerate(values) if value == best]
    return ties[0] if len(ties) == 1 else random.choice(ties)


def most(values: Sequence[float], random: Random) -> int:
    """Position of the greatest value; among equal ones by lot."""
    return least([-value for value in values], random)


def depth(blocks: Sequence[int], held: Container[int]) -> int:
    """Return the number of leading blocks held, given that a holder of a block holds all before it."""
    return bisect_left(blocks, True, key=lambda block: block not in held)
