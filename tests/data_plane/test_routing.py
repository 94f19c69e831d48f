"""Requests through a real Envoy reach the endpoint that was picked, unchanged."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import pytest
from tests.data_plane.plane import Plane, plane, route, subset_hint
from tests.data_plane.stub import Transport

from kvist_epp.errors import BadRequest, NoEndpoints, PickError, Shed
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.names import DESTINATION_HEADER
from kvist_sim.envoy import Json, Mode

SIZES = [0, 1, 62_000, 62_001, 1_000_000, 5_000_000]


async def test_the_picked_endpoint_gets_the_request(plane: Plane) -> None:
    """The upstream that answers is the picked one, and the picker saw method, path and its headers."""
    async with plane.client.post(
        "/v1/completions?a=b", data=b"{}", headers={"X-Session-Id": "blue"}
    ) as response:
        assert (response.status, await response.text()) == (200, plane.addresses[1])

    ask = plane.picker.asks[0]
    assert (ask.method, ask.path, ask.body, ask.subset) == ("POST", "/v1/completions", b"{}", None)
    assert ask.headers["x-session-id"] == "blue"
    assert not any(key.startswith(":") for key in ask.headers)


@pytest.mark.parametrize("size", SIZES)
async def test_bodies_arrive_unchanged(plane: Plane, size: int) -> None:
    """A body of any size reaches picker and upstream byte for byte."""
    body = os.urandom(size)

    async with plane.client.post("/v1/chat/completions", data=BytesIO(body)) as response:
        assert response.status == 200

    assert plane.picker.asks[0].body == body
    assert plane.upstreams[1].received[0].body == body


async def test_a_body_of_many_chunks_arrives_unchanged(plane: Plane) -> None:
    """A body sent without a length, in uneven chunks, reaches picker and upstream whole."""
    chunks = [os.urandom(size) for size in (1, 70_000, 3, 200_000, 62_000)]

    async def upload() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async with plane.client.post("/v1/completions", data=upload()) as response:
        assert response.status == 200

    assert plane.picker.asks[0].body == b"".join(chunks)
    assert plane.upstreams[1].received[0].body == b"".join(chunks)


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
async def test_bodyless_requests_are_picked_for(plane: Plane, method: str) -> None:
    """A request that ends with its headers reaches the picked endpoint."""
    async with plane.client.request(method, "/v1/models") as response:
        assert await response.text() == plane.addresses[1]

    assert (plane.picker.asks[0].method, plane.picker.asks[0].body) == (method, b"")


async def test_header_and_metadata_are_both_set_and_equal(transport: Transport, mode: Mode) -> None:
    """Envoy sees the same destination list in the request header and in its dynamic metadata."""

    def show(settings: Json) -> None:
        route(settings)["response_headers_to_add"] = [
            _added("seen-header", f"%REQ({DESTINATION_HEADER})%"),
            _added("seen-metadata", f"%DYNAMIC_METADATA(envoy.lb:{DESTINATION_HEADER})%"),
        ]

    async with plane(transport, mode, tweak=show) as running:
        wanted = ",".join(running.addresses[::-1])
        running.picker.picks(*running.addresses[::-1])
        async with running.client.post("/v1/completions", data=b"{}") as response:
            assert response.headers["seen-header"] == wanted
            assert response.headers["seen-metadata"] == wanted


async def test_metadata_alone_routes_too(transport: Transport, mode: Mode) -> None:
    """A gateway that reads only the metadata sends the request to the picked endpoint."""

    def only_metadata(settings: Json) -> None:
        policy = settings["static_resources"]["clusters"][0]["load_balancing_policy"]["policies"][0]
        sources = policy["typed_extension_config"]["typed_config"]["override_host_sources"]
        del sources[0]

    async with plane(transport, mode, tweak=only_metadata) as running:
        for _ in range(4):
            async with running.client.post("/v1/completions", data=b"{}") as response:
                assert await response.text() == running.addresses[1]


async def test_a_client_cannot_choose_its_endpoint(plane: Plane) -> None:
    """A destination header sent by the client is overwritten."""
    headers = {DESTINATION_HEADER: plane.addresses[0]}

    async with plane.client.post("/v1/completions", data=b"{}", headers=headers) as response:
        assert await response.text() == plane.addresses[1]

    assert plane.upstreams[1].received[0].headers[DESTINATION_HEADER] == plane.addresses[1]


async def test_extra_headers_reach_the_upstream(plane: Plane) -> None:
    """Headers of the pick are set on the request, replacing the client's."""
    plane.picker.picks(plane.addresses[1], headers=(("x-session-id", "r1.7"), ("x-data-parallel-rank", "3")))

    async with plane.client.post("/v1/completions", data=b"{}", headers={"x-session-id": "mine"}) as response:
        assert response.status == 200

    received = plane.upstreams[1].received[0].headers
    assert (received["x-session-id"], received["x-data-parallel-rank"]) == ("r1.7", "3")


