"""Engines, relays of their events, pickers and one Envoy, each of which can be stopped and started again.

::

    load (this process) -> Envoy -> engines (processes), KV events -> relays (here) -> pickers (processes)
                             | ext_proc, access log (TLS)                               pickers <-> pickers
                             +-----------------------------------------------------------^   through relays

Engine 0 has no relay: it is the one that is killed, and pickers then get its events as in a real
pool.

``Secrets`` has the certificates: one authority, and a folder for each picker as Kubernetes mounts a Secret.
``folder/..data`` is a symbolic link to a folder with the files, ``tls.crt`` and the others are links through
it; a rotation writes a new folder and swaps the one link (``AtomicWriter`` in Kubernetes' volume code).
"""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import json
import signal
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from kvist_epp.http2.tls import AUTHORITY_LIFETIME, LEAF_LIFETIME
from kvist_kube.certificates import CertificateAuthority
from kvist_sim import envoy, launch
from kvist_sim import model as model_files
from kvist_sim.bench.chaos.judge import Life, Prediction
from kvist_sim.bench.harness.records import PickLog, with_route_headers
from kvist_sim.envoy_settings import PickerTls
from kvist_sim.http1 import answers
from kvist_sim.launch import HOST
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children
from kvist_sim.relays import EventRelay, TcpRelay
from kvist_sim.workloads import Shape

_FILES: Final = ("tls.crt", "tls.key", "ca.crt")
NAME: Final = "kvist-epp.local"


class Secrets:
    """Certificates for servers on the loopback, verified by Envoy."""

    def __init__(self, folder: Path, owners: Sequence[str]) -> None:
        """Makes and writes a first certificate for each of ``owners``."""
        self._folder = folder
        self._authority = CertificateAuthority("kvist-chaos", dt.datetime.now(dt.UTC), AUTHORITY_LIFETIME)
        self._issued = 0
        self._ca = folder / "ca.pem"
        self._ca.write_bytes(self._authority.pem)
        for owner in owners:
            self.folder(owner).mkdir(parents=True)
            self.rotate(owner)
            for name in _FILES:
                (self.folder(owner) / name).symlink_to(Path("..data") / name)

    def folder(self, owner: str) -> Path:
        """Return the folder for the owner's ``--cert-path``."""
        return self._folder / "secrets" / owner

    def gateway(self) -> PickerTls:
        """TLS settings of Envoy, which verifies authority and name."""
        return PickerTls(ca_file=self._ca, name=NAME)

    def rotate(self, owner: str) -> bytes:
        """Replace the owner's certificate and key, as a mounted Secret changes; the new certificate, DER."""
        self._issued += 1
        chain, key = self._authority.sign([NAME, "localhost", HOST], dt.datetime.now(dt.UTC), LEAF_LIFETIME)
        version = self.folder(owner) / f"..{self._issued}"
        version.mkdir()
        for name, content in zip(_FILES, (chain, key, self._authority.pem), strict=True):
            (version / name).write_bytes(content)
        fresh = self.folder(owner) / "..fresh"
        fresh.symlink_to(version.name)
        fresh.replace(self.folder(owner) / "..data")
        return ssl.PEM_cert_to_DER_cert(chain.decode())


