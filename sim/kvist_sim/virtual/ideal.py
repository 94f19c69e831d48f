"""Best possible pool: one cache for all engines, and a router that sees their true state.

Its goodput defines capacity: 100 % load is the highest rate at which the ideal pool still serves 95 % of the
requests within the SLO.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvist_sim.engine.tiers import TierKind
from kvist_sim.virtual.fleet import Fleet
from kvist_sim.virtual.jobs import Call
from kvist_sim.virtual.judge import judge
from kvist_sim.virtual.noting_pool import NotingPool
from kvist_sim.virtual.policy import Context, Pod, Quiet, Request, Spec
from kvist_sim.virtual.traffic import Shape
from kvist_sim.virtual.world import World

GOOD: Final = 0.95
"""Share within the SLO that the ideal pool must reach."""
STEPS: Final = 5
"""Halvings of a factor of two: within 2.2 %."""
RUNNING_SECONDS: Final = 0.010
"""Per sequence on an engine, as in ``kvist_epp.scheduling.cost``."""
MOST_RATE: Final = 100_000.0
"""Rate in requests per second above which a pool has no capacity: too few requests to fill it."""
_SOURCES: Final = (
    "engine.py",
    "fleet.py",
    "hardware.py",
    "ideal.py",
    "jobs.py",
    "../engine/tiers.py",
    "traffic.py",
    "world.py",
)


class TooFewRequestsError(Exception):
    """The requests never fill the pool, so that it has no capacity."""


class Ideal(Quiet):
    """The engine with the least prompt tokens to compute; all hit the same cache, whose state it sees.

    Engines load from no place in which a block takes longer than computing it.
    """

    def __init__(
        self, pool: Callable[[Pod], NotingPool], rates: Callable[[Pod], float], tiers: Sequence[TierKind] = ()
    ) -> None:
        self._pool, self._rates, self._tiers = pool, rates, tiers
        self._owed: dict[Pod, float] = {}
        self._running: dict[Pod, int] = {}
        self._uncached: dict[Request, int] = {}

    def joined(self, pod: Pod, now: float) -> None:  # noqa: ARG002
        self._owed[pod] = self._running[pod] = 0

    def choose(self, request: Request, pods: Sequence[Pod], now: float) -> int:  # noqa: ARG002
        held = self._pool(pods[0]).held_prefix(request.blocks, request.tokens) * pods[0].block_size
        if self._tiers and isinstance(request, Call):
            most = pods[0].block_size / max(map(self._rates, pods))
            request.load_tiers = frozenset(k.medium for k in self._tiers if k.block_seconds < most)
        self._uncached[request] = request.tokens - held
        return min(range(len(pods)), key=lambda at: self._cost(pods[at], request.tokens - held))

    def routed(self, request: Request, pod: Pod, now: float) -> None:  # noqa: ARG002
        self._owed[pod] += self._uncached[request]
        self._running[pod] += 1

    def first_token(self, request: Request, pod: Pod, now: float) -> None:  # noqa: ARG002
        self._owed[pod] -= self._uncached.pop(request)

    def finished(self, request: Request, pod: Pod, now: float) -> None:  # noqa: ARG002
        self._running[pod] -= 1

    def _cost(self, pod: Pod, uncached: int) -> float:
        return (self._owed[pod] + uncached) / self._rates(pod) + RUNNING_SECONDS * self._running[pod]


def ideal_world(shape: Shape, fleet: Fleet, *, rate: float, requests: int, seed: int) -> World:
    """Return a world with the same traffic on the ideal pool of the same hardware, which no pod leaves."""
    world: World

    def make(_context: Context) -> Ideal:
        return Ideal(
            lambda pod: world.sites[pod].engine.pool,
            lambda pod: world.sites[pod].engine.hardware.timing.prefill_tokens_per_second,
            fleet.tiers,
        )

    spec = Spec("ideal", "one cache for all, true state", make)
    steady = replace(fleet, shared=True, changes=(), absent=())
    world = World(shape, steady, spec, rate=rate, requests=requests, seed=seed)
    return world


def capacity(shape: Shape, fleet: Fleet, *, requests: int, seed: int = 0) -> float:
    """Return requests per second, by bisection. Raises TooFewRequestsError."""

    def fits(rate: float) -> bool:
        outcome = ideal_world(shape, fleet, rate=rate, requests=requests, seed=seed).run()
        return judge(outcome, shape).goodput >= GOOD

    low = 0.5 * len(fleet.engines)
    while fits(2 * low):
        low *= 2
        if low > MOST_RATE:
            raise TooFewRequestsError(f"{shape.name}: {requests} requests do not fill the pool at any rate")
    factor = 2.0
    for _ in range(STEPS):
        factor **= 0.5
        if fits(low * factor):
            low *= factor
    return low


class Remembered:
    """Cache file of capacities by shape, fleet and source code: they take minutes and never change."""

    def __init__(self, path: Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = path or cache / "kvist" / "route-capacity.json"
        self._sources = _fingerprint()

    def capacity(self, shape: Shape, fleet: Fleet, requests: int) -> float:
        """Return the capacity from the file, or measure it now."""
        key = blake2b(
            repr((self._sources, shape.name, shape.summary, fleet.engines, fleet.tiers, requests)).encode(),
            digest_size=12,
        ).hexdigest()
        known = self._read()
        if key not in known:
            found = capacity(shape, fleet, requests=requests)
            known = {**self._read(), key: found}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(known, indent=1))
        return known[key]

    def _read(self) -> dict[str, float]:
        try:
            return dict(json.loads(self._path.read_bytes()))
        except (OSError, ValueError):
            return {}


def _fingerprint() -> str:
    folder = Path(__file__).parent
    files = [folder / name for name in _SOURCES] + sorted((folder / "workloads").glob("*.py"))
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=12).hexdigest()
