"""One request's trace through a real Envoy and the picker: who is whose parent, in both of Envoy's ways."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.crd.cases import planned
from tests.data_plane.plane import envoy_for
from tests.data_plane.product import CHAT, MODEL
from tests.data_plane.stub import Transport
from tests.data_plane.upstream import Upstream
from tests.epp.tracing.picks import PARENT, TRACE
from tests.fakes.collector import Collector, Seen

from kvist_epp.tracing.trace_context import read_trace_context
from kvist_operator.manifests.bootstrap import bootstrap
from kvist_operator.manifests.picker import settings as picker_settings
from kvist_operator.manifests.tokenizer import Tokenizer
from kvist_operator.spec import read_pool
from kvist_sim.envoy import Mode
from kvist_sim.envoy_tracing import add_tracing, send_spans_at_once
from kvist_sim.launch import Picker, metric, start_picker
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children

CALL = "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress"
INGRESS, EGRESS = "ingress", "router pool egress"
"""Names of Envoy's spans: the call of the picker, the request as it came, and as it went to the engine."""
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
EXPORTED = "kvist_epp_trace_spans_exported_total"
BODY = {"model": "m", "messages": [{"role": "user", "content": "a secret prompt"}]}


@dataclass
class Traced:
    """A client, Envoy, the picker as a process, an upstream that keeps headers, and a collector."""

    client: aiohttp.ClientSession
    picker: Picker
    upstream: Upstream
    collector: Collector

    async def send(self, **headers: str) -> dict[str, str]:
        """Send a request; return the headers that the upstream got."""
        before = len(self.upstream.received)
        async with self.client.post(CHAT, json=BODY, headers=headers) as response:
            assert response.status == 200
        return next(r.headers for r in self.upstream.received[before:] if r.path == CHAT)

    async def log_lines(self, count: int = 1) -> list[dict[str, Any]]:
        """Wait for so many request lines of the picker's log."""
        while True:
            text = self.picker.child.log.read_text()
            lines = [line for line in text.splitlines() if '"event":"request"' in line]
            if len(lines) >= count:
                return [json.loads(line) for line in lines]
            await asyncio.sleep(0.02)


@asynccontextmanager
async def traced(
    folder: Path,
    transport: Transport,
    mode: Mode,
    *,
    envoy: float | None = None,
    flags: Sequence[str] = ("--trace-sample-ratio=1",),
    protocol: str = "http/protobuf",
    last: Sequence[str] = (),
    by_operator: bool = False,
) -> AsyncIterator[Traced]:
    """All of it running. ``envoy``: percent of the requests that it samples; None: it does not trace.

    ``last``: flags that win. ``by_operator``: Envoy and picker trace as ``spec.tracing`` has them do.
    """
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(Collector())
        upstream = await stack.enter_async_context(Upstream())
        children = await stack.enter_async_context(Children(folder))
        file = folder / "endpoints.json"
        address, port = upstream.address.split(":")
        endpoint = {"name": "a", "address": address, "port": int(port), "kvEvents": "none"}
        file.write_text(json.dumps({"endpoints": [endpoint]}))
        url = collector.grpc if protocol == "grpc" else collector.http
        arguments = [f"--transport={transport}", "--log-format=json", "--warmup-timeout=1", *flags]
        arguments += [f"--trace-endpoint={url}", f"--trace-protocol={protocol}", *last]
        pool = read_pool(traced_pool(collector.grpc))
        if by_operator:
            made = picker_settings(pool, planned(traced_pool(collector.grpc)), Tokenizer())
            arguments += [word for word in made.to_args() if word.startswith("--trace")]
        picker = await start_picker(children, file, MODEL, arguments=arguments)

        def tweak(settings: dict[str, Any]) -> None:
            if by_operator:
                trace_as(settings, bootstrap(pool))
                send_spans_at_once(settings)
            elif envoy is not None:
                add_tracing(settings, collector.grpc.removeprefix("http://"), percent=envoy)
                send_spans_at_once(settings)

        proxy = await stack.enter_async_context(envoy_for(picker.address, mode, (upstream,), tweak=tweak))
        client = await stack.enter_async_context(aiohttp.ClientSession(proxy.url))
        yield Traced(client, picker, upstream, collector)


def traced_pool(collector: str) -> dict[str, Any]:
    """A pool whose Envoy, pickers and engines trace."""
    spec = {
        "model": {"source": "hf://Qwen/Qwen3-8B"},
        "gateway": {"mode": "Envoy"},
        "tracing": {"endpoint": collector, "samplingPercent": 100},
    }
    head = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool"}
    return {**head, "metadata": {"name": "twig", "namespace": "forest"}, "spec": spec}


def trace_as(settings: dict[str, Any], made: dict[str, Any]) -> None:
    """Give an Envoy the tracer and the collector of another configuration."""
    ours, theirs = [
        found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        for found in (settings, made)
    ]
    ours["tracing"] = theirs["tracing"]
    clusters = made["static_resources"]["clusters"]
    settings["static_resources"]["clusters"] += [c for c in clusters if c["name"] == "collector"]


def parent_of(headers: dict[str, str]) -> tuple[str, str, bool]:
    """Trace, parent and sampled flag of the request that the upstream got."""
    found = read_trace_context(headers)
    assert found is not None
    return found.trace_id, found.parent_id, found.sampled


def within(inner: Seen, outer: Seen) -> bool:
    """Return whether a span lies within another one, but for 2 ms between the clocks of two processes."""
    begun = inner.span.start_time_unix_nano - outer.span.start_time_unix_nano
    ended = outer.span.end_time_unix_nano - inner.span.end_time_unix_nano
    return min(begun, ended) > -2_000_000


