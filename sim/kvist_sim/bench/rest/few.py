"""CPU per request at a low rate: simulated engines that publish every event, a real Envoy.

A picker without requests uses CPU too, which a few requests have to bear: nothing is subtracted.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_sim import envoy, launch, load
from kvist_sim import model as model_files
from kvist_sim.bench.epp.profiler import begin, profiled
from kvist_sim.bench.rest.idle import NOW, QUIET_SECONDS, Windows, programs
from kvist_sim.demo.plan import MODEL_NAME, DemoPlan
from kvist_sim.demo.run import start_engines
from kvist_sim.processes import Child, Children
from kvist_sim.workloads import Arrival, arrivals, warm_up

ENGINES: Final = 4
RATE: Final = 20.0
DRAIN_SECONDS: Final = 8.0
WARM_RATE: Final = 8.0
ARGUMENTS: Final = ("--log-requests=false", "--log-format=text")


@dataclass(frozen=True, slots=True)
class Few:
    """CPU at a low rate; times in seconds."""

    picker: str
    requests: int
    failed: int
    picker_cpu: float
    """Of the picker per request, all its work included; in the median window."""
    proxy_cpu: float
    """Of Envoy per request."""
    idle_share: float
    """Of a core, of the same picker with warm caches and no requests."""


@dataclass(frozen=True, slots=True)
class _Running:
    picker: Child
    proxy: Child
    target: load.Target


async def measure(plan: Windows, *, baseline: str, folder: Path, profile: bool = False) -> list[Few]:
    """Send the same kind of traffic through each picker in turn. Raises ChildFailedError or RevisionError."""
    demo = DemoPlan(engines=ENGINES, rate=RATE)
    async with contextlib.AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder, grace_seconds=10))
        engines = launch.engine_ports(ENGINES)
        await start_engines(children, engines, str(model_files.folder()))
        running = {
            name: await stack.enter_async_context(_gateway(children, folder, engines, name, program))
            for name, program in programs(
                baseline, folder, profiled(folder, "few") if profile else None
            ).items()
        }
        traffic = arrivals(demo.shape, rate=RATE, seed=demo.seed, model=MODEL_NAME)
        first = next(iter(running.values()))
        warm = list(warm_up(demo.shape, rate=WARM_RATE, seed=demo.seed, model=MODEL_NAME))
        await _sent(first.target, iter(warm), len(warm) / WARM_RATE)
        for one in running.values():
            await _sent(one.target, traffic, plan.seconds / 2)
        idle = await _idle(running.values(), plan.seconds)
        if profile:
            begin(running[NOW].picker.pid)
        windows: dict[str, list[Few]] = {name: [] for name in running}
        for _ in range(plan.rounds):
            for name, one in running.items():
                windows[name].append(await _window(name, one, traffic, plan.seconds, idle[one.picker.pid]))
        for one in running.values():
            one.target.close()
    return [_middle(found) for found in windows.values()]


@contextlib.asynccontextmanager
async def _gateway(
    children: Children, folder: Path, engines: Sequence[launch.EnginePorts], name: str, program: Sequence[str]
) -> AsyncIterator[_Running]:
    file = folder / "endpoints-few.json"
    file.write_text(json.dumps(launch.endpoints_file(engines)))
    picker = await launch.start_picker(
        children,
        file,
        str(model_files.folder()),
        name=f"picker-few-{name}",
        arguments=ARGUMENTS,
        program=program,
    )
    gateway = envoy.Gateway(endpoints=[engine.hostport for engine in engines], picker=picker.address)
    async with envoy.Envoy(envoy.config(gateway)) as proxy:
        yield _Running(picker.child, proxy.process, load.Target(launch.HOST, proxy.port))


async def _sent(target: load.Target, traffic: Iterator[Arrival], seconds: float) -> list[load.Outcome]:
    """Send what is planned for the next ``seconds``; times of arrival begin with the first request."""
    first = next(traffic)
    plan = (Arrival(a.at - first.at, a.group, a.turn, a.body) for a in itertools.chain([first], traffic))
    return await load.open_loop(target, plan, seconds=seconds, drain_seconds=DRAIN_SECONDS)


async def _idle(running: Collection[_Running], seconds: float) -> dict[int, float]:
    await asyncio.sleep(QUIET_SECONDS)
    before = {one.picker.pid: one.picker.cpu_seconds() for one in running}
    await asyncio.sleep(seconds)
    return {one.picker.pid: (one.picker.cpu_seconds() - before[one.picker.pid]) / seconds for one in running}


async def _window(name: str, one: _Running, traffic: Iterator[Arrival], seconds: float, idle: float) -> Few:
    """Send for a while; the CPU until the last answer counts, and no longer."""
    picker, proxy = one.picker.cpu_seconds(), one.proxy.cpu_seconds()
    outcomes = await _sent(one.target, traffic, seconds)
    count = len(outcomes)
    return Few(
        name,
        count,
        sum(not outcome.good for outcome in outcomes),
        (one.picker.cpu_seconds() - picker) / count,
        (one.proxy.cpu_seconds() - proxy) / count,
        idle,
    )


def _middle(windows: Sequence[Few]) -> Few:
    """Return the window with the median CPU, with the counts of all."""
    middle = sorted(windows, key=lambda window: window.picker_cpu)[len(windows) // 2]
    requests, failed = sum(one.requests for one in windows), sum(one.failed for one in windows)
    return Few(middle.picker, requests, failed, middle.picker_cpu, middle.proxy_cpu, middle.idle_share)
