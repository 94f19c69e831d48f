"""Run ``kvist bench soak``: load for a long time, memory each second, and the state left when it stops.

Two parts, one after the other, since two cores do not carry both at full rate: ``direct`` asks one picker
over ext_proc without a gateway while its engines store and evict; ``stack`` sends requests through Envoy to
simulated engines, with replicas of the picker. ``judge`` has the bounds.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from kvist_sim import launch
from kvist_sim import model as model_files
from kvist_sim.bench.harness.direct import PICKED, Direct, SteadyClient
from kvist_sim.bench.harness.proof import console, folder, prove
from kvist_sim.bench.harness.records import Record, Recorder
from kvist_sim.bench.harness.stack import MODEL_NAME, SHAPE, Setup, Stack
from kvist_sim.bench.harness.watch import held, sampled, until_empty
from kvist_sim.bench.soak.judge import Memory, SoakFigures
from kvist_sim.bench.soak.report import SoakReport, document, table
from kvist_sim.load import percentile
from kvist_sim.processes import Children
from kvist_sim.workloads import arrivals

SECONDS: Final = 600.0
PICKS: Final = 1_000.0
RATE: Final = 200.0
DIRECT, STACK = "direct", "stack"
ENGINES: Final = 8
"""Engines of the direct part: ports that answer ``/metrics``, and their events."""
BLOCKS_PER_SECOND: Final = 2_000
CONNECTIONS: Final = 4
START_SECONDS: Final = 60.0
DRAIN_SECONDS: Final = 15.0
EXAMPLES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """Parts, rates and lengths of a run."""

    parts: tuple[str, ...]
    setup: Setup
    seconds: float = SECONDS
    picks: float = PICKS
    rate: float = RATE
    logs: str | None = None


def main(options: argparse.Namespace) -> int:
    """Run and print the table. Return a non-zero code when a bound is broken or a component failed."""
    say = console()
    plan = SoakPlan(
        parts=(options.part,) if options.part else (DIRECT, STACK),
        setup=Setup(pickers=2),
        seconds=options.seconds,
        picks=options.picks,
        rate=options.rate,
        logs=options.logs,
    )
    return prove("soak", soak(plan, say), say, options, table=table, document=document)


async def soak(plan: SoakPlan, say: Console) -> SoakReport:
    """Run both parts. Raises ChildFailedError, EnvoyMissingError."""
    figures: list[SoakFigures] = []
    for part in plan.parts:
        with folder(plan.logs and f"{plan.logs}/{part}") as name:
            figures += await (_direct if part == DIRECT else _stack)(plan, name, say)
    setting = {
        "seconds": plan.seconds,
        "picks": plan.picks,
        "rate": plan.rate,
        "blocks": BLOCKS_PER_SECOND,
        "engines": plan.setup.engines,
        "pickers": plan.setup.pickers,
        "full": plan.seconds >= SECONDS,
    }
    return SoakReport(figures, setting)


# -- direct


async def _direct(plan: SoakPlan, name: Path, say: Console) -> list[SoakFigures]:
    async with Children(name, grace_seconds=10) as children:
        picker = await _asked(children, name)
        before = await held(picker)
        say.print(f"direct: {plan.picks:g} picks/s for {plan.seconds:g} s")
        async with _connected(picker) as connections:
            client = SteadyClient(connections, plan.picks)
            loop = asyncio.get_running_loop()
            begin, cpu = loop.time(), picker.child.cpu_seconds()
            async with sampled(picker.child.pid, lambda: loop.time() - begin) as samples:
                await children.watch(asyncio.create_task(client.run(plan.seconds)))
            spent = picker.child.cpu_seconds() - cpu
            why = [f"{client.waiting} not answered; held: {await held(picker)}"] if client.waiting else []
        remains = await until_empty(picker, before)
    latencies = client.latencies
    return [
        SoakFigures(
            part=DIRECT,
            picker="picker",
            seconds=plan.seconds,
            requests=client.sent,
            failed=client.sent - client.statuses[PICKED],
            p50=percentile(latencies, 0.5),
            p99=percentile(latencies, 0.99),
            memory=Memory(samples, plan.seconds),
            left=remains,
            cpu_per_second=spent / plan.seconds,
            why=why + [f"status {s}: {count}" for s, count in client.statuses.items() if s != PICKED],
        )
    ]


async def _asked(children: Children, name: Path) -> launch.Picker:
    """Start a picker whose engines are one process that answers scrapes and one that publishes events."""
    engines = launch.engine_ports(ENGINES)
    ports = [str(engine.http) for engine in engines]
    children.start("upstream", [sys.executable, "-m", "kvist_sim.bench.harness.upstream", *ports])
    ready, spec = name / "published", name / "publisher.json"
    sockets = [(engine.events, engine.replay) for engine in engines]
    spec.write_text(json.dumps({"sockets": sockets, "rate": BLOCKS_PER_SECOND, "ready": str(ready)}))
    child = children.start("publisher", [sys.executable, "-m", "kvist_sim.bench.harness.churn", str(spec)])
    await children.ready(child, lambda: asyncio.sleep(0, ready.exists()), START_SECONDS)
    file = name / "endpoints.json"
    file.write_text(json.dumps(launch.endpoints_file(engines)))
    # 600,000 unread lines would be written to the disk; the other part logs requests
    return await launch.start_picker(
        children, file, str(model_files.folder()), arguments=["--log-requests=false"]
    )


@contextlib.asynccontextmanager
async def _connected(picker: launch.Picker) -> AsyncIterator[list[Direct]]:
    async with contextlib.AsyncExitStack() as stack:
        connections = []
        for _ in range(CONNECTIONS):
            connection = await Direct.open(launch.HOST, picker.grpc_port)
            connections.append(await stack.enter_async_context(connection))
        yield connections


# -- through the stack


async def _stack(plan: SoakPlan, name: Path, say: Console) -> list[SoakFigures]:
    async with Stack(plan.setup, name) as stack:
        pickers = [one.running for one in stack.pickers if one.running is not None]
        recorder = Recorder(launch.HOST, stack.port)
        before = [await held(picker) for picker in pickers]
        say.print(f"stack: {plan.rate:g} requests/s for {plan.seconds:g} s")
        cpu = [picker.child.cpu_seconds() for picker in pickers]
        async with contextlib.AsyncExitStack() as sampling:
            samples = [
                await sampling.enter_async_context(sampled(picker.child.pid, lambda: recorder.now))
                for picker in pickers
            ]
            await _loaded(plan, recorder, stack.children)
        spent = [picker.child.cpu_seconds() - at for picker, at in zip(pickers, cpu, strict=True)]
        await stack.end_gateway()
        remains = [await until_empty(picker, at) for picker, at in zip(pickers, before, strict=True)]
    return [
        _of_stack(plan, number, recorder.records, samples[number], remains[number], spent[number])
        for number in range(len(pickers))
    ]


def _of_stack(
    plan: SoakPlan,
    number: int,
    records: Sequence[Record],
    samples: Sequence[tuple[float, int]],
    remains: Sequence[str],
    spent: float,
) -> SoakFigures:
    waits = [record.token - record.began for record in records if record.good and record.token is not None]
    bad = [record for record in records if not record.good]
    return SoakFigures(
        part=STACK,
        picker=f"picker-{number}",
        seconds=plan.seconds,
        requests=len(records),
        failed=len(bad),
        p50=percentile(waits, 0.5),
        p99=percentile(waits, 0.99),
        memory=Memory(samples, plan.seconds),
        left=remains,
        cpu_per_second=spent / plan.seconds,
        why=[f"{record.id}: status {record.status} {record.error}" for record in bad[:EXAMPLES]],
    )


async def _loaded(plan: SoakPlan, recorder: Recorder, children: Children) -> None:
    plan_of_arrivals = arrivals(SHAPE, rate=plan.rate, seed=0, model=MODEL_NAME)
    load = asyncio.create_task(recorder.run(plan_of_arrivals))
    stop = asyncio.get_running_loop().call_later(plan.seconds, recorder.stop)
    try:
        async with asyncio.timeout(plan.seconds + DRAIN_SECONDS):
            await children.watch(load)
    except TimeoutError:
        pass  # what is not answered by now is a failed request
    finally:
        stop.cancel()
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        recorder.close()