MODEL_NAME: Final = "kvist-chaos"
BLOCK_SIZE: Final = 16
BLOCKS: Final = 8_000
"""Blocks per engine: enough for every shared prefix many times; full within the first phases, so blocks
are evicted."""
ENGINE_FLAGS: Final = ("--sim-prefill-tokens-per-second", "80000", "--sim-step-seconds", "0.04")
"""Fast prefill and few steps, so that two cores carry 200 requests a second, with engines and pickers."""
SHAPE: Final = Shape(
    groups=40,
    system_words=160,
    user_words=(10, 40),
    assistant_words=(10, 25),
    turns=4,
    max_tokens=5,
)
DRAIN_SECONDS: Final = 20.0
DRAIN_DELAY: Final = 2.0
"""Seconds of a picker's drain; Envoy's health check runs every second."""
FIRST_ENGINE: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Numbers of engines and pickers, and their settings."""

    engines: int = 4
    pickers: int = 3
    tls: bool = True
    peers: bool = True


@dataclass(slots=True)
class StackEngine:
    """Ports of one engine and its present process."""

    number: int
    ports: launch.EnginePorts
    child: Child | None = None

    @property
    def name(self) -> str:
        """Name in logs."""
        return f"engine-{self.number}"


@dataclass(slots=True)
class Replica:
    """Ports of one picker and its present process."""

    number: int
    ports: launch.PickerPorts
    peer_port: int
    running: launch.Picker | None = None

    @property
    def name(self) -> str:
        """Name in logs."""
        return f"picker-{self.number}"


@dataclass(slots=True)
class Stack:
    """All components; ``async with Stack(setup, folder) as stack`` starts them and stops them on exit."""

    setup: Setup
    folder: Path
    clock: Callable[[], float] = lambda: 0.0
    """Seconds since the load began, for ``lives``; set when the load begins."""
    lives: list[Life] = field(default_factory=list)
    engines: list[StackEngine] = field(init=False)
    pickers: list[Replica] = field(init=False)
    relays: list[EventRelay] = field(default_factory=list)
    """Relays of engines 1 and up."""
    links: dict[tuple[int, int], TcpRelay] = field(default_factory=dict)
    """Relays by (from, to): picker ``from`` reaches picker ``to`` through it."""
    secrets: Secrets | None = None
    children: Children = field(init=False)
    port: int = 0
    """Port of Envoy."""
    gateway: envoy.Envoy = field(init=False)
    _exit: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def __post_init__(self) -> None:
        ports = launch.engine_ports(self.setup.engines)
        self.engines = [StackEngine(number, one) for number, one in enumerate(ports)]
        peers = free_ports(self.setup.pickers)
        self.pickers = [Replica(number, launch.picker_ports(), port) for number, port in enumerate(peers)]
        self.children = Children(self.folder, grace_seconds=10)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def _start(self) -> None:
        await self._exit.enter_async_context(self.children)
        if self.setup.tls:
            self.secrets = Secrets(self.folder, [picker.name for picker in self.pickers])
        for engine in self.engines:
            self._spawn(engine)
        for engine in self.engines:
            await self._ready(engine)
        self._file.write_text(
            json.dumps(launch.endpoints_file([await self._relayed(e) for e in self.engines]))
        )
        if self.setup.peers:
            await self._link()
        await asyncio.gather(*(self.start_picker(picker.number) for picker in self.pickers))
        self.gateway = await self._exit.enter_async_context(self._envoy())
        self.port = self.gateway.port

    @property
    def _file(self) -> Path:
        return self.folder / "endpoints.json"

    async def _relayed(self, engine: StackEngine) -> launch.EnginePorts:
        """Return the ports as the pickers see them."""
        if engine.number == FIRST_ENGINE:
            return engine.ports
        (port,) = free_ports(1)
        relay = EventRelay(engine.ports.events, port, seed=engine.number)
        self.relays.append(await self._exit.enter_async_context(relay))
        return dataclasses.replace(engine.ports, events=port)

    async def _link(self) -> None:
        for one in self.pickers:
            for other in self.pickers:
                if one is not other:
                    relay = await self._exit.enter_async_context(TcpRelay(other.peer_port))
                    self.links[one.number, other.number] = relay

    def _envoy(self) -> envoy.Envoy:
        gateway = envoy.Gateway(
            endpoints=[engine.ports.hostport for engine in self.engines],
            pickers=tuple(f"{launch.HOST}:{picker.ports.grpc}" for picker in self.pickers),
            picker_tls=self.secrets.gateway() if self.secrets else None,
        )
        return envoy.Envoy(with_route_headers(envoy.config(gateway)))

    async def end_gateway(self) -> None:
        """Stop Envoy: its access log and health checks are streams at the pickers, too."""
        await self.gateway.__aexit__(None, None, None)

    # -- engines

    def _spawn(self, engine: StackEngine) -> None:
        command = launch.engine_command(
            engine.ports,
            str(model_files.folder()),
            served=MODEL_NAME,
            block_size=BLOCK_SIZE,
            blocks=BLOCKS,
            more=ENGINE_FLAGS,
        )
        engine.child = self.children.start(engine.name, command)

    async def _ready(self, engine: StackEngine) -> None:
        assert engine.child is not None
        probe = functools.partial(answers, launch.HOST, engine.ports.http, "/health")
        await self.children.ready(engine.child, probe, launch.START_SECONDS)
        self.lives.append(Life(engine.ports.hostport, self.clock()))

    async def kill_engine(self, number: int) -> None:
        """Kill an engine with SIGKILL."""
        engine = self.engines[number]
        assert engine.child is not None
        life = next(one for one in reversed(self.lives) if one.engine == engine.ports.hostport)
        life.killed = self.clock()
        await self.children.end(engine.child, signal.SIGKILL, DRAIN_SECONDS)

    async def start_engine(self, number: int) -> None:
        """Start another process at the same ports; returns when it answers its health check."""
        engine = self.engines[number]
        self._spawn(engine)
        await self._ready(engine)

    # -- pickers

    async def end_picker(self, number: int, how: signal.Signals) -> int:
        """Stop one picker with a signal and return its exit status."""
        picker = self.pickers[number]
        assert picker.running is not None
        return await self.children.end(picker.running.child, how, DRAIN_SECONDS)

    async def start_picker(self, number: int) -> None:
        """Start one picker at its ports; returns when it is ready."""
        picker = self.pickers[number]
        picker.running = await launch.start_picker(
            self.children,
            self._file,
            str(model_files.folder()),
            name=picker.name,
            arguments=list(self._arguments(picker)),
            ports=picker.ports,
            secure=self.setup.tls,
        )

    def _arguments(self, picker: Replica) -> Iterator[str]:
        yield "--log-format=json"
        yield from (f"--drain-timeout={DRAIN_SECONDS / 2:g}", f"--drain-delay={DRAIN_DELAY:g}")
        if self.secrets is not None:
            yield f"--cert-path={self.secrets.folder(picker.name)}"
        if self.setup.peers:
            others = [relay.address for (one, _), relay in self.links.items() if one == picker.number]
            yield f"--replicas={','.join(others)}"
            yield f"--replica-port={picker.peer_port}"

    def predictions(self) -> dict[str, Prediction]:
        """Return what the pickers have logged so far, by request id."""
        lines = (
            line for picker in self.pickers for line in PickLog(self.folder / f"{picker.name}.log").read()
        )
        return {line.id: Prediction(line.endpoint, line.matched_tokens) for line in lines if line.endpoint}
