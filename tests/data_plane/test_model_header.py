"""Several pools behind one Envoy, as docs/guides/several-pools.yaml has them: the body's model chooses."""

import asyncio
import json
import os
import shlex
import signal
from pathlib import Path

import aiohttp
import pytest
from tests.data_plane.plane import connection_manager
from tests.data_plane.several import ADAPTER, LARGE, POOLS, SMALL, Several, model_header, real, several
from tests.data_plane.stub import Transport
from tests.docs import several_pools
from tests.test_guide_pools import COMMANDS

from kvist_epp.names import BASE_MODEL_HEADER, DESTINATION_HEADER, MODEL_HEADER
from kvist_sim.envoy import Json, Mode
from kvist_sim.envoy_pools import Route
from kvist_sim.launch import HOST, metric
from kvist_sim.processes import Children

CHAT = "/v1/chat/completions"
NO_CANARY = (
    Route(models=(LARGE,), pools={"large": 1}, header=BASE_MODEL_HEADER),
    Route(models=(SMALL,), pools={"small": 1}),
)
FORGED = {MODEL_HEADER: LARGE, BASE_MODEL_HEADER: LARGE}


def body_of(model: object, text: str = "hello") -> bytes:
    """A chat; OpenAI's own client writes the model after the messages."""
    return json.dumps({"messages": [{"role": "user", "content": text}], "model": model}).encode()


async def post(running: Several, body: bytes, *, path: str = CHAT, **headers: str) -> int:
    """The status of one request."""
    async with running.client.post(path, data=body, headers=headers) as response:
        await response.read()
        return response.status


def without_cleaning(settings: Json) -> None:
    """Envoy lets clients' headers through to the filter."""
    del connection_manager(settings)["early_header_mutation_extensions"]


async def test_the_bodys_model_chooses_the_pool(tmp_path: Path, transport: Transport, mode: Mode) -> None:
    """Each model goes to its own pool, an adapter to its base's: that pool's picker is asked, and obeyed."""
    async with several(tmp_path, transport, mode, routes=NO_CANARY) as running:
        long = "a long prompt " * 20_000
        bodies = {LARGE: body_of(LARGE, long), SMALL: body_of(SMALL), ADAPTER: body_of(ADAPTER)}
        assert [await post(running, body) for body in bodies.values()] == [200] * 3

        assert running.served == running.asked == {"large": 2, "small": 1}
        for pool in running.pools.values():
            assert pool.upstreams[0].received == []
            for got in pool.received:
                model = json.loads(got.body)["model"]
                assert got.body == bodies[model]
                assert got.headers[MODEL_HEADER] == model
                assert got.headers.get(BASE_MODEL_HEADER) == (None if model == SMALL else LARGE)
                assert got.headers[DESTINATION_HEADER] == pool.upstreams[1].address


UNNAMED: dict[str, bytes | None] = {
    "GET": None,
    "empty": b"",
    "no json": b"\x00\x01\x02",
    "no model": b'{"prompt": "x"}',
    "no text": body_of(7),
    "two lines": body_of("a\r\nx-gateway-model-name: " + LARGE),
    "unknown": body_of("nobody's"),
}


@pytest.mark.parametrize("cleaned", [True, False], ids=["cleaned", "filter alone"])
async def test_a_client_cannot_choose_the_pool(
    tmp_path: Path, transport: Transport, mode: Mode, cleaned: bool
) -> None:
    """Forged headers never decide: the body does, or else the default; also without Envoy's own cleaning."""
    tweak = (lambda _: None) if cleaned else without_cleaning
    async with several(tmp_path, transport, mode, routes=NO_CANARY, tweak=tweak) as running:
        for body in UNNAMED.values():
            method = "GET" if body is None else "POST"
            async with running.client.request(method, CHAT, data=body, headers=FORGED) as response:
                assert response.status == 200
        await post(running, body_of(SMALL), **FORGED)
        twice = b'{"model":"%s","messages":[],"model":"%s"}' % (LARGE.encode(), SMALL.encode())
        await post(running, twice)
        assert await trailers_alone(running.envoy.port) == b"HTTP/1.1 200 OK"

        assert running.served == running.asked == {"small": len(UNNAMED) + 3}
        told = [got.headers.get(MODEL_HEADER) for got in running.pools["small"].received]
        assert told == [None] * (len(UNNAMED) - 1) + ["nobody's", SMALL, SMALL, None]
        assert {got.headers.get(BASE_MODEL_HEADER) for got in running.pools["small"].received} == {None}
        page = await running.page("/metrics")
        forged = 0 if cleaned else len(UNNAMED) + 2
        assert f"kvist_epp_model_header_forged_total {forged}.0" in page
        assert 'kvist_epp_model_header_requests_total{outcome="named"} 3.0' in page


