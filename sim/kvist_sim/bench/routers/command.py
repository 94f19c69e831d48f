"""Run ``kvist bench routers``: the same traffic to simulated engines through other projects' routers.

For each router fresh engines, the demo's warm-up and chat traffic (``kvist_sim.demo.plan``), and before them
short requests one at a time, by turns straight to an engine and through the router: the difference of the
medians is what the router adds.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from rich.console import Console

from kvist_sim import launch, load
from kvist_sim import model as model_files
from kvist_sim.bench.harness.proof import console, folder, prove
from kvist_sim.bench.routers.dynamo import DYNAMO
from kvist_sim.bench.routers.kinds import ROUTERS, EnginePool, Router, RouterMissingError, RunningRouter
from kvist_sim.bench.routers.report import Absent, RouterFigures, RouterReport, document, table
from kvist_sim.demo.plan import BLOCK_SIZE, MODEL_NAME, DemoPlan
from kvist_sim.demo.run import start_engines, traffic
from kvist_sim.envoy import EnvoyMissingError
from kvist_sim.processes import ChildFailedError, Children

PROBES: Final = 40
"""Short requests each way."""


def main(options: argparse.Namespace) -> int:
    """Run and print the table. Return a non-zero code when requests through kvist failed."""
    say = console()
    plan = DemoPlan(seconds=options.seconds, engines=options.engines, rate=options.engines * options.rate)
    chosen = [router for router in (*ROUTERS, DYNAMO) if not options.only or router.name in options.only]
    work = bench(plan, chosen, options.logs, say)
    return prove("routers", work, say, options, table=table, document=document)


async def bench(plan: DemoPlan, routers: Sequence[Router], logs: str | None, say: Console) -> RouterReport:
    """Run each router once; a router that cannot be run is reported in its row."""
    found: list[RouterFigures | Absent] = []
    for router in routers:
        say.print(
            f"{router.name}: {plan.engines} engines, {plan.rate:g} requests/s, {plan.run_seconds:.0f} s"
        )
        with folder(logs and f"{logs}/{router.name}") as name:
            found.append(await _one(plan, router, name))
    return RouterReport(plan, found)


async def _one(plan: DemoPlan, router: Router, name: Path) -> RouterFigures | Absent:
    try:
        async with _started(plan, router, name) as (running, engines):
            return await _measured(plan, router, running, engines)
    except (ChildFailedError, EnvoyMissingError, RouterMissingError) as failure:
        return Absent(router.name, router.version, str(failure))


@contextlib.asynccontextmanager
async def _started(
    plan: DemoPlan, router: Router, name: Path
) -> AsyncIterator[tuple[RunningRouter, Sequence[launch.EnginePorts]]]:
    model = str(model_files.folder())
    engines = launch.engine_ports(plan.engines)
    async with Children(name) as children:
        await start_engines(children, engines, model)
        pool = EnginePool(engines, model, MODEL_NAME, BLOCK_SIZE, children, name)
        async with router.start(pool) as running:
            yield running, engines


async def _measured(
    plan: DemoPlan, router: Router, running: RunningRouter, engines: Sequence[launch.EnginePorts]
) -> RouterFigures:
    straight = load.Target(launch.HOST, engines[0].http)
    try:
        added = await added_seconds(straight, running.target)
        asked = list(takewhile(lambda arrival: arrival.at < plan.run_seconds, traffic(plan)))
        for arrival in asked:
            running.prepare(arrival.body)
        before = _cpu(running)
        outcomes = await load.open_loop(
            running.target, asked, seconds=plan.run_seconds, drain_seconds=plan.drain_seconds
        )
        spent = {part: (used - before[part]) / len(outcomes) for part, used in _cpu(running).items()}
    finally:
        straight.close()
        running.target.close()
    begin = plan.warm_up_seconds + plan.lead_in_seconds
    summary = load.summarise(outcomes, begin=begin, end=begin + plan.seconds)
    return RouterFigures(router.name, router.version, router.how, summary, spent, added, running.note())


def _cpu(running: RunningRouter) -> dict[str, float]:
    return {part: child.cpu_seconds() for part, child in running.parts.items()}


async def added_seconds(straight: load.Target, through: load.Target) -> float:
    """Return the seconds that ``through`` adds to the median time to the first byte of a short request."""
    waits: dict[load.Target, list[float]] = {straight: [], through: []}
    for probe in range(PROBES):
        for target, seen in waits.items():
            seen.append(await _first_byte(target, _short(probe)))
    return statistics.median(waits[through]) - statistics.median(waits[straight])


async def _first_byte(target: load.Target, body: bytes) -> float:
    clock = asyncio.get_running_loop().time
    times = [clock()]
    await target.post(body, lambda _: times.append(clock()))
    return times[min(1, len(times) - 1)] - times[0]


def _short(number: int) -> bytes:
    message = {"role": "user", "content": f"Short question number {number}."}
    request = {"model": MODEL_NAME, "messages": [message], "max_tokens": 1, "stream": True}
    return json.dumps(request).encode()
