"""The promises that hold in every body mode, plaintext and TLS, on both servers, behind a real Envoy."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import get_args

import aiohttp
import pytest
from tests.data_plane.plane import (
    Plane,
    connection_manager,
    envoy_for,
    healthy_pickers,
    picker_process,
    plane,
    trusting,
)
from tests.data_plane.stub import Transport
from tests.data_plane.upstream import LAST_CHUNK, Upstream
from tests.epp.http2.certificates import self_made

from kvist_epp.errors import PickError, Shed
from kvist_epp.extproc.pick_request import PickRequest, PickResult
from kvist_sim.envoy import Json, Mode

BODY = os.urandom(300_000)
STREAMS = 10
UNSEEN: tuple[Mode, ...] = ("none",)
"""Modes in which the picker sees no body."""


@pytest.fixture(params=get_args(Mode))
def mode(request: pytest.FixtureRequest) -> Mode:
    """Which way Envoy sends bodies: all there are."""
    found: Mode = request.param
    return found


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> bool:
    """Whether Envoy and the picker speak TLS."""
    return bool(request.param)


def _let_trailers_through(settings: Json) -> None:
    connection_manager(settings)["http_protocol_options"] = {"enable_trailers": True}


@pytest.fixture
async def plane_of(transport: Transport, mode: Mode, tls: bool) -> AsyncIterator[Plane]:
    """A data plane of this combination; without retries, which make Envoy 1.40 send trailed bodies twice."""
    async with plane(transport, mode, tls=tls, retries=0, tweak=_let_trailers_through) as running:
        yield running


async def _faultless(running: Plane) -> None:
    stats = await running.filter_stats()
    faults = ("spurious_msgs_received", "streams_failed", "rejected_header_mutations", "message_timeouts")
    assert {name: stats[name] for name in faults} == dict.fromkeys(faults, 0)
    assert running.picker.protocol_errors == []


async def test_every_mode_routes_bodies_of_any_size(plane_of: Plane, mode: Mode) -> None:
    """Bodies of many sizes at once, and none at all, reach the picked endpoint unchanged; the picker saw as
    much as the mode shows."""
    bodies = [BODY[:size] for size in (0, 1, 62_000, 62_001, 300_000)]

    async def post(body: bytes) -> None:
        async with plane_of.client.post("/v1/completions?a=b", data=BytesIO(body)) as response:
            assert (response.status, await response.text()) == (200, plane_of.addresses[1])

    await asyncio.gather(*map(post, bodies))
    async with plane_of.client.get("/v1/models") as response:
        assert await response.text() == plane_of.addresses[1]

    assert sorted(request.body for request in plane_of.upstreams[1].received) == sorted([*bodies, b""])
    asks = [ask for ask in plane_of.picker.asks if ask.method == "POST"]
    if mode in UNSEEN:
        assert {(ask.body, ask.partial) for ask in asks if ask.partial} <= {(b"", True)}
    else:
        assert sorted(ask.body for ask in asks if not ask.partial) == sorted(bodies)
    await _faultless(plane_of)


async def test_every_mode_refuses(plane_of: Plane) -> None:
    """A refusal reaches the client as OpenAI JSON with its headers, and nothing reaches an endpoint."""
    error: PickError = Shed("too many requests wait", retry_after=7)
    plane_of.picker.answer = lambda _: error
    for body in (b"{}", BODY):
        async with plane_of.client.post("/v1/completions", data=BytesIO(body)) as response:
            assert response.status == 429
            assert response.headers["retry-after"] == "7"
            assert response.headers["x-kvist-dropped-reason"] == "rejected-saturated"
            assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            assert (await response.json())["error"]["message"] == "too many requests wait"

    assert [upstream.received for upstream in plane_of.upstreams] == [[], []]
    await _faultless(plane_of)


@pytest.mark.parametrize("body", [b"4\r\nbody\r\n", b""], ids=["body", "no-body"])
@pytest.mark.parametrize("mode", [mode for mode in get_args(Mode) if mode != "streamed"])
async def test_trailers_are_taken(plane_of: Plane, mode: Mode, body: bytes) -> None:
    """A chunked body with trailers, even an empty one, is picked for and arrives whole."""
    answer = await _trailed(plane_of, body)

    whole = b"body" if body else b""
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [ask.body for ask in plane_of.picker.asks] == [b"" if mode in UNSEEN else whole]
    assert [request.body for request in plane_of.upstreams[1].received] == [whole]
    await _faultless(plane_of)


async def test_a_streamed_body_with_trailers_passes_unpicked(transport: Transport) -> None:
    """A request with STREAMED body and trailers is not lost: Envoy never reports the body's end, so the
    request is sent to the fallback endpoint when the gateway's message timeout is over."""
    tweak = _let_trailers_through
    async with plane(transport, "streamed", retries=0, tweak=tweak, message_timeout_seconds=0.5) as running:
        answer = await _trailed(running, b"4\r\nbody\r\n")

        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert running.picker.asks == []
        assert (await running.filter_stats())["message_timeouts"] == 1


async def _trailed(running: Plane, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.envoy.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n"
    writer.write(head + b"connection: close\r\n\r\n" + body + b"0\r\nx-checksum: 1\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_every_mode_drains(plane_of: Plane) -> None:
    """A request that waits when the server is drained gets its answer, and then the port is closed, although
    the gateway's health checks connect anew each second."""
    asked = asyncio.Event()
    answer: asyncio.Future[PickResult] = asyncio.get_running_loop().create_future()

    def wait(_: PickRequest) -> asyncio.Future[PickResult]:
        asked.set()
        return answer

    await plane_of.picker_is(healthy=True)
    plane_of.picker.answer = wait
    request = asyncio.ensure_future(plane_of.client.post("/v1/completions", data=b"{}"))
    await asyncio.wait_for(asked.wait(), 30)
    drain = asyncio.ensure_future(plane_of.server.drain(3600))
    await asyncio.sleep(0)
    answer.set_result(PickResult((plane_of.addresses[1],)))
    async with await request as response:
        assert await response.text() == plane_of.addresses[1]
    await asyncio.wait_for(drain, 30)

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", plane_of.server.port)


async def test_every_mode_outlives_its_picker(
    transport: Transport, mode: Mode, tls: bool, tmp_path: Path
) -> None:
    """A picker killed while responses stream cuts none of them, and then requests are balanced without it."""
    certificates, material = "", self_made().material
    if tls:
        certificates = str(tmp_path)
        (tmp_path / "tls.crt").write_bytes(material.chain)
        (tmp_path / "tls.key").write_bytes(material.key)
    security = trusting(self_made(), tmp_path) if tls else None
    async with (
        Upstream() as upstream,
        Upstream() as other,
        picker_process(transport, upstream.address, certificates=certificates) as (process, address),
        envoy_for(address, mode, (upstream, other), picker_tls=security) as envoy,
        aiohttp.ClientSession(envoy.url, connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        responses = [await client.post("/stream", data=b"x" * 1_000 * i) for i in range(STREAMS)]
        for response in responses:
            assert await response.content.readline() == b"data: first\n"
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        upstream.release.set()
        bodies = await asyncio.gather(*(response.read() for response in responses))
        await healthy_pickers(envoy, 0)
        answers = {await (await client.post("/v1/completions", data=b"{}")).text() for _ in range(4)}

    whole = b"\n" + b"".join(b"data: %d\n\n" % i for i in range(20)) + LAST_CHUNK
    assert bodies == [whole] * STREAMS
    assert answers == {upstream.address, other.address}
