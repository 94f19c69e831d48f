"""Run ``kvist bench epp``: the cost of the picker behind a real Envoy.

::

    this process: client (uvloop)  ->  Envoy, one per way of asking  ->  upstream process, 20 ports
                                         |  ext_proc, access log
                                       picker, one per transport     <-  publisher process, KV events over ZMQ
                                       echo, the unit of the bounds

Every cell is measured in several short windows, all ways next to each other in each round, so that the
machine's noise hits all alike, and the middle one of the rounds counts. A picker's CPU is read from the
kernel's clock of its process, a moment after each window, when the access log has come in.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console

from kvist_sim import envoy, launch
from kvist_sim import model as model_files
from kvist_sim.bench.epp.client import window
from kvist_sim.bench.epp.profiler import begin, profiled, profiles
from kvist_sim.bench.epp.prompts import Kind, PromptShape, requests
from kvist_sim.bench.epp.report import (
    AIM_CONCURRENCY,
    ECHO,
    ECHO_KIND,
    ECHO_WAY,
    Cell,
    EppFigures,
    EppReport,
    Way,
    changes,
    document,
    figures,
    middle,
)
from kvist_sim.bench.epp.revision import BEST_REVISION, RevisionError, accepted_arguments, picker_of_revision
from kvist_sim.bench.epp.tables import changes_table, tables
from kvist_sim.bench.harness.machine import BusyError, demand_quiet
from kvist_sim.bench.harness.proof import write
from kvist_sim.envoy_settings import PickerTls
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, ChildFailedError, Children, Stopped, run

ENDPOINTS: Final = 20
INDEX_BLOCKS: Final = 100_000
BLOCKS_METRIC: Final = "kvist_epp_index_blocks"
CONCURRENCIES: Final = (1, AIM_CONCURRENCY)
SIZES: Final = (1, 8, 40, 160, 450)
QUICK_SIZES: Final = (1, 450)
SHAPES: Final[tuple[PromptShape, ...]] = (PromptShape.COMPLETION, PromptShape.CHAT_2, PromptShape.CHAT_40)
QUICK_SHAPES: Final[tuple[PromptShape, ...]] = (PromptShape.COMPLETION, PromptShape.CHAT_2)
ROUNDS: Final = 5
SECONDS: Final = 2.4
QUICK_SECONDS: Final = 0.9
SETTLE_SECONDS: Final = 0.15
"""Envoy sends its access log every 0.1 s; taking it in belongs to the requests before."""
WARM_SECONDS: Final = 90.0
WIDTH: Final = 100
FAILED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EppPlan:
    """Cells to measure."""

    transports: tuple[str, ...]
    modes: tuple[envoy.Mode, ...]
    kinds: tuple[Kind, ...]
    seconds: float
    """Seconds for each cell, over all rounds."""
    profile: bool = False
    tls: bool = True
    """True for one more column: the first way, with TLS between Envoy and the picker."""
    revision: str = ""
    """Older revision to compare with; then only the first way is measured, for both."""

    @property
    def ways(self) -> list[Way]:
        """Configurations to measure, the baseline first."""
        asked = [Way(transport, mode) for transport in self.transports for mode in self.modes]
        if self.revision:
            asked = [dataclasses.replace(asked[0], revision=self.revision), asked[0]]
        if self.tls:
            asked.append(dataclasses.replace(asked[-1] if self.revision else asked[0], tls=True))
        return [Way(None, None), *asked, ECHO_WAY]

    @property
    def asked(self) -> list[Way]:
        """One configuration for each picker process."""
        pickers = [way for way in self.ways if way.transport and way != ECHO_WAY]
        return list({way.picker: way for way in pickers}.values())

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Connections of the client; revisions are compared at the bounds' concurrency only."""
        return (AIM_CONCURRENCY,) if self.revision else CONCURRENCIES

    @property
    def cells(self) -> list[Cell]:
        """All cells in the order of measuring.

        The echo's only cell, the unit of the bounds, comes again before each kind: a shared machine is not
        equally fast at all times.
        """
        ways = [way for way in self.ways if way != ECHO_WAY]
        echo = Cell(ECHO_WAY, ECHO_KIND, AIM_CONCURRENCY)
        found: list[Cell] = []
        for number in self.concurrencies:
            for kind in self.kinds:
                found += [echo] * (number == AIM_CONCURRENCY)
                found += [Cell(way, kind, number) for way in ways]
        return found


