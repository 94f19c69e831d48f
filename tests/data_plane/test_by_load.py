"""Embedding requests through a real Envoy: routed by load to engines without KV events."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.data_plane.stub import Transport

from kvist_sim.envoy import Envoy, Gateway, Mode, config
from kvist_sim.http1 import answers
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

HOST = "127.0.0.1"
METRICS = 'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v2/embed": {"texts": ["a"]},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"]},
    "/rerank": {"query": "q", "documents": ["a", "b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/score": {"text_1": "a", "text_2": ["b"]},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
}


class EmbeddingEngine:
    """An engine without KV cache: it answers scrapes and, when ``release`` is set, requests."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.seen: list[tuple[str, bytes]] = []
        self.port = 0

    async def serve(self, stack: AsyncExitStack) -> None:
        """Serve on a free port until the stack ends."""
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/{path:.*}", self._work)
        runner = web.AppRunner(application)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, HOST, 0).start()
        self.port = runner.addresses[0][1]

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 512}]})

    async def _work(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, await request.read()))
        await self.release.wait()
        return web.json_response({"served": self.port})


@dataclass
class ByLoad:
    """The running engines, Envoy, and the picker with ``--prefix-matching=false``."""

    engines: list[EmbeddingEngine]
    client: aiohttp.ClientSession
    url: str
    metrics_url: str
    log: Path

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the answer to one request through Envoy."""
        async with self.client.post(f"{self.url}{path}", json={"model": "m", **body}) as response:
            return response.status, await response.json(content_type=None)

    async def page(self, path: str) -> str:
        """Return a page of the picker."""
        async with self.client.get(f"{self.metrics_url}{path}") as response:
            return await response.text()

    async def decisions(self, count: int) -> list[dict[str, Any]]:
        """Return the picker's log lines of requests, once there are so many."""
        while True:
            whole = self.log.read_text().rpartition("\n")[0]
            found = [json.loads(line) for line in whole.splitlines() if '"event":"request"' in line]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


@asynccontextmanager
async def by_load(folder: Path, transport: Transport, mode: Mode, engines: int = 2) -> AsyncIterator[ByLoad]:
    """All of it started and ready."""
    async with AsyncExitStack() as stack:
        running = [EmbeddingEngine() for _ in range(engines)]
        for engine in running:
            await engine.serve(stack)
        file = folder / "endpoints.json"
        listed = [{"name": f"e{i}", "address": HOST, "port": each.port} for i, each in enumerate(running)]
        file.write_text(json.dumps({"endpoints": listed}))
        grpc, health, metrics = free_ports(3)
        children = await stack.enter_async_context(Children(folder))
        child = children.start(
            "picker",
            [
                *(sys.executable, "-m", "kvist_epp", f"--endpoints-file={file}", "--prefix-matching=false"),
                *(f"--grpc-port={grpc}", f"--grpc-health-port={health}", f"--metrics-port={metrics}"),
                *(f"--transport={transport}", f"--host={HOST}", "--secure-serving=false"),
                *("--log-format=json", "--kv-events=false", "--scrape-interval=60"),
            ],
        )
        await children.ready(child, partial(answers, HOST, metrics, "/readyz"), 30)
        hostports = [f"{HOST}:{each.port}" for each in running]
        gateway = Gateway(endpoints=hostports, picker=f"{HOST}:{grpc}", mode=mode, failure_mode_allow=False)
        envoy = await stack.enter_async_context(Envoy(config(gateway)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield ByLoad(running, client, envoy.url, f"http://{HOST}:{metrics}", child.log)


async def _until(count: int, running: ByLoad) -> None:
    while sum(len(each.seen) for each in running.engines) < count:
        await asyncio.sleep(0.02)


@pytest.mark.timeout(60)
async def test_embeddings_go_to_the_engine_with_the_least_work(
    tmp_path: Path, transport: Transport, mode: Mode
) -> None:
    """While one engine computes a long text, short ones with the same beginning go to the other."""
    async with by_load(tmp_path, transport, mode) as running:
        long = "The same beginning. " * 20_000
        first = asyncio.create_task(running.post("/v1/embeddings", {"input": long}))
        await _until(1, running)
        busy = next(each for each in running.engines if each.seen)
        idle = next(each for each in running.engines if not each.seen)
        short = [
            asyncio.create_task(running.post("/v1/embeddings", {"input": long[:200] + str(i)}))
            for i in range(8)
        ]
        await _until(9, running)
        for engine in running.engines:
            engine.release.set()
        found = await asyncio.gather(first, *short)

        assert Counter(answer["served"] for _, answer in found) == {busy.port: 1, idle.port: 8}
        assert {status for status, _ in found} == {200}
        assert {(line["kind"], line["mode"]) for line in await running.decisions(9)} == {("pooling", "load")}


@pytest.mark.timeout(60)
async def test_all_paths_reach_an_engine_and_nothing_waits_for_events(
    tmp_path: Path, transport: Transport, mode: Mode
) -> None:
    """Every path of the pooling runner is answered; the picker is ready without events, reports no endpoint
    as approximate, and takes a body that is no JSON."""
    async with by_load(tmp_path, transport, mode) as running:
        for engine in running.engines:
            engine.release.set()
        for path, body in BODIES.items():
            assert (await running.post(path, body))[0] == 200
        async with running.client.post(f"{running.url}/v1/embeddings", data=b"\xff no json") as response:
            assert response.status == 200

        assert sorted({path for each in running.engines for path, _ in each.seen}) == sorted(BODIES)
        assert json.loads(await running.page("/debug/fleet"))["approximate"] == {}
        assert "kvist_epp_index_trust{" not in await running.page("/metrics")
        assert [line["outcome"] for line in await running.decisions(9)] == ["picked"] * 9
