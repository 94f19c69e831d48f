"""Run ``kvist bench disaggregation``: what a request in two legs costs the picker, behind a real Envoy.

::

    this process: client (uvloop)  ->  Envoy, one per mode and picker  ->  engines, one process, 20 ports
                                         |  ext_proc, access log               ^
                                       pickers, without disaggregation and  ---+ leg 1
                                       with it                         <-  publisher process, KV events

Both pickers run the same program. Every cell is measured in several short windows, both pickers in turn, and
the middle window counts. The picker's own metrics prove that every request was split.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from kvist_sim import envoy, launch
from kvist_sim import model as model_files
from kvist_sim.bench.disaggregation.burst import CASES, DECODE, LEG_SECONDS, PREFILL, burst
from kvist_sim.bench.disaggregation.pool import EAGER, FALLBACKS, SPLITS, Pool, start_pool, until_paired
from kvist_sim.bench.disaggregation.report import (
    CONCURRENCY,
    SPLIT,
    WHOLE,
    BurstFigures,
    LegCell,
    LegsReport,
    document,
    tables,
)
from kvist_sim.bench.epp.client import window
from kvist_sim.bench.epp.command import SETTLE_SECONDS, start_publisher, warm_index
from kvist_sim.bench.epp.prompts import Kind, PromptShape, requests
from kvist_sim.bench.epp.report import EppFigures, figures, middle
from kvist_sim.bench.harness.proof import console, folder, prove
from kvist_sim.processes import Children

PREFILL_ENDPOINTS, DECODE_ENDPOINTS = 4, 16
SIZES: Final = (1, 40, 450)
SHAPES: Final = (PromptShape.COMPLETION, PromptShape.CHAT_2)
MODES: Final[tuple[envoy.Mode, ...]] = ("buffered", "duplex")
ROUNDS: Final = 5


@dataclass(slots=True)
class _Bench:
    """The running stack."""

    pickers: Mapping[str, launch.Picker]
    ports: Mapping[tuple[str, envoy.Mode], int]
    """Envoy's port by picker and mode."""
    blocks: int
    missing: dict[LegCell, int] = field(default_factory=dict)
    """Requests that were not split or fell back, where there are any."""


def main(options: argparse.Namespace) -> int:
    """Measure, print the tables, and write the results; non-zero when a request was lost or not split."""
    say = console()
    kinds = [Kind(size, shape) for shape in SHAPES for size in options.sizes or SIZES]
    work = bench(kinds, options.seconds, say, part=options.part)
    return prove("disaggregation-cost", work, say, options, table=tables, document=document)


async def bench(
    kinds: Sequence[Kind], seconds: float, say: Console, *, part: str | None = None
) -> LegsReport:
    """Measure every cell for ``seconds``, then the bursts; ``part``: one of them. Raises ChildFailedError."""
    cells: dict[LegCell, EppFigures] = {}
    missing: dict[LegCell, int] = {}
    bursts: list[BurstFigures] = []
    setting = {
        "prefill": PREFILL_ENDPOINTS,
        "decode": DECODE_ENDPOINTS,
        "index_blocks": 0,
        "seconds_per_cell": seconds,
        "rounds": ROUNDS,
        "leg_seconds": LEG_SECONDS,
        "burst_prefill": PREFILL,
        "burst_decode": DECODE,
    }
    if part != "burst":
        async with _running(kinds, say) as running:
            setting["index_blocks"], missing = running.blocks, running.missing
            cells = await _measure(running, kinds, seconds, say)
    if part != "cost":
        for case in CASES:
            bursts.append(await burst(case))
            say.print(f"{case.name} at once: done")
    shown = kinds if cells else ()
    return LegsReport(cells, missing, bursts, setting, shown, MODES)


@contextlib.asynccontextmanager
async def _running(kinds: Sequence[Kind], say: Console) -> AsyncIterator[_Bench]:
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(folder(None))
        children = await stack.enter_async_context(Children(logs, grace_seconds=10))
        pool = start_pool(children, PREFILL_ENDPOINTS, DECODE_ENDPOINTS, 0.0)
        await start_publisher(children, kinds, pool.engines, logs)
        file = logs / "endpoints.json"
        file.write_text(json.dumps(pool.endpoints))
        pickers = {name: await _picker(children, file, name) for name in (WHOLE, SPLIT)}
        blocks = min([await warm_index(picker) for picker in pickers.values()])
        await until_paired(pickers[SPLIT], pool)
        say.print(f"pickers ready: {blocks:,} blocks in the index, all pairs of engines are connected")
        ports = {
            (name, mode): await _envoy(stack, pool, picker, mode)
            for name, picker in pickers.items()
            for mode in MODES
        }
        yield _Bench(pickers, ports, blocks)


async def _picker(children: Children, file: Path, name: str) -> launch.Picker:
    arguments = [f"--disaggregation={'on' if name == SPLIT else 'off'}"]
    model = str(model_files.folder())
    return await launch.start_picker(
        children, file, model, name=f"picker {name}", arguments=arguments, program=EAGER
    )


async def _envoy(
    stack: contextlib.AsyncExitStack, pool: Pool, picker: launch.Picker, mode: envoy.Mode
) -> int:
    gateway = envoy.Gateway(
        endpoints=pool.hostports, picker=picker.address, mode=mode, failure_mode_allow=False
    )
    return (await stack.enter_async_context(envoy.Envoy(envoy.config(gateway)))).port


async def _measure(
    running: _Bench, kinds: Sequence[Kind], seconds: float, say: Console
) -> dict[LegCell, EppFigures]:
    cells = [
        LegCell(picker, mode, kind, concurrency)
        for concurrency in (1, CONCURRENCY)
        for kind in kinds
        for mode in MODES
        for picker in (WHOLE, SPLIT)
    ]
    windows: dict[LegCell, list[EppFigures]] = {cell: [] for cell in cells}
    for number in range(ROUNDS):
        for cell in cells:
            windows[cell].append(await _window(running, cell, seconds / ROUNDS))
        say.print(f"round {number + 1} of {ROUNDS} done")
    return {cell: middle(found) for cell, found in windows.items()}


async def _window(running: _Bench, cell: LegCell, seconds: float) -> EppFigures:
    picker = running.pickers[cell.picker]
    split, fallbacks = await _splits(picker)
    before = picker.child.cpu_seconds()
    sample = await window(
        running.ports[cell.picker, cell.mode],
        requests(cell.kind),
        concurrency=cell.concurrency,
        seconds=seconds,
    )
    await asyncio.sleep(SETTLE_SECONDS)
    picker.child.check()
    found = figures(sample, picker.child.cpu_seconds() - before)
    if cell.picker == SPLIT:
        now, fallen = await _splits(picker)
        missing = found.requests + sample.uncounted - (now - split) + fallen - fallbacks
        if missing:
            running.missing[cell] = running.missing.get(cell, 0) + missing
    return found


async def _splits(picker: launch.Picker) -> tuple[int, int]:
    """Return how many requests were split so far, and how many of them fell back."""
    return int(await launch.metric(picker, *SPLITS)), int(await launch.metric(picker, FALLBACKS))
