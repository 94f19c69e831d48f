"""CPU of a picker without requests, by the number of endpoints and the kind of engines."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_sim import launch
from kvist_sim import model as model_files
from kvist_sim.bench.epp.profiler import begin, profiled
from kvist_sim.bench.epp.revision import picker_of_revision
from kvist_sim.bench.rest.fleet import FleetPorts, endpoints_file
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

VLLM: Final = "vllm"
NO_METRICS: Final = "no-metrics"
UNREACHABLE: Final = "unreachable"
ENGINES: Final = (VLLM, NO_METRICS, UNREACHABLE)
"""Kinds of engines: vLLM's, servers that have neither its metrics nor a list of models, and addresses
without a server."""
NOW: Final = "now"
"""Name of the working tree's picker."""
QUIET_SECONDS: Final = 8.0
"""From readiness to the first measurement: scrapes and replays of the start are over."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a measurement, of which the median counts."""

    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Idle:
    """CPU without requests."""

    endpoints: int
    picker: str
    """``now``, or an older revision."""
    share: float
    """Of a core, in the median window."""
    engines: str = VLLM
    """One of ``ENGINES``."""


@contextlib.asynccontextmanager
async def fleet(children: Children, folder: Path, engines: int, *, kind: str = VLLM) -> AsyncIterator[Path]:
    """Start engines of a kind in one process; yield the endpoints file. They publish as many blocks a second
    as the file ``fleet-<engines>.rate`` says, once there is one."""
    ports = FleetPorts(*free_ports(3))
    file = folder / f"endpoints-{engines}.json"
    file.write_text(json.dumps(endpoints_file(engines, ports)))
    if kind == UNREACHABLE:
        yield file
        return
    spec, ready = folder / f"fleet-{engines}.json", folder / f"fleet-{engines}.ready"
    spec.write_text(
        json.dumps(
            {
                "engines": engines,
                "pages": kind == VLLM,
                "ports": [ports.http, ports.events, ports.replay],
                "rate": str(folder / f"fleet-{engines}.rate"),
                "ready": str(ready),
            }
        )
    )
    program = [sys.executable, "-m", "kvist_sim.bench.rest.fleet", str(spec)]
    child = children.start(f"fleet {engines}", program)
    await children.ready(child, lambda: asyncio.sleep(0, ready.exists()), launch.START_SECONDS)
    yield file


def programs(baseline: str, folder: Path, now: Sequence[str] | None = None) -> Mapping[str, Sequence[str]]:
    """Return the commands of the pickers to measure: today's (``now``), and one of an older revision."""
    found = {NOW: now or launch.PICKER}
    return {baseline: picker_of_revision(baseline, folder), **found} if baseline else found


async def measure(
    sizes: Sequence[int],
    windows: Windows,
    *,
    kind: str = VLLM,
    baseline: str,
    folder: Path,
    profile: bool = False,
) -> list[Idle]:
    """Run a picker for each number of endpoints of a kind, all at once; return the CPU of each.

    Raises ChildFailedError or RevisionError.
    """
    pickers: dict[tuple[int, str], Child] = {}
    async with contextlib.AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder, grace_seconds=10))
        for size in sizes:
            file = await stack.enter_async_context(fleet(children, folder, size, kind=kind))
            now = profiled(folder, f"{size}") if profile else None
            for name, program in programs(baseline, folder, now).items():
                started = await launch.start_picker(
                    children,
                    file,
                    str(model_files.folder()),
                    name=f"picker-{size}-{name}",
                    program=program,
                )
                pickers[size, name] = started.child
        await asyncio.sleep(QUIET_SECONDS)
        if profile:
            for size in sizes:
                begin(pickers[size, NOW].pid)
        shares: dict[tuple[int, str], list[float]] = {key: [] for key in pickers}
        for _ in range(windows.rounds):
            before = {key: child.cpu_seconds() for key, child in pickers.items()}
            await asyncio.sleep(windows.seconds)
            children.check()
            for key, child in pickers.items():
                shares[key].append((child.cpu_seconds() - before[key]) / windows.seconds)
    return [Idle(size, name, sorted(found)[len(found) // 2], kind) for (size, name), found in shares.items()]
