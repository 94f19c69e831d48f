"""Pickers that die, drain or misbehave, clients that leave, and requests that are reported as ended."""

import asyncio
import signal

import aiohttp
import pytest
from tests.data_plane.plane import Plane, envoy_for, healthy_pickers, picker_process, plane
from tests.data_plane.stub import Transport
from tests.data_plane.upstream import LAST_CHUNK, Upstream

from kvist_epp.errors import Shed
from kvist_epp.extproc.pick_request import PickRequest, PickResult
from kvist_sim.envoy import Mode

STREAMS = 50


async def test_the_access_log_says_how_requests_ended(plane: Plane) -> None:
    """Each request is reported with session, upstream and status."""
    plane.picker.picks(plane.addresses[1], headers=(("x-session-id", "r1.1"),))
    async with plane.client.post("/v1/completions", data=b"{}") as response:
        assert response.status == 200
        await response.read()

    (ended,) = await plane.picker.reports(1)
    assert (ended.session, ended.upstream, ended.status) == ("r1.1", plane.addresses[1], 200)
    assert ended.request_id == plane.upstreams[1].received[0].headers["x-request-id"]


async def test_the_access_log_reports_refusals_and_disconnects(plane: Plane) -> None:
    """A refused request and one whose client left are reported too, neither with a wrong upstream."""
    plane.picker.answer = lambda _: Shed("busy")
    async with plane.client.post("/v1/completions", data=b"{}") as response:
        assert response.status == 429
    plane.picker.picks(plane.addresses[1])
    async with plane.client.post("/stream", data=b"{}") as response:
        await response.content.readline()
        response.close()

    ended = await plane.picker.reports(2)
    assert [(entry.status, entry.upstream) for entry in ended] == [(429, None), (200, plane.addresses[1])]


