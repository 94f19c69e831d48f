"""Rolling update behind the real picker and Envoy: the sockets part of ``kvist bench prewarm``.

All engines of a run are up from its beginning, the replacements too, so that the start of an
interpreter is not measured; pods leave and join by the endpoints file.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Final

from rich.console import Console

from kvist_epp.names import LABEL_MAX_NUM_SEQS, TENANT_HEADERS
from kvist_sim import envoy, launch
from kvist_sim import model as model_files
from kvist_sim.bench.harness.proof import folder
from kvist_sim.bench.harness.records import Record, Recorder
from kvist_sim.bench.prewarm.virtual import ENGINES, KINDS, LOAD, PREWARMED, STEADY
from kvist_sim.load import percentile
from kvist_sim.processes import Children
from kvist_sim.workloads import Arrival, Shape, arrivals, warm_up

MODEL_NAME: Final = "kvist-prewarm"
SPEED: Final = 0.4
"""Speed relative to the usual engine (an H100); eight of these and their clients are enough for two cores."""
BLOCK_SIZE: Final = 64
BLOCKS: Final = 1_650
"""An engine holds 17 of the prompts below, all together hold each of them twice."""
SHAPE: Final = Shape(groups=64, system_words=2_750, user_words=(300, 900), turns=1, max_tokens=40)
"""Shared prompts of about 6,000 tokens, 650 to 1,960 tokens of one's own."""
CAPACITY: Final = 26.3
"""Requests per second of this traffic on these engines at 100 %, by ``kvist_sim.virtual.ideal.capacity`` for
a TTFT of 2 s: answers are short, and time per token is not judged."""
RATE: Final = round(LOAD * CAPACITY, 1)
TENANTS: Final = 4
LEAD_IN_SECONDS: Final = 20.0
DRAIN_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run, with or without a rollout. Times in seconds."""

    kind: str
    requests: int
    failed: int
    p50: float
    p90: float
    p99: float
    prompt: int
    """Number of prompt tokens."""
    cached: int
    """Cached tokens, reported by the engines."""
    prewarmed_tokens: float = 0
    """Tokens of prewarm requests."""
    steps_failed: float = 0


async def measured(slot_seconds: float, logs: str | None, say: Console) -> list[Run]:
    """Run all kinds one after the other, with the same requests.

    Raises ChildFailedError, EnvoyMissingError.
    """
    found = []
    for kind in KINDS:
        say.print(f"sockets: {kind}, {RATE:g} requests/s, {ENGINES} slots of {slot_seconds:g} s")
        with folder(logs and f"{logs}/{kind.replace(' ', '-')}") as name:
            found.append(await _one(kind, slot_seconds, name))
    return found


async def _one(kind: str, slot_seconds: float, name: Path) -> Run:
    begin = SHAPE.groups / RATE + LEAD_IN_SECONDS
    end = begin + ENGINES * slot_seconds
    async with _started(kind, name) as (children, rollout, picker, port):
        recorder = Recorder(launch.HOST, port, headers=tenant)
        load = asyncio.create_task(recorder.run(plan(end)))
        steps = asyncio.create_task(rollout.run(begin, slot_seconds) if kind != STEADY else _never())
        try:
            async with asyncio.timeout(end + DRAIN_SECONDS):
                await children.watch(load)
            given = await launch.metric(picker, "kvist_epp_prewarm_tokens_total")
            failed = await launch.metric(picker, "kvist_epp_prewarm_steps_total", 'outcome="failed"')
        finally:
            for task in (load, steps):
                task.cancel()
            await asyncio.gather(load, steps, return_exceptions=True)
            recorder.close()
    return judged(kind, [one for one in recorder.records if begin <= one.began < end], given, failed)


def plan(end: float) -> chain[Arrival]:
    """Return each shared prompt once, then traffic; equal for each kind."""
    first = list(warm_up(SHAPE, rate=RATE, seed=0, model=MODEL_NAME))
    after = first[-1].at
    more = (
        Arrival(after + one.at, one.group, one.turn, one.body)
        for one in arrivals(SHAPE, rate=RATE, seed=0, model=MODEL_NAME)
    )
    return chain(first, takewhile(lambda one: one.at < end, more))


def tenant(arrival: Arrival) -> dict[str, str]:
    """Return the tenant's header: all tenants use all shared prompts."""
    return {TENANT_HEADERS[0]: f"tenant-{len(arrival.body) % TENANTS}"}


def judged(kind: str, records: Sequence[Record], given: float = 0, steps_failed: float = 0) -> Run:
    """Return the figures of these requests."""
    good = [record for record in records if record.good and record.token is not None]
    waits = [(record.token or 0.0) - record.began for record in good]
    return Run(
        kind,
        len(records),
        len(records) - len(good),
        percentile(waits, 0.5),
        percentile(waits, 0.9),
        percentile(waits, 0.99),
        sum(record.prompt for record in good),
        sum(record.cached for record in good),
        given,
        steps_failed,
    )


class Rollout:
    """Endpoints file of a pool whose pods are replaced one by one."""

    def __init__(self, file: Path, engines: Sequence[launch.EnginePorts]) -> None:
        """Use ``engines`` in order: the old ones, then as many new ones."""
        self._file, self._engines = file, engines
        self.write(range(ENGINES))

    async def run(self, begin: float, slot_seconds: float) -> None:
        """Remove one pod after the other; its successor joins half a slot later."""
        clock = asyncio.get_running_loop().time
        zero = clock()
        for gone in range(ENGINES):
            for share, first in ((0.0, gone + 1), (0.5, gone + 1)):
                await asyncio.sleep(max(0.0, zero + begin + (gone + share) * slot_seconds - clock()))
                new = range(ENGINES, ENGINES + gone + (share > 0))
                self.write([*range(first, ENGINES), *new])

    def write(self, numbers: Sequence[int]) -> None:
        """Write these endpoints to the file."""
        every = launch.endpoints_file(self._engines)["endpoints"]
        listed = [every[number] | {"labels": {LABEL_MAX_NUM_SEQS: "256"}} for number in numbers]
        fresh = self._file.with_suffix(".fresh")
        fresh.write_text(json.dumps({"endpoints": listed}))
        fresh.replace(self._file)


@contextlib.asynccontextmanager
async def _started(kind: str, name: Path) -> AsyncIterator[tuple[Children, Rollout, launch.Picker, int]]:
    """Engines, picker, Envoy, started in order."""
    model, engines = str(model_files.folder()), launch.engine_ports(2 * ENGINES)
    async with contextlib.AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(name, grace_seconds=10))
        await _start_engines(children, engines, model)
        file = name / "endpoints.json"
        rollout = Rollout(file, engines)
        flags = ["--log-format=json", "--scrape-interval=1"]
        if kind != PREWARMED:
            flags.append("--prewarm-tokens=0")
        picker = await launch.start_picker(children, file, model, arguments=flags)
        gateway = envoy.Gateway(endpoints=[one.hostport for one in engines], picker=picker.address)
        proxy = await stack.enter_async_context(envoy.Envoy(envoy.config(gateway)))
        yield children, rollout, picker, proxy.port


async def _start_engines(children: Children, engines: Sequence[launch.EnginePorts], model: str) -> None:
    def command(ports: launch.EnginePorts) -> list[str]:
        return launch.engine_command(
            ports, model, served=MODEL_NAME, block_size=BLOCK_SIZE, blocks=BLOCKS, more=flags
        )

    flags = ("--sim-time-scale", str(SPEED))
    await launch.start_engines(children, engines, command)


async def _never() -> None:
    """Keep the pool as it is."""
