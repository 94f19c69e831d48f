"""Pickers as processes over simulated engines, called without a gateway."""

import asyncio
import functools
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

import kvist_sim.model
from kvist_sim.bench.harness.direct import Direct, PickAnswer
from kvist_sim.http1 import answers, get
from kvist_sim.launch import (
    HOST,
    EnginePorts,
    Picker,
    PickerPorts,
    endpoints_file,
    engine_command,
    engine_ports,
    picker_ports,
    start_picker,
)
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

MODEL = str(Path(kvist_sim.model.__file__).parent)
CHAT = "/v1/chat/completions"
QUIET = ("--scrape-interval=60", "--log-requests=false", "--prefill-tokens-per-second=100")
"""Flags without scrapes, so that all load comes from events and replicas, and with slow engines."""

AddressList = Callable[[int, Sequence[int]], str]
"""(picker's number, peer ports of all) → the picker's ``--replicas``."""


def all_addresses(_number: int, ports: Sequence[int]) -> str:
    """Return all addresses, including the picker's own, as a headless Service does."""
    return ",".join(f"{HOST}:{port}" for port in ports)


def chat(text: str, max_tokens: int = 4) -> dict[str, Any]:
    """Return the body of a request."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}


@dataclass
class Pool:
    """Engines, and pickers that start and stop at fixed ports."""

    children: Children
    client: aiohttp.ClientSession
    engines: Sequence[EnginePorts]
    file: Path
    arguments: Callable[[int], Sequence[str]]
    ports: list[PickerPorts]
    running: dict[int, Picker] = field(default_factory=dict)
    names: "count[int]" = field(default_factory=count)

    async def start(self, *numbers: int) -> None:
        """Start these pickers and wait until they are ready."""
        started = (
            start_picker(
                self.children,
                self.file,
                MODEL,
                name=f"picker-{number}-{next(self.names)}",
                arguments=self.arguments(number),
                ports=self.ports[number],
            )
            for number in numbers
        )
        for number, picker in zip(numbers, await asyncio.gather(*started), strict=True):
            self.running[number] = picker

    async def end(self, number: int, how: signal.Signals) -> int:
        """End a picker; return its exit status."""
        return await self.children.end(self.running.pop(number).child, how, 30)

    async def page(self, number: int, path: str) -> Any:
        """Return a JSON page of a picker."""
        _, body = await get(HOST, self.ports[number].metrics, path)
        return json.loads(body)

    async def ask(self, number: int, text: str, **headers: str) -> PickAnswer:
        """Request one pick."""
        picked: asyncio.Future[PickAnswer] = asyncio.get_running_loop().create_future()
        async with await Direct.open(HOST, self.ports[number].grpc) as direct:
            fields = {":method": "POST", ":path": CHAT, **headers}
            direct.ask(f"id-{next(self.names)}", fields, json.dumps(chat(text)).encode(), picked.set_result)
            answer = await picked
        assert answer.endpoint, answer
        return answer

    async def logged(self, number: int, *ended: PickAnswer) -> None:
        """Report the end of requests to a picker, as a gateway does."""
        async with await Direct.open(HOST, self.ports[number].grpc) as direct:
            direct.ended(ended)
            await direct.drained()
            await asyncio.sleep(0.05)

    async def serve(self, answer: PickAnswer, text: str) -> None:
        """Send the request to the picked engine, as a gateway does."""
        url = f"http://{answer.endpoint}{CHAT}"
        headers = {"x-session-id": answer.session}
        async with self.client.post(url, json=chat(text), headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.read()

    async def requests(self, number: int) -> int:
        """Return the number of requests in flight of a picker."""
        fleet = await self.page(number, "/debug/fleet")
        return sum(endpoint["requests"] for endpoint in fleet["endpoints"])

    async def all_have(self, requests: int, *numbers: int) -> None:
        """Wait until the ledgers of these pickers have a number of requests; the test's time limit bounds the
        wait."""
        while [await self.requests(number) for number in numbers] != [requests] * len(numbers):
            await asyncio.sleep(0.05)

    async def replication(self, number: int) -> Any:
        """Return the page ``/debug/peers``."""
        return await self.page(number, "/debug/peers")

    async def states(self, number: int) -> list[str]:
        """Return the states of the addresses that a picker dials."""
        return sorted(one["state"] for one in (await self.replication(number))["addresses"])

    async def until_states(self, number: int, *states: str) -> None:
        """Wait until the addresses have these states."""
        while await self.states(number) != sorted(states):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def pool(
    folder: Path,
    *,
    pickers: int = 3,
    engines: int = 2,
    addresses: AddressList = all_addresses,
    ports: Sequence[int] = (),
    more: Callable[[int], Sequence[str]] = lambda _number: (),
) -> AsyncIterator[Pool]:
    """Start engines; the test starts pickers. ``ports`` are the pickers' ports for replicas."""
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        places = engine_ports(engines)
        for number, one in enumerate(places):
            child = children.start(
                f"engine-{number}",
                engine_command(
                    one, MODEL, served="m", block_size=16, blocks=5000, more=("--sim-time-scale=20",)
                ),
            )
            await children.ready(child, functools.partial(answers, HOST, one.http, "/health"), 60)
        file = folder / "endpoints.json"
        file.write_text(json.dumps(endpoints_file(places)))
        listening = list(ports) or free_ports(pickers)

        def arguments(number: int) -> Sequence[str]:
            named = f"--replicas={addresses(number, listening)}", f"--replica-port={listening[number]}"
            return (*QUIET, *named, *more(number))

        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Pool(children, client, places, file, arguments, [picker_ports() for _ in range(pickers)])