async def test_killing_the_picker_cuts_no_response(transport: Transport, mode: Mode) -> None:
    """With the picker killed while 50 responses stream, all 50 end as the upstream ended them."""
    async with (
        Upstream() as upstream,
        picker_process(transport, upstream.address) as (process, address),
        envoy_for(address, mode, (upstream,)) as envoy,
        aiohttp.ClientSession(envoy.url, connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        responses = [await client.post("/stream", data=b"x" * 1_000 * i) for i in range(STREAMS)]
        for response in responses:
            assert await response.content.readline() == b"data: first\n"
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        upstream.release.set()
        bodies = await asyncio.gather(*(response.read() for response in responses))

    whole = b"\n" + b"".join(b"data: %d\n\n" % i for i in range(20)) + LAST_CHUNK
    assert bodies == [whole] * STREAMS


async def test_a_dead_picker_means_plain_balancing(transport: Transport, mode: Mode) -> None:
    """With the picker gone, requests are spread over all endpoints when failing open is allowed."""
    async with plane(transport, mode) as running:
        await running.server.close()
        await running.picker_is(healthy=False)
        answers = set()
        for _ in range(4):
            async with running.client.post("/v1/completions", data=b"the body") as response:
                assert response.status == 200
                answers.add(await response.text())

        assert answers == set(running.addresses)
        assert {request.body for request in running.upstreams[0].received} == {b"the body"}


async def test_a_dead_picker_refuses_when_failing_closed(transport: Transport, mode: Mode) -> None:
    """With the picker gone, no request passes when failing open is not allowed."""
    async with plane(transport, mode, failure_mode_allow=False) as running:
        await running.server.close()
        async with running.client.post("/v1/completions", data=b"{}") as response:
            assert response.status in {500, 503, 504}

        assert [upstream.received for upstream in running.upstreams] == [[], []]


async def test_a_picker_that_came_back_is_used_again(transport: Transport, mode: Mode) -> None:
    """A picker that was killed and started again on the same port answers for the next requests."""
    async with (
        Upstream() as first,
        Upstream() as second,
        picker_process(transport, second.address) as (process, address),
    ):
        port = address.rpartition(":")[2]
        async with (
            envoy_for(address, mode, (first, second)) as envoy,
            aiohttp.ClientSession(envoy.url) as client,
        ):
            process.kill()
            await healthy_pickers(envoy, 0)
            async with picker_process(transport, second.address, port):
                await healthy_pickers(envoy, 1)
                picked = [await _text(client) for _ in range(4)]

    assert picked == [second.address] * 4


async def test_a_client_that_leaves_leaves_no_call(plane: Plane) -> None:
    """If the client disconnects while its request is queued, the pending decision is cancelled."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def wait(_: PickRequest) -> PickResult:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError

    plane.picker.answer = wait
    request = asyncio.ensure_future(plane.client.post("/v1/completions", data=b"{}"))
    await asked.wait()
    request.cancel()
    await gone.wait()

    assert plane.picker.protocol_errors == []


async def test_a_client_that_leaves_mid_body_gets_no_pick(plane: Plane) -> None:
    """A request whose body never ends is not picked for, and the next one is."""
    _, writer = await asyncio.open_connection("127.0.0.1", plane.envoy.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 100000\r\n\r\nonly this")
    await writer.drain()
    await _eventually_started(plane)
    writer.close()
    await writer.wait_closed()

    async with plane.client.post("/v1/completions", data=b"whole") as response:
        assert response.status == 200
    assert [ask.body for ask in plane.picker.asks] == [b"whole"]


async def test_a_bug_in_the_picker_costs_one_request(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    """An exception of the decision lets that request pass by the fall-back; its text is not logged."""

    def fail(ask: PickRequest) -> PickResult:
        raise ValueError(ask.headers["x-secret"])

    plane.picker.answer = fail
    async with plane.client.get("/v1/models", headers={"x-secret": "the prompt"}) as response:
        assert response.status == 200
    plane.picker.picks(plane.addresses[1])
    async with plane.client.get("/v1/models") as response:
        assert await response.text() == plane.addresses[1]

    assert plane.picker.protocol_errors == ["pick-failed"]
    assert "ValueError" in caplog.text
    assert "the prompt" not in caplog.text


async def _text(client: aiohttp.ClientSession) -> str:
    async with client.post("/v1/completions", data=b"{}") as response:
        return await response.text()


async def _eventually_started(plane: Plane) -> None:
    """Wait until Envoy has opened the stream to the picker."""
    while (await plane.filter_stats())["streams_started"] == 0:
        await asyncio.sleep(0)


async def test_a_dead_picker_of_two_costs_no_pick(transport: Transport, mode: Mode) -> None:
    """With one of two pickers dead and health checks unaware of it, the other one picks for every request."""
    async with (
        Upstream() as first,
        Upstream() as second,
        picker_process(transport, second.address) as (dead, address),
        picker_process(transport, second.address) as (_, other),
        envoy_for(
            address,
            mode,
            (first, second),
            pickers=(address, other),
            health_check=False,
            failure_mode_allow=False,
        ) as envoy,
        aiohttp.ClientSession(envoy.url) as client,
    ):
        assert {await _text(client) for _ in range(6)} == {second.address}
        dead.kill()
        await dead.wait()

        assert {await _text(client) for _ in range(12)} == {second.address}


async def test_a_request_queued_in_a_killed_picker_is_sent_again(transport: Transport) -> None:
    """FULL_DUPLEX_STREAMED: as long as a picker has answered nothing its death is not the request's."""
    async with (
        Upstream() as first,
        Upstream() as second,
        picker_process(transport, "") as (dead, address),
        picker_process(transport, second.address) as (_, other),
        envoy_for(
            address, "duplex", (first, second), pickers=(address, other), failure_mode_allow=False
        ) as envoy,
        aiohttp.ClientSession(envoy.url, connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        requests = [asyncio.ensure_future(_text(client)) for _ in range(8)]
        while sum(request.done() for request in requests) < 4:
            await asyncio.sleep(0.01)
        dead.kill()

        assert set(await asyncio.gather(*requests)) == {second.address}
