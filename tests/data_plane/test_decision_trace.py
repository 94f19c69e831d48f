"""Decisions of the running product over sockets, replayed through the virtual driver."""

import asyncio
import json
import logging
import random
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.data_plane.pickers import CHAT, MODEL

from kvist_epp.names import PRIORITY_HEADER, TENANT_HEADERS
from kvist_sim.bench.harness.direct import Direct, PickAnswer
from kvist_sim.launch import (
    HOST,
    Picker,
    PickerPorts,
    endpoints_file,
    engine_command,
    engine_ports,
    picker_ports,
    start_engines,
    start_picker,
)
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children
from kvist_sim.virtual.decision_trace import Comparison, Entry, replay

REQUESTS = 20_000
ENGINES = 4
AT_ONCE = 96
"""Requests under way: more than the engines' slots, so that some wait."""
SLOTS = 16
FLAGS = (
    *("--tpot-target=0.03", "--scrape-interval=0.5", "--queue-seconds=20", "--log-requests=true"),
    *("--prefill-tokens-per-second=20000", "--max-backlog-seconds=2", "--prewarm-tokens=0"),
)


class Load:
    """Requests of several tenants and priorities, some with one session at once, to two pickers."""

    def __init__(self, pickers: list[Direct], client: aiohttp.ClientSession) -> None:
        self.pickers = pickers
        self.client = client
        self.dice = random.Random("decisions")
        self.done = self.refused = 0

    async def run(self, number: int) -> None:
        """Send requests one after the other until enough were sent."""
        while self.done + self.refused < REQUESTS:
            await self.one(number)

    async def one(self, worker: int) -> None:
        """Ask a picker, send the request to the engine, and report its end."""
        dice, name = self.dice, f"{worker}-{self.done}-{time.monotonic_ns()}"
        shared = f"tenant {dice.randrange(12)} asks for " * dice.choice((4, 20, 60))
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": shared + str(dice.randrange(400))}],
            "max_tokens": dice.choice((1, 2, 8)),
        }
        headers = {":method": "POST", ":path": CHAT, TENANT_HEADERS[0]: f"tenant-{dice.randrange(5)}"}
        if dice.random() < 0.5:
            headers[PRIORITY_HEADER] = str(dice.choice((-1, 0, 2)))
        if dice.random() < 0.2:
            headers["x-session-id"] = f"client-{dice.randrange(30)}"
        picker = dice.choice(self.pickers)
        answered: asyncio.Future[PickAnswer] = asyncio.get_running_loop().create_future()
        picker.ask(name, headers, json.dumps(body).encode(), answered.set_result)
        answer = await answered
        if not answer.endpoint:
            self.refused += 1
            return
        url = f"http://{answer.endpoint.split(',')[0]}{CHAT}"
        async with self.client.post(url, json=body, headers={"x-session-id": answer.session}) as response:
            await response.read()
        dice.choice(self.pickers).ended([answer])  # gateways report to either replica
        self.done += 1


async def record(folder: Path) -> list[Path]:
    """Run two replicas over simulated engines under load; return their traces."""
    traces = [folder / f"trace-{number}" for number in range(2)]
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        engines = engine_ports(ENGINES)
        flags = ("--max-num-seqs", str(SLOTS), "--sim-step-seconds", "0.004")

        def command(ports: Any) -> list[str]:
            return engine_command(ports, MODEL, served="m", block_size=16, blocks=600, more=flags)

        await start_engines(children, engines, command)
        file = folder / "endpoints.json"
        fleet = endpoints_file(engines)
        for endpoint in fleet["endpoints"]:
            endpoint["labels"] = {"kvist.dev/max-num-seqs": str(SLOTS)}
        file.write_text(json.dumps(fleet))
        peers = free_ports(2)
        addresses = ",".join(f"{HOST}:{port}" for port in peers)

        async def picker(number: int, ports: PickerPorts) -> Picker:
            program = (sys.executable, "-m", "kvist_sim.virtual.decision_trace", str(traces[number]))
            arguments = (
                *FLAGS,
                f"--replicas={addresses}",
                f"--replica-port={peers[number]}",
                "--warmup-timeout=20",
            )
            name = f"picker-{number}"
            return await start_picker(
                children, file, MODEL, name=name, arguments=arguments, program=program, ports=ports
            )

        pickers = await asyncio.gather(*(picker(number, picker_ports()) for number in range(2)))
        direct = [await stack.enter_async_context(await Direct.open(HOST, p.grpc_port)) for p in pickers]
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        load = Load(direct, client)
        await asyncio.gather(*(load.run(number) for number in range(AT_ONCE)))
        await asyncio.gather(*(one.drained() for one in direct))
    return traces


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the traces of one run."""
    return asyncio.run(record(tmp_path_factory.mktemp("traces")))


@pytest.mark.timeout(600)
def test_the_virtual_driver_decides_as_the_running_product_did(traces: list[Path]) -> None:
    """Endpoint, cost terms and queue outcome of every request are the same, in both replicas."""
    found = [replay(trace) for trace in traces]
    for one in found:
        logging.warning(
            "%d inputs, %d requests, %d queued: %s", one.inputs, one.requests, one.queued, one.kinds
        )
        assert one.differences[:3] == []
        assert one.queued > one.requests / 100
        assert one.kinds["RemoteLoad.apply"] > 50
        assert one.kinds["Scraper.on_answer"] > 50
    assert sum(one.requests for one in found) >= REQUESTS


def _every(kind: str, nth: int) -> Any:
    """Return a fault that leaves out every n-th input of a kind."""
    count = 0

    def fault(_number: int, entry: Entry) -> bool:
        nonlocal count
        count += entry.kind == kind
        return entry.kind == kind and count % nth == 0

    return fault


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind", ["Scraper.on_answer", "RequestProgress.on_observation", "RemoteLoad.apply", "Poll.step"]
)
def test_a_driver_that_leaves_something_out_is_found(traces: list[Path], kind: str) -> None:
    """Without some scrapes, events, updates of the other replica, or polls, decisions differ."""
    found: Comparison = replay(traces[0], _every(kind, 5))
    assert found.differences
