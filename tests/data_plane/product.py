"""The product without a GPU: kvist-epp as a process, real Envoy, simulated engines that publish KV events."""

import asyncio
import functools
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

import kvist_sim.model
from kvist_sim.envoy import Envoy, Gateway, Json, Mode, config
from kvist_sim.envoy_settings import Responses
from kvist_sim.http1 import answers
from kvist_sim.launch import HOST, EnginePorts, Picker, endpoints_file, engine_ports, start_picker
from kvist_sim.processes import Child, Children

MODEL = str(Path(kvist_sim.model.__file__).parent)
CHAT = "/v1/chat/completions"


@dataclass
class Product:
    """The running client, Envoy, picker and engines."""

    client: aiohttp.ClientSession
    envoy: Envoy
    picker: Picker
    engines: Sequence[EnginePorts]
    engine_processes: Sequence[Child]
    file: Path

    async def send(self, body: Any, path: str = CHAT, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Status, JSON (or text), headers of one request through Envoy."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.client.post(f"{self.envoy.url}{path}", data=data, headers=headers) as response:
            text = await response.text(errors="replace")
            try:
                return response.status, json.loads(text), response.headers
            except ValueError:
                return response.status, text, response.headers

    async def page(self, path: str) -> Any:
        """A page of the metrics port: JSON, or text for /metrics."""
        async with self.client.get(f"http://{HOST}:{self.picker.metrics_port}{path}") as response:
            return await (response.text() if path == "/metrics" else response.json())

    async def explain(self, body: Mapping[str, Any]) -> Any:
        """Post a body to /debug/pick and return the page."""
        url = f"http://{HOST}:{self.picker.metrics_port}/debug/pick"
        async with self.client.post(url, json=body, headers={"x-kvist-path": CHAT}) as response:
            return await response.json()

    async def metric(self, name: str) -> float:
        """The sum of all series of one metric."""
        lines = (await self.page("/metrics")).splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))
        )

    async def until(self, name: str, value: float) -> None:
        """Wait until a metric has at least this value; the test's time limit bounds it."""
        while await self.metric(name) < value:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def product(
    folder: Path,
    *,
    mode: Mode = "buffered",
    transport: str = "fast",
    engines: int = 2,
    flags: Sequence[str] = (),
    own_flags: Sequence[Sequence[str]] = (),
    picker_flags: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    ranks: int = 1,
    failure_mode_allow: bool = True,
    responses: Responses | None = None,
    tweak: Callable[[Json], None] = lambda _: None,
) -> AsyncIterator[Product]:
    """All of it started and ready, and ended on the way out.

    ``flags``: of every engine; ``own_flags``: of each, besides. ``labels`` and ``ranks``: of each endpoint in
    the file. ``tweak`` changes Envoy's configuration.
    """
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        ports = engine_ports(engines)
        own = [*own_flags, *[()] * (engines - len(own_flags))]
        processes = [
            _engine(children, number, one, (*flags, *own[number])) for number, one in enumerate(ports)
        ]
        for one, process in zip(ports, processes, strict=True):
            await children.ready(process, functools.partial(answers, HOST, one.http, "/health"), 60)
        file = folder / "endpoints.json"
        fleet = endpoints_file(ports)
        for endpoint in fleet["endpoints"]:
            endpoint |= {"labels": dict(labels or {}), "dataParallelRanks": ranks}
        file.write_text(json.dumps(fleet))
        arguments = [f"--transport={transport}", "--scrape-interval=0.5", "--log-format=json", *picker_flags]
        picker = await start_picker(children, file, MODEL, arguments=arguments)
        await children.ready(
            picker.child, functools.partial(answers, HOST, picker.metrics_port, "/readyz"), 30
        )
        gateway = Gateway(
            endpoints=[one.hostport for one in ports],
            picker=picker.address,
            mode=mode,
            failure_mode_allow=failure_mode_allow,
            responses=responses,
        )
        settings = config(gateway)
        tweak(settings)
        envoy = await stack.enter_async_context(Envoy(settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Product(client, envoy, picker, ports, processes, file)


def _engine(children: Children, number: int, ports: EnginePorts, flags: Sequence[str]) -> Child:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",
        "replay_endpoint": f"tcp://*:{ports.replay}",
    }
    argv = [
        *(sys.executable, "-m", "kvist_sim.engine", MODEL, "--served-model-name", "m"),
        *("--host", HOST, "--port", str(ports.http), "--enable-prompt-tokens-details"),
        *("--kv-events-config", json.dumps(events), *flags),
    ]
    return children.start(f"engine-{number}", argv)
