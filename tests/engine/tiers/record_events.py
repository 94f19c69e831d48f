"""Records the KV events of a real vLLM with a host tier and a disk tier, for the golden file of the tests.

    .venv/bin/python -m tests.engine.tiers.record_events [FILE]

Starts three engines one after the other, with a GPU cache of 24 blocks and 40 blocks of host memory: with
self-describing events; another one on the same folder of the disk tier, whose disk is warm; and with vLLM's
default, placeholders, on a folder of its own. Two prompts, one plain and one salted, are computed,
and asked for again while they are on the GPU, after they left it, and after they left host memory, too.

The file is gzipped msgpack: ``[{"mode", "steps": [{"name", "prompt" (token ids), "salt", "session", "cached"
(reported by the response), "metrics" (lines of /metrics), "batches": [[seq, payload], ...]}]}]``. About five
minutes on two busy cores.
"""

import asyncio
import gzip
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from tests.engine import tiny
from tests.engine.vllm import VllmEngine

GOLDEN = Path(__file__).parents[2] / "epp" / "kvevents" / "golden" / "tiers-vllm-0.32.0.msgpack.gz"
BLOCK = 32
GPU_BLOCKS = 24
HOST_BLOCKS = 40
BLOCK_BYTES = BLOCK * 1024
"""The tiny model has 1 KiB a token, for 2 layers, keys and values, 2 heads of 32 floats."""
PROMPT = 330
"""Tokens: ten whole blocks and a piece."""
OTHER = 400
FILES = {"type": "fs"}
QUIET_SECONDS = 1.0
"""Without an event for so long, all of a request's events have come."""
WANTED = (b"vllm:kv_offload", b"vllm:prompt_tokens_cached_by_source_total", b"vllm:prompt_tokens_by_source")


def transfer_config(
    folder: Path,
    *,
    self_describing: bool = True,
    tier: Mapping[str, str] = FILES,
    host_blocks: int = HOST_BLOCKS,
    **more: str,
) -> str:
    """Return ``--kv-transfer-config`` for a host tier and a disk tier in this folder.

    ``tier``: the class of the disk tier with its settings; ``more``: members beside the connector's own.
    """
    disk = {
        "root_dir": str(folder),
        "n_read_threads": 2,
        "n_write_threads": 2,
        "enable_kv_events": True,
        "locality": "REMOTE",
        **tier,
    }
    extra = {
        "spec_name": "HostTiers",
        "spec_module_path": "offload_on_cpu",
        "cpu_bytes_to_use": host_blocks * BLOCK_BYTES,
        "offload_prompt_only": False,
        "secondary_tiers": [disk],
    }
    if self_describing:
        extra["self_describing_kv_events"] = True
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return json.dumps({**connector, "kv_connector_extra_config": extra, **more})


def tiered_engine(
    model: Path,
    config: str,
    *flags: str,
    ports: tuple[int, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> VllmEngine:
    """Return an engine with a small GPU cache and the tiers of a ``transfer_config``."""
    return VllmEngine(
        model,
        *("--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-model-len", "640"),
        *("--kv-transfer-config", config, *flags),
        block_size=BLOCK,
        environment={"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "0", **environment},
        ports=ports,
    )


class Recorder:
    """Sends requests to one engine, and records each with the events that it caused."""

    def __init__(self, engine: VllmEngine, client: aiohttp.ClientSession, seed: int) -> None:
        self.steps: list[dict[str, Any]] = []
        self._engine = engine
        self._client = client
        self._random = random.Random(seed)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(engine.events)

    def close(self) -> None:
        """Close the subscription."""
        self._socket.close(0)

    def tokens(self, count: int) -> list[int]:
        """Return a prompt that no other prompt shares a block with."""
        return [self._random.randrange(3, 250) for _ in range(count)]

    async def ask(self, name: str, prompt: list[int], salt: str | None = None) -> None:
        """Send one request, wait until its events have come, and record the step."""
        session = f"step-{len(self.steps)}"
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        if salt is not None:
            body["cache_salt"] = salt
        async with self._client.post(
            f"{self._engine.url}/v1/completions", json=body, headers={"X-Session-ID": session}
        ) as response:
            answer = await response.json()
            assert response.status == 200, answer
        batches = await self._events()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        metrics = await self._metrics()
        step = {"name": name, "prompt": prompt, "salt": salt, "session": session, "cached": cached}
        self.steps.append({**step, "metrics": metrics, "batches": batches})
        sys.stdout.write(f"{name}: {cached} of {len(prompt)} tokens cached, {len(batches)} batches\n")

    async def others(self, count: int) -> None:
        """Compute prompts that push older ones out."""
        for _ in range(count):
            await self.ask("other", self.tokens(OTHER))

    async def _events(self) -> list[tuple[int, bytes]]:
        batches: list[tuple[int, bytes]] = []
        while True:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    _, number, payload = await self._socket.recv_multipart()
            except TimeoutError:
                return batches
            batches.append((int.from_bytes(number, "big"), payload))

    async def _metrics(self) -> str:
        async with self._client.get(f"{self._engine.url}/metrics") as response:
            page = await response.read()
        found = [line for line in page.splitlines() if line.startswith(WANTED) and b"_bucket" not in line]
        return b"\n".join(found).decode()


async def through_the_tiers(recorder: Recorder, prompt: list[int], salt: str | None) -> None:
    """Compute a prompt, and ask for it again on the GPU, on the host tier and on the disk."""
    await recorder.ask("first", prompt, salt)
    await recorder.ask("device", prompt, salt)
    await recorder.others(2)
    await recorder.ask("host", prompt, salt)
    await recorder.others(5)
    await recorder.ask("disk", prompt, salt)


async def record(model: Path, folder: Path, mode: str, prompts: Mapping[str, list[int]]) -> dict[str, Any]:
    """Run one engine in this mode; return what is recorded of it."""
    sys.stdout.write(f"{mode}\n")
    async with (
        aiohttp.ClientSession() as client,
        tiered_engine(model, transfer_config(folder, self_describing=mode != "placeholders")) as engine,
    ):
        recorder = Recorder(engine, client, seed=len(mode))
        await asyncio.sleep(QUIET_SECONDS)  # until the subscription has reached the engine
        if mode == "warm-disk":
            await recorder.ask("warm", prompts["plain"])
            await recorder.ask("warm-salted", prompts["salted"], "tenant")
        else:
            await through_the_tiers(recorder, prompts["plain"], None)
            await through_the_tiers(recorder, prompts["salted"], "tenant")
        recorder.close()
        return {"mode": mode, "steps": recorder.steps}


async def record_all() -> list[dict[str, Any]]:
    """Record the three runs."""
    with tempfile.TemporaryDirectory() as work:
        model = tiny.build("chatml", Path(work) / "model")
        numbers = random.Random(1)
        plain = [numbers.randrange(3, 250) for _ in range(PROMPT)]
        prompts = {"plain": plain, "salted": plain}
        runs = [
            await record(model, Path(work) / "shared", mode, prompts)
            for mode in ("self-describing", "warm-disk")
        ]
        runs.append(await record(model, Path(work) / "own", "placeholders", prompts))
    return runs


def write(golden: Path, runs: list[dict[str, Any]]) -> None:
    """Write the golden file."""
    golden.parent.mkdir(exist_ok=True)
    golden.write_bytes(gzip.compress(msgspec.msgpack.encode(runs), mtime=0))
    sys.stdout.write(f"{golden}: {golden.stat().st_size} bytes\n")


if __name__ == "__main__":
    os.nice(10)
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN, asyncio.run(record_all()))
