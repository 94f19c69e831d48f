"""Session hash, and consistent hashing with bounded loads.

The ring: Karger et al., "Consistent hashing and random trees", STOC 1997; each pod has ``REPLICATION``
points on it, KubeAI's default (``api/k8s/v1/model_types.go``, ``prefixHash.replication``): from four pods on
no fewer than the 1,024 in all that Envoy's ring hash begins with.

Bounded loads: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018
(arXiv:1608.01350): with m requests in flight, the new one included, a pod may have ceil(c m / n) of them; one
that has goes to the next pod on the ring. KubeAI routes LLM requests so, by the first 100 characters of the
prompt and with c = 1.25 (``prefixHash.prefixCharLength``, ``meanLoadFactor``).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import ceil
from typing import Final

from kvist_sim.virtual.policy import Context, Pod, Quiet, Request

from .counters import InFlight

REPLICATION: Final = 256
"""Points of a pod on the ring."""
PREFIX_BYTES: Final = 100
"""Length of the prompt's prefix that is hashed."""
LOAD_FACTOR: Final = 1.25
"""c: no pod has more than so many times the mean."""


def place(key: bytes) -> int:
    """A point on the ring: 64 bits."""
    return int.from_bytes(blake2b(key, digest_size=8).digest())


class Ring:
    """Pods on a circle, each at many points."""

    def __init__(self, replication: int = REPLICATION) -> None:
        self._replication = replication
        self._points: list[tuple[int, int, Pod]] = []

    def add(self, pod: Pod) -> None:
        """A new pod takes an even share from all."""
        for copy in range(self._replication):
            insort(self._points, (place(f"{pod.name}-{copy}".encode()), pod.number, pod), key=_at)

    def remove(self, pod: Pod) -> None:
        """Remove a pod: its keys move to the next pods on the ring, the others stay."""
        self._points = [point for point in self._points if point[2] is not pod]

    def walk(self, key: bytes) -> Iterator[Pod]:
        """Every pod once, in the order in which the circle is met from the key on."""
        begin = bisect_left(self._points, (place(key), -1), key=_at)
        seen: set[Pod] = set()
        for _, _, pod in self._points[begin:] + self._points[:begin]:
            if pod not in seen:
                seen.add(pod)
                yield pod


def _at(point: tuple[int, int, Pod]) -> tuple[int, int]:
    return point[0], point[1]


class SessionHash(Quiet):
    """Every request of a session goes to one pod, while that lives: ring hash on a session header."""

    def __init__(self, context: Context) -> None:
        self._ring = Ring()

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        return pods.index(next(self._ring.walk(request.session.encode())))

    def joined(self, pod: Pod, now: float) -> None:
        self._ring.add(pod)

    def left(self, pod: Pod, now: float) -> None:
        self._ring.remove(pod)


class BoundedLoads(InFlight):
    """Prompts that begin alike go to one pod until it has its bound."""

    def __init__(self, context: Context, factor: float = LOAD_FACTOR) -> None:
        super().__init__()
        self._factor = factor
        self._ring = Ring()

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:
        bound = capacity(sum(self.requests[pod] for pod in pods), len(pods), self._factor)
        around = self._ring.walk(request.text[:PREFIX_BYTES])
        return pods.index(next(pod for pod in around if self.requests[pod] < bound))

    def joined(self, pod: Pod, now: float) -> None:
        self._ring.add(pod)

    def left(self, pod: Pod, now: float) -> None:
        super().left(pod, now)
        self._ring.remove(pod)


def capacity(in_flight: int, pods: int, factor: float = LOAD_FACTOR) -> int:
    """Requests a pod may have when one more comes to those in flight."""
    return ceil(factor * (in_flight + 1) / pods)