@dataclass(frozen=True, slots=True)
class EppBench:
    """Ports and processes of the running stack."""

    ports: Mapping[Way, int]
    """Envoy's port for each way."""
    pickers: Mapping[str, Child]
    """Processes of the pickers and of the echo, by ``Way.picker``."""
    blocks: int
    """Blocks in each picker's index."""


def main(options: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON.

    Return a non-zero code when a component or a request failed.
    """
    say = Console(stderr=True, width=WIDTH, highlight=False)
    try:
        if options.guard:
            demand_quiet()
        report = run(bench(_plan(options), say), loop_factory=uvloop.new_event_loop)
    except Stopped as stopped:
        say.print("stopped")
        return stopped.exit_code
    except (ChildFailedError, envoy.EnvoyMissingError, RevisionError, BusyError) as failure:
        say.print(f"bench failed: {failure}", style="red", markup=False)
        return FAILED
    return _publish(report, options, say)


def _plan(options: argparse.Namespace) -> EppPlan:
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    shapes = QUICK_SHAPES if options.quick else SHAPES
    if options.shape:
        shapes = (PromptShape[options.shape.upper().replace("-", "_")],)
    return EppPlan(
        transports=(options.transport,) if options.transport else ("fast", "grpc"),
        modes=(options.mode,) if options.mode else ("buffered", "duplex"),
        kinds=tuple(Kind(size, shape) for shape in shapes for size in sizes),
        seconds=options.seconds or (QUICK_SECONDS if options.quick else SECONDS),
        profile=options.profile,
        revision=BEST_REVISION if options.guard else options.baseline or "",
    )


def _publish(report: EppReport, options: argparse.Namespace, say: Console) -> int:
    file = options.json
    text = json.dumps(document(report), indent=2)
    if file == "-":
        sys.stdout.write(text + "\n")
    else:
        Console(width=WIDTH).print(tables(report))
        if file:
            Path(file).write_text(text + "\n")
    if options.write_docs:
        found = changes(report)
        name, shown = ("epp-baseline", changes_table(found)) if found else ("epp", tables(report))
        write(Path(options.write_docs), name, document(report), shown)
    if errors := report.errors():
        say.print(f"bench failed: {errors} requests were not answered with 200", style="red")
        return FAILED
    for broken in report.broken():
        say.print(f"bound broken: {broken}", style="red", markup=False)
    return FAILED if report.broken() else 0


async def bench(plan: EppPlan, say: Console) -> EppReport:
    """Start everything, measure every cell, stop everything. Raises ChildFailedError."""
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as name:
        folder = Path(name)
        async with _running(plan, folder, say) as running:
            cells = await _measure(plan, running, say)
        if plan.profile:
            for text in profiles(folder, [way.picker for way in plan.asked]):
                say.print(text, markup=False)
    setting = {
        "endpoints": ENDPOINTS,
        "index_blocks": running.blocks,
        "seconds_per_cell": plan.seconds,
        "rounds": ROUNDS,
        "profiled": plan.profile,
    }
    return EppReport(cells, plan.ways, plan.kinds, plan.concurrencies, setting)


@contextlib.asynccontextmanager
async def _running(plan: EppPlan, folder: Path, say: Console) -> AsyncIterator[EppBench]:
    engines = launch.engine_ports(ENDPOINTS)
    async with contextlib.AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder, grace_seconds=10))
        upstream = [sys.executable, "-m", "kvist_sim.bench.harness.upstream", *(str(e.http) for e in engines)]
        children.start("upstream", upstream)
        await start_publisher(children, plan.kinds, engines, folder)
        say.print(f"upstream with {ENDPOINTS} ports and event publisher ready")
        pickers = await _start_pickers(children, plan, engines, folder)
        blocks = [await warm_index(picker) for picker in pickers.values()]
        say.print(f"pickers ready: {', '.join(pickers)}; {min(blocks):,} blocks in the index")
        if plan.profile:
            for picker in pickers.values():
                begin(picker.child.pid)
        echo, address = await start_echo(children, engines[0])
        addresses = {name: picker.address for name, picker in pickers.items()} | {ECHO: address}
        ports = {way: await _envoy(stack, way, engines, addresses) for way in plan.ways}
        running = {name: picker.child for name, picker in pickers.items()} | {ECHO: echo}
        yield EppBench(ports, running, min(blocks))


async def start_publisher(
    children: Children, kinds: Sequence[Kind], engines: Sequence[launch.EnginePorts], folder: Path
) -> None:
    """Start the publisher of the prefixes that these requests share.

    Waits for its file, written when all sockets are bound and all events can be replayed. Raises
    ChildFailedError.
    """
    ready = folder / "published"
    spec = folder / "publisher.json"
    spec.write_text(
        json.dumps(
            {
                "kinds": [(kind.kilobytes, kind.shape.name) for kind in kinds],
                "blocks": INDEX_BLOCKS,
                "sockets": [(e.events, e.replay) for e in engines],
                "ready": str(ready),
            }
        )
    )
    command = [sys.executable, "-m", "kvist_sim.bench.epp.publisher", str(spec)]
    child = children.start("publisher", command)
    await children.ready(child, lambda: asyncio.sleep(0, ready.exists()), WARM_SECONDS)


async def start_echo(children: Children, engine: launch.EnginePorts) -> tuple[Child, str]:
    """Start the echo, which names ``engine`` to every request; return it and its address."""
    (port,) = free_ports(1)
    child = children.start(
        "echo", [sys.executable, "-m", "kvist_sim.bench.epp.echo", str(port), engine.hostport]
    )
    await children.ready(child, functools.partial(_listens, port), launch.START_SECONDS)
    return child, f"{launch.HOST}:{port}"


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(launch.HOST, port)
    except OSError:
        return False
    writer.close()
    return True


async def _start_pickers(
    children: Children, plan: EppPlan, engines: Sequence[launch.EnginePorts], folder: Path
) -> dict[str, launch.Picker]:
    file = folder / "endpoints.json"
    file.write_text(json.dumps(launch.endpoints_file(engines)))
    started = {}
    for way in plan.asked:
        program, arguments = _program(plan, way, folder), [f"--transport={way.transport}"]
        if way.revision:
            arguments = accepted_arguments(way.revision, program, arguments)
        started[way.picker] = await launch.start_picker(
            children,
            file,
            str(model_files.folder()),
            name=f"picker {way.picker}",
            arguments=arguments,
            secure=way.tls,
            program=program,
        )
    return started


def _program(plan: EppPlan, way: Way, folder: Path) -> Sequence[str]:
    if way.revision:
        return picker_of_revision(way.revision, folder)
    return profiled(folder, way.picker) if plan.profile else launch.PICKER


async def warm_index(picker: launch.Picker) -> int:
    """Wait for all events; return the number of blocks in the index. Raises ChildFailedError."""
    deadline = asyncio.get_running_loop().time() + WARM_SECONDS
    while (blocks := int(await launch.metric(picker, BLOCKS_METRIC))) < INDEX_BLOCKS:
        picker.child.check()
        if asyncio.get_running_loop().time() > deadline:
            what = f"{blocks:,} of {INDEX_BLOCKS:,} blocks in the index after {WARM_SECONDS:.0f} s"
            raise ChildFailedError(picker.child.name, what, picker.child.tail())
        await asyncio.sleep(0.2)
    return blocks


async def _envoy(
    stack: contextlib.AsyncExitStack,
    way: Way,
    engines: Sequence[launch.EnginePorts],
    addresses: Mapping[str, str],
) -> int:
    options: dict[str, Any] = {}
    if way.transport is not None:
        options = {"picker": addresses[way.picker], "mode": way.mode}
        options["picker_tls"] = PickerTls() if way.tls else None
        options["access_log"] = options["health_check"] = way != ECHO_WAY
        if way == ECHO_WAY:
            options["responses"] = "skip"
    gateway = envoy.Gateway(endpoints=[engine.hostport for engine in engines], **options)
    proxy = await stack.enter_async_context(envoy.Envoy(envoy.config(gateway)))
    return proxy.port


async def _measure(plan: EppPlan, running: EppBench, say: Console) -> dict[Cell, EppFigures]:
    cells = plan.cells
    windows: dict[Cell, list[EppFigures]] = {cell: [] for cell in cells}
    for number in range(ROUNDS):
        with say.status(f"round {number + 1} of {ROUNDS}, {len(cells)} cells"):
            for cell in cells:
                windows[cell].append(await _window(cell, running, plan.seconds / ROUNDS))
        say.print(f"round {number + 1} of {ROUNDS} done")
    return {cell: middle(found) for cell, found in windows.items()}


async def _window(cell: Cell, running: EppBench, seconds: float) -> EppFigures:
    picker = running.pickers.get(cell.way.picker)
    before = picker.cpu_seconds() if picker else 0.0
    sample = await window(
        running.ports[cell.way], requests(cell.kind), concurrency=cell.concurrency, seconds=seconds
    )
    await asyncio.sleep(SETTLE_SECONDS)
    if picker is None:
        return figures(sample, None)
    picker.check()
    return figures(sample, picker.cpu_seconds() - before)
