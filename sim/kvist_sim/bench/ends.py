"""Run ``kvist bench ends``: one endpoint behind gateways that report how requests end, and that do not.

The endpoint answers at once, or is a simulated engine that can run few requests; a closed loop of clients
asks it through a real Envoy. Without an access log the picker must neither hold requests back from an
endpoint that has answered long ago, nor send more than a little beyond what a busy one can take.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.table import Table

from kvist_sim import envoy, launch
from kvist_sim import model as model_files
from kvist_sim.bench.epp.client import Sample, window
from kvist_sim.bench.epp.prompts import MODEL_NAME, Kind, PromptShape, requests
from kvist_sim.bench.harness.proof import console, folder, prove
from kvist_sim.bench.harness.upstream import WITHOUT_METRICS
from kvist_sim.http1 import get
from kvist_sim.processes import Children

CLIENTS: Final = (16, 128)
SECONDS: Final = 5.0
WARM_SECONDS: Final = 1.5
"""The first scrapes show that ends are not reported; what waited for them is not counted."""
BUSY_CLIENTS: Final = 64
BUSY_SECONDS: Final = 20.0
SEQUENCES: Final = 8
"""Requests that the busy engine runs at once."""
QUEUE_SECONDS: Final = 3.0
P99_MS: Final = 20.0
LEAST_SHARE: Final = 0.9
"""Of the throughput of 16 clients that 128 have to reach."""
LONG: Final = 100
"""Tokens of an answer with which more is offered than the engine can take."""
SHORT: Final = 16
"""Tokens of an answer that takes less time than passes between two messages of a slow log."""
BUSY_SHARE: Final = 0.8
"""Of a busy engine's answers with an access log: a free slot is seen up to 0.1 s late, of 1.2 s a request."""
POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """A gateway and an endpoint."""

    name: str
    access_log: bool
    metrics: bool = True
    log_seconds: float = 0.1
    """Time between two messages of the access log."""


CASES: Final = (
    Case("access log", access_log=True),
    Case("no access log", access_log=False),
    Case("no metrics", access_log=True, metrics=False),
    Case("neither", access_log=False, metrics=False),
)
EACH_SECOND: Final = Case("log each second", access_log=True, log_seconds=1.0)
"""Envoy's default, and Istio's."""
BUSY_CASES: Final = (
    (CASES[0], LONG),
    (CASES[1], LONG),
    (EACH_SECOND, LONG),
    (CASES[0], SHORT),
    (EACH_SECOND, SHORT),
)
"""With the tokens of an answer; the first one with as many is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Quick:
    """An endpoint that answers at once."""

    case: str
    clients: int
    rate: float
    """Answers per second."""
    p50_ms: float
    p99_ms: float
    refused: int


@dataclass(frozen=True, slots=True)
class Busy:
    """An engine that can run few requests, under more load than it can take."""

    case: str
    tokens: int
    """Of an answer."""
    answered: int
    refused: int
    refused_seconds: float
    """Until the latest refusal."""
    most_waiting: int
    """Requests that waited in the engine, at most."""
    may_wait: float
    """Requests that may wait there: another batch, and what is answered between two messages of the log."""


@dataclass(frozen=True, slots=True)
class EndsReport:
    """All figures of one run of the command."""

    quick: list[Quick]
    busy: list[Busy]

    def broken(self) -> list[str]:
        """Return the bounds that do not hold, in words."""
        found = [f"{q.case}, {q.clients} clients: {q.refused} refused" for q in self.quick if q.refused]
        for few, many in zip(self.quick[::2], self.quick[1::2], strict=True):
            if many.rate < LEAST_SHARE * few.rate:
                found.append(
                    f"{few.case}: {many.rate:,.0f} requests/s with 128 clients, {few.rate:,.0f} with 16"
                )
            if few.p99_ms > P99_MS:
                found.append(f"{few.case}: p99 of {few.p99_ms:.1f} ms with 16 clients")
        for one in self.busy:
            name = f"busy, {one.case}, {one.tokens} tokens"
            if (one.tokens == LONG and not one.refused) or one.refused_seconds > QUEUE_SECONDS + 1:
                found.append(f"{name}: {one.refused} refused, after {one.refused_seconds:.1f} s at most")
            if one.most_waiting > one.may_wait:
                found.append(f"{name}: {one.most_waiting} requests waited in the engine")
            best = next(other for other in self.busy if other.tokens == one.tokens)
            if one.answered < BUSY_SHARE * best.answered:
                found.append(f"{name}: {one.answered} answered, {best.answered} with reports")
        return found


def main(options: argparse.Namespace) -> int:
    """Measure, print the tables, and write the results; non-zero when a bound is broken."""
    say = console()
    return prove("ends", bench(options.seconds, say), say, options, table=table, document=document)


async def bench(seconds: float, say: Console) -> EndsReport:
    """Measure every case. Raises ChildFailedError."""
    quick, busy = [], []
    for case in CASES:
        async with _quick_stack(case) as port:
            body = requests(Kind(1, PromptShape.COMPLETION))
            await window(port, body, concurrency=CLIENTS[0], seconds=WARM_SECONDS)
            for clients in CLIENTS:
                sample = await window(port, body, concurrency=clients, seconds=seconds)
                quick.append(_quick(case, clients, sample))
        say.print(f"{case.name}: done")
    for case, tokens in BUSY_CASES:
        busy.append(await _busy(case, tokens))
        say.print(f"busy engine, {case.name}, {tokens} tokens: done")
    return EndsReport(quick, busy)


def _quick(case: Case, clients: int, sample: Sample) -> Quick:
    ordered = sorted(sample.latencies)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] * 1000 for share in (0.5, 0.99))
    return Quick(case.name, clients, len(ordered) / sample.seconds, p50, p99, sample.errors)


@contextlib.asynccontextmanager
async def _quick_stack(case: Case) -> AsyncIterator[int]:
    """Yield Envoy's port before an endpoint that answers at once."""
    engines = launch.engine_ports(1)
    words = [] if case.metrics else [WITHOUT_METRICS]
    upstream = [sys.executable, "-m", "kvist_sim.bench.harness.upstream", *words, str(engines[0].http)]
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(folder(None))
        children = await stack.enter_async_context(Children(logs))
        children.start("upstream", upstream)
        yield await _gateway(stack, logs, children, case, engines, ())


