"""Work on the event loop in slices, between which picks run: pages of a thousand endpoints take 100 ms."""

import asyncio
from collections.abc import Generator
from time import perf_counter
from typing import Final, TypeVar

SLICE_SECONDS: Final = 0.001
"""Work after which the event loop may run a pick."""

T = TypeVar("T")


async def run_in_slices(steps: Generator[None, None, T]) -> tuple[T, float]:
    """Run a generator to its end, a millisecond or a step at a time; return its result and the seconds of
    work."""
    worked, until = 0.0, 0.0
    began = perf_counter()
    try:
        while True:
            until = began + SLICE_SECONDS
            next(steps)
            while perf_counter() < until:
                next(steps)
            worked += perf_counter() - began
            await asyncio.sleep(0)
            began = perf_counter()
    except StopIteration as end:
        return end.value, worked + perf_counter() - began
