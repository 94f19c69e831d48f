"""Run ``kvist bench prewarm``: TTFT through a rolling update, with and without prewarming.

Two parts. *virtual*: the picker's own parts in virtual time, paired seeds, two workloads. *sockets*: the
picker as a process, real Envoy and simulated engines, the same requests three times: without a rollout, with
one, and with one and prewarming. In both, eight pods are replaced one by one, each away for half of its slot.
"""

import argparse
import os
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from kvist_sim.bench.harness.proof import console, prove
from kvist_sim.bench.prewarm.report import PrewarmReport, document, table
from kvist_sim.bench.prewarm.sockets import Run, measured
from kvist_sim.bench.prewarm.virtual import LOAD, Setting, workloads

SEEDS: Final = 8
SLOT_SECONDS: Final = 60.0
"""The slot length of the part in virtual time. With engines as slow as these, prewarming avoids 29 % of the
added TTFT for slots of 24 s, 69 % for 60 s and 74 % for 150 s (virtual time): in short slots, pods leave
before the prefixes they got are requested."""
VIRTUAL, SOCKETS = "virtual", "sockets"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmPlan:
    """Parts, seeds and lengths of a run."""

    parts: tuple[str, ...]
    virtual: Setting
    slot_seconds: float = SLOT_SECONDS
    logs: str | None = None


def main(options: argparse.Namespace) -> int:
    """Run and print the tables. Return a non-zero code when a bound is broken or a component failed."""
    say = console()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    plan = PrewarmPlan(
        parts=(options.part,) if options.part else (VIRTUAL, SOCKETS),
        virtual=Setting(tuple(seeds), options.seconds, options.jobs),
        slot_seconds=options.slot_seconds,
        logs=options.logs,
    )
    return prove("prewarm", measure(plan, say), say, options, table=table, document=document)


async def measure(plan: PrewarmPlan, say: Console) -> PrewarmReport:
    """Run both parts. Raises ChildFailedError, EnvoyMissingError."""
    rows = await workloads(plan.virtual, say) if VIRTUAL in plan.parts else []
    before = os.getloadavg()[0]
    runs: list[Run] = []
    if SOCKETS in plan.parts:
        runs = await measured(plan.slot_seconds, plan.logs, say)
    setting = {
        "load": LOAD,
        "seeds": list(plan.virtual.seeds),
        "seconds": plan.virtual.seconds,
        "slot_seconds": plan.slot_seconds,
        "busy_before": round(before, 2),
        "full": len(plan.parts) == 2 and len(plan.virtual.seeds) >= SEEDS,
    }
    return PrewarmReport(rows, runs, setting)
