"""Routers of the comparison, each started on the same pool as its own documentation says.

Each is asked by HTTP and passes the answer on, but for Dynamo's selection service (``dynamo``), which
only picks.
"""

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_sim import envoy, launch, load
from kvist_sim.bench.routers.environments import VERSIONS, python
from kvist_sim.http1 import answers
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

START_SECONDS: Final = 60.0
CHATS_BY_LOAD: Final = (
    "vllm-router 0.1.17 does not look at the text of chats, only at a session id in their body; without one "
    "it\nroutes them by load alone (vllm-project/router#219)."
)
PICKER_ARGUMENTS: Final = ("--log-requests=false", "--log-format=text")


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines and model for which a router is started."""

    engines: Sequence[launch.EnginePorts]
    model: str
    """Folder of its files."""
    served: str
    """Model name in requests."""
    block_size: int
    children: Children
    folder: Path


@dataclass(frozen=True, slots=True)
class Running:
    """A router that takes requests."""

    target: load.Target
    parts: Mapping[str, Child]
    """Processes by role; their CPU time is counted."""
    note: Callable[[], str] = str
    """Returns a remark for the report, after the load."""
    prepare: Callable[[bytes], object] = len
    """Called with every body before the load."""


@dataclass(frozen=True, slots=True)
class Router:
    """One router of the comparison."""

    name: str
    version: str
    how: str
    """Short description of the router's knowledge."""
    start: Callable[[Pool], AbstractAsyncContextManager[Running]]
    """Raises ChildFailedError, EnvoyMissingError, RouterMissingError."""


@contextlib.asynccontextmanager
async def kvist(pool: Pool) -> AsyncIterator[Running]:
    """Start the picker behind Envoy."""
    file = pool.folder / "endpoints.json"
    file.write_text(json.dumps(launch.endpoints_file(pool.engines)))
    picker = await launch.start_picker(pool.children, file, pool.model, arguments=PICKER_ARGUMENTS)
    async with _envoy(pool, picker.address) as proxy:
        yield Running(load.Target(launch.HOST, proxy.port), {"picker": picker.child, "proxy": proxy.process})


@contextlib.asynccontextmanager
async def round_robin(pool: Pool) -> AsyncIterator[Running]:
    """Start Envoy alone."""
    async with _envoy(pool, None) as proxy:
        yield Running(load.Target(launch.HOST, proxy.port), {"proxy": proxy.process})


def _envoy(pool: Pool, picker: str | None) -> envoy.Envoy:
    endpoints = [engine.hostport for engine in pool.engines]
    return envoy.Envoy(envoy.config(envoy.Gateway(endpoints=endpoints, picker=picker)))


@contextlib.asynccontextmanager
async def cache_aware(pool: Pool, *, package: str, said: str = "") -> AsyncIterator[Running]:
    """Start ``vllm-router`` or ``sglang-router`` with its default policy, ``cache_aware``."""
    port, metrics = free_ports(2)
    module = package.replace("-", "_")
    command = [
        *(str(python(package)), "-m", f"{module}.launch_router"),
        *("--host", launch.HOST, "--port", str(port), "--policy", "cache_aware"),
        *("--prometheus-host", launch.HOST, "--prometheus-port", str(metrics)),
        *("--log-level", "warning" if package == "vllm-router" else "warn"),
        *("--worker-startup-check-interval", "1"),
        *("--worker-urls", *(f"http://{engine.hostport}" for engine in pool.engines)),
    ]
    child = pool.children.start(package, command)
    # before it knows a worker it answers too, but with an error
    await pool.children.ready(
        child, functools.partial(answers, launch.HOST, port, "/v1/models"), START_SECONDS
    )
    yield Running(load.Target(launch.HOST, port), {"router": child}, lambda: said)


KVIST: Final = "kvist"
ROUTERS: Final = (
    Router(KVIST, "", "engines' events, bytes of the prompt, work owed", kvist),
    Router("round-robin", "", "Envoy alone", round_robin),
    *(
        Router(
            package,
            VERSIONS[package],
            "characters of what it routed, requests in flight",
            functools.partial(cache_aware, package=package, said=said),
        )
        for package, said in (("vllm-router", CHATS_BY_LOAD), ("sglang-router", ""))
    ),
)
