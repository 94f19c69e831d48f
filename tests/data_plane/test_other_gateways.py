"""The picker behind gateways that are no Envoy: agentgateway, and NGINX Gateway Fabric."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.data_plane.other_gateways import AgentGateway, NginxGatewayFabric, encoded
from tests.data_plane.plane import ext_proc, plane
from tests.data_plane.product import CHAT, Product, product
from tests.data_plane.stub import Transport
from tests.data_plane.test_product import FAST, SYSTEM, chat

from kvist_sim.envoy import Json, Mode

SLOW = ("--sim-step-seconds", "0.05", "--max-num-seqs", "64")
ENDED = 'kvist_epp_requests_ended_total{source="response"}'


@asynccontextmanager
async def agentgateway(
    folder: Path,
    transport: Transport,
    engine: tuple[str, ...] = FAST,
    *flags: str,
    engines: int = 3,
    labels: dict[str, str] | None = None,
) -> AsyncIterator[tuple[Product, AgentGateway]]:
    """Picker and engines with these labels, and agentgateway before them."""
    async with product(
        folder, transport=transport, engines=engines, flags=engine, picker_flags=flags, labels=labels
    ) as running:
        gateway = AgentGateway(running.picker.address, running.client)
        try:
            yield running, gateway
        finally:
            await gateway.close()


async def in_flight(running: Product) -> int:
    """Requests that the picker believes to be at its endpoints."""
    endpoints = (await running.page("/debug/fleet"))["endpoints"]
    return sum(endpoint["requests"] for endpoint in endpoints)


async def test_agentgateway_is_served_by_prefix(tmp_path: Path, transport: Transport) -> None:
    """Each pick names one endpoint, the stream stays open to the response's end, and ends are known without
    an access log."""
    async with agentgateway(tmp_path, transport) as (running, gateway):
        first = await gateway.send(CHAT, encoded(chat("first")))
        assert first.status == 200, first
        await running.until("kvist_epp_index_events_total", 1)
        for number in range(5):
            answer = await gateway.send(CHAT, encoded(chat(f"again {number}")))
            usage = json.loads(answer.body)["usage"]
            assert (answer.status, answer.endpoint) == (200, first.endpoint)
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0

        await running.until(ENDED, 6)
        assert await running.metric("kvist_epp_ends_reported") == 1
        assert await running.metric('kvist_epp_usage_tokens_total{kind="completion"}') == 24
        assert await in_flight(running) == 0


async def test_agentgateway_streams(tmp_path: Path, transport: Transport) -> None:
    """Events arrive while the engine still computes, unchanged and whole."""
    body = chat("tell", stream=True, max_tokens=30, ignore_eos=True)
    async with (
        agentgateway(tmp_path, transport, SLOW) as (running, gateway),
        gateway.opened(CHAT, encoded(body)) as (answer, chunks),
    ):
        first = await anext(chunks)
        assert (answer.status, await running.metric(ENDED)) == (200, 0)
        text = first + b"".join([chunk async for chunk in chunks])

        assert text.count(b"data: ") > 30
        assert text.endswith(b"data: [DONE]\n\n")
        await running.until(ENDED, 1)


async def test_clients_of_agentgateway_go_away(tmp_path: Path, transport: Transport) -> None:
    """A request ends with its engine's response where that has begun, and at once where it has not."""
    body = encoded(chat("tell", stream=True, max_tokens=40, ignore_eos=True))
    async with agentgateway(tmp_path, transport, SLOW) as (running, gateway):
        async with gateway.opened(CHAT, body) as (_, chunks):
            await anext(chunks)
            assert await in_flight(running) == 1
        await running.until(ENDED, 1)

        gone = asyncio.Event()
        leaving = asyncio.ensure_future(gateway.leave(CHAT, body, gone))
        await running.until("kvist_epp_requests_total", 2)
        assert await in_flight(running) == 1
        gone.set()
        await leaving
        await running.until(ENDED, 2)
        assert await in_flight(running) == 0


async def test_clients_of_agentgateway_leave_the_queue(tmp_path: Path, transport: Transport) -> None:
    """A request that waits in the picker is dropped when its client goes, and is never picked for."""
    body = encoded(chat("tell", stream=True, max_tokens=300, ignore_eos=True))
    one_slot = ("--sim-step-seconds", "0.05", "--max-num-seqs", "1")
    gone = asyncio.Event()
    label = {"kvist.dev/max-num-seqs": "1"}  # without it scrapes would find that the engine may run more
    async with agentgateway(tmp_path, transport, one_slot, engines=1, labels=label) as (running, gateway):
        async with gateway.opened(CHAT, body) as (_, chunks):
            await anext(chunks)
            leaving = [asyncio.ensure_future(gateway.leave(CHAT, body, gone)) for _ in range(4)]
            await running.until("kvist_epp_queue_requests", 4)
            gone.set()
            await asyncio.gather(*leaving)
            await running.until('kvist_epp_requests_total{outcome="rejected-context-cancelled"}', 4)
            assert await running.metric("kvist_epp_queue_requests") == 0

        await running.until(ENDED, 1)
        assert await running.metric('kvist_epp_requests_total{outcome="picked"}') == 1


