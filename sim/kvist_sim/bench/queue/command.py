"""Run ``kvist bench queue``: tens of thousands of requests queue in one picker, until there is capacity.

Three runs of a picker whose engines say that they are full. *held*: everything waits; memory is taken, then
the engines have room, and the order of the picks is judged. *bounded*: the same load on a picker whose queue
may hold little and not for long; what it cannot hold it refuses, what waits too long it answers. *relieved*:
one request ends after the other, and the next pick is timed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final

from rich.console import Console

from kvist_epp.names import LABEL_MAX_NUM_SEQS, PRIORITY_HEADER, TENANT_HEADERS
from kvist_sim import launch
from kvist_sim import model as model_files
from kvist_sim.bench.harness.direct import PICKED, AccessLogWriter, Direct, PickAnswer
from kvist_sim.bench.harness.proof import console, folder, prove
from kvist_sim.bench.harness.records import PickLog
from kvist_sim.bench.harness.watch import held, resident, until_empty
from kvist_sim.bench.queue.judge import Ends, Relieved, WantedRequest, late, out_of_order, relieved, shares
from kvist_sim.bench.queue.report import Bounded, Drained, QueueReport, document, table
from kvist_sim.load import CHAT_PATH
from kvist_sim.processes import Children
from kvist_sim.workloads import text

REQUESTS: Final = 50_000
BODY_BYTES: Final = 2_000
BOUND_BYTES: Final = 32 << 20
"""``--queue-bytes`` of the bounded run: less than half of what is sent."""
BOUND_SECONDS: Final = 15.0
"""Value of ``--queue-seconds``."""
ENGINES: Final = 8
SEQUENCES: Final = 64
"""Each engine's ``--max-num-seqs``."""
SERVED_SECONDS: Final = 0.02
"""From a pick to its end, once there is room: what is measured is the picker, not its engines."""
CONNECTIONS: Final = 8
BURST: Final = 200
"""Requests written at a time."""
RELIEVED: Final = 3_000
"""Requests of the run in which one after the other gets room."""
SCRAPED_SECONDS: Final = 1.5
"""Three scrapes: every engine's figure is known."""
FILL_SECONDS: Final = 180.0
DRAIN_SECONDS: Final = 240.0
TICK_SECONDS: Final = 0.01
FAIR_LEVEL: Final = 0
KEPT: Final = ("routing_history",)
"""The routing history is all that is known of engines without events: it stays, up to their caches' size."""
MIX: Final = (
    # share of the requests, priority, tenant: a flood of one tenant comes before the others
    (0.10, -1, "batch"),
    (0.55, 0, "a"),
    (0.20, 0, "b"),
    (0.10, 0, "c"),
    (0.05, 10, "urgent"),
)


@dataclass(slots=True)
class QueuedClients:
    """Requests that were sent at once, and their results."""

    wanted: Sequence[WantedRequest]
    clock: Callable[[], float]
    sent: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds to the answer, by id."""
    statuses: Counter[int] = field(default_factory=Counter)
    log_writer: AccessLogWriter | None = None
    ends: Ends | None = None

    async def send(self, connections: Sequence[Direct]) -> None:
        """Send all, as fast as the sockets accept them."""
        rng = random.Random("queue")
        for number, one in enumerate(self.wanted):
            connection = connections[number % len(connections)]
            headers = {
                ":method": "POST",
                ":path": CHAT_PATH,
                PRIORITY_HEADER: str(one.priority),
                TENANT_HEADERS[0]: one.tenant,
            }
            self.sent[one.id] = self.clock()
            connection.ask(one.id, headers, body(rng, one.size), self._answered)
            if number % BURST == 0:
                await asyncio.sleep(0)
                await connection.drained()

    async def answered(self, seconds: float) -> None:
        """Wait for all answers, and settle picks meanwhile. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while sum(self.statuses.values()) < len(self.wanted):
                if self.log_writer is not None:
                    self.log_writer.settle()
                await asyncio.sleep(TICK_SECONDS)
        if self.log_writer is not None:
            self.log_writer.settle(rest=True)

    def _answered(self, answer: PickAnswer) -> None:
        self.statuses[answer.status] += 1
        self.waits[answer.id] = self.clock() - self.sent[answer.id]
        follower = self.log_writer or self.ends
        if answer.status == PICKED and follower is not None:
            follower.picked(answer)


