"""Measure how long requests wait while a page of a thousand endpoints is read.

The pages of the metrics port are made on the event loop that picks endpoints. A health check, which needs no
work, is requested all the time: what it waits for, a pick would wait for.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from kvist_sim import launch
from kvist_sim import model as model_files
from kvist_sim.bench.rest.idle import QUIET_SECONDS, fleet, programs
from kvist_sim.http1 import get
from kvist_sim.processes import Children

ENDPOINTS: Final = 1_000
PAGES: Final = ("/metrics", "/fleet", "/debug/fleet", "/debug/index", "/live/state")
READS: Final = 7
"""Times that each page is read."""
PAUSE_SECONDS: Final = 0.3
"""After each read."""
PROBE_SECONDS: Final = 0.002
"""Between two health checks."""


@dataclass(frozen=True, slots=True)
class PageRead:
    """Reading one page, or none (an empty path)."""

    picker: str
    """``now``, or an older revision."""
    page: str
    size: int
    """Bytes."""
    seconds: float
    """Median time until the whole page was there."""
    delay: float
    """Median of the longest waits of health checks, one for each read: seconds."""


async def measure(*, baseline: str, folder: Path) -> list[PageRead]:
    """Read each page of each picker. Raises ChildFailedError or RevisionError."""
    found: list[PageRead] = []
    async with contextlib.AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder, grace_seconds=10))
        file = await stack.enter_async_context(fleet(children, folder, ENDPOINTS))
        ports: dict[str, int] = {}
        for name, program in programs(baseline, folder).items():
            picker = await launch.start_picker(
                children, file, str(model_files.folder()), name=f"picker-pages-{name}", program=program
            )
            ports[name] = picker.metrics_port
        await asyncio.sleep(QUIET_SECONDS)
        for page in ("", *PAGES):
            found += [await _read(name, port, page) for name, port in ports.items()]
    return found


async def _read(picker: str, port: int, page: str) -> PageRead:
    sizes, seconds, delays = [0], list[float](), list[float]()
    for _ in range(READS):
        async with _health_checks(port) as waits:
            began = time.perf_counter()
            if page:
                sizes.append(len((await get(launch.HOST, port, page))[1]))
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)
        delays.append(max(waits))
    return PageRead(picker, page, sizes[-1], median(seconds), median(delays))


@contextlib.asynccontextmanager
async def _health_checks(port: int) -> AsyncIterator[list[float]]:
    """Request ``/healthz`` again and again; the seconds that each took are in the list at the end."""
    waits: list[float] = []
    stop = asyncio.Event()

    async def probe() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            await get(launch.HOST, port, "/healthz")
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(PROBE_SECONDS)

    task = asyncio.create_task(probe())
    try:
        yield waits
    finally:
        stop.set()
        await task
