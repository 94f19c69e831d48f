"""One request's trace across a real Envoy, the picker and a real vLLM, in one collector."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from tests.engine import tiny
from tests.engine.mix import CHAT
from tests.engine.pool import FLAGS
from tests.engine.vllm import VllmEngine
from tests.fakes.collector import Collector, Seen

from kvist_sim.envoy import Envoy, Gateway, config
from kvist_sim.envoy_tracing import add_tracing, send_spans_at_once
from kvist_sim.launch import start_picker
from kvist_sim.processes import Children

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
PICKER, ENGINE = "kvist-epp", "vllm"
CALL = "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress"
CLIENT = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
VARIABLES = {
    "OTEL_SERVICE_NAME": ENGINE,
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}
"""vLLM's exporter is that of OpenTelemetry's SDK, which reads them: it sends soon, and begins no traces."""


@dataclass
class Traced:
    """An engine and a picker that send their traces to one collector, behind an Envoy."""

    client: aiohttp.ClientSession
    engine: VllmEngine
    picker: str
    collector: Collector

    @asynccontextmanager
    async def envoy(self, *, traces: bool) -> AsyncIterator[str]:
        """Run an Envoy in front of them; yield its URL."""
        settings = config(
            Gateway(endpoints=[self.engine.hostport], picker=self.picker, failure_mode_allow=False)
        )
        if traces:
            add_tracing(settings, self.collector.grpc.removeprefix("http://"))
            send_spans_at_once(settings)
        async with Envoy(settings) as running:
            yield running.url

    async def ask(self, url: str, **headers: str) -> str:
        """Send a chat; return its request id."""
        body = {"model": "m", "messages": [{"role": "user", "content": "a secret prompt"}], "max_tokens": 4}
        name = os.urandom(4).hex()
        async with self.client.post(
            f"{url}{CHAT}", json=body, headers={"x-request-id": name, **headers}
        ) as response:
            assert response.status == 200, await response.text()
        return name

    async def trace_of(self, name: str) -> dict[str, Seen]:
        """Wait until a request's trace has spans of picker and engine; return all by name."""
        while True:
            picks = [
                seen
                for seen in self.collector.spans
                if seen.service == PICKER and seen.attributes.get("kvist.request_id") == name
            ]
            trace = {s.name: s for s in self.collector.spans if picks and s.trace_id == picks[0].trace_id}
            if "llm_request" in trace:
                return trace
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    """All but Envoy, started and ready."""
    folder = Path(tmp_path_factory.mktemp("tracing"))
    model = tiny.build("chatml", folder / "model")
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(Collector())
        engine = VllmEngine(model, *FLAGS, "--otlp-traces-endpoint", collector.grpc, environment=VARIABLES)
        stack.push_async_callback(engine.stop)
        await engine.__aenter__()
        file = folder / "endpoints.json"
        address, port = engine.hostport.split(":")
        endpoint = {"name": "engine", "address": address, "port": int(port)}
        endpoint |= {"kvEvents": engine.events, "kvReplay": engine.replay}
        file.write_text(json.dumps({"endpoints": [endpoint]}))
        children = await stack.enter_async_context(Children(folder))
        flags = [f"--trace-endpoint={collector.http}", "--trace-sample-ratio=1", "--log-format=json"]
        picker = await start_picker(children, file, str(model), arguments=flags)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Traced(client, engine, picker.address, collector)


def secret(collector: Collector) -> list[str]:
    """Names of the picker's spans that have text of the prompt in them."""
    own = (seen for seen in collector.spans if seen.service == PICKER)
    return [seen.name for seen in own if b"secret" in seen.span.SerializeToString()]


async def test_envoy_picker_and_vllm_share_a_trace(traced: Traced) -> None:
    """Below Envoy's span of the request are its call of the picker, with the pick, and its request to the
    engine, with vLLM's span."""
    async with traced.envoy(traces=True) as url:
        name = await traced.ask(url)
        await traced.collector.until("ingress", "router pool egress", CALL)
        trace = await traced.trace_of(name)

    pick, engine = trace["kvist.pick"], trace["llm_request"]
    assert {pick.service, engine.service, trace["ingress"].service} == {PICKER, ENGINE, "envoy"}
    assert trace["ingress"].parent_id == ""
    assert trace[CALL].parent_id == trace["router pool egress"].parent_id == trace["ingress"].span_id
    assert pick.parent_id == trace[CALL].span_id
    assert trace["kvist.stage.match"].parent_id == pick.span_id
    assert engine.parent_id == trace["router pool egress"].span_id
    assert pick.attributes["kvist.endpoint"] == traced.engine.hostport
    assert pick.attributes["kvist.prompt_tokens"] > 0
    assert engine.attributes["gen_ai.usage.prompt_tokens"] > 0
    assert secret(traced.collector) == []


async def test_without_envoy_s_traces_the_pick_is_the_engine_s_parent(traced: Traced) -> None:
    """A trace that begins in the picker has vLLM's span as a child of the pick."""
    async with traced.envoy(traces=False) as url:
        trace = await traced.trace_of(await traced.ask(url))
    pick, engine = trace["kvist.pick"], trace["llm_request"]
    assert (pick.parent_id, engine.parent_id) == ("", pick.span_id)


async def test_a_client_s_trace_has_pick_and_engine_in_it(traced: Traced) -> None:
    """The client's span is the parent of both where Envoy does not trace."""
    trace_id, parent = CLIENT
    async with traced.envoy(traces=False) as url:
        trace = await traced.trace_of(await traced.ask(url, traceparent=f"00-{trace_id}-{parent}-01"))
    assert trace["kvist.pick"].trace_id == trace_id
    assert trace["kvist.pick"].parent_id == trace["llm_request"].parent_id == parent