@pytest.mark.parametrize(
    ("error", "status", "reason", "retry_after"),
    [
        (BadRequest("no model"), 400, "bad-request", None),
        (NoEndpoints("nothing eligible"), 503, "rejected-no-endpoints", None),
        (Shed("too busy", retry_after=7), 429, "rejected-saturated", "7"),
    ],
)
async def test_errors_are_openai_json(
    plane: Plane, error: PickError, status: int, reason: str, retry_after: str | None
) -> None:
    """A refusal reaches the client with its status, an OpenAI error body and the reason headers."""
    plane.picker.answer = lambda _: error

    async with plane.client.post("/v1/completions", data=b"x" * 100_000) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        assert response.headers["x-kvist-dropped-reason"] == reason
        assert response.headers["x-llm-d-request-dropped-reason"] == reason
        assert response.headers.get("retry-after") == retry_after
        body = json.loads(await response.text())

    assert body == {"error": {"message": error.message, "type": error.kind, "code": reason}}
    assert [upstream.received for upstream in plane.upstreams] == [[], []]


async def test_ipv6_everywhere(transport: Transport, mode: Mode) -> None:
    """Picker and upstreams on IPv6: the pick in brackets routes by header and by metadata, a list of them is
    walked, the subset names one, and log and response tell it in the same form."""
    shown: dict[str, Any] = {"observe_responses": True, "responses": "streamed"}
    hint = subset_hint(["[::1]:80", "::1"])
    async with plane(transport, mode, host="::1", tweak=hint, **shown) as running:
        refusing, good = running.addresses
        assert good.startswith("[::1]:")
        await running.upstreams[0].stop()
        running.picker.picks(refusing, good)
        for _ in range(2):
            async with running.client.post("/v1/completions", data=b"the body") as response:
                assert (response.status, await response.text()) == (200, good)

        assert {ask.subset for ask in running.picker.asks} == {("[::1]:80", "::1")}
        assert {ended.upstream for ended in await running.picker.reports(2)} == {good}
        assert {seen.served for seen in await running.picker.sees(2)} == {good}


async def test_the_list_is_walked_when_a_connection_is_refused(plane: Plane) -> None:
    """If the first endpoint of the list refuses, the second gets the request with its body."""
    refusing, good = plane.addresses
    await plane.upstreams[0].stop()
    plane.picker.picks(refusing, good)

    for _ in range(4):
        async with plane.client.post("/v1/completions", data=b"the body") as response:
            assert (response.status, await response.text()) == (200, good)

    assert {request.body for request in plane.upstreams[1].received} == {b"the body"}


@pytest.mark.parametrize(
    ("hint", "subset"),
    [(["10.0.0.1:80", "10.0.0.2"], ("10.0.0.1:80", "10.0.0.2")), ("a:1, b:2", ("a:1", "b:2")), ([], ())],
)
async def test_the_subset_hint_is_read(
    transport: Transport, mode: Mode, hint: Any, subset: tuple[str, ...]
) -> None:
    """The gateway's subset metadata, as a list or a string, reaches the picker; an empty one stays empty."""

    async with plane(transport, mode, tweak=subset_hint(hint)) as running:
        async with running.client.post("/v1/completions", data=b"{}") as response:
            assert response.status == 200
        assert running.picker.asks[0].subset == subset


async def test_a_pick_may_take_its_time(plane: Plane) -> None:
    """A decision that is awaited routes as one that is not."""
    asked = asyncio.Event()
    answer: asyncio.Future[PickResult] = asyncio.get_running_loop().create_future()

    def wait(_: object) -> asyncio.Future[PickResult]:
        asked.set()
        return answer

    plane.picker.answer = wait
    request = asyncio.ensure_future(plane.client.post("/v1/completions", data=b"{}"))
    await asked.wait()
    answer.set_result(PickResult((plane.addresses[1],)))
    async with await request as response:
        assert await response.text() == plane.addresses[1]


async def test_many_at_once_are_not_mixed_up(plane: Plane) -> None:
    """Each of 64 simultaneous requests reaches the endpoint that was picked for it, with its own body."""
    plane.picker.answer = lambda ask: PickResult((plane.addresses[ask.body[-1] % 2],))

    async def post(number: int) -> tuple[str, str]:
        body = os.urandom(number * 1_500) + bytes((number,))
        async with plane.client.post("/v1/completions", data=body) as response:
            return await response.text(), plane.addresses[number % 2]

    for got, wanted in await asyncio.gather(*map(post, range(64))):
        assert got == wanted


async def test_envoy_finds_no_fault(plane: Plane) -> None:
    """After picks, refusals and bodyless requests Envoy counted no spurious message and no failed stream."""
    for body in (b"{}", b"y" * 200_000, None):
        async with plane.client.request("POST" if body else "GET", "/v1/completions", data=body) as response:
            assert response.status == 200
    plane.picker.answer = lambda _: NoEndpoints("none")
    async with plane.client.post("/v1/completions", data=b"{}") as response:
        assert response.status == 503

    stats = await plane.filter_stats()
    faults = ("spurious_msgs_received", "streams_failed", "rejected_header_mutations", "message_timeouts")
    assert {name: stats[name] for name in faults} == dict.fromkeys(faults, 0)
    assert stats["streams_started"] == 4


def _added(name: str, value: str) -> Json:
    return {"header": {"key": name, "value": value}}