async def test_a_pick_is_a_child_of_envoy_s_call(tmp_path: Path, transport: Transport, mode: Mode) -> None:
    """Envoy begins the trace: the pick is a child of its ext_proc call, and the engine's parent is Envoy's
    own span of the request to it."""
    async with traced(tmp_path, transport, mode, envoy=100) as running:
        trace_id, parent_id, sampled = parent_of(await running.send())
        names = "kvist.pick", "kvist.stage.book", "kvist.request_end", CALL, INGRESS, EGRESS
        spans = await running.collector.until(*names)
        pick, call = spans["kvist.pick"], spans[CALL]

        assert (pick.service, call.service, sampled) == ("kvist-epp", "envoy", True)
        assert {seen.trace_id for seen in running.collector.spans} == {trace_id}
        assert spans["kvist.stage.book"].parent_id == pick.span_id
        assert pick.parent_id == call.span_id
        assert call.parent_id == spans[EGRESS].parent_id == spans[INGRESS].span_id
        assert (spans[EGRESS].span_id, spans[INGRESS].parent_id) == (parent_id, "")
        assert within(pick, call)
        assert pick.attributes["kvist.endpoint"] == running.upstream.address
        end = spans["kvist.request_end"]
        assert end.parent_id == pick.span_id
        assert (end.attributes["kvist.end"], end.attributes["kvist.endpoint"]) == (
            "access-log",
            running.upstream.address,
        )
        assert (await running.log_lines())[0]["trace_id"] == trace_id
        assert not [seen for seen in running.collector.spans if b"secret" in seen.span.SerializeToString()]


async def test_a_pool_with_tracing_has_one_trace(tmp_path: Path) -> None:
    """The tracer that the operator gives the pool's Envoy, and the flags that it gives pickers, join spans in
    one trace, which the engine gets."""
    async with traced(tmp_path, "fast", "buffered", by_operator=True) as running:
        trace_id, parent_id, sampled = parent_of(await running.send())
        spans = await running.collector.until("kvist.pick", "kvist.request_end", CALL, INGRESS, EGRESS)

        assert sampled
        assert {seen.trace_id for seen in running.collector.spans} == {trace_id}
        assert spans["kvist.pick"].parent_id == spans[CALL].span_id
        assert spans["kvist.request_end"].parent_id == spans["kvist.pick"].span_id
        assert spans[EGRESS].span_id == parent_id
        assert (spans[CALL].service, spans["kvist.pick"].service) == ("twig-envoy", "kvist-epp")


async def test_a_client_s_trace_goes_through_envoy(tmp_path: Path) -> None:
    """A trace that the client begins has the spans of Envoy and of the picker in it."""
    async with traced(tmp_path, "fast", "buffered", envoy=100) as running:
        got = await running.send(**CLIENT, tracestate="a=b")
        spans = await running.collector.until("kvist.pick", CALL, INGRESS, EGRESS)

        assert {seen.trace_id for seen in running.collector.spans} == {TRACE}
        assert spans[INGRESS].parent_id == PARENT
        assert spans["kvist.pick"].parent_id == spans[CALL].span_id
        assert spans["kvist.pick"].span.trace_state == got["tracestate"] == "a=b"


async def test_envoy_s_decision_not_to_sample_is_kept(tmp_path: Path) -> None:
    """Picker and engine do not sample what Envoy does not; the log line has the trace all the same."""
    async with traced(tmp_path, "fast", "buffered", envoy=0) as running:
        trace_id, _, sampled = parent_of(await running.send())
        assert not sampled
        [line] = await running.log_lines()
        assert line["trace_id"] == trace_id
        assert await metric(running.picker, EXPORTED) == 0
        assert running.collector.spans == []


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_trace_begins_in_the_picker(tmp_path: Path, protocol: str) -> None:
    """The pick is the root, and the engine's parent, where nothing else traces; over both protocols."""
    async with traced(tmp_path, "fast", "buffered", protocol=protocol) as running:
        context = parent_of(await running.send())
        pick = (await running.collector.until("kvist.pick", "kvist.stage.book"))["kvist.pick"]

        assert context == (pick.trace_id, pick.span_id, True)
        assert (pick.parent_id, pick.resource["service.name"]) == ("", "kvist-epp")
        while not await metric(running.picker, EXPORTED):
            await asyncio.sleep(0.05)
        assert await metric(running.picker, EXPORTED) == len(running.collector.spans)


async def test_without_envoy_s_spans_pick_and_engine_are_siblings(tmp_path: Path) -> None:
    """An Envoy that does not trace passes the client's context on, which is the parent of both."""
    async with traced(tmp_path, "grpc", "duplex", flags=("--trace-sample-ratio=0",)) as running:
        assert parent_of(await running.send(**CLIENT)) == (TRACE, PARENT, True)
        spans = await running.collector.until("kvist.pick")
        assert (spans["kvist.pick"].trace_id, spans["kvist.pick"].parent_id) == (TRACE, PARENT)

        assert "traceparent" not in await running.send()
        assert len([seen for seen in running.collector.spans if seen.name == "kvist.pick"]) == 1


async def test_an_absent_collector_costs_no_request(tmp_path: Path) -> None:
    """All requests are served where no collector listens, and the log says that spans are not taken."""
    closed = f"--trace-endpoint=http://127.0.0.1:{free_ports(1)[0]}"
    async with traced(
        tmp_path, "fast", "buffered", flags=("--trace-sample-ratio=1",), last=(closed,)
    ) as running:
        for _ in range(20):
            await running.send()
        assert [line["outcome"] for line in await running.log_lines(20)] == ["picked"] * 20
        while "does not take spans" not in running.picker.child.log.read_text():
            await asyncio.sleep(0.05)
