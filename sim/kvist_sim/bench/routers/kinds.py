"""Routers of the comparison, each started on the same pool as its own documentation says.

Each is asked by HTTP and passes the answer on, but for Dynamo's selection service (``dynamo``), which only
picks. Each is installed in a virtual environment of its own in the cache folder (``$KVIST_CACHE`` or
``~/.cache/kvist``, as the tools of the tests): seconds and some ten megabytes each, once.
"""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvist_sim import envoy, launch, load
from kvist_sim.http1 import answers
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

VERSIONS: Final = {
    "vllm-router": "0.1.17",
    "sglang-router": "0.3.2",
    "ai-dynamo-runtime": "1.6.1",
}
"""By name of the package."""
PYTHON: Final = "3.11"


class RouterMissingError(Exception):
    """A router cannot be installed on this machine; the text has the reason."""


def python(package: str) -> Path:
    """Return the interpreter of an environment with this package, made if needed.

    Raises RouterMissingError.
    """
    home = _cache() / "routers" / f"{package}-{VERSIONS[package]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            _build(home, f"{package}=={VERSIONS[package]}")
    return home / "bin" / "python"


def _cache() -> Path:
    return Path(os.environ.get("KVIST_CACHE") or Path.home() / ".cache" / "kvist")


def _build(home: Path, requirement: str) -> None:
    shutil.rmtree(home, ignore_errors=True)
    _uv("venv", "--quiet", "--python", PYTHON, str(home))
    _uv("pip", "install", "--quiet", "--python", str(home / "bin" / "python"), requirement)
    (home / "complete").touch()


def _uv(*arguments: str) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise RouterMissingError("uv is missing: `pip install uv` into the environment that runs this")
    done = subprocess.run([uv, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RouterMissingError(f"`uv {' '.join(arguments[:2])} … {arguments[-1]}`: {_last(done.stderr)}")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no word"


START_SECONDS: Final = 60.0
CHATS_BY_LOAD: Final = (
    "vllm-router 0.1.17 does not look at the text of chats, only at a session id in their body; without one "
    "it\nroutes them by load alone (vllm-project/router#219)."
)
PICKER_ARGUMENTS: Final = ("--log-requests=false", "--log-format=text")


@dataclass(frozen=True, slots=True)
class EnginePool:
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
class RunningRouter:
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
    start: Callable[[EnginePool], AbstractAsyncContextManager[RunningRouter]]
    """Raises ChildFailedError, EnvoyMissingError, RouterMissingError."""


@contextlib.asynccontextmanager
async def kvist(pool: EnginePool) -> AsyncIterator[RunningRouter]:
    """Start the picker behind Envoy."""
    file = pool.folder / "endpoints.json"
    file.write_text(json.dumps(launch.endpoints_file(pool.engines)))
    picker = await launch.start_picker(pool.children, file, pool.model, arguments=PICKER_ARGUMENTS)
    async with _envoy(pool, picker.address) as proxy:
        yield RunningRouter(
            load.Target(launch.HOST, proxy.port), {"picker": picker.child, "proxy": proxy.process}
        )


@contextlib.asynccontextmanager
async def round_robin(pool: EnginePool) -> AsyncIterator[RunningRouter]:
    """Start Envoy alone."""
    async with _envoy(pool, None) as proxy:
        yield RunningRouter(load.Target(launch.HOST, proxy.port), {"proxy": proxy.process})


def _envoy(pool: EnginePool, picker: str | None) -> envoy.Envoy:
    endpoints = [engine.hostport for engine in pool.engines]
    return envoy.Envoy(envoy.config(envoy.Gateway(endpoints=endpoints, picker=picker)))


@contextlib.asynccontextmanager
async def cache_aware(pool: EnginePool, *, package: str, said: str = "") -> AsyncIterator[RunningRouter]:
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
    yield RunningRouter(load.Target(launch.HOST, port), {"router": child}, lambda: said)


KVIST: Final = "kvist"
ROUTERS: Final = (
    Router(KVIST, "", "engines' events, bytes of the prompt, backlog", kvist),
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
