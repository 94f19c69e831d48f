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
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import uvloop
from rich.table import Table

from kvist_epp.app.decision_batch import DecisionBatch
from kvist_epp.app.process import freeze_startup_objects
from kvist_epp.director.assembly import make_director
from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.extproc.service import ext_proc_methods
from kvist_epp.flowcontrol.driver import FlowDriver
from kvist_epp.http2 import frames
from kvist_epp.http2.grpc_health import Health
from kvist_epp.http2.http2_connection import Http2Connection
from kvist_epp.http2.limits import Limits
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.counters import TraceStats
from kvist_epp.telemetry.metrics import PickerMetrics
from kvist_epp.telemetry.request_log import LogWriter, RequestLog
from kvist_epp.tracing.destination import destination, resource
from kvist_epp.tracing.exporter import BATCH, SpanExporter, open_exporter
from kvist_epp.tracing.trace_context import PickTracer, TraceContext
from kvist_sim.bench.epp.prompts import Kind, PromptShape, bodies
from kvist_sim.bench.epp.report import RISE_BOUND
from kvist_sim.bench.epp.revision import PACKAGES, RevisionError, python_path_of_revision
from kvist_sim.bench.harness.direct import (
    GIVEN_WINDOW,
    LOG_OPENING,
    OPENING,
    PICKED,
    PickAnswer,
    body_message,
    framed,
    head_message,
    log_message,
)
from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.bench.harness.proof import FAILED, WIDTH, console, publish

MODULE: Final = "kvist_sim.bench.trace_instructions"
ENDPOINTS: Final = 20
REQUESTS: Final = 2560
"""Requests of one count: a tenth of them is one full export."""
LOG_STREAM: Final = 1
WARM_UP: Final = 640
TURN: Final = 4
"""Requests that arrive in one turn of the event loop."""
REPEATS: Final = 2
KIND: Final = Kind(1, PromptShape.COMPLETION)
UNKNOWN: Final = ":0"
"""The endpoint in the access log: none, because the bytes are made before the picks."""
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


class _ForgottenLines(LogWriter):
    """Takes lines as the log does, without its thread, which would be woken by a clock."""

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque(maxlen=1)

    def write(self, line: bytes) -> None:
        self._kept.append(line)


class _CountingTracer(PickTracer):
    """A tracer that also counts what is recorded."""

    recorded = 0

    def on_sent(self, request: InFlightRequest, trace: TraceContext) -> None:
        self.recorded += 1
        super().on_sent(request, trace)


