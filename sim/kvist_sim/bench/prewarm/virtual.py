"""Virtual-time part of ``kvist bench prewarm``."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final, NamedTuple

from rich.console import Console

from kvist_sim.virtual.ideal import Remembered
from kvist_sim.virtual.judge import Verdict, judge
from kvist_sim.virtual.ours import KVIST
from kvist_sim.virtual.prewarming import PREWARMING, PrewarmingWorld
from kvist_sim.virtual.runner import case_named
from kvist_sim.virtual.workloads.cases import even, rolling
from kvist_sim.virtual.world import World

ENGINES: Final = 8
LOAD: Final = 0.6
"""Share of the capacity of an ideal pool with one shared cache."""
CAPACITY_REQUESTS: Final = 2_500
NAMES: Final = ("system-prompts", "groups")
STEADY, ROLLOUT, PREWARMED = "no rollout", "rollout", "prewarming"
KINDS: Final = (STEADY, ROLLOUT, PREWARMED)


class Setting(NamedTuple):
    """Seeds, length and processes."""

    seeds: Sequence[int]
    seconds: float
    """Virtual seconds; a slot is three fortieths of them."""
    jobs: int
    """Number of worker processes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one run."""

    kind: str
    seed: int
    verdict: Verdict
    prewarmed_tokens: int = 0
    """Tokens of prewarm requests."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All runs of one workload."""

    name: str
    rate: float
    """Requests per second."""
    cells: Sequence[Cell]

    def of(self, kind: str) -> list[Cell]:
        """Return the cells of a kind, sorted by seed."""
        return sorted((cell for cell in self.cells if cell.kind == kind), key=lambda cell: cell.seed)

    def added(self, kind: str) -> list[float]:
        """Seconds by which this rollout's TTFT p90 is above that of the same seed without one."""
        pairs = zip(self.of(kind), self.of(STEADY), strict=True)
        return [one.verdict.ttft_p90 - other.verdict.ttft_p90 for one, other in pairs]


async def workloads(setting: Setting, say: Console) -> list[Workload]:
    """Run every workload, kind and seed."""
    pool = ProcessPoolExecutor(setting.jobs, mp_context=get_context("spawn"))
    try:
        return [await _workload(pool, name, setting, say) for name in NAMES]
    finally:
        pool.shutdown(cancel_futures=True)


async def _workload(pool: ProcessPoolExecutor, name: str, setting: Setting, say: Console) -> Workload:
    loop = asyncio.get_running_loop()
    rate = await loop.run_in_executor(pool, rate_of, name)
    wanted = [(kind, seed) for seed in setting.seeds for kind in KINDS]
    say.print(f"virtual: {name}, {rate:.1f} requests/s, {len(wanted)} runs")
    running = [
        loop.run_in_executor(pool, cell, name, rate, kind, seed, setting.seconds) for kind, seed in wanted
    ]
    return Workload(name, rate, await asyncio.gather(*running))


def rate_of(name: str) -> float:
    """Return requests per second at the load."""
    shape = case_named(name).shape(ENGINES)
    return LOAD * Remembered().capacity(shape, even(ENGINES), CAPACITY_REQUESTS)


def cell(name: str, rate: float, kind: str, seed: int, seconds: float) -> Cell:
    """Run one cell."""
    shape = case_named(name).shape(ENGINES)
    fleet = even(ENGINES) if kind == STEADY else rolling(ENGINES)
    make, spec = (PrewarmingWorld, PREWARMING) if kind == PREWARMED else (World, KVIST)
    world = make(shape, fleet, spec, rate=rate, requests=round(seconds * rate), seed=seed)
    verdict = judge(world.run(), shape)
    return Cell(kind, seed, verdict, world.prewarmed_tokens if isinstance(world, PrewarmingWorld) else 0)
