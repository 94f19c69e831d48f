"""Real vLLM on CPU as an async context manager: engines that serve, and render servers that only tokenise."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Self

import aiohttp
from tests.engine import install

from kvist_sim.ports import free_ports

START_SECONDS = 600
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "WARNING",
    START_METHOD: "fork",
}
"""No network, no telemetry, loopback only, one thread: two engines share two cores. Processes are forked:
each would import everything again."""
PLUGIN = Path(__file__).parent / "plugin"
"""On the PYTHONPATH of every engine: its processes fork, and wait where they would ask in a loop."""


class EngineError(RuntimeError):
    """vLLM ended before it was ready, or was not ready in time; the message has the end of its log."""


class Process:
    """A process group of vLLM's interpreter; ended as a whole, by its id."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._environment = environment
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed in stop
        self._running: asyncio.subprocess.Process | None = None

    async def start(self, urls: Sequence[str], health: str = "/health") -> None:
        self._running = await asyncio.create_subprocess_exec(
            str(install.install()),
            *self._arguments,
            stdout=self._log,
            stderr=self._log,
            env=self._complete_environment(),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._until_healthy([f"{url}{health}" for url in urls])
        except TimeoutError:
            raise EngineError(f"not ready after {START_SECONDS} s:\n{self.log()}") from None

    def _complete_environment(self) -> dict[str, str]:
        found = {**os.environ, **ENVIRONMENT, **self._environment}
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PLUGIN), found.get("PYTHONPATH"))))
        return found

    async def _until_healthy(self, urls: Sequence[str]) -> None:
        async with aiohttp.ClientSession() as client:
            for url in urls:
                while not await _answers(client, url):
                    if self._running is None or self._running.returncode is not None:
                        raise EngineError(f"it ended while starting:\n{self.log()}")
                    await asyncio.sleep(0.2)

    async def stop(self, kind: signal.Signals) -> None:
        """Sends the signal to the engine and its children, waits, and leaves none of them behind."""
        if self._running is None:
            return
        group = self._running.pid
        for sent in (kind, signal.SIGKILL):
            try:
                os.killpg(group, sent)
            except ProcessLookupError:
                break
            try:
                async with asyncio.timeout(20):
                    await self._running.wait()
            except TimeoutError:
                continue
        await self._running.wait()
        self._running = None
        self._log.close()

    def send(self, kind: signal.Signals) -> None:
        """Sends the signal to the engine and its children, and does not wait."""
        assert self._running is not None
        os.killpg(self._running.pid, kind)

    def log(self) -> str:
        """The last 4,000 bytes the process wrote."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4000))
        return self._log.read().decode(errors="replace")


class _Server:
    """One vLLM server, from entering to leaving; ``url`` is where it becomes ready."""

    url: str
    _process: "Process"

    async def __aenter__(self) -> Self:
        try:
            await self._process.start([self.url])
        except BaseException:
            await self._process.stop(signal.SIGKILL)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self, kind: signal.Signals = signal.SIGTERM) -> None:
        """Ends the engine and its children; ``SIGKILL`` for a crash. Does nothing when it has ended."""
        await self._process.stop(kind)

    def send(self, kind: signal.Signals) -> None:
        """Sends a signal to the engine and its children: they stand still, go on, or die."""
        self._process.send(kind)

    def log(self) -> str:
        """The end of what the engine wrote."""
        return self._process.log()


class VllmEngine(_Server):
    """One vLLM server with KV events and replay; about 1.5 GB and 20 to 75 seconds to be ready.

    ``flags`` come last and win. Attributes after start: ``url``, ``events`` and ``replay`` (ZMQ endpoints
    to connect to), ``hostport``.
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        name: str = "m",
        block_size: int = 32,
        environment: Mapping[str, str] | None = None,
        ports: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.ports = ports or tuple(free_ports(3))
        port, events, replay = self.ports
        self.hostport = f"127.0.0.1:{port}"
        self.url = f"http://{self.hostport}"
        self.events = f"tcp://127.0.0.1:{events}"
        self.replay = f"tcp://127.0.0.1:{replay}"
        kv_events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
            "topic": "kv-events",
        }
        base = (
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", name),
            *("--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--enforce-eager"),
            *("--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", "64M", "--block-size", str(block_size)),
            *("--enable-prompt-tokens-details", "--enable-scale-out"),
            *("--kv-events-config", json.dumps(kv_events)),
        )
        self._process = Process((*base, *flags), environment or {})


class PlannedEngine(_Server):
    """A vLLM server with the arguments of a plan for a CPU; attributes after start as ``VllmEngine``'s.

    ``argv`` is the command after ``vllm``; weights are random, and the port is another one.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        [port] = free_ports(1)
        self.hostport = f"127.0.0.1:{port}"
        self.url = f"http://{self.hostport}"
        serve, model, *words = argv
        assert serve == "serve"
        own = ("--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--enforce-eager")
        module = ("-m", "vllm.entrypoints.openai.api_server", "--model", model)
        self._process = Process((*module, *words, *own), {})


class RenderServers:
    """A render-only server per model folder, in one process: ``urls`` maps folder names to base URLs."""

    def __init__(
        self,
        models: Sequence[Path],
        *flags: str,
        code: Path | None = None,
        own: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """``code``: a folder with the code of another release (``install.newest_code``); ``own``: flags of
        single servers, by the names of their folders."""
        ports = dict(zip(models, free_ports(len(models)), strict=True))
        self.urls = {model.name: f"http://127.0.0.1:{port}" for model, port in ports.items()}
        common = ("--served-model-name", "m", "--enable-scale-out", "--max-model-len", "32768", *flags)
        words = [
            json.dumps([str(model), "--port", str(port), *common, *own.get(model.name, ())])
            for model, port in ports.items()
        ]
        # -P: this folder has a vllm.py of its own
        script = ("-P", str(Path(__file__).with_name("render_servers.py")))
        self._process = Process((*script, *words), {} if code is None else {"PYTHONPATH": str(code)})

    async def __aenter__(self) -> Self:
        try:
            await self._process.start(list(self.urls.values()))
        except BaseException:
            await self._process.stop(signal.SIGKILL)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._process.stop(signal.SIGKILL)


async def render(
    client: aiohttp.ClientSession, url: str, path: str, body: Mapping[str, Any]
) -> list[list[int]]:
    """The token ids of each prompt the engine would run; empty when it refuses the request."""
    async with client.post(f"{url}{path}/render", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            return []
    return [one["token_ids"] for one in (answer if isinstance(answer, list) else [answer])]


async def _answers(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
