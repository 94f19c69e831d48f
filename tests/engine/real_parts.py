"""Parts that tests of the product start: real engines, the picker as a process, Envoy in front of them."""

import asyncio
import json
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from tests.engine.vllm import VllmEngine

from kvist_sim.envoy import Envoy, Gateway, Mode, config
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children


class RealParts:
    """``async with`` a subclass: everything started, ready, and ended on the way out.

    A subclass starts its parts in ``_start``.
    """

    model: Path
    """Folder of the model that the engines serve."""
    engines: list[VllmEngine]
    client: aiohttp.ClientSession
    picker: Child
    envoy: Envoy
    metrics_port: int

    def __init__(self, folder: Path, mode: Mode) -> None:
        self._folder, self._mode = folder, mode
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        raise NotImplementedError

    async def _start_engines(self) -> None:
        for number in range(len(self.engines)):  # before they start: when one fails to, no other must stay
            self._stack.push_async_callback(self._stop_engine, number)
        await asyncio.gather(*(engine.__aenter__() for engine in self.engines))

    async def _stop_engine(self, number: int) -> None:
        await self.engines[number].stop()

    async def _open_client(self, seconds: float) -> None:
        timeout = aiohttp.ClientTimeout(total=seconds)
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))

    def _choose_ports(self) -> None:
        self.grpc_port, self.health_port, self.metrics_port = free_ports(3)

    async def _run_picker(self, folder: Path, *flags: str, module: str = "kvist_epp") -> Child:
        """Start the picker at the ports that were chosen; its log goes to a new folder."""
        children = self._children(folder)
        argv = [
            *(sys.executable, "-m", module, f"--endpoints-file={self._file}", f"--model={self.model}"),
            *(f"--grpc-port={self.grpc_port}", f"--grpc-health-port={self.health_port}"),
            *("--secure-serving=false", f"--metrics-port={self.metrics_port}", "--host=127.0.0.1"),
            *("--log-format=json", "--scrape-interval=1", *flags),
        ]
        child = children.start("picker", argv)
        await children.ready(child, self._ready, 60)
        return child

    def _children(self, folder: Path) -> Children:
        folder.mkdir()
        children = Children(folder)
        self._stack.push_async_callback(children.stop)
        return children

    async def _ready(self) -> bool:
        try:
            async with self.client.get(f"http://127.0.0.1:{self.metrics_port}/readyz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _start_envoy(self, engines: Iterable[VllmEngine], **settings: Any) -> None:
        """Start Envoy in front of these engines, with more settings of a ``Gateway``."""
        gateway = Gateway(
            endpoints=[engine.hostport for engine in engines],
            picker=f"127.0.0.1:{self.grpc_port}",
            mode=self._mode,
            failure_mode_allow=False,
            **settings,
        )
        self.envoy = await self._stack.enter_async_context(Envoy(config(gateway)))

    @property
    def _file(self) -> Path:
        return self._folder / "endpoints.json"

    def _write_endpoints(self, rows: Iterable[dict[str, Any]]) -> None:
        fresh = self._file.with_suffix(".fresh")
        fresh.write_text(json.dumps({"endpoints": list(rows)}))
        fresh.replace(self._file)

    def _row(self, number: int, **labels: str) -> dict[str, Any]:
        """Return an engine's entry of the endpoints file."""
        engine = self.engines[number]
        address, port = engine.hostport.split(":")
        return {
            "name": f"engine-{number}",
            "namespace": "test",
            "address": address,
            "port": int(port),
            "labels": {"kvist.dev/max-num-seqs": "8", **labels},
            "kvEvents": engine.events,
            "kvReplay": engine.replay,
        }


def logprobs(choice: dict[str, Any]) -> tuple[float, ...]:
    """Return the log probabilities of an answer's tokens; none if they were not asked for."""
    found = choice.get("logprobs") or {}
    listed = found.get("token_logprobs") or [token["logprob"] for token in found.get("content") or ()]
    return tuple(listed)
