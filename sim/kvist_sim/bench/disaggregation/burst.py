"""Requests in two legs that all come at once, before engines whose first leg takes a while.

The picker is a fresh one for each kind of burst, so that the largest memory is that of the burst.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_sim import envoy, launch
from kvist_sim import model as model_files
from kvist_sim.bench.disaggregation.pool import EAGER, FALLBACKS, SPLITS, Pool, start_pool, until_paired
from kvist_sim.bench.disaggregation.report import BurstFigures
from kvist_sim.bench.epp.client import Sample, window
from kvist_sim.bench.epp.prompts import Kind, PromptShape, bodies
from kvist_sim.bench.harness.proof import folder
from kvist_sim.http1 import request_bytes
from kvist_sim.load import percentile
from kvist_sim.processes import Children

REQUESTS: Final = 200
LEG_SECONDS: Final = 1.0
PREFILL, DECODE = 4, 4
LOOK_SECONDS: Final = 0.1
TIMES: Final = 2
"""Bursts of one picker: the first one opens Envoy's and the picker's connections."""
_QUEUED: Final = "kvist_epp_queue_requests"
_TCP: Final = Path("/proc/net/tcp")
_ESTABLISHED: Final = "01"


@dataclass(frozen=True, slots=True)
class BurstCase:
    """A kind of burst."""

    name: str
    kilobytes: int
    arguments: tuple[str, ...] = ()
    """Further flags of the picker."""


CASES: Final = (
    BurstCase("200 of 1 KB", 1),
    BurstCase("200 of 40 KB", 40),
    BurstCase("200 of 450 KB", 450),
    BurstCase("200 of 450 KB, no queue", 450, ("--queue-requests=0",)),
)


async def burst(case: BurstCase, requests: int = REQUESTS, leg_seconds: float = LEG_SECONDS) -> BurstFigures:
    """Send the requests, wait for the answers, and return the figures. Raises ChildFailedError."""
    async with _stack(case, leg_seconds) as (picker, pool, port):
        before = resident(picker.child.pid, "VmRSS")
        looks = _Looks(picker, [one.http for one in pool.prefill])
        watching = asyncio.create_task(looks.run())
        try:
            sample = await window(port, _distinct(case, TIMES * requests), concurrency=requests, seconds=0)
        finally:
            watching.cancel()
        picker.child.check()
        return await _figures(case, picker, sample, before, looks)


async def _figures(
    case: BurstCase, picker: launch.Picker, sample: Sample, before: int, looks: "_Looks"
) -> BurstFigures:
    counted = len(sample.latencies) + sample.errors
    return BurstFigures(
        name=case.name,
        requests=counted,
        answered=len(sample.latencies),
        split=int(await launch.metric(picker, *SPLITS)),
        sent=counted + sample.uncounted,
        fallbacks=int(await launch.metric(picker, FALLBACKS)),
        seconds=sample.seconds,
        p50=percentile(sample.latencies, 0.5),
        most_queued=looks.queued,
        resident_before=before,
        resident_most=resident(picker.child.pid, "VmHWM"),
        connections=looks.connections,
    )


@contextlib.asynccontextmanager
async def _stack(case: BurstCase, leg_seconds: float) -> AsyncIterator[tuple[launch.Picker, Pool, int]]:
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(folder(None))
        children = await stack.enter_async_context(Children(logs, grace_seconds=10))
        pool = start_pool(children, PREFILL, DECODE, leg_seconds)
        file = logs / "endpoints.json"
        file.write_text(json.dumps(pool.endpoints))
        arguments = ["--kv-events=false", "--disaggregation=on", *case.arguments]
        model = str(model_files.folder())
        picker = await launch.start_picker(children, file, model, arguments=arguments, program=EAGER)
        gateway = envoy.Gateway(
            endpoints=pool.hostports, picker=picker.address, mode="duplex", failure_mode_allow=False
        )
        proxy = await stack.enter_async_context(envoy.Envoy(envoy.config(gateway)))
        await until_paired(picker, pool)
        yield picker, pool, proxy.port


def _distinct(case: BurstCase, count: int) -> list[bytes]:
    """Return completions that share no prefix."""
    body = bodies(Kind(case.kilobytes, PromptShape.COMPLETION))[-1]
    key = b'"prompt":"'
    path = PromptShape.COMPLETION.path
    changed = (body.replace(key, key + b"%d, " % number, 1) for number in range(count))
    return [request_bytes("POST", path, "bench", one) for one in changed]


class _Looks:
    """Largest values that a picker shows from outside, looked at every 0.1 s."""

    def __init__(self, picker: launch.Picker, ports: Sequence[int]) -> None:
        self._picker = picker
        self._ports = {f"{port:04X}" for port in ports}
        self.queued = self.connections = 0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.queued = max(self.queued, int(await launch.metric(self._picker, _QUEUED)))
            self.connections = max(self.connections, self._open())
            await asyncio.sleep(LOOK_SECONDS)

    def _open(self) -> int:
        """Return the connections to the engines of leg 1 (``proc(5)``, ``/proc/net/tcp``)."""
        rows = [line.split() for line in _TCP.read_text().splitlines()[1:]]
        return sum(row[3] == _ESTABLISHED and row[2].rpartition(":")[2] in self._ports for row in rows)


def resident(pid: int, name: str) -> int:
    """Return a size from ``/proc/PID/status`` in bytes, such as ``VmHWM``. Raises OSError."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