@dataclass(slots=True)
class QueueBench:
    """A picker and its engines."""

    children: Children
    picker: launch.Picker
    log: PickLog
    running: Path
    """File with the number of requests that each engine says it runs."""

    def full(self, full: bool) -> None:
        """Set whether the engines report, from the next scrape on, that they have no capacity."""
        fresh = self.running.with_suffix(".fresh")
        fresh.write_text(str(SEQUENCES if full else 0))
        fresh.replace(self.running)


def main(options: argparse.Namespace) -> int:
    """Run and print the tables. Return a non-zero code when a bound is broken or a component failed."""
    say = console()
    work = queue(options.requests, options.logs, say)
    return prove("queue", work, say, options, table=table, document=document)


async def queue(requests: int, logs: str | None, say: Console) -> QueueReport:
    """Run all parts. Raises ChildFailedError, TimeoutError."""
    with folder(logs) as name:
        for part in ("held", "bounded", "relieved"):
            (name / part).mkdir(exist_ok=True)
        drained = await _drained(requests, name / "held", say)
        bounded = await _bounded(requests, name / "bounded", say)
        soon = await _relieved(name / "relieved", say)
    setting = {"requests": requests, "body_bytes": BODY_BYTES, "full": requests >= REQUESTS}
    return QueueReport(drained, bounded, soon, setting)


def queued_requests(requests: int) -> list[WantedRequest]:
    """Return the queued requests in order of arrival: tenant by tenant, so that serving in this order
    is unfair."""
    found: list[WantedRequest] = []
    for share, priority, tenant in MIX:
        count = round(share * requests)
        found += [
            WantedRequest(f"{tenant}-{number}", priority, tenant, BODY_BYTES) for number in range(count)
        ]
    return found


