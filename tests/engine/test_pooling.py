"""Embedding models on real vLLM engines, started as planned and asked through the picker and Envoy."""

import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.engine import tiny
from tests.engine.vllm import PlannedEngine

from kvist_epp.engines.vllm.engine_metrics import parse_metrics
from kvist_epp.settings.settings import Settings
from kvist_operator.models.source import from_folder
from kvist_operator.plan import Plan, make_plan
from kvist_operator.spec import read_pool
from kvist_sim.envoy import Envoy, Gateway, config
from kvist_sim.http1 import answers
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

pytestmark = pytest.mark.timeout(900)


def planned(model: Path) -> Plan:
    """Return the plan for a folder on a CPU, as the operator makes it."""
    spec = {
        "model": {"source": str(model)},
        "engine": {"version": "0.32.0", "extraArgs": ["--dtype", "float32"]},
        "accelerator": {"resourceName": "cpu", "memory": "6Gi"},
    }
    meta = {"name": "twig", "namespace": "n"}
    pool = read_pool(
        {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": spec}
    )
    return make_plan(pool, from_folder(model))


@dataclass
class Served:
    """An engine, a picker that routes to it by load, and Envoy before them."""

    plan: Plan
    engine: PlannedEngine
    client: aiohttp.ClientSession
    url: str
    picker_log: Path

    async def post(self, path: str, **body: Any) -> Any:
        """Send a request through Envoy and the picker; return the engine's answer."""
        async with self.client.post(f"{self.url}{path}", json={"model": "twig", **body}) as response:
            answer = await response.json(content_type=None)
            assert response.status == 200, answer
            return answer

    async def decisions(self, count: int) -> list[dict[str, Any]]:
        """Return the picker's log lines of requests, once there are so many."""
        while True:
            whole = self.picker_log.read_text().rpartition("\n")[0]
            found = [json.loads(line) for line in whole.splitlines() if '"event":"request"' in line]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


@asynccontextmanager
async def served(folder: Path, *, encoder: bool) -> AsyncIterator[Served]:
    """All of it running: the engine with the plan's arguments, the picker with the pool's settings."""
    model = tiny.embedding(folder / "model", encoder=encoder)
    plan = planned(model)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(PlannedEngine(plan.argv))
        host, port = engine.hostport.split(":")
        file = folder / "endpoints.json"
        file.write_text(json.dumps({"endpoints": [{"name": "e", "address": host, "port": int(port)}]}))
        grpc, health, metrics = free_ports(3)
        settings = Settings(
            endpoints_file=str(file),
            prefix_matching=plan.routes_by_prefix,
            kv_events=plan.kv_events,
            grpc_port=grpc,
            grpc_health_port=health,
            metrics_port=metrics,
            host=host,
            secure_serving=False,
            log_format="json",
        )
        children = await stack.enter_async_context(Children(folder / "logs"))
        child = children.start("picker", [sys.executable, "-m", "kvist_epp", *settings.to_args()])
        await children.ready(child, functools.partial(answers, host, metrics, "/readyz"), 60)
        gateway = Gateway(endpoints=[engine.hostport], picker=f"{host}:{grpc}", failure_mode_allow=False)
        envoy = await stack.enter_async_context(Envoy(config(gateway)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Served(plan, engine, client, envoy.url, child.log)


@pytest.mark.parametrize("encoder", [True, False], ids=["encoder", "decoder"])
async def test_a_planned_embedding_model_answers_through_the_picker(tmp_path: Path, encoder: bool) -> None:
    """vLLM starts with the arguments of the plan; embeddings and scores come back, and the picker routes each
    request by load."""
    (tmp_path / "logs").mkdir()
    async with served(tmp_path, encoder=encoder) as found:
        texts = ["a short text", "another text about trees"]
        embedded = await found.post("/v1/embeddings", input=texts)
        scored = await found.post("/v1/rerank", query="trees", documents=texts)
        async with found.client.get(f"{found.engine.url}/metrics") as response:
            sample = parse_metrics(await response.text())

        assert [len(row["embedding"]) for row in embedded["data"]] == [128, 128]
        assert len(scored["results"]) == 2
        lines = await found.decisions(2)
        assert [(line["kind"], line["mode"], line["outcome"]) for line in lines] == [
            ("pooling", "load", "picked")
        ] * 2
        print(f"reported: {sample}")  # noqa: T201 - figures for the log of the run
        assert sample.prompt_tokens > 0
        assert not sample.kv_full
        assert encoder or sample.reported_tokens
