"""Run ``kvist bench traces``: the picker's CPU per request with traces off, and with several shares sampled.

::

    client  ->  Envoy, one per picker  ->  upstream with 20 ports
                  |  ext_proc, access log
                pickers, one per way  ->  a collector that accepts everything

All ways are measured next to each other in each round, in short windows. A way's rise is the median, over all
rounds, of its CPU per request divided by that without traces in the same round: what other processes of the
machine do hits both alike. Beside it is that of the least windows. With ``--instructions`` nothing is timed
(``trace_instructions``).
"""

import argparse
import asyncio
import contextlib
import functools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from kvist_epp.http2.call import Sink
from kvist_epp.http2.server import serve_http2
from kvist_sim import envoy, launch
from kvist_sim import model as model_files
from kvist_sim.bench import trace_instructions
from kvist_sim.bench.epp.client import window
from kvist_sim.bench.epp.prompts import Kind, PromptShape, requests
from kvist_sim.bench.epp.revision import accepted_arguments, picker_of_revision
from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.bench.harness.proof import console, folder, prove
from kvist_sim.envoy_tracing import add_tracing
from kvist_sim.http1 import answers
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

ENDPOINTS: Final = 20
CLIENTS: Final = 16
KIND: Final = Kind(1, PromptShape.COMPLETION)
SETTLE_SECONDS: Final = 2.3
"""The access log of the last requests, and the export of their spans, belong to a window."""
MOST_RISE: Final = 0.03
"""Largest acceptable rise of the CPU per request with a tenth of the requests sampled."""
OFF: Final = "off"
TENTH: Final = "10 % sampled"
ENVOY: Final = "Envoy samples 10 %, picker off"
WAYS: Final[Mapping[str, tuple[str, float | None]]] = {
    OFF: ("", None),
    "none sampled": ("0", None),
    TENTH: ("0.1", None),
    "all sampled": ("1", None),
    ENVOY: ("", 10),
    "Envoy samples 10 %, both trace": ("0", 10),
}
"""By the name of the way: ``--trace-sample-ratio``, empty where the picker does not trace, and the percentage
that Envoy samples, None where it does not trace."""
EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
EXPORTED: Final = "kvist_epp_trace_spans_exported_total"
DROPPED: Final = "kvist_epp_trace_spans_dropped_total"


@dataclass(frozen=True, slots=True)
class TracedWay:
    """Figures of one way; CPU in seconds per request."""

    way: str
    requests: int
    errors: int
    cpu: float
    """Median of all windows."""
    least_cpu: float
    rise: float
    """Share by which it costs more than traces that are off: the median of all rounds."""
    least_rise: float
    """The same of the least windows, which other processes have disturbed least."""
    spans: int
    """Exported, warm-up included."""
    dropped: int


@dataclass(frozen=True, slots=True)
class TracesReport:
    """All figures of one run of the command."""

    ways: list[TracedWay]
    rounds: int
    seconds: float

    def broken(self) -> list[str]:
        """Return the bounds that do not hold, in words."""
        found = [f"{each.way}: {each.errors} requests were not answered with 200" for each in self.ways]
        found = [text for text, each in zip(found, self.ways, strict=True) if each.errors]
        found += [f"{each.way}: {each.dropped} spans were dropped" for each in self.ways if each.dropped]
        for each in self.ways:
            rise = min(each.rise, each.least_rise)  # other processes make both larger, now and then
            if each.way == TENTH and rise > MOST_RISE:
                found.append(f"{each.way}: {rise:.1%} more CPU per request than without traces")
        return found


