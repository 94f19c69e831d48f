"""The product on a cluster: kvist-epp on an InferencePool, engines as pods at 127.0.0.x, a real Envoy."""

import functools
import io
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.cluster.client import Namespace
from tests.data_plane.plane import healthy_pickers
from tests.data_plane.product import CHAT, MODEL

from kvist_sim.envoy import Envoy, Gateway, config
from kvist_sim.http1 import answers, get
from kvist_sim.launch import HOST, START_SECONDS, Picker, PickerPorts, picker_ports
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

FAST = ("--sim-time-scale", "20", "--num-gpu-blocks-override", "4000")


@dataclass(frozen=True)
class Engine:
    """One engine, and the pod it is said to run in."""

    name: str
    address: str
    port: int
    events: int
    replay: int

    @property
    def annotations(self) -> dict[str, str]:
        """Return the annotations of the pod: the tests' engines share a machine, so each has its own
        ports."""
        return {"kvist.dev/kv-events-port": str(self.events), "kvist.dev/kv-replay-port": str(self.replay)}

    async def served(self) -> float:
        """Requests it has answered so far."""
        _, page = await get(self.address, self.port, "/metrics")
        lines = page.decode().splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith("vllm:request_success_total"))


@dataclass
class Product:
    """The running client, Envoy, engines and picker."""

    children: Children
    client: aiohttp.ClientSession
    envoy: Envoy
    engines: Sequence[Engine]
    space: Namespace
    kubeconfig: Path
    ports: PickerPorts
    picker: Child

    async def send(self, text: str) -> int:
        """The status of a chat through Envoy."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        data = io.BytesIO(json.dumps(body).encode())
        async with self.client.post(f"{self.envoy.url}{CHAT}", data=data) as response:
            await response.read()
            return response.status

    async def served(self) -> list[float]:
        """Requests answered by each engine."""
        return [await engine.served() for engine in self.engines]

    async def page(self, path: str) -> tuple[int, str]:
        """A page of the metrics port."""
        status, body = await get(HOST, self.ports.metrics, path)
        return status, body.decode()

    async def discovery(self) -> dict[str, Any]:
        """Return what /debug/fleet shows of the discovery."""
        _, text = await self.page("/debug/fleet")
        found: dict[str, Any] = json.loads(text)["discovery"]
        return found

    def start_picker(self) -> None:
        """Start it, again or for the first time."""
        self.picker = _picker(self.children, self.kubeconfig, self.space, self.ports)

    async def ready(self) -> None:
        """Wait until the picker is ready and Envoy's health check has seen it."""
        probe = functools.partial(answers, HOST, self.ports.metrics, "/readyz")
        await self.children.ready(self.picker, probe, START_SECONDS)
        await healthy_pickers(self.envoy, 1)


@asynccontextmanager
async def product(
    folder: Path, space: Namespace, kubeconfig: Path, engines: int = 2
) -> AsyncIterator[Product]:
    """All of it started, pods for the engines not yet made; ended on the way out."""
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        made = _engines(engines)
        processes = [_engine(children, engine) for engine in made]
        for engine, process in zip(made, processes, strict=True):
            probe = functools.partial(answers, engine.address, engine.port, "/health")
            await children.ready(process, probe, START_SECONDS)
        ports = picker_ports()
        picker = Picker(_picker(children, kubeconfig, space, ports), ports.grpc, ports.metrics)
        endpoints = [f"{engine.address}:{engine.port}" for engine in made]
        gateway = Gateway(endpoints=endpoints, picker=picker.address, failure_mode_allow=False)
        envoy = await stack.enter_async_context(Envoy(config(gateway)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Product(children, client, envoy, made, space, kubeconfig, ports, picker.child)


def _engines(count: int) -> list[Engine]:
    port, *others = free_ports(1 + 2 * count)
    return [Engine(f"e{n}", f"127.0.0.{n + 2}", port, others[2 * n], others[2 * n + 1]) for n in range(count)]


def _engine(children: Children, engine: Engine) -> Child:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{engine.events}",
        "replay_endpoint": f"tcp://*:{engine.replay}",
    }
    argv = [
        *(sys.executable, "-m", "kvist_sim.engine", MODEL, "--served-model-name", "m", *FAST),
        *("--host", engine.address, "--port", str(engine.port)),
        *("--kv-events-config", json.dumps(events)),
    ]
    return children.start(engine.name, argv)


def _picker(children: Children, kubeconfig: Path, space: Namespace, ports: PickerPorts) -> Child:
    argv = [
        *(sys.executable, "-m", "kvist_epp", "--pool-name=pool", f"--pool-namespace={space.name}"),
        *(f"--model={MODEL}", f"--host={HOST}", f"--grpc-port={ports.grpc}", "--secure-serving=false"),
        *(f"--grpc-health-port={ports.health}", f"--metrics-port={ports.metrics}"),
        *("--scrape-interval=0.5", "--log-format=json"),
    ]
    return children.start("picker", argv, environment={"KUBECONFIG": str(kubeconfig)})