def body(rng: random.Random, size: int) -> bytes:
    """Return a chat of exactly ``size`` bytes, unlike any other."""
    request = {"model": "queue", "max_tokens": 16, "messages": [{"role": "user", "content": ""}]}
    empty = len(json.dumps(request))
    request["messages"] = [{"role": "user", "content": text(rng, size // 4)[: size - empty]}]
    return json.dumps(request).encode()


# -- held, then drained


async def _drained(requests: int, name: Path, say: Console) -> Drained:
    flags = [
        f"--queue-requests={requests + 1}",
        f"--queue-bytes={1 << 30}",
        *("--queue-seconds=900", "--stream-idle-timeout=3600"),
    ]
    async with _started(name, flags) as bench:
        pid = bench.picker.child.pid
        before, empty = resident(pid), await held(bench.picker)
        async with _connected(bench, requests) as connections:
            waiting = QueuedClients(queued_requests(requests), asyncio.get_running_loop().time)
            say.print(f"held: {len(waiting.wanted):,} requests, every engine is full")
            await waiting.send(connections)
            queued = await _until_queued(bench, waiting)
            full = resident(pid)
            say.print(f"held: {queued['queued_requests']:,} wait in {(full - before) / 1e6:.0f} MB")
            waiting.log_writer = AccessLogWriter(connections[0], SERVED_SECONDS)
            begin = asyncio.get_running_loop().time()
            bench.full(False)
            await waiting.answered(DRAIN_SECONDS)
            took = asyncio.get_running_loop().time() - begin
        remains = await until_empty(bench.picker, empty, KEPT)
    by_id = {wanted.id: wanted for wanted in waiting.wanted}
    order = [by_id[line.id] for line in bench.log.read() if line.outcome == "picked"]
    return Drained(
        requests=len(by_id),
        queued=queued["queued_requests"],
        queued_bytes=queued["waiting_bytes"],
        resident_before=before,
        resident_full=full,
        seconds=took,
        picked=waiting.statuses[PICKED],
        logged=len(order),
        shares=shares(order, FAIR_LEVEL),
        out_of_order=out_of_order(order),
        left=remains,
    )


async def _until_queued(bench: QueueBench, waiting: QueuedClients) -> dict[str, int]:
    """``/debug/held`` when everything that was sent waits, or what is missing has been answered."""
    for _ in range(round(FILL_SECONDS / 0.2)):
        bench.children.check()
        found = await held(bench.picker)
        if found["queued_requests"] + sum(waiting.statuses.values()) >= len(waiting.wanted):
            return found
        await asyncio.sleep(0.2)
    raise TimeoutError(
        f"{found['queued_requests']} of {len(waiting.wanted)} requests wait after {FILL_SECONDS:g} s"
    )


# -- bounded


async def _bounded(requests: int, name: Path, say: Console) -> Bounded:
    flags = [
        f"--queue-requests={requests + 1}",
        f"--queue-bytes={BOUND_BYTES}",
        f"--queue-seconds={BOUND_SECONDS:g}",
    ]
    async with _started(name, flags) as bench:
        pid = bench.picker.child.pid
        before, empty = resident(pid), await held(bench.picker)
        async with _connected(bench, requests) as connections:
            # only what may not be shed: each has a right to an answer in time
            wanted = [one for one in queued_requests(requests) if one.priority >= 0]
            waiting = QueuedClients(wanted, asyncio.get_running_loop().time)
            say.print(
                f"bounded: {len(wanted):,} requests for {BOUND_BYTES >> 20} MiB and {BOUND_SECONDS:g} s"
            )
            await waiting.send(connections)
            queued = await _until_queued(bench, waiting)
            full, refused = resident(pid), sum(waiting.statuses.values())
            with contextlib.suppress(TimeoutError):
                await waiting.answered(BOUND_SECONDS + DRAIN_SECONDS)
        remains = await until_empty(bench.picker, empty, KEPT)
    waited = {line.id: line.waited_ms / 1e3 for line in bench.log.read()}
    waits = [waited.get(one.id, inf) if one.id in waiting.waits else inf for one in wanted]
    return Bounded(
        requests=len(wanted),
        bound_bytes=BOUND_BYTES,
        bound_seconds=BOUND_SECONDS,
        queued=queued["queued_requests"],
        queued_bytes=queued["waiting_bytes"],
        refused=refused,
        resident_before=before,
        resident_full=full,
        statuses=dict(waiting.statuses),
        longest=max(waits),
        longest_seen=max(waiting.waits.values(), default=inf),
        late=late(waits, BOUND_SECONDS),
        left=remains,
    )


# -- one by one


async def _relieved(name: Path, say: Console) -> Relieved:
    flags = ["--queue-seconds=900", "--stream-idle-timeout=3600"]
    async with _started(name, flags) as bench, _connected(bench, RELIEVED) as connections:
        clock = asyncio.get_running_loop().time
        waiting = QueuedClients(queued_requests(RELIEVED), clock)
        await waiting.send(connections)
        await _until_queued(bench, waiting)
        waiting.ends = Ends(clock)
        bench.full(False)
        async with asyncio.timeout(DRAIN_SECONDS):
            await waiting.ends.taken(ENGINES * SEQUENCES)
        bench.full(True)
        await asyncio.sleep(SCRAPED_SECONDS)
        left = len(waiting.wanted) - len(waiting.ends.open)
        say.print(f"relieved: {left:,} wait, and one after the other gets room")
        return await relieved(waiting.ends, connections[0], left)


# -- what runs


@contextlib.asynccontextmanager
async def _started(name: Path, flags: Sequence[str]) -> AsyncIterator[QueueBench]:
    engines, running = launch.engine_ports(ENGINES), name / "running"
    running.write_text(str(SEQUENCES))
    file = name / "endpoints.json"
    listed = launch.endpoints_file(engines)
    for endpoint in listed["endpoints"]:
        endpoint["labels"] = {LABEL_MAX_NUM_SEQS: str(SEQUENCES)}
    file.write_text(json.dumps(listed))
    async with Children(name, grace_seconds=10) as children:
        ports = [str(engine.http) for engine in engines]
        command = [sys.executable, "-m", "kvist_sim.bench.queue.engines", str(running), *ports]
        children.start("engines", command)
        arguments = [
            *("--log-format=json", "--scrape-interval=0.5", "--kv-events=false"),
            *flags,
        ]
        picker = await launch.start_picker(children, file, str(model_files.folder()), arguments=arguments)
        await _until_full(children, picker)
        yield QueueBench(children, picker, PickLog(name / "picker.log"), running)


async def _until_full(children: Children, picker: launch.Picker) -> None:
    """Wait until the picker has scraped all engines; before that it would send them requests."""

    async def scraped() -> bool:
        return await launch.metric(picker, "kvist_epp_endpoints", 'state="ready"') == ENGINES

    await children.ready(picker.child, scraped, launch.START_SECONDS)


@contextlib.asynccontextmanager
async def _connected(bench: QueueBench, requests: int) -> AsyncIterator[list[Direct]]:
    """Open enough connections for all streams, since the picker bounds the streams of each."""
    async with contextlib.AsyncExitStack() as stack:
        connections: list[Direct] = []
        while len(connections) < CONNECTIONS or sum(c.max_streams for c in connections) < 2 * requests:
            connection = await Direct.open(launch.HOST, bench.picker.grpc_port)
            connections.append(await stack.enter_async_context(connection))
        yield connections
