"""Three pickers as processes behind one real Envoy that checks their health, engines, steady load."""

import asyncio
import functools
import json
import os
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from tests.data_plane.plane import Tweak, healthy_pickers
from tests.data_plane.product import CHAT, MODEL
from tests.epp.http2.certificates import Mounted, Pki

from kvist_sim.envoy import Envoy, Gateway, config
from kvist_sim.envoy_settings import PickerTls
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
from kvist_sim.processes import Children

NAME: Final = "picker.test"
ENGINE_FLAGS: Final = ("--sim-step-seconds", "0.01", "--max-num-seqs", "256")
DRAIN: Final = ("--drain-delay=2.5s", "--drain-timeout=20s")
"""Envoy asks for health every second and may wait a second for the answer."""


@dataclass
class Load:
    """Clients that send one request after the other until they are stopped."""

    url: str
    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by status, or by the exception that ended them."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lost(self) -> dict[str, int]:
        """All but the answered ones."""
        return {outcome: count for outcome, count in self.outcomes.items() if outcome != "200"}

    async def more(self, count: int) -> None:
        """Wait until so many more requests have been answered, or one is lost."""
        enough = self.outcomes["200"] + count
        while self.outcomes["200"] < enough and not self.lost:
            await asyncio.sleep(0.02)

    async def run(self, clients: int) -> None:
        """Send requests with this number of clients until ``stop`` is set."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not self.stop.is_set():
            turn += 1
            self.outcomes[await self._one(session, number, turn)] += 1
            await asyncio.sleep(0.02)

    async def _one(self, session: aiohttp.ClientSession, number: int, turn: int) -> str:
        text = f"client {number} says {turn}"
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        try:
            async with session.post(f"{self.url}{CHAT}", json=body) as response:
                await response.read()
                return str(response.status)
        except aiohttp.ClientError as error:
            return type(error).__name__


@dataclass
class Replicas:
    """The running Envoy and the pickers behind it."""

    envoy: Envoy
    children: Children
    file: Path
    arguments: Sequence[str]
    secure: bool
    ports: list[PickerPorts]
    pickers: list[Picker]
    secret: Mounted
    pki: Pki

    async def start(self, number: int) -> None:
        """A picker on the ports of that number, until it is ready and Envoy knows."""
        self.pickers[number] = await self._start(number)
        await healthy_pickers(self.envoy, len(self.pickers))

    async def _start(self, number: int) -> Picker:
        return await start_picker(
            self.children,
            self.file,
            MODEL,
            name=f"picker-{number}",
            arguments=self.arguments,
            ports=self.ports[number],
            secure=self.secure,
        )

    async def end(self, number: int, how: signal.Signals) -> int:
        """End a picker by a signal; its exit code."""
        process = self.pickers[number].child.process
        os.kill(process.pid, how)
        return await asyncio.to_thread(process.wait, 40)

    def gateway(self, tls: PickerTls | None) -> Envoy:
        """Another Envoy, not yet started, in front of the same pickers."""
        pickers = tuple(picker.address for picker in self.pickers)
        return Envoy(config(Gateway(endpoints=["127.0.0.1:1"], pickers=pickers, picker_tls=tls)))

    async def unpicked(self) -> int:
        """Requests that Envoy let pass without a pick, or whose stream to a picker failed."""
        found = await self.envoy.stats("ext_proc")
        counters = {name.rpartition(".")[2]: value for name, value in found.items()}
        return counters["failure_mode_allowed"] + counters["streams_failed"]

    async def page(self, number: int, path: str) -> bytes:
        """A page of a picker's metrics port."""
        status, content = await get(HOST, self.ports[number].metrics, path)
        assert status == 200
        return content

    async def metric(self, number: int, series: str) -> float:
        """The value of one series, labels included."""
        lines = (await self.page(number, "/metrics")).decode().splitlines()
        (value,) = (float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} "))
        return value

    async def shown(self, number: int) -> bytes:
        """The certificate a new connection to that picker gets, PEM."""
        address = (HOST, self.ports[number].grpc)
        return (await asyncio.to_thread(ssl.get_server_certificate, address, timeout=10)).encode()

    @asynccontextmanager
    async def load(self, clients: int = 8) -> AsyncIterator[Load]:
        """Steady load as long as the block lasts."""
        load = Load(self.envoy.url)
        running = asyncio.ensure_future(load.run(clients))
        try:
            yield load
        finally:
            load.stop.set()
            await running


@asynccontextmanager
async def replicas(
    folder: Path,
    *,
    transport: str,
    secure: bool,
    count: int = 3,
    more: Sequence[str] = (),
    tweak: Tweak = lambda _: None,
    **gateway: Any,
) -> AsyncIterator[Replicas]:
    """All of it started and healthy, and ended on the way out. TLS: from files, verified by Envoy.

    ``more`` are flags of the pickers; ``gateway`` and ``tweak`` change Envoy's configuration.
    """
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        engines = engine_ports(2)
        await asyncio.gather(*(_engine(children, number, ports) for number, ports in enumerate(engines)))
        file = folder / "endpoints.json"
        file.write_text(json.dumps(endpoints_file(engines)))
        secret, pki = Mounted(folder / "tls"), Pki()
        secret.write(*pki.pair(NAME), pki.pem)
        (folder / "ca.pem").write_bytes(pki.pem)
        places = [picker_ports() for _ in range(count)]
        pickers = tuple(f"{HOST}:{ports.grpc}" for ports in places)
        verified = PickerTls(ca_file=folder / "ca.pem", name=NAME) if secure else None
        hosts = [ports.hostport for ports in engines]
        settings = config(Gateway(endpoints=hosts, pickers=pickers, **{"picker_tls": verified, **gateway}))
        tweak(settings)
        tls = (f"--cert-path={secret.path}",) if secure else ()
        arguments = [f"--transport={transport}", "--log-requests=false", *DRAIN, *tls, *more]
        envoy = await stack.enter_async_context(Envoy(settings))
        running = Replicas(envoy, children, file, arguments, secure, places, [], secret, pki)
        running.pickers = list(await asyncio.gather(*(running._start(number) for number in range(count))))
        await healthy_pickers(envoy, count)
        yield running


async def _engine(children: Children, number: int, ports: EnginePorts) -> None:
    command = engine_command(ports, MODEL, served="m", block_size=16, blocks=4000, more=ENGINE_FLAGS)
    process = children.start(f"engine-{number}", command)
    await children.ready(process, functools.partial(answers, HOST, ports.http, "/health"), 60)