@dataclass(slots=True)
class _Replay:
    """A picker without sockets, and the requests that it gets."""

    connection: Http2Connection
    stats: TraceStats
    tracer: _CountingTracer | None
    turns: Iterator[bytes]
    picked: Mapping[str, int]
    """Requests so far by outcome."""
    exporter: SpanExporter | None = None

    def prepared(self, requests: int) -> list[bytes]:
        """Return the bytes of the next requests, a turn each."""
        return list(itertools.islice(self.turns, requests // TURN))

    async def run(self, turns: Sequence[bytes]) -> None:
        """Answer requests that come in turns, report the ends of those before, and export all spans."""
        outbox, before = self.connection.outbox, self.picked["picked"]
        tracer: Sized = () if self.tracer is None else self.tracer
        for received in turns:
            self.connection.receive(received)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            outbox.take()
            if len(tracer) >= BATCH:
                await self._flush()
        await self._flush()
        assert self.picked == {"picked": before + TURN * len(turns)}, "a request was not answered"
        assert not self.stats.dropped.total(), "spans were dropped"

    async def _flush(self) -> None:
        if self.exporter is not None:
            await self.exporter.flush(600)


def _settings(collector: str) -> Settings:
    return Settings.from_args(
        ["--endpoints-file=none", "--kv-events=false", f"--trace-endpoint=http://{collector}"]
    )


def _replay_of(way: CountedWay, settings: Settings) -> _Replay:
    loop_clock, logs = asyncio.get_running_loop().time, RequestLog(_ForgottenLines())
    stats, driver = TraceStats(), FlowDriver(loop_clock)
    sampler = random.Random(1).getrandbits
    tracer = None if way.ratio is None else _CountingTracer(way.ratio, stats, random_bits=sampler)
    metrics, decisions = (
        PickerMetrics(),
        DecisionLog(settings.decision_log, "r", clock=loop_clock, wall=time.time),
    )
    director = make_director(
        settings,
        metrics=metrics,
        log=logs,
        now=loop_clock(),
        wake=driver.wake,
        replica="r",
        tracer=tracer,
        decisions=decisions,
    )
    endpoints = [Endpoint(f"engine-{n}", "pool", "10.0.0.1", 8000 + n, {}) for n in range(ENDPOINTS)]
    director.set_endpoints([Candidate(e, director.tracker.load(e.key)) for e in endpoints], 0.0)
    assert director.flow is not None
    driver.start(director.flow)
    batch, completion = DecisionBatch(director, driver, loop_clock), CompletionHandler(director, loop_clock)
    methods = ext_proc_methods(batch.decide, completion.on_access_log, Health())
    connection = Http2Connection(methods, Limits())
    return _Replay(connection, stats, tracer, _turns(way), metrics.requests)


def _turns(way: CountedWay) -> Iterator[bytes]:
    """Yield the bytes of one turn after the other: requests, the ends of their calls, and the access log."""
    contents, draw = bodies(KIND), random.Random(2)
    first = {frames.SETTING_ENABLE_PUSH: 0, frames.SETTING_INITIAL_WINDOW_SIZE: GIVEN_WINDOW}
    before = frames.PREFACE + frames.settings(first) + _access_log_frames(LOG_STREAM, (), opens=True)
    for turn in itertools.count():
        numbers = [3 + 2 * (turn * TURN + at) for at in range(TURN)]
        found = [before, frames.window_update(frames.CONNECTION, 1 << 16)]
        for at, number in enumerate(numbers):
            metadata = {}
            if way.contexts is not None:
                flags = "01" if draw.random() < way.contexts else "00"
                metadata["traceparent"] = f"00-{draw.getrandbits(128) | 1:032x}-{number:016x}-{flags}"
            head = {":method": "POST", ":path": KIND.shape.path, "content-type": "application/json"}
            found.append(
                _request_frames(number, _name(turn, at), head, contents[at % len(contents)], metadata)
            )
        yield b"".join(found)
        ended = [
            PickAnswer(_name(turn, at), PICKED, UNKNOWN, f"r.{turn * TURN + at + 1}") for at in range(TURN)
        ]
        ends = [frames.frame(frames.DATA, frames.END_STREAM, n.to_bytes(4, "big")) for n in numbers]
        before = b"".join([*ends, _access_log_frames(LOG_STREAM, ended)])


def _request_frames(
    number: int, name: str, headers: Mapping[str, str], body: bytes, metadata: Mapping[str, str]
) -> bytes:
    """Return all that opens one stream and sends a request on it; ``metadata`` is the call's."""
    block = OPENING + b"".join(frames.literal(k.encode(), v.encode()) for k, v in metadata.items())
    return _messages(number, block, framed(head_message(name, headers)) + framed(body_message(body)))


def _access_log_frames(number: int, answers: Iterable[PickAnswer], *, opens: bool = False) -> bytes:
    """Return a message of the access log with the ends of these requests; ``opens``: it begins the stream."""
    return _messages(number, LOG_OPENING if opens else b"", framed(log_message(answers, PICKED)))


def _messages(number: int, block: bytes, content: bytes) -> bytes:
    stream, end = number.to_bytes(4, "big"), frames.END_HEADERS
    opening = frames.frame(frames.HEADERS, end, stream, block) if block else b""
    return opening + frames.frame(frames.DATA, 0, stream, content)


def _name(turn: int, at: int) -> str:
    """Return the id of a request, as Envoy makes them."""
    return f"{turn:08x}-0000-4000-8000-{at:012x}"


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
        running = {name: _replay_of(WAYS[name], settings) for name in ways}
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