async def _gateway(
    stack: contextlib.AsyncExitStack,
    logs: Path,
    children: Children,
    case: Case,
    engines: Sequence[launch.EnginePorts],
    arguments: Sequence[str],
) -> int:
    """Start picker and Envoy; return Envoy's port."""
    file = logs / "endpoints.json"
    file.write_text(json.dumps(launch.endpoints_file(engines)))
    picker = await launch.start_picker(children, file, str(model_files.folder()), arguments=arguments)
    gateway = envoy.Gateway(
        endpoints=[engine.hostport for engine in engines],
        picker=picker.address,
        mode="duplex",
        responses="skip",
        access_log=case.access_log,
        log_seconds=case.log_seconds,
        failure_mode_allow=False,
    )
    return (await stack.enter_async_context(envoy.Envoy(envoy.config(gateway)))).port


async def _busy(case: Case, tokens: int) -> Busy:
    engines = launch.engine_ports(1)
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(folder(None))
        children = await stack.enter_async_context(Children(logs))
        more = ("--max-num-seqs", str(SEQUENCES), "--max-model-len", "8192")
        model = str(model_files.folder())
        await launch.start_engines(
            children,
            engines,
            lambda ports: launch.engine_command(
                ports, model, served=MODEL_NAME, block_size=16, blocks=4096, more=more
            ),
        )
        arguments = (f"--queue-seconds={QUEUE_SECONDS:g}", f"--max-num-seqs={SEQUENCES}")
        port = await _gateway(stack, logs, children, case, engines, arguments)
        body = [_answer_of(tokens, request) for request in requests(Kind(1, PromptShape.COMPLETION))]
        await window(port, body, concurrency=SEQUENCES, seconds=WARM_SECONDS)
        most = [0]
        watch = asyncio.create_task(_watch(engines[0].http, most))
        sample = await window(port, body, concurrency=BUSY_CLIENTS, seconds=BUSY_SECONDS)
        watch.cancel()
        answered, refused = len(sample.latencies), sample.errors
        may_wait = SEQUENCES + answered / BUSY_SECONDS * case.log_seconds
        return Busy(case.name, tokens, answered, refused, sample.longest_error, most[0], may_wait)


def _answer_of(tokens: int, request: bytes) -> bytes:
    """The request with an answer of so many tokens."""
    head, _, body = request.partition(b"\r\n\r\n")
    body = body.replace(b'"max_tokens":16', b'"max_tokens":%d' % tokens)
    return re.sub(rb"(?i)content-length: \d+", b"content-length: %d" % len(body), head) + b"\r\n\r\n" + body


async def _watch(port: int, most: list[int]) -> None:
    """Note the most requests that waited in an engine."""
    while True:
        page = (await get(launch.HOST, port, "/metrics"))[1].decode()
        found = re.findall(r"^vllm:num_requests_waiting\{.*\} ([\d.]+)$", page, re.MULTILINE)
        most[0] = max(most[0], *(int(float(value)) for value in found), 0)
        await asyncio.sleep(POLL_SECONDS)


def document(report: EndsReport) -> dict[str, Any]:
    """Return the figures for JSON."""
    return {"quick": [asdict(row) for row in report.quick], "busy": [asdict(row) for row in report.busy]}


def table(report: EndsReport) -> Group:
    """Return both tables."""
    quick = Table(box=None, title="an endpoint that answers at once", title_justify="left")
    for title in ("gateway reports", "clients", "requests/s", "p50 ms", "p99 ms", "refused"):
        quick.add_column(title, justify="left" if title.startswith("gateway") else "right")
    for q in report.quick:
        figures = (f"{q.rate:,.0f}", f"{q.p50_ms:.1f}", f"{q.p99_ms:.1f}", str(q.refused))
        quick.add_row(q.case, str(q.clients), *figures)
    busy = Table(box=None, title_justify="left")
    busy.title = (
        f"an engine of {SEQUENCES} sequences, {BUSY_CLIENTS} clients for {BUSY_SECONDS:.0f} s, "
        f"--queue-seconds={QUEUE_SECONDS:g}"
    )
    titles = ("gateway reports", "tokens", "answered", "refused", "after s, at most", "waiting in the engine")
    for title in titles:
        busy.add_column(title, justify="left" if title.startswith("gateway") else "right")
    for b in report.busy:
        figures = (str(b.tokens), f"{b.answered:,}", f"{b.refused:,}", f"{b.refused_seconds:.2f}")
        busy.add_row(b.case, *figures, str(b.most_waiting))
    return Group(quick, "", busy)
