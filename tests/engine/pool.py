"""The product on real parts: two vLLM engines, the picker as a process, Envoy in front of them."""

import asyncio
import itertools
import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from tests.engine import tiny
from tests.engine.lossy import LossyRelay
from tests.engine.mix import CHAT, Turn
from tests.engine.vllm import VllmEngine

from kvist_sim.envoy import Envoy, Gateway, Mode, config
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

BLOCK = 32
FLAGS = ("--num-gpu-blocks-override", "192", "--max-model-len", "4096")
"""A cache of 6,144 tokens, so that evictions are frequent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, as the engine and the picker saw it."""

    endpoint: str
    predicted: int
    """Cached tokens by the picker."""
    cached: int
    """Cached tokens by the engine."""
    prompt_tokens: int
    text: str


class Pool:
    """``async with Pool(folder) as pool``: everything started, ready, and ended on the way out."""

    def __init__(self, folder: Path, *, mode: Mode = "buffered", transport: str = "fast") -> None:
        self._folder = folder
        self._mode: Mode = mode
        self._transport = transport
        self._stack = AsyncExitStack()
        self._numbers = itertools.count(1)
        self._prefix = os.urandom(4).hex()
        self._log_at = 0
        self._seen: dict[str, dict[str, Any]] = {}

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
        self.model = tiny.build("chatml", self._folder / "model")
        first, second = VllmEngine(self.model, *FLAGS), VllmEngine(self.model, *FLAGS)
        self.engines = [first, second]
        for number in range(2):  # before they start: when one fails to, the other must not stay
            self._stack.push_async_callback(self._stop_engine, number)
        await asyncio.gather(first.__aenter__(), second.__aenter__())
        self.relay = await self._stack.enter_async_context(LossyRelay(second.events))
        self.client = await self._stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        )
        self.picker = await self._start_picker()
        gateway = Gateway(
            endpoints=[engine.hostport for engine in self.engines],
            picker=f"127.0.0.1:{self.grpc_port}",
            mode=self._mode,
            failure_mode_allow=False,
        )
        self.envoy = await self._stack.enter_async_context(Envoy(config(gateway)))

    async def _stop_engine(self, number: int) -> None:
        await self.engines[number].stop()

    async def _start_picker(self) -> Child:
        folder = self._folder / "picker"
        folder.mkdir()
        children = Children(folder)
        self._stack.push_async_callback(children.stop)
        self.grpc_port, health, self.metrics_port = free_ports(3)
        self.listed(0, 1)
        argv = [
            *(sys.executable, "-m", "kvist_epp", f"--endpoints-file={self._file}", f"--model={self.model}"),
            *(f"--grpc-port={self.grpc_port}", f"--grpc-health-port={health}", "--secure-serving=false"),
            *(f"--metrics-port={self.metrics_port}", "--host=127.0.0.1", "--log-format=json"),
            *(f"--transport={self._transport}", "--scrape-interval=1"),
        ]
        child = children.start("picker", argv)
        await children.ready(child, self._ready, 60)
        return child

    @property
    def _file(self) -> Path:
        return self._folder / "endpoints.json"

    def listed(self, *numbers: int) -> None:
        """Write these engines to the endpoints file."""
        fresh = self._file.with_suffix(".fresh")
        fresh.write_text(json.dumps({"endpoints": [self._endpoint(number) for number in numbers]}))
        fresh.replace(self._file)

    async def until(self, metric: str, value: float) -> None:
        """Wait until a metric of the picker, all series together, has this value; the test's time limit
        bounds it."""
        while True:
            lines = [line for line in (await self.page("/metrics")).splitlines() if line.startswith(metric)]
            if sum(float(line.rpartition(" ")[2]) for line in lines) == value:
                return
            await asyncio.sleep(0.1)

    def _endpoint(self, number: int) -> dict[str, Any]:
        engine = self.engines[number]
        address, port = engine.hostport.split(":")
        return {
            "name": f"engine-{number}",
            "namespace": "test",
            "address": address,
            "port": int(port),
            "labels": {"kvist.dev/max-num-seqs": "8"},
            "kvEvents": self.relay.address if number == 1 else engine.events,
            "kvReplay": engine.replay,
        }

    async def _ready(self) -> bool:
        try:
            async with self.client.get(f"http://127.0.0.1:{self.metrics_port}/readyz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def restart(self, number: int) -> None:
        """Kill an engine as a crash would and start another at the same ports."""
        import signal

        old = self.engines[number]
        await old.stop(signal.SIGKILL)
        self.engines[number] = VllmEngine(self.model, *FLAGS, ports=old.ports)
        await self.engines[number].__aenter__()

    async def ask(self, turn: Turn, **headers: str) -> Outcome:
        """Send one request through Envoy; the conversation gets its answer."""
        name = f"{self._prefix}-{next(self._numbers)}"
        url = f"{self.envoy.url}{turn.path}"
        async with self.client.post(
            url, json=turn.body, headers={"x-request-id": name, **headers}
        ) as response:
            answer = await response.json(content_type=None)
            assert response.status == 200, answer
        choice = answer["choices"][0]
        text = choice["message"]["content"] if turn.path == CHAT else choice["text"]
        if turn.conversation is not None:
            turn.conversation.append({"role": "assistant", "content": text or ""})
        line = await self._line(name)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Outcome(
            endpoint=line["endpoint"],
            predicted=line["matched_tokens"],
            cached=details.get("cached_tokens") or 0,
            prompt_tokens=answer["usage"]["prompt_tokens"],
            text=text or "",
        )

    async def direct(self, number: int, turn: Turn) -> int:
        """Send one request to an engine past Envoy and the picker; its cached tokens."""
        url = f"{self.engines[number].url}{turn.path}"
        async with self.client.post(url, json=turn.body) as response:
            assert response.status == 200, await response.text()
            details = (await response.json())["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    async def page(self, path: str) -> Any:
        """A debug page of the picker."""
        async with self.client.get(f"http://127.0.0.1:{self.metrics_port}{path}") as response:
            return await response.json() if path != "/metrics" else await response.text()

    async def _line(self, name: str) -> dict[str, Any]:
        """The picker's log line of one request."""
        for _ in range(200):
            self._read_log()
            if name in self._seen:
                return self._seen.pop(name)
            await asyncio.sleep(0.02)
        raise AssertionError(f"no log line of {name}:\n{self.picker.tail()}")

    def _read_log(self) -> None:
        with self.picker.log.open("rb") as file:
            file.seek(self._log_at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._log_at += len(line)
                if b'"event":"request"' in line:
                    entry = json.loads(line)
                    self._seen[entry["id"]] = entry
