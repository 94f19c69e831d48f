"""Gateways without access log, and endpoints without metrics of vLLM, through a real Envoy."""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from tests.data_plane.stub import Transport

from kvist_sim import model as model_files
from kvist_sim.bench.harness.upstream import WITHOUT_METRICS
from kvist_sim.envoy import Envoy, Gateway, Mode, config
from kvist_sim.http1 import answers
from kvist_sim.launch import endpoints_file, engine_ports, metric, start_picker
from kvist_sim.processes import Children

HOST = "127.0.0.1"
CLIENTS, REQUESTS = 16, 80
"""More requests than the slots of the endpoint, in less time than between two scrapes."""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("metrics", [True, False])
async def test_an_endpoint_that_answers_at_once_is_never_full(
    tmp_path: Path, transport: Transport, mode: Mode, metrics: bool
) -> None:
    """Without access log, with metrics of vLLM and without, all requests are served; the log says once what
    is missing, the page for each endpoint, and the picker is ready all the same."""
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children(tmp_path))
        engines = engine_ports(2)
        words = [] if metrics else [WITHOUT_METRICS]
        ports = [str(engine.http) for engine in engines]
        upstream = [sys.executable, "-m", "kvist_sim.bench.harness.upstream", *words, *ports]
        await children.ready(
            children.start("upstream", upstream), partial(answers, HOST, engines[1].http, "/health"), 30
        )
        file = tmp_path / "endpoints.json"
        file.write_text(json.dumps(endpoints_file(engines)))
        flags = (f"--transport={transport}", "--max-num-seqs=64", "--kv-events=false", "--queue-seconds=5")
        picker = await start_picker(children, file, str(model_files.folder()), arguments=flags)
        gateway = Gateway(
            endpoints=[engine.hostport for engine in engines],
            picker=picker.address,
            mode=mode,
            access_log=False,
            failure_mode_allow=False,
        )
        envoy = await stack.enter_async_context(Envoy(config(gateway)))
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def ask(number: int) -> int:
            body = {"model": "kvist-bench", "prompt": f"{number} times", "max_tokens": 1}
            async with client.post(f"{envoy.url}/v1/completions", json=body) as response:
                await response.read()
                return response.status

        async def one_client(number: int) -> set[int]:
            return {await ask(number * REQUESTS + at) for at in range(REQUESTS)}

        found = await asyncio.gather(*(one_client(number) for number in range(CLIENTS)))
        assert set().union(*found) == {200}
        assert await metric(picker, "kvist_epp_requests_total", 'outcome="picked"') == CLIENTS * REQUESTS
        async with client.get(f"http://{HOST}:{picker.metrics_port}/debug/fleet") as response:
            fleet = await response.json()
        text = picker.child.log.read_text()

        assert [engine["has_metrics"] for engine in fleet["endpoints"]] == [metrics, metrics]
        assert text.count("has no metrics of vLLM") == (0 if metrics else 1)
        if metrics:
            assert await metric(picker, "kvist_epp_ends_reported") == 0
            assert await metric(picker, "kvist_epp_requests_ended_total", 'source="estimated"') > 0
        assert len(fleet["approximate"]) == 2
