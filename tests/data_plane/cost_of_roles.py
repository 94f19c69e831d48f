"""``python -m tests.data_plane.cost_of_roles``: CPU per request of the role model-header, and of a picker.

One Envoy each, 16 connections, three sizes of body; the log line of each request is written. Absolute times
are the machine's; the two roles beside each other are what counts.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
from tests.data_plane.product import product
from tests.data_plane.several import LARGE, several
from tests.data_plane.stub import Transport

from kvist_sim.processes import Child

CONNECTIONS: Final = 16
SECONDS: Final = 4.0
SIZES: Final = (1_000, 40_000, 450_000)
URL: Final = "/v1/chat/completions"
SENTENCE: Final = "the cat sat on the mat and said nothing of it "
ENGINES: Final = ("--sim-time-scale=1000", "--num-gpu-blocks-override=40000", "--max-model-len=400000")


Start = Callable[[Transport], AbstractAsyncContextManager[tuple[str, Child]]]


class Forgetful(list[object]):
    """Keeps nothing of what stubs would keep."""

    def append(self, one: object) -> None:
        """Discard the entry."""


@asynccontextmanager
async def filter_alone(transport: Transport) -> AsyncIterator[tuple[str, Child]]:
    """Start the model-header filter; yield the URL for requests and the process that is measured."""
    with tempfile.TemporaryDirectory() as folder:
        async with several(Path(folder), transport) as running:
            for pool in running.pools.values():
                pool.picker.asks = Forgetful()  # type: ignore[assignment]
                for upstream in pool.upstreams:
                    upstream.received = Forgetful()  # type: ignore[assignment]
            yield running.envoy.url, running.filter


@asynccontextmanager
async def picker_alone(transport: Transport) -> AsyncIterator[tuple[str, Child]]:
    """Start a picker with two simulated engines; yield the URL for requests and the process that is
    measured."""
    flags = ("--max-backlog-seconds=100000",)
    with tempfile.TemporaryDirectory() as folder:
        async with product(Path(folder), transport=transport, flags=ENGINES, picker_flags=flags) as running:
            yield running.envoy.url, running.picker.child


async def measure(url: str, child: Child, bodies: Sequence[bytes]) -> tuple[float, float]:
    """Requests per second, CPU seconds of each."""
    async with aiohttp.ClientSession(url) as client:
        await load(client, bodies, SECONDS / 4)
        before = child.cpu_seconds()
        count = await load(client, bodies, SECONDS)
        return count / SECONDS, (child.cpu_seconds() - before) / count


async def load(client: aiohttp.ClientSession, bodies: Sequence[bytes], seconds: float) -> int:
    """Requests answered in this time."""
    end, answered = time.monotonic() + seconds, 0

    async def connection() -> None:
        nonlocal answered
        while time.monotonic() < end:
            async with client.post(URL, data=bodies[answered % len(bodies)]) as response:
                assert response.status == 200, await response.text()
                await response.read()
            answered += 1

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return answered


def bodies_of(size: int, model: str) -> list[bytes]:
    """Chats with one long system prompt, the model's name at the end."""
    system = {"role": "system", "content": (SENTENCE * (size // len(SENTENCE) + 1))[:size]}
    questions = [{"role": "user", "content": f"question {number}"} for number in range(20)]
    return [
        json.dumps({"messages": [system, question], "max_tokens": 1, "model": model}).encode()
        for question in questions
    ]


async def main() -> None:
    """Measure all cells and print the table."""
    rows: tuple[tuple[str, str, Start], ...] = (
        ("model-header", LARGE, filter_alone),
        ("picker", "m", picker_alone),
    )
    transports: tuple[Transport, ...] = ("fast", "grpc")
    for role, model, start in rows:
        for transport in transports:
            async with start(transport) as (url, child):
                for size in SIZES:
                    rate, cpu = await measure(url, child, bodies_of(size, model))
                    print(f"{role:12} {transport:4} {size:7} B {rate:6.0f}/s {cpu * 1e6:6.0f} us", flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
