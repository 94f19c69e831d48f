"""Run ``kvist bench traces --instructions``: machine instructions of a request, with traces off and on.

Valgrind counts them (``Ir`` of callgrind), so that the figures do not depend on what else the machine does.
One process replays prebuilt HTTP/2 bytes through the picker's connection, ext_proc, batches, director, log
and account of ends, and exports the spans with the picker's exporter to a collector that is another process.
Timers, sockets of the gateway and work in the kernel are not in it; each would make a share of the whole
smaller. Every way runs the same requests several times; the least counts.

With ``--baseline`` only requests without traces are counted, replayed by this revision and by an older one,
each with its own replay. This finds a rise of 1 % on machines that are never quiet enough for a clock.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import uvloop
from rich.table import Table

from kvist_epp.app.process import freeze_startup_objects
from kvist_epp.settings.settings import Settings
from kvist_epp.tracing.destination import destination, resource
from kvist_epp.tracing.exporter import open_exporter
from kvist_sim.bench.epp.report import RISE_BOUND
from kvist_sim.bench.epp.revision import PACKAGES, RevisionError, python_path_of_revision
from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.bench.harness.proof import FAILED, WIDTH, console, publish
from kvist_sim.bench.harness.replay import replay_of

MODULE: Final = "kvist_sim.bench.trace_instructions"
REQUESTS: Final = 2560
"""Requests of one count: a tenth of them is one full export."""
WARM_UP: Final = 640
REPEATS: Final = 2
MARK: Final = "getsid"
"""A function of libc that nothing else calls: a call begins and ends what is counted."""
MOST_RISE: Final = 0.03
OFF: Final = "off"
TENTH: Final = "10 % sampled"


@dataclass(frozen=True, slots=True)
class CountedWay:
    """Settings of one way, and the trace contexts of its requests."""

    ratio: float | None
    """``--trace-sample-ratio``; None: the picker does not trace."""
    contexts: float | None = None
    """Fraction of the requests that come with a sampled context; the others have one that is not sampled.
    None: they come without."""


WAYS: Final[Mapping[str, CountedWay]] = {
    OFF: CountedWay(None),
    "none sampled": CountedWay(0.0),
    TENTH: CountedWay(0.1),
    "all sampled": CountedWay(1.0),
    "contexts, picker off": CountedWay(None, 0.1),
    "contexts, none sampled": CountedWay(0.0, 0.0),
    "contexts, 10 % sampled": CountedWay(0.0, 0.1),
}
BESIDE: Final = {
    name: "contexts, picker off" if way.contexts is not None else OFF for name, way in WAYS.items()
}
"""The way without traces of the same requests."""


@dataclass(frozen=True, slots=True)
class InstructionsOfWay:
    """Instructions of one way."""

    way: str
    instructions: float
    """For each request."""
    rise: float
    """Share by which it has more than the same requests without traces."""
    recorded: int
    """Requests of one count whose spans were exported."""
    per_recorded: float
    """Instructions that one recorded request adds, 0 where none is."""


@dataclass(frozen=True, slots=True)
class InstructionsReport:
    """All figures of one run."""

    ways: list[InstructionsOfWay]
    requests: int
    baseline: str = ""
    """Older revision in the first row, whose instructions the others are compared with."""

    def broken(self) -> list[str]:
        """Return the bound that does not hold, in words."""
        if self.baseline:
            bounds = {OFF: (RISE_BOUND, f"in {self.baseline}")}
        else:
            bounds = {TENTH: (MOST_RISE, "without traces")}
        return [
            f"{each.way}: {each.rise:.1%} more instructions per request than {bounds[each.way][1]}"
            for each in self.ways
            if each.way in bounds and each.rise > bounds[each.way][0]
        ]


def main(options: argparse.Namespace) -> int:
    """Count, print the table, and write the results; non-zero when the bound is broken."""
    if shutil.which("valgrind") is None:
        console().print("traces failed: valgrind is not installed (Debian's package valgrind)", style="red")
        return FAILED
    if options.baseline and options.write_docs:
        console().print("traces failed: --write-docs has no place for --baseline; use --json", style="red")
        return FAILED
    with TemporaryDirectory(prefix="kvist-bench-") as name:
        try:
            folder = Path(name)
            report = beside(options.baseline, folder) if options.baseline else count(folder)
        except RevisionError as failure:
            console().print(f"traces failed: {failure}", style="red", markup=False)
            return FAILED
    found = {**measured_on(), **asdict(report)}
    publish("trace-instructions", found, table(report), options, width=WIDTH)
    for broken in report.broken():
        console().print(f"bound broken: {broken}", style="red", markup=False)
    return FAILED if report.broken() else 0


def beside(revision: str, folder: Path) -> InstructionsReport:
    """Count requests without traces in an older revision and in this one. Raises RevisionError."""
    path = python_path_of_revision(revision, folder, (*PACKAGES, "sim"))
    try:
        before = count(folder, (OFF,), {"PYTHONPATH": path}).ways[0].instructions
    except subprocess.CalledProcessError as error:
        raise RevisionError(revision, f"it cannot replay requests: {error}") from error
    now = count(folder, (OFF,)).ways[0].instructions
    ways = [
        InstructionsOfWay(revision, before, 0.0, 0, 0.0),
        InstructionsOfWay(OFF, now, now / before - 1, 0, 0.0),
    ]
    return InstructionsReport(ways, REQUESTS, revision)


def count(
    folder: Path, ways: Sequence[str] = tuple(WAYS), environment: Mapping[str, str] | None = None
) -> InstructionsReport:
    """Count the instructions of these ways. Raises ``subprocess.CalledProcessError``."""
    valgrind = [
        "valgrind",
        "--tool=callgrind",
        f"--dump-before={MARK}",
        f"--callgrind-out-file={folder}/count",
    ]
    replay = [sys.executable, "-m", MODULE, "--replay", str(folder / "replay.json"), *ways]
    fixed = {"PYTHONHASHSEED": "0", "OTEL_SDK_DISABLED": "false", **(environment or {})}
    subprocess.run([*valgrind, *replay], check=True, env=os.environ | fixed, stderr=subprocess.DEVNULL)
    recorded: dict[str, int] = json.loads((folder / "replay.json").read_text())
    totals = [_total(folder / f"count.{number}") for number in range(1, 2 * REPEATS * len(ways) + 1)]
    counted = totals[1::2]  # the others are what lies between the counts
    least = {name: min(counted[at :: len(ways)]) / REQUESTS for at, name in enumerate(ways)}
    return InstructionsReport([_figures(name, least, recorded[name]) for name in ways], REQUESTS)


def _figures(name: str, least: Mapping[str, float], recorded: int) -> InstructionsOfWay:
    beside = least.get(BESIDE[name], least[name])
    added = least[name] - beside
    each = added * REQUESTS / recorded if recorded else 0.0
    return InstructionsOfWay(name, least[name], least[name] / beside - 1, recorded, each)


def _total(file: Path) -> int:
    found = re.search(r"^(?:totals|summary): (\d+)", file.read_text(errors="replace"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{file.name}: no total")
    return int(found[1])


def table(report: InstructionsReport) -> Table:
    """Return the figures as a table."""
    found = Table(
        title=f"Instructions of a request: 1 KB completions, {report.requests} of them, least of {REPEATS}"
    )
    compared = f"more than {report.baseline or OFF}"
    for name in ("traces", "instructions", compared, "recorded", "for each recorded"):
        found.add_column(name, justify="left" if name == "traces" else "right")
    for each in report.ways:
        per_recorded = f"{each.per_recorded:,.0f}" if each.recorded else ""
        found.add_row(
            each.way, f"{each.instructions:,.0f}", f"{each.rise:+.2%}", f"{each.recorded:,}", per_recorded
        )
    return found


def _settings(collector: str) -> Settings:
    return Settings.from_args(
        ["--endpoints-file=none", "--kv-events=false", f"--trace-endpoint=http://{collector}"]
    )


async def _replay(ways: Sequence[str]) -> dict[str, int]:
    """Replay every way; return how many requests of one count were recorded."""
    recorded: dict[str, int] = dict.fromkeys(ways, 0)
    async with AsyncExitStack() as stack:
        arguments = [sys.executable, "-m", MODULE, "--collector"]
        child = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        stack.callback(child.kill)
        assert child.stdout is not None
        collector = (await child.stdout.readline()).decode().strip()
        settings = _settings(collector)
        where = destination(settings, {})
        assert where is not None
        running = {name: replay_of(WAYS[name].ratio, WAYS[name].contexts, settings) for name in ways}
        for replay in running.values():
            if replay.tracer is not None:
                opened = open_exporter(
                    replay.tracer, replay.stats, where, resource=resource({}, "1", "r"), version="1"
                )
                replay.exporter = await stack.enter_async_context(opened)
            await replay.run(replay.prepared(WARM_UP))
        for _ in range(REPEATS):
            for name, replay in running.items():
                turns = replay.prepared(REQUESTS)
                before = 0 if replay.tracer is None else replay.tracer.recorded
                freeze_startup_objects()  # the collector begins each count alike
                os.getsid(0)
                await replay.run(turns)
                os.getsid(0)
                recorded[name] = 0 if replay.tracer is None else replay.tracer.recorded - before
    return recorded


async def _collect() -> None:
    """Accept every export, until killed."""
    from aiohttp import web

    async def accepted(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    application = web.Application(client_max_size=1 << 28)
    application.router.add_post("/v1/traces", accepted)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(f"127.0.0.1:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "--collector":
        asyncio.run(_collect())
    else:
        Path(sys.argv[2]).write_text(json.dumps(uvloop.run(_replay(sys.argv[3:]))))
