"""What a router knows of the work it has sent out and has not seen end: base classes of policies."""

from collections import Counter
from collections.abc import Sequence

from kvist_sim.virtual.policy import Pod, Quiet, Request


class InFlight(Quiet):
    """Requests on each pod, from ``routed`` to ``finished``, as this replica knows them."""

    def __init__(self) -> None:
        self.requests: Counter[Pod] = Counter()

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """One more."""
        self.requests[pod] += 1

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """One less; the pod may have left before."""
        if self.requests[pod]:
            self.requests[pod] -= 1

    def left(self, pod: Pod, now: float) -> None:
        """Nothing is on a pod that is gone."""
        del self.requests[pod]


class Prefill(InFlight):
    """Also the prompt tokens each pod still has to compute: a request owes its uncached tokens, all of them,
    until its first token is seen.

    ``expect`` is called by ``choose``, as only it knows what is cached where.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Counter[Pod] = Counter()
        self._expected = 0
        self._owed: dict[Request, int] = {}

    def expect(self, uncached: Sequence[int], position: int) -> int:
        """``position``, which is chosen: there the request will owe its share of ``uncached``."""
        self._expected = uncached[position]
        return position

    def routed(self, request: Request, pod: Pod, now: float) -> None:
        """It owes what was expected."""
        super().routed(request, pod, now)
        self._owed[request] = self._expected
        self.tokens[pod] += self._owed[request]

    def first_token(self, request: Request, pod: Pod, now: float) -> None:
        """Its prompt is computed."""
        owed = self._owed.pop(request, 0)
        if pod in self.tokens:
            self.tokens[pod] -= owed

    def finished(self, request: Request, pod: Pod, now: float) -> None:
        """Whatever it still owed goes with it."""
        self.first_token(request, pod, now)
        super().finished(request, pod, now)

    def left(self, pod: Pod, now: float) -> None:
        """A pod that is gone owes nothing."""
        super().left(pod, now)
        del self.tokens[pod]
