"""The product on real parts: two vLLM engines, the picker as a process, Envoy in front of them."""

import asyncio
import itertools
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import tiny
from tests.engine.lossy import LossyRelay
from tests.engine.mix import CHAT, MESSAGES, Turn
from tests.engine.real_parts import RealParts, logprobs
from tests.engine.vllm import VllmEngine

from kvist_sim.envoy import Mode

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
    logprobs: tuple[float, ...] = ()
    """Of the answer's tokens, if the request asks for them."""
    request_id: str = ""


class Pool(RealParts):
    """``async with Pool(folder) as pool``: two engines, the events of one of which can be lost."""

    _picker_flags: tuple[str, ...] = ()

    def __init__(self, folder: Path, *, mode: Mode = "buffered", transport: str = "fast") -> None:
        super().__init__(folder, mode)
        self._transport = transport
        self._numbers = itertools.count(1)
        self._prefix = os.urandom(4).hex()
        self._log_at = 0
        self._seen: dict[str, dict[str, Any]] = {}

    async def _start(self) -> None:
        self.model = self._build_model()
        self.engines = [self._engine(number) for number in range(2)]
        await self._start_engines()
        self.relay = await self._stack.enter_async_context(LossyRelay(self.engines[1].events))
        await self._open_client(120)
        self._choose_ports()
        self.listed(0, 1)
        await self._start_picker("picker")
        await self._start_envoy(self.engines)

    async def _start_picker(self, folder: str) -> None:
        flags = (f"--transport={self._transport}", *self._picker_flags)
        self.picker = await self._run_picker(self._folder / folder, *flags)
        self._log_at = 0

    def _build_model(self) -> Path:
        """The folder of the model that all engines serve."""
        return tiny.build("chatml", self._folder / "model")

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        """An engine that is not started; ``ports``: of the one whose place it takes."""
        return VllmEngine(self.model, *FLAGS, ports=ports)

    def listed(self, *numbers: int) -> None:
        """Write these engines to the endpoints file."""
        self._write_endpoints(self._endpoint(number) for number in numbers)

    async def until(self, metric: str, value: float) -> None:
        """Wait until a metric of the picker, all series together, has this value; the test's time limit
        bounds it."""
        while True:
            lines = [line for line in (await self.page("/metrics")).splitlines() if line.startswith(metric)]
            if sum(float(line.rpartition(" ")[2]) for line in lines) == value:
                return
            await asyncio.sleep(0.1)

    def _endpoint(self, number: int) -> dict[str, Any]:
        found = self._row(number)
        return found | {"kvEvents": self.relay.address} if number == 1 else found

    async def restart(self, number: int) -> None:
        """Kill an engine as a crash would and start another at the same ports."""
        old = self.engines[number]
        await old.stop(signal.SIGKILL)
        self.engines[number] = self._engine(number, old.ports)
        await self.engines[number].__aenter__()

    async def restart_picker(self) -> None:
        """Kill the picker as a crash would and start another at the same ports."""
        os.kill(self.picker.pid, signal.SIGKILL)
        while self.picker.running():
            await asyncio.sleep(0.05)
        await self._start_picker("restarted")
        while True:  # until Envoy has connected to it
            async with self.client.get(f"{self.envoy.url}/v1/models") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)

    async def ask(self, turn: Turn, **headers: str) -> Outcome:
        """Send one request through Envoy; the conversation gets its answer."""
        name = f"{self._prefix}-{next(self._numbers)}"
        url = f"{self.envoy.url}{turn.path}"
        async with self.client.post(
            url, json=turn.body, headers={"x-request-id": name, **headers}
        ) as response:
            answer = await response.json(content_type=None)
            assert response.status == 200, answer
        line = await self._line(name)
        if turn.path == MESSAGES:
            cached = answer["usage"].get("cache_read_input_tokens") or 0
            return Outcome(
                endpoint=line["endpoint"],
                predicted=line["matched_tokens"],
                cached=cached,
                prompt_tokens=answer["usage"]["input_tokens"] + cached,
                text="".join(block.get("text", "") for block in answer["content"]),
                logprobs=(),
                request_id=name,
            )
        choice = answer["choices"][0]
        text = choice["message"]["content"] if turn.path == CHAT else choice["text"]
        if turn.conversation is not None:
            turn.conversation.append({"role": "assistant", "content": text or ""})
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Outcome(
            endpoint=line["endpoint"],
            predicted=line["matched_tokens"],
            cached=details.get("cached_tokens") or 0,
            prompt_tokens=answer["usage"]["prompt_tokens"],
            text=text or "",
            logprobs=logprobs(choice),
            request_id=name,
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
