"""Observe a picker: its memory each second, its CPU time, the state it holds."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from kvist_sim.bench.soak.judge import left
from kvist_sim.http1 import get
from kvist_sim.launch import HOST, Picker
from kvist_sim.processes import ChildFailedError

SAMPLE_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.5
EMPTY_SECONDS: Final = 40.0
"""Longest wait until a picker holds no state; access logs, events and credits take some time."""
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int) -> int:
    """Return the resident bytes (``/proc/PID/statm``). Raises OSError when there is no such process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


async def held(picker: Picker) -> dict[str, Any]:
    """Return ``/debug/held``. Raises OSError, HttpError, and ChildFailedError for another answer than 200."""
    status, page = await get(HOST, picker.metrics_port, "/debug/held")
    if status != 200:
        raise ChildFailedError(picker.child.name, f"/debug/held answers {status}", picker.child.tail())
    found: dict[str, Any] = json.loads(page)
    return found


async def until_empty(picker: Picker, before: dict[str, Any], kept: Collection[str] = ()) -> list[str]:
    """Return the state still held after ``EMPTY_SECONDS``, except ``kept``; return early if none is."""
    found: list[str] = []
    for _ in range(round(EMPTY_SECONDS / LOOK_SECONDS)):
        if not (found := left(before, await held(picker), kept)):
            break
        await asyncio.sleep(LOOK_SECONDS)
    return found


@asynccontextmanager
async def sampled(pid: int, clock: Callable[[], float]) -> AsyncIterator[list[tuple[float, int]]]:
    """Yield samples of a process's memory while the block runs: (clock's time, bytes)."""
    samples: list[tuple[float, int]] = []

    async def sample() -> None:
        while True:
            samples.append((clock(), resident(pid)))
            await asyncio.sleep(SAMPLE_SECONDS)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.wait((task,))