async def trailers_alone(port: int) -> bytes:
    """The first line of the answer to a request without a body, with a forged header, and with trailers."""
    reader, writer = await asyncio.open_connection(HOST, port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\n{MODEL_HEADER}: {LARGE}\r\ntransfer-encoding: chunked\r\n"
    writer.write(f"{head}connection: close\r\n\r\n0\r\n{MODEL_HEADER}: {LARGE}\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line.strip()


async def test_a_canary_takes_its_weight(tmp_path: Path, transport: Transport, mode: Mode) -> None:
    """Requests are split 90 to 10 between two pools; the picker of the chosen pool picks and gets the report
    of the end."""
    async with several(tmp_path, transport, mode) as running:
        numbers = iter(range(400))

        async def post_the_next_ones() -> set[int]:
            return {await post(running, body_of(LARGE, str(n))) for n in numbers}

        # sixteen at once: with all of them at once on a busy machine, Envoy gives up asking for some
        statuses = await asyncio.gather(*(post_the_next_ones() for _ in range(16)))
        assert set().union(*statuses) == {200}

        assert running.served == running.asked
        assert running.served["large"] + running.served["large-next"] == 400
        assert 16 <= running.served["large-next"] <= 64  # 40, and four standard deviations of 6
        for name in ("large", "large-next"):
            pool = running.pools[name]
            ended = await pool.picker.reports(running.served[name])
            assert {entry.upstream for entry in ended} == {pool.upstreams[1].address}
        assert running.pools["small"].picker.ended == []


async def until_down(running: Several) -> None:
    """Wait until Envoy knows that the filter is dead."""
    name = "cluster.model-header.membership_healthy"
    while (await running.envoy.stats(name))[name]:
        await asyncio.sleep(0.02)


async def test_without_the_filter_the_default_pool_serves(
    tmp_path: Path, transport: Transport, mode: Mode
) -> None:
    """Fail open: every request goes to the default pool, picked for; a forged header decides nothing then."""
    async with several(tmp_path, transport, mode, routes=NO_CANARY) as running:
        os.kill(running.filter.pid, signal.SIGKILL)
        await until_down(running)
        assert [await post(running, body_of(LARGE), **FORGED) for _ in range(5)] == [200] * 5

        assert running.served == running.asked == {"small": 5}
        assert {got.headers.get(MODEL_HEADER) for got in running.pools["small"].received} == {None}


async def test_without_the_filter_no_request_passes_if_configured(
    tmp_path: Path, transport: Transport, mode: Mode
) -> None:
    """Fail closed: 503, and no engine sees the request."""
    async with several(tmp_path, transport, mode, model_failure_mode_allow=False) as running:
        os.kill(running.filter.pid, signal.SIGKILL)
        await until_down(running)
        assert await post(running, body_of(LARGE)) == 503
        assert running.served == {}


async def test_filters_come_and_go_without_a_lost_request(tmp_path: Path, transport: Transport) -> None:
    """Two replicas rolled under load: every request is answered by its own pool, each process ends with 0."""
    async with Children(tmp_path) as children:
        second, ports = await model_header(children, transport, "--drain-delay=3")
        addresses = f"{HOST}:{ports.grpc}"

        def both(settings: Json) -> None:
            for cluster in settings["static_resources"]["clusters"]:
                if cluster["name"] == "model-header":
                    add(cluster, addresses)

        async with several(tmp_path, transport, routes=NO_CANARY, tweak=both) as running:
            stop = asyncio.Event()
            load = [asyncio.create_task(keep_asking(running, stop)) for _ in range(4)]
            os.kill(second.pid, signal.SIGTERM)
            assert await asyncio.to_thread(second.process.wait, 30) == 0
            stop.set()
            statuses = [status for task in load for status in await task]

            assert len(statuses) > 100
            assert set(statuses) == {200}
            assert running.served == {"large": len(statuses)}


def add(cluster: Json, address: str) -> None:
    """One more endpoint in a cluster."""
    host, _, port = address.rpartition(":")
    endpoint = {"address": {"socket_address": {"address": host, "port_value": int(port)}}}
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"].append({"endpoint": endpoint})


async def keep_asking(running: Several, stop: asyncio.Event) -> list[int]:
    """Requests one after the other."""
    statuses = []
    while not stop.is_set():
        statuses.append(await post(running, body_of(LARGE)))
    return statuses


async def test_the_process_has_health_pages_and_tls(tmp_path: Path) -> None:
    """TLS with an authority to fetch, a picker's pages but the fleet's, ready at once, and a clean end."""
    async with Children(tmp_path) as children, aiohttp.ClientSession() as client:
        child, ports = await model_header(children, "fast", "--secure-serving=true")

        async def page(path: str) -> tuple[int, str]:
            async with client.get(f"http://{HOST}:{ports.metrics}{path}") as response:
                return response.status, await response.text()

        assert (await page("/readyz")) == (200, "ok\n")
        assert (await page("/healthz"))[0] == 200
        assert "BEGIN CERTIFICATE" in (await page("/ca.crt"))[1]
        status, metrics = await page("/metrics")
        assert status == 200
        for name in (
            "certificate_expiry_timestamp_seconds",
            "http2_connections",
            "model_header_seconds_count",
        ):
            assert f"kvist_epp_{name}" in metrics
        assert (await page("/debug/fleet"))[0] == 404
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.process.wait, 20) == 0


@pytest.mark.parametrize("command", COMMANDS)
async def test_the_guides_commands_start_it(tmp_path: Path, command: str) -> None:
    """Each command of the guide, on other ports, becomes ready and ends cleanly."""
    async with Children(tmp_path) as children:
        child, _ = await model_header(children, "fast", *shlex.split(command)[1:])
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.process.wait, 20) == 0


