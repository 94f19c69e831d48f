"""A thousand pods on a real API server: the cost of lists and changes; ``pytest -rP`` prints the figures."""

import asyncio
import time
from collections.abc import Awaitable, Iterable

from tests.cluster.client import Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.following import following

PODS = 1_000
CHANGED = 200
FILLING = {"filling": "x" * 6_000}
"""Pods of real clusters are this large: environment, volumes, managed fields."""


async def together(work: Iterable[Awaitable[object]], at_once: int = 24) -> None:
    """All of it, so many at once."""
    gate = asyncio.Semaphore(at_once)

    async def one(step: Awaitable[object]) -> None:
        async with gate:
            await step

    async with asyncio.TaskGroup() as group:
        for step in work:
            group.create_task(one(step))


def address(number: int) -> str:
    """Return the address of a pod."""
    return f"10.1.{number // 250}.{number % 250 + 1}"


async def test_a_thousand_pods(plane: ControlPlane, space: Namespace) -> None:
    """A fleet of a thousand pods is read in pages and published once; changes are published together, without
    a new list."""
    await together(space.pod(f"p{n}", address(n), annotations=FILLING) for n in range(PODS))
    began, cpu = time.perf_counter(), time.process_time()
    async with following(plane.kubeconfig("admin"), space) as seen:
        await seen.until(lambda: bool(seen.fleets))
        listed, listed_cpu = time.perf_counter() - began, time.process_time() - cpu
        assert len(seen.fleets[0]) == PODS
        first = {endpoint.name: endpoint for endpoint in seen.fleets[0]}

        await together(space.status(f"p{n}", ready=False) for n in range(CHANGED))
        changed = {f"p{n}" for n in range(CHANGED)}
        await seen.until(lambda: {name for name, why in seen.standing.items() if why} == changed)
        assert seen.watch()["lists"] == 1
        assert len(seen.fleets) - 1 <= CHANGED
        untouched = [e for e in seen.fleets[-1] if e.name not in changed]
        assert all(first[endpoint.name] is endpoint for endpoint in untouched)
    print(  # noqa: T201
        f"{PODS} pods of 7 KB: first fleet after {listed:.2f} s, {listed_cpu:.2f} s of CPU, the test's own "
        f"included; {CHANGED} changes published as {len(seen.fleets) - 1} fleets"
    )
