"""Run ``kvist bench chaos``: steady load with one fault at a time; every request is accounted for.

Warm-up, then one phase after the other without a pause of the load: `LEAD_SECONDS` of calm, the fault, and
the rest of the phase to heal in. ``judge`` says what counts as lost, cut and healed.
"""

import argparse
import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from kvist_sim import launch
from kvist_sim.bench.chaos.faults import ELSEWHERE, SCENES, Scene
from kvist_sim.bench.chaos.judge import SETTLE_SECONDS, WINDOW, Evidence, Phase, judge
from kvist_sim.bench.chaos.report import ChaosReport, document, table
from kvist_sim.bench.harness.proof import console, folder, prove
from kvist_sim.bench.harness.records import Recorder
from kvist_sim.bench.harness.stack import MODEL_NAME, SHAPE, Setup, Stack
from kvist_sim.workloads import Arrival, arrivals, warm_up

RATE: Final = 200.0
PHASE_SECONDS: Final = 60.0
LEAD_SECONDS: Final = 5.0
WARM_RATE: Final = 20.0
STEADY_SECONDS: Final = 15.0
"""Traffic before the first phase, so that it begins with warm caches and learned rates."""
DRAIN_SECONDS: Final = 60.0
"""Longest wait for answers after the last request was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """Phases, rate, length and output of a run."""

    scenes: tuple[Scene, ...]
    setup: Setup
    rate: float = RATE
    phase_seconds: float = PHASE_SECONDS
    seed: int = 0
    logs: str | None = None
    """Folder that keeps the components' logs."""

    @property
    def settle(self) -> float:
        """Seconds from a fault until the prediction is judged; fewer in shorter runs, which prove nothing."""
        least = self.phase_seconds - LEAD_SECONDS - 3 * WINDOW / self.rate
        return min(SETTLE_SECONDS, max(0.0, least))

    @property
    def full(self) -> bool:
        """True if the run is complete: every phase, at full length and rate."""
        enough = self.rate >= RATE and self.phase_seconds >= PHASE_SECONDS
        return enough and len(self.scenes) == len(SCENES)

    @property
    def warm_seconds(self) -> float:
        """Seconds before the first phase."""
        return SHAPE.groups / WARM_RATE + STEADY_SECONDS


def main(options: argparse.Namespace) -> int:
    """Run the phases and print the table.

    Return a non-zero code when a bound is broken or a component failed.
    """
    say = console()
    return prove("chaos", chaos(_plan(options), say), say, options, table=table, document=document)


def _plan(options: argparse.Namespace) -> ChaosPlan:
    setup = Setup(engines=options.engines, tls=not options.plaintext)
    return ChaosPlan(
        scenes=scenes(options.only, setup),
        setup=setup,
        rate=options.rate,
        phase_seconds=options.phase_seconds,
        seed=options.seed,
        logs=options.logs,
    )


def scenes(only: Sequence[str], setup: Setup) -> tuple[Scene, ...]:
    """Return the named phases in order, or all if none is named. Raises SystemExit for unknown names."""
    possible = {scene.name: scene for scene in SCENES if scene.needs(setup)}
    if unknown := [name for name in only if name not in possible]:
        raise SystemExit(f"--only: no phase {', '.join(unknown)}; there are: {', '.join(possible)}")
    return tuple(scene for name, scene in possible.items() if not only or name in only)


async def chaos(plan: ChaosPlan, say: Console) -> ChaosReport:
    """Run all phases. Raises ChildFailedError, EnvoyMissingError."""
    with folder(plan.logs) as name:
        say.print(f"starting {plan.setup.engines} engines, {plan.setup.pickers} pickers, Envoy")
        async with Stack(plan.setup, name) as stack:
            say.print(f"ready; warm-up of {plan.warm_seconds:.0f} s")
            recorder = Recorder(launch.HOST, stack.port)
            stack.clock = lambda: recorder.now
            phases = await _under_load(plan, stack, recorder, say)
            say.print("reading the pickers' logs")
            evidence = Evidence(recorder.records, stack.predictions(), stack.lives)
    figures = [judge(phase, evidence, settle=plan.settle) for phase in phases]
    setting = {
        "rate": plan.rate,
        "phase_seconds": plan.phase_seconds,
        "settle_seconds": plan.settle,
        "engines": plan.setup.engines,
        "pickers": plan.setup.pickers,
        "tls": plan.setup.tls,
        "peers": plan.setup.peers,
        "seed": plan.seed,
        "full": plan.full,
    }
    return ChaosReport(figures, setting, ELSEWHERE)


async def _under_load(plan: ChaosPlan, stack: Stack, recorder: Recorder, say: Console) -> list[Phase]:
    load = asyncio.create_task(recorder.run(traffic(plan)))
    try:
        await _sleep(plan.warm_seconds, load, stack)
        phases = [await _phase(plan, scene, stack, recorder, load, say) for scene in plan.scenes]
        recorder.stop()
        await asyncio.wait((load,), timeout=DRAIN_SECONDS)
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        recorder.close()
    return phases


async def _phase(
    plan: ChaosPlan, scene: Scene, stack: Stack, recorder: Recorder, load: asyncio.Task[None], say: Console
) -> Phase:
    begin = recorder.now
    phase = Phase(scene.name, begin, begin + LEAD_SECONDS, begin + plan.phase_seconds)

    def note(text: str) -> None:
        phase.steps.append((recorder.now - phase.fault, text))
        say.print(f"  {scene.name:<16} {phase.steps[-1][0]:>5.1f} s  {text}", markup=False)

    await _sleep(LEAD_SECONDS, load, stack)
    phase.fault = recorder.now
    await scene.fault(stack, note)
    await _sleep(max(0.0, phase.end - recorder.now), load, stack)
    phase.end = recorder.now
    return phase


async def _sleep(seconds: float, load: asyncio.Task[None], stack: Stack) -> None:
    """Wait. Raises ChildFailedError if a component ends by itself meanwhile, and the error that ended the
    load early."""
    deadline = asyncio.get_running_loop().time() + seconds
    while (left := deadline - asyncio.get_running_loop().time()) > 0:
        stack.children.check()
        if load.done():
            load.result()
            return
        await asyncio.sleep(min(0.5, left))


def traffic(plan: ChaosPlan) -> Iterator[Arrival]:
    """Yield every shared prompt once, then requests at the rate, without end."""
    begin = SHAPE.groups / WARM_RATE
    first = warm_up(SHAPE, rate=WARM_RATE, seed=plan.seed, model=MODEL_NAME)
    rest = arrivals(SHAPE, rate=plan.rate, seed=plan.seed, model=MODEL_NAME)
    return itertools.chain(first, (Arrival(a.at + begin, a.group, a.turn, a.body) for a in rest))
