"""The table's cells: case, load, policy and seed each give one run; pairs share everything but the policy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import msgspec

from kvist_sim.virtual.ideal import Remembered, ideal_world
from kvist_sim.virtual.judge import Verdict, judge
from kvist_sim.virtual.ours import FIXED, FLUID, KVIST
from kvist_sim.virtual.policies import DISAGGREGATED, POLICIES
from kvist_sim.virtual.policy import Spec
from kvist_sim.virtual.workloads.cases import CASES, DISAGGREGATION_CASES, Case, even
from kvist_sim.virtual.workloads.mooncake import trace
from kvist_sim.virtual.world import USUAL, Setting, World

SPECS: Final[Mapping[str, Spec]] = {
    spec.name: spec for spec in (KVIST, *POLICIES, FLUID, *FIXED, *DISAGGREGATED)
}
DISAGGREGATING: Final = (FLUID, *FIXED, *DISAGGREGATED)
"""Policies with which two engines may share a request."""
IDEAL: Final = "ideal"
"""Not a policy: the bound that no policy can reach."""
NO_TIERS: Final = "no-tiers"
"""Our policy on engines that have no slower places for blocks, where the others have some."""
PICTURE_POINTS: Final = 120
"""Moments of a run at which pods' loads are kept."""


class Cell(msgspec.Struct, frozen=True):
    """Case, load, policy and seed of one run."""

    case: str
    load: float
    """Offered, by capacity."""
    policy: str
    seed: int


class Result(msgspec.Struct, frozen=True):
    """The result of one run."""

    cell: Cell
    rate: float
    """Requests per second offered."""
    verdict: Verdict
    loads: list[tuple[float, tuple[int, ...]]] = []
    """(seconds, requests on each pod); only of the first seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a run needs besides its cell."""

    engines: int
    requests: int
    setting: Setting = USUAL
    trace: Path | None = None
    """Instead of the cases: this file on the usual fleet."""
    pictured: int = -1
    """The seed whose runs keep every pod's load over time."""

    def case(self, name: str) -> Case:
        """A row by its name."""
        if self.trace is not None:
            shape = trace(self.trace)
            return Case(shape.name, lambda _engines: shape, even)
        return case_named(name)

    def has_tiers(self, name: str) -> bool:
        """Return whether the engines of a row have slower places for blocks."""
        return bool(self.case(name).fleet(self.engines).tiers)

    def capacity(self, name: str) -> float:
        """Requests per second of the ideal pool."""
        case = self.case(name)
        return Remembered().capacity(case.shape(self.engines), case.fleet(self.engines), self.requests)

    def run(self, cell: Cell, capacity: float, *, loads: bool = False) -> Result:
        """One cell; ``loads``: with every pod's load over time."""
        case = self.case(cell.case)
        shape, rate = case.shape(self.engines), cell.load * capacity
        outcome = self._world(cell, case, rate).run()
        step = max(1, len(outcome.loads) // PICTURE_POINTS)
        return Result(cell, rate, judge(outcome, shape), outcome.loads[::step] if loads else [])

    def _world(self, cell: Cell, case: Case, rate: float) -> World:
        shape, fleet = case.shape(self.engines), case.fleet(self.engines)
        if cell.policy == IDEAL:
            return ideal_world(shape, fleet, rate=rate, requests=self.requests, seed=cell.seed)
        bare = cell.policy == NO_TIERS
        return World(
            shape,
            replace(fleet, tiers=()) if bare else fleet,
            KVIST if bare else SPECS[cell.policy],
            rate=rate,
            requests=self.requests,
            seed=cell.seed,
            setting=self.setting,
        )


def case_named(name: str) -> Case:
    """One of the table's rows."""
    return next(case for case in (*CASES, *DISAGGREGATION_CASES) if case.name == name)


def cells(
    cases: Sequence[str], loads: Sequence[float], policies: Sequence[str], seeds: Iterable[int]
) -> list[Cell]:
    """All of them; what is compared comes together."""
    every = list(seeds)
    return [
        Cell(case, load, policy, seed)
        for case in cases
        for load in loads
        for seed in every
        for policy in policies
    ]


def run_all(job: Job, asked: Sequence[Cell], *, jobs: int, done: Callable[[str], None]) -> Iterator[Result]:
    """Yield results as they come, from ``jobs`` processes; ``done`` gets a line of text for each step."""
    names = list(dict.fromkeys(cell.case for cell in asked))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        capacities = dict(zip(names, pool.map(job.capacity, names), strict=True))
        for name, found in capacities.items():
            done(f"{name}: capacity {found:.1f} requests/s")
        running = [
            pool.submit(job.run, cell, capacities[cell.case], loads=cell.seed == job.pictured)
            for cell in asked
        ]
        for number, future in enumerate(as_completed(running), 1):
            result = future.result()
            cell = result.cell
            done(f"{number}/{len(asked)} {cell.case} {cell.load:.0%} {cell.policy} seed {cell.seed}")
            yield result