async def test_agentgateway_passes_refusals_on(tmp_path: Path, transport: Transport) -> None:
    """A request that the picker refuses is answered by the gateway with the picker's status and body."""
    async with agentgateway(tmp_path, transport) as (_, gateway):
        answer = await gateway.send(CHAT, b"no JSON")

        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "bad-json")


async def test_bodies_of_any_size_pass_agentgateway(tmp_path: Path, transport: Transport) -> None:
    """A long body arrives whole at its engine."""
    async with agentgateway(tmp_path, transport) as (_, gateway):
        answer = await gateway.send(CHAT, encoded(chat("word " * 100, note="x" * 1_000_000)))

        assert answer.status == 200


async def test_nginx_is_served_by_prefix_although_it_names_no_path(
    tmp_path: Path, transport: Transport
) -> None:
    """The body tells the API: chats and completions follow their prefix, one endpoint for each pick."""
    async with product(tmp_path, transport=transport, engines=3, flags=FAST) as running:
        gateway = NginxGatewayFabric(running.picker.address, running.client)
        completion = {"model": "m", "prompt": SYSTEM, "max_tokens": 4}
        for path, body in ((CHAT, chat("first")), ("/v1/completions", completion)):
            first = await gateway.send(path, encoded(body))
            assert first.status == 200, first
            await running.until("kvist_epp_index_events_total", 1)
            await asyncio.sleep(0.2)
            again = [await gateway.send(path, encoded(body)) for _ in range(4)]

            assert {answer.endpoint for answer in again} == {first.endpoint}
            cached = [json.loads(answer.body)["usage"]["prompt_tokens_details"] for answer in again]
            assert all(one["cached_tokens"] > 0 for one in cached)


async def test_a_pick_for_nginx_is_no_end(tmp_path: Path, transport: Transport) -> None:
    """A stream whose gateway has ended its side ends with the pick, and the request is at its endpoint from
    then on."""
    async with product(tmp_path, transport=transport, flags=SLOW) as running:
        gateway = NginxGatewayFabric(running.picker.address, running.client)
        body = chat("tell", stream=True, max_tokens=100, ignore_eos=True)
        sent = asyncio.ensure_future(gateway.send(CHAT, encoded(body)))
        await running.until("kvist_epp_requests_total", 1)

        assert (await in_flight(running), await running.metric(ENDED)) == (1, 0)
        assert (await sent).status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "m"}', b"\xff" * 100], ids=repr)
async def test_nginx_sends_anything(tmp_path: Path, body: bytes) -> None:
    """A body whose API is not known is routed by load, never refused."""
    async with product(tmp_path, flags=FAST) as running:
        gateway = NginxGatewayFabric(running.picker.address, running.client)
        answer = await gateway.pick(body)

        assert (answer.status, answer.endpoint in {one.hostport for one in running.engines}) == (200, True)


def google_grpc(settings: Json) -> None:
    """Have Envoy call the picker by the gRPC library, whose calls do not tell an Envoy."""
    service = ext_proc(settings)["grpc_service"]
    name = service.pop("envoy_grpc")["cluster_name"]
    service.pop("retry_policy", None)
    [cluster] = [one for one in settings["static_resources"]["clusters"] if one["name"] == name]
    [endpoints] = cluster["load_assignment"]["endpoints"]
    where = endpoints["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    target = f"{where['address']}:{where['port_value']}"
    service["google_grpc"] = {"target_uri": target, "stat_prefix": "picker"}


@pytest.mark.parametrize("mode", ["duplex", "buffered", "streamed"])
async def test_an_envoy_that_is_not_known_as_one(transport: Transport, mode: Mode) -> None:
    """A real Envoy whose calls do not tell it is served, with streams that it ends itself: bodies pass both
    ways, and each stream ends with its response, whether it is shown or not."""
    async with plane(transport, mode, tweak=google_grpc) as running:
        first, second = running.addresses
        running.picker.picks(second, first)
        answer = [b"a" * size for size in (1, 70_000, 200_000)]
        running.upstreams[1].responses["/long"] = ("application/json", answer)
        for size in (10, 100_000, 600_000):
            body = b"x" * size
            async with running.client.post("/long", data=io.BytesIO(body)) as response:
                assert (response.status, await response.read()) == (200, b"".join(answer))
            assert running.upstreams[1].received[-1].body == body
        if mode == "duplex":
            seen = list(await running.picker.sees(3))
            assert [(one.status, one.complete) for one in seen] == [(200, True)] * 3

        async with running.client.post("/stream", data=b"{}") as response:
            assert response.status == 200
            await response.content.readany()
            before = len(running.picker.seen)
            await asyncio.sleep(0.2)
            assert len(running.picker.seen) == before == (3 if mode == "duplex" else 0)
            running.upstreams[1].release.set()
            await response.read()
        if mode == "duplex":
            await running.picker.sees(4)
        assert running.picker.protocol_errors == []
