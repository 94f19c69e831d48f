"""The guide's configuration of several pools, running: kvist-epp --role=model-header, pickers, engines."""

import asyncio
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.data_plane.product import MODEL
from tests.data_plane.stub import StubPicker, Transport
from tests.data_plane.upstream import Received, Upstream
from tests.docs import several_pools

from kvist_sim.envoy import Envoy, Json, Mode
from kvist_sim.envoy_pools import Pool
from kvist_sim.http1 import answers
from kvist_sim.launch import (
    HOST,
    PICKER,
    Picker,
    PickerPorts,
    endpoints_file,
    engine_command,
    engine_ports,
    picker_ports,
    start_picker,
)
from kvist_sim.processes import Child, Children

POOLS = ("small", "large", "large-next")
"""Of the guide."""
SMALL, LARGE, ADAPTER = "qwen3-4b", "qwen3-32b", "sql-lora"


@dataclass
class Stub:
    """One pool: a picker that always picks the second of two engines."""

    picker: StubPicker
    address: str
    upstreams: tuple[Upstream, Upstream]

    @property
    def received(self) -> list[Received]:
        """Return the requests that the pool's engines received."""
        return [one for upstream in self.upstreams for one in upstream.received]


@dataclass
class Several:
    """The running client, Envoy, filter and pools."""

    client: aiohttp.ClientSession
    envoy: Envoy
    filter: Child
    ports: PickerPorts
    pools: Mapping[str, Stub]

    @property
    def served(self) -> Counter[str]:
        """Requests by the pool whose engines got them."""
        return Counter({name: len(pool.received) for name, pool in self.pools.items() if pool.received})

    @property
    def asked(self) -> Counter[str]:
        """Requests by the pool whose picker was asked."""
        return Counter({name: len(p.picker.asks) for name, p in self.pools.items() if p.picker.asks})

    async def page(self, path: str) -> str:
        """A page of the filter's metrics port."""
        async with self.client.get(f"http://{HOST}:{self.ports.metrics}{path}") as response:
            return await response.text()


@asynccontextmanager
async def several(
    folder: Path,
    transport: Transport,
    mode: Mode = "buffered",
    *,
    tweak: Callable[[Json], None] = lambda _: None,
    **choices: Any,
) -> AsyncIterator[Several]:
    """All of it; ``choices``: fields of `Pools` unlike the guide's; ``tweak`` changes what comes of it."""
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        pools = {name: await _stub(stack, transport) for name in POOLS}
        child, ports = await model_header(children, transport)
        settings = several_pools(
            pools={
                name: Pool(endpoints=[u.address for u in pool.upstreams], pickers=(pool.address,))
                for name, pool in pools.items()
            },
            **{"model_headers": (f"{HOST}:{ports.grpc}",), "tls": None, "port": 0, "mode": mode, **choices},
        )
        tweak(settings)
        envoy = await stack.enter_async_context(Envoy(settings))
        client = await stack.enter_async_context(aiohttp.ClientSession(envoy.url))
        yield Several(client, envoy, child, ports, pools)


@dataclass
class Real:
    """Envoy before real pickers with simulated engines, a pool for each."""

    envoy: Envoy
    pickers: Mapping[str, Picker]


@asynccontextmanager
async def real(folder: Path, models: Mapping[str, str]) -> AsyncIterator[Real]:
    """The guide's routes, and TLS as it has it; ``models``: pool → what its one engine serves."""
    async with Children(folder) as children:
        places = dict(zip(models, engine_ports(len(models)), strict=True))
        engines = {
            name: children.start(
                f"engine-{name}",
                engine_command(ports, MODEL, served=models[name], block_size=16, blocks=1000),
            )
            for name, ports in places.items()
        }
        for name, ports in places.items():
            await children.ready(engines[name], functools.partial(answers, HOST, ports.http, "/health"), 60)
            (folder / f"{name}.json").write_text(json.dumps(endpoints_file([ports])))
        starts = (
            start_picker(children, folder / f"{name}.json", MODEL, name=f"picker-{name}", secure=True)
            for name in places
        )
        pickers = dict(zip(places, await asyncio.gather(*starts), strict=True))
        pools = {
            name: Pool(endpoints=[ports.hostport], pickers=(pickers[name].address,))
            for name, ports in places.items()
        }
        _, own = await model_header(children, "fast", "--secure-serving=true")
        settings = several_pools(pools=pools, model_headers=(f"{HOST}:{own.grpc}",), port=0)
        async with Envoy(settings) as envoy:
            yield Real(envoy, pickers)


async def model_header(children: Children, transport: Transport, *flags: str) -> tuple[Child, PickerPorts]:
    """The role as a process, ready; in plaintext and with one adapter unless ``flags`` name the role."""
    ports = picker_ports()
    if not any(flag.startswith("--role") for flag in flags):
        flags = ("--role=model-header", f"--base-models={ADAPTER}={LARGE}", "--secure-serving=false", *flags)
    command = [
        *(*PICKER, f"--transport={transport}", "--drain-delay=0", f"--metrics-port={ports.metrics}"),
        *(f"--host={HOST}", f"--grpc-port={ports.grpc}", f"--grpc-health-port={ports.health}", *flags),
    ]
    child = children.start(f"model-header-{ports.grpc}", command)
    await children.ready(child, functools.partial(answers, HOST, ports.metrics, "/readyz"), 60)
    return child, ports


async def _stub(stack: AsyncExitStack, transport: Transport) -> Stub:
    upstreams = (await stack.enter_async_context(Upstream()), await stack.enter_async_context(Upstream()))
    picker = StubPicker()
    picker.picks(upstreams[1].address)
    server = await picker.serve(transport)
    stack.push_async_callback(server.close)
    return Stub(picker, f"{HOST}:{server.port}", upstreams)