@dataclass(frozen=True, slots=True)
class _Running:
    picker: launch.Picker
    port: int


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, and write the results; non-zero when a bound is broken."""
    if options.instructions:
        return trace_instructions.main(options)
    say = console()
    work = bench(options.seconds, options.rounds, say, baseline=options.baseline or "")
    return prove("traces", work, say, options, table=table, document=document)


async def bench(seconds: float, rounds: int, say: Console, *, baseline: str = "") -> TracesReport:
    """Measure every way, and the picker of an older revision if one is given. Raises ChildFailedError."""
    engines = launch.engine_ports(ENDPOINTS)
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(folder(None))
        children = await stack.enter_async_context(Children(logs))
        ports, hosts = [str(e.http) for e in engines], [e.hostport for e in engines]
        children.start("upstream", [sys.executable, "-m", "kvist_sim.bench.harness.upstream", *ports])
        http, grpc = await _collector(children)
        running = {}
        before: dict[str, tuple[str, float | None]] = {baseline: ("", None)} if baseline else {}
        for name, (ratio, percent) in (before | dict(WAYS)).items():
            sampled = [f"--trace-endpoint=http://{http}", f"--trace-sample-ratio={ratio}"] if ratio else []
            picker = await _start_picker(children, logs, engines, name, sampled, baseline)
            settings = envoy.config(envoy.Gateway(endpoints=hosts, picker=picker.address))
            if percent is not None:
                add_tracing(settings, grpc, percent=percent)
            running[name] = _Running(picker, (await stack.enter_async_context(envoy.Envoy(settings))).port)
        say.print(f"pickers ready: {', '.join(running)}")
        for one in running.values():
            await window(one.port, requests(KIND), concurrency=CLIENTS, seconds=1.0)
        windows: dict[str, list[float]] = {name: [] for name in running}
        totals: dict[str, list[int]] = {name: [0, 0] for name in running}
        for number in range(rounds):
            # there and back, so that a drift of the machine meets no way more than another
            for name, one in list(running.items())[:: -1 if number % 2 else 1]:
                used, count, errors = await _window(one, seconds)
                windows[name].append(used)
                totals[name][0] += count
                totals[name][1] += errors
        ways = []
        for name, one in running.items():
            spans, dropped = [int(await launch.metric(one.picker, each)) for each in (EXPORTED, DROPPED)]
            cpu = windows[name]
            rise = statistics.median(a / b for a, b in zip(cpu, windows[OFF], strict=True)) - 1
            count, errors = totals[name]
            least = min(cpu) / min(windows[OFF]) - 1
            ways.append(
                TracedWay(name, count, errors, statistics.median(cpu), min(cpu), rise, least, spans, dropped)
            )
    return TracesReport(ways, rounds, seconds)


async def _start_picker(
    children: Children,
    logs: Path,
    engines: Sequence[launch.EnginePorts],
    name: str,
    arguments: list[str],
    baseline: str,
) -> launch.Picker:
    file = logs / "endpoints.json"
    file.write_text(json.dumps(launch.endpoints_file(engines)))
    # nor scrapes, which each window would have to bear
    arguments = ["--kv-events=false", "--scrape-interval=60", "--log-format=json", *arguments]
    program: Sequence[str] = launch.PICKER
    if baseline and name == baseline:
        program = picker_of_revision(baseline, logs)
        arguments = accepted_arguments(baseline, program, arguments)
    model = str(model_files.folder())
    label = f"picker {name}".replace("%", "percent")
    return await launch.start_picker(children, file, model, name=label, arguments=arguments, program=program)


async def _collector(children: Children) -> tuple[str, str]:
    """Start one; return its addresses for HTTP and for gRPC."""
    http, grpc = free_ports(2)
    child = children.start(
        "collector", [sys.executable, "-m", "kvist_sim.bench.traces", str(http), str(grpc)]
    )
    ready = functools.partial(answers, launch.HOST, http, "/health")
    await children.ready(child, ready, launch.START_SECONDS)
    return f"{launch.HOST}:{http}", f"{launch.HOST}:{grpc}"


async def _window(one: _Running, seconds: float) -> tuple[float, int, int]:
    """Return CPU seconds per request, requests and errors of one window."""
    child: Child = one.picker.child
    before = child.cpu_seconds()
    sample = await window(one.port, requests(KIND), concurrency=CLIENTS, seconds=seconds)
    await asyncio.sleep(SETTLE_SECONDS)
    child.check()
    count = len(sample.latencies) + sample.errors + sample.uncounted
    return (child.cpu_seconds() - before) / count, count, sample.errors


def table(report: TracesReport) -> Table:
    """Return the figures as a table."""
    title = f"CPU of the picker per request: 1 KB completions, {CLIENTS} connections"
    found = Table(title=f"{title}, median of {report.rounds} windows of {report.seconds:g} s")
    for name in ("traces", "us of CPU", "more", "least us", "more", "requests", "spans exported"):
        found.add_column(name, justify="left" if name == "traces" else "right")
    for each in report.ways:
        found.add_row(
            each.way,
            f"{each.cpu * 1e6:.1f}",
            f"{each.rise:+.1%}",
            f"{each.least_cpu * 1e6:.1f}",
            f"{each.least_rise:+.1%}",
            f"{each.requests:,}",
            f"{each.spans:,}",
        )
    return found


def document(report: TracesReport) -> dict[str, Any]:
    """Return the figures for JSON."""
    ways = [asdict(each) for each in report.ways]
    return {**measured_on(), "rounds": report.rounds, "seconds": report.seconds, "ways": ways}


class _Accepting:
    """A call that accepts an export over gRPC."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def on_message(self, data: bytes) -> None:  # noqa: ARG002  whatever it is
        self._sink.send(b"")

    def on_half_closed(self) -> None:
        self._sink.close()

    def on_cancelled(self) -> None:
        pass


async def _collect(http: int, grpc: int) -> None:
    """Accept every export, until killed."""
    from aiohttp import web

    async def accepted(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    application = web.Application(client_max_size=1 << 28)
    application.router.add_post("/v1/traces", accepted)
    application.router.add_get("/health", accepted)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await serve_http2({EXPORT: _Accepting}, launch.HOST, grpc)
    await web.TCPSite(runner, launch.HOST, http).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_collect(*map(int, sys.argv[1:])))
