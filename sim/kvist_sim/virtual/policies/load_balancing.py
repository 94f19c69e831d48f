"""Random, round robin and least requests: policies that ignore caches.

As Envoy's ``RANDOM`` and ``ROUND_ROBIN`` (its documentation, "Supported load balancers"), SGLang's and
vllm-router's ``random`` and ``round_robin``, and a Kubernetes Service.

Least requests: the pod with the fewest requests in flight.

Envoy's ``LEAST_REQUEST`` with ``selection_method: FULL_SCAN`` (``least_request.proto``: of hosts with equally
few active requests one is picked at random); nginx's ``least_conn``.
"""

from collections.abc import Sequence

from kvist_sim.virtual.policy import Context, Pod, Quiet, Request

from .counters import InFlight, least


class ByLot(Quiet):
    """Each pod with the same probability."""

    def __init__(self, context: Context) -> None:
        self._random = context.random

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        return self._random.randrange(len(pods))


class RoundRobin(Quiet):
    """Each pod in turn. Replicas begin anywhere, so that they do not march in step."""

    def __init__(self, context: Context) -> None:
        self._turn = context.random.randrange(1 << 16)

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        self._turn += 1
        return self._turn % len(pods)


class LeastRequests(InFlight):
    """Counts what this replica has sent, as a proxy does."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._random = context.random

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        return least([self.requests[pod] for pod in pods], self._random)
