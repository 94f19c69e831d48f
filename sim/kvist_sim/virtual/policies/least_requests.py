"""Least requests: the pod with the fewest requests in flight.

Envoy's ``LEAST_REQUEST`` with ``selection_method: FULL_SCAN`` (``least_request.proto``: of hosts with equally
few active requests one is picked at random); nginx's ``least_conn``.
"""

from collections.abc import Sequence

from kvist_sim.virtual.policy import Context, Pod, Request

from .counts import InFlight
from .ties import least


class LeastRequests(InFlight):
    """Counts what this replica has sent, as a proxy does."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._random = context.random

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        return least([self.requests[pod] for pod in pods], self._random)
