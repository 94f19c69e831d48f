"""A pool under load: simulated engines, pickers that can be started again, a real Envoy, and traffic."""

import asyncio
import functools
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kvist_sim.model
from kvist_sim import envoy, launch, load
from kvist_sim.demo.plan import DemoPlan
from kvist_sim.demo.run import engine_command, traffic
from kvist_sim.http1 import answers, get
from kvist_sim.launch import HOST, EnginePorts, Picker, PickerPorts
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

MODEL: Final = str(Path(kvist_sim.model.__file__).parent)
SECONDS: Final = 600.0
"""Longest load; tests end before."""
END_SECONDS: Final = 20.0


@dataclass
class Pool:
    """Running processes, and the addresses of the pickers' pages."""

    children: Children
    file: Path
    engines: Sequence[EnginePorts]
    ports: Sequence[PickerPorts]
    arguments: Sequence[Sequence[str]]
    engine_processes: list[Child] = field(default_factory=list)
    pickers: dict[int, Picker] = field(default_factory=dict)

    def url(self, number: int = 0) -> str:
        """Return the address of a picker's live page."""
        return f"http://{HOST}:{self.ports[number].metrics}/"

    async def start_picker(self, number: int = 0) -> None:
        """Start a picker at its ports and wait until it is ready."""
        self.pickers[number] = await launch.start_picker(
            self.children,
            self.file,
            MODEL,
            name=f"picker-{number}",
            arguments=[
                "--log-format=json",
                "--drain-timeout=2",
                "--warmup-timeout=3",
                *self.arguments[number],
            ],
            ports=self.ports[number],
        )

    async def end_picker(self, number: int = 0) -> None:
        """End a picker in order."""
        await self.children.end(self.pickers.pop(number).child, signal.SIGTERM, END_SECONDS)

    async def kill_engine(self, number: int) -> None:
        """Kill an engine."""
        await self.children.end(self.engine_processes[number], signal.SIGKILL, END_SECONDS)

    async def document(self, number: int = 0, query: str = "") -> Any:
        """Return a picker's ``/live/state``."""
        _, body = await get(HOST, self.ports[number].metrics, f"/live/state{query}")
        return json.loads(body)


@asynccontextmanager
async def busy_pool(
    folder: Path, *, engines: int = 4, pickers: int = 1, rate: float = 12.0, arguments: Sequence[str] = ()
) -> AsyncIterator[Pool]:
    """Yield a pool under the demo's traffic; everything ends with it. ``arguments``: of each picker."""
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(folder))
        places = launch.engine_ports(engines)
        processes = [
            children.start(f"engine-{number}", engine_command(ports, MODEL))
            for number, ports in enumerate(places)
        ]
        for process, ports in zip(processes, places, strict=True):
            probe = functools.partial(answers, HOST, ports.http, "/health")
            await children.ready(process, probe, launch.START_SECONDS)
        file = folder / "pool.json"
        file.write_text(json.dumps(launch.endpoints_file(places)))
        running = Pool(
            children,
            file,
            places,
            [launch.picker_ports() for _ in range(pickers)],
            [[*_replica_arguments(number, ports), *arguments] for number, ports in _peers(pickers)],
            processes,
        )
        await asyncio.gather(*(running.start_picker(number) for number in range(pickers)))
        addresses = tuple(f"{HOST}:{ports.grpc}" for ports in running.ports)
        gateway = envoy.Gateway(endpoints=[one.hostport for one in places], pickers=addresses)
        proxy = await stack.enter_async_context(envoy.Envoy(envoy.config(gateway)))
        plan = DemoPlan(seconds=SECONDS, engines=engines, rate=rate)
        target = load.Target(HOST, proxy.port)
        stack.callback(target.close)
        sending = asyncio.create_task(
            load.open_loop(target, traffic(plan), seconds=SECONDS, drain_seconds=0), name="traffic"
        )
        stack.push_async_callback(_stop, sending)
        yield running


def _peers(pickers: int) -> list[tuple[int, list[int]]]:
    ports = free_ports(pickers)
    return [(number, ports) for number in range(pickers)]


def _replica_arguments(number: int, ports: Sequence[int]) -> list[str]:
    if len(ports) == 1:
        return []
    others = ",".join(f"{HOST}:{port}" for port in ports)
    return [f"--replicas={others}", f"--replica-port={ports[number]}"]


async def _stop(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait((task,))