async def test_the_whole_product(tmp_path: Path) -> None:
    """Real pickers over TLS: each picks for its own model alone and receives the ends of its requests."""
    models = {"small": SMALL, "large": LARGE, "large-next": LARGE}
    async with real(tmp_path, models) as running, aiohttp.ClientSession(running.envoy.url) as client:
        answered = []
        for model in [SMALL] * 5 + [LARGE] * 60:
            body = json.loads(body_of(model)) | {"max_tokens": 1}
            async with client.post(CHAT, json=body) as response:
                answered.append((response.status, (await response.json())["model"]))
        assert answered == [(200, SMALL)] * 5 + [(200, LARGE)] * 60

        picked = {name: await metric(one, PICKED, "picked") for name, one in running.pickers.items()}
        assert picked["small"] == 5
        assert picked["large"] + picked["large-next"] == 60
        assert picked["large"] > picked["large-next"]
        for name, one in running.pickers.items():
            while await metric(one, ENDED, "access-log") < picked[name]:
                await asyncio.sleep(0.05)


PICKED = "kvist_epp_requests_total"
ENDED = "kvist_epp_requests_ended_total"


def test_the_guide_names_these_pools() -> None:
    """The pools of this test are those of the guide's configuration."""
    names = {cluster["name"] for cluster in several_pools()["static_resources"]["clusters"]}
    assert names == {"model-header", *POOLS, *(f"{name}-picker" for name in POOLS)}
