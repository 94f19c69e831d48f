"""Start engines and pickers on this machine, for the demo and the benchmarks."""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .http1 import HttpError, answers, get
from .ports import free_ports
from .processes import Child, Children

HOST: Final = "127.0.0.1"
PICKER: Final = (sys.executable, "-m", "kvist_epp")
START_SECONDS: Final = 60.0
"""Longest wait for one component; a machine with all cores busy starts Python slowly."""


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """Ports of one engine."""

    http: int
    events: int
    replay: int

    @property
    def hostport(self) -> str:
        """Address for Envoy and the picker."""
        return f"{HOST}:{self.http}"


@dataclass(frozen=True, slots=True)
class Picker:
    """A running picker."""

    child: Child
    grpc_port: int
    metrics_port: int

    @property
    def address(self) -> str:
        """Address of the picker for Envoy."""
        return f"{HOST}:{self.grpc_port}"


@dataclass(frozen=True, slots=True)
class PickerPorts:
    """Ports of one picker, used again after a restart."""

    grpc: int
    health: int
    metrics: int


def picker_ports() -> PickerPorts:
    """Return free ports for one picker."""
    return PickerPorts(*free_ports(3))


def engine_ports(count: int) -> list[EnginePorts]:
    """Return free ports for ``count`` engines."""
    ports = free_ports(3 * count)
    return [EnginePorts(*ports[at : at + 3]) for at in range(0, 3 * count, 3)]


def engine_command(
    ports: EnginePorts, model: str, *, served: str, block_size: int, blocks: int, more: Sequence[str] = ()
) -> list[str]:
    """Return the command of a simulated engine that publishes KV events; ``more`` are further flags."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",  # vLLM connects to an address without a star
        "replay_endpoint": f"tcp://*:{ports.replay}",
    }
    return [
        *(sys.executable, "-m", "kvist_sim.engine", "--model", model, "--served-model-name", served),
        *("--host", HOST, "--port", str(ports.http), "--block-size", str(block_size)),
        *("--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details"),
        *("--kv-events-config", json.dumps(events), *more),
    ]


async def start_engines(
    children: Children, engines: Sequence[EnginePorts], command: Callable[[EnginePorts], list[str]]
) -> None:
    """Start all engines and wait until all answer. Raises ChildFailedError."""
    started = [children.start(f"engine-{number}", command(ports)) for number, ports in enumerate(engines)]
    for child, ports in zip(started, engines, strict=True):
        await children.ready(child, functools.partial(answers, HOST, ports.http, "/health"), START_SECONDS)


def endpoints_file(engines: Sequence[EnginePorts]) -> dict[str, Any]:
    """Return the content of the picker's endpoints file, as JSON (which is YAML too)."""
    return {
        "endpoints": [
            {
                "name": f"engine-{number}",
                "namespace": "local",
                "address": HOST,
                "port": ports.http,
                "kvEvents": f"tcp://{HOST}:{ports.events}",
                "kvReplay": f"tcp://{HOST}:{ports.replay}",
            }
            for number, ports in enumerate(engines)
        ]
    }


async def start_picker(
    children: Children,
    file: Path,
    model: str,
    *,
    name: str = "picker",
    arguments: Sequence[str] = (),
    program: Sequence[str] = PICKER,
    ports: PickerPorts | None = None,
    secure: bool = False,
) -> Picker:
    """Start one on an endpoints file and wait until it is ready to be asked. Raises ChildFailedError.

    ``ports``: free ones by default. ``secure``: TLS, with its own certificate unless ``arguments`` name one.
    """
    ports = ports or picker_ports()
    command = [
        *(*program, f"--endpoints-file={file}", f"--model={model}"),
        *(f"--host={HOST}", f"--grpc-port={ports.grpc}", f"--grpc-health-port={ports.health}"),
        *(f"--metrics-port={ports.metrics}", f"--secure-serving={str(secure).lower()}", *arguments),
    ]
    # as a variable, which an older picker without the flag does not mind
    child = children.start(name, command, environment={"KVIST_EPP_DRAIN_DELAY": "0"})
    await children.ready(child, functools.partial(answers, HOST, ports.metrics, "/readyz"), START_SECONDS)
    return Picker(child, ports.grpc, ports.metrics)


async def metric(picker: Picker, name: str, label: str = "") -> float:
    """Return the sum of a picker's metric over its labels, or those with ``label`` in them; 0.0 without
    an answer."""
    try:
        _, page = await get(HOST, picker.metrics_port, "/metrics")
    except (OSError, HttpError):
        return 0.0
    lines = (line for line in page.decode().splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)
