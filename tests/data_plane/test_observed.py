"""Responses that are observed and requests that are renamed, through a real Envoy on both servers."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from io import BytesIO

import aiohttp
import pytest
from tests.data_plane.plane import Plane, plane
from tests.data_plane.stub import Transport

from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.extproc.response import Usage
from kvist_sim.envoy import Mode
from kvist_sim.envoy_settings import Responses

COMBINATIONS: list[tuple[Mode, Responses]] = [
    ("buffered", "streamed"),
    ("buffered", "buffered"),
    ("duplex", "duplex"),
    ("streamed", "streamed"),
]
USAGE = {"prompt_tokens": 1200, "completion_tokens": 30, "prompt_tokens_details": {"cached_tokens": 1024}}
COUNTED = Usage(1200, 30, 1024)
JSON_PATH, SSE_PATH, LARGE_PATH = "/v1/completions", "/v1/chat/completions", "/v1/large"
REWRITE = {"x-llm-d-model-name-rewrite": "engine/name"}
PAD = os.urandom(200_000).hex()


def _events(model: str) -> list[bytes]:
    """An SSE stream whose parts end inside lines, the last event's usage among them."""
    texts = [f'"model":"engine/name" {n}' for n in range(20)]
    events: list[object] = [{"model": model, "choices": [{"delta": {"content": text}}]} for text in texts]
    events.append({"model": model, "choices": [], "usage": USAGE})
    text = (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    )
    return [text[at : at + 37] for at in range(0, len(text), 37)]


def _document(model: str, **more: object) -> bytes:
    return json.dumps({"model": model, **more, "usage": USAGE}).encode()


@pytest.fixture(params=COMBINATIONS, ids="-".join)
async def observed(transport: Transport, request: pytest.FixtureRequest) -> AsyncIterator[Plane]:
    """A data plane whose picker sees responses; the second upstream answers as an engine would."""
    mode, responses = request.param
    async with plane(transport, mode, responses=responses, observe_responses=True) as running:
        running.picker.answer = lambda _: PickResult((running.addresses[1],), session="r1.1")
        running.upstreams[1].responses = {
            JSON_PATH: ("application/json", [_document("engine/name")]),
            LARGE_PATH: ("application/json", [_document("engine/name", pad=PAD)]),
            SSE_PATH: ("text/event-stream", _events("engine/name")),
        }
        yield running


async def _faultless(running: Plane) -> None:
    stats = await running.filter_stats()
    faults = ("spurious_msgs_received", "streams_failed", "rejected_header_mutations", "message_timeouts")
    assert {name: stats[name] for name in faults} == dict.fromkeys(faults, 0)
    assert running.picker.protocol_errors == []


async def test_usage_is_read_as_it_passes(observed: Plane) -> None:
    """JSON and SSE arrive unchanged, and their usage is reported with session, status and endpoint."""
    for path, wanted in ((JSON_PATH, _document("engine/name")), (SSE_PATH, b"".join(_events("engine/name")))):
        async with observed.client.post(path, data=BytesIO(PAD.encode())) as response:
            assert (response.status, await response.read()) == (200, wanted)

    for seen in await observed.picker.sees(2):
        assert (seen.session, seen.status, seen.usage, seen.complete) == ("r1.1", 200, COUNTED, True)
        assert seen.served == observed.addresses[1]
        assert seen.request_id
    await _faultless(observed)


async def test_names_are_rewritten_there_and_back(observed: Plane) -> None:
    """The engine gets the name of the header, the client its own back; generated text keeps the engine's."""
    body = b'{"stream": true, "model": "my-model", "messages": []}'
    for path in (JSON_PATH, SSE_PATH, LARGE_PATH):
        async with observed.client.post(path, data=body, headers=REWRITE) as response:
            got = await response.read()
        wanted = {
            JSON_PATH: _document("my-model"),
            LARGE_PATH: _document("my-model", pad=PAD),
            SSE_PATH: b"".join(_events("my-model")),
        }
        assert got == wanted[path]

    received = observed.upstreams[1].received
    assert {request.body for request in received} == {body.replace(b"my-model", b"engine/name")}
    assert all("x-llm-d-model-name-rewrite" not in request.headers for request in received)
    assert {seen.usage.prompt for seen in await observed.picker.sees(3)} == {1200}
    await _faultless(observed)


async def test_observed_responses_of_any_size_arrive(observed: Plane) -> None:
    """Megabytes of response, none at all, and one to a bodyless request arrive unchanged."""
    sizes = (0, 1, 62_001, 3_000_000)
    for size in sizes:
        observed.upstreams[1].responses[f"/{size}"] = ("application/octet-stream", [bytes(size)])
        async with observed.client.post(f"/{size}", data=b"{}") as response:
            assert await response.read() == bytes(size)
    async with observed.client.get("/v1/models") as response:
        assert await response.text() == observed.addresses[1]

    assert {seen.usage.known for seen in await observed.picker.sees(len(sizes) + 1)} == {False}
    await _faultless(observed)


async def test_a_response_begins_before_it_ends(transport: Transport) -> None:
    """Observed and renamed events are passed on as they come, in the modes that stream."""
    modes: tuple[tuple[Mode, Responses], ...] = (("duplex", "duplex"), ("buffered", "streamed"))
    for mode, responses in modes:
        async with (
            plane(transport, mode, responses=responses, observe_responses=True) as running,
            running.client.post("/stream", data=b'{"model":"a"}', headers=REWRITE) as response,
        ):
            assert await response.content.readline() == b"data: first\n"
            running.upstreams[1].release.set()
            assert (await response.read()).endswith(b"data: 19\n\ndata: [DONE]\n\n")


async def test_the_endpoint_that_served_is_reported(observed: Plane) -> None:
    """If the first endpoint refuses, the response reports that the second one served."""
    await observed.upstreams[0].stop()
    observed.picker.picks(*observed.addresses)
    async with observed.client.post(JSON_PATH, data=b"{}") as response:
        assert response.status == 200
    [seen] = await observed.picker.sees(1)
    [ended] = await observed.picker.reports(1)

    assert seen.served == ended.upstream == observed.addresses[1]


async def test_a_client_that_leaves_ends_what_is_observed(observed: Plane) -> None:
    """If the client disconnects in the middle, the response is reported as incomplete."""
    request = asyncio.ensure_future(observed.client.post("/stream", data=b"{}"))
    while not observed.upstreams[1].received:
        await asyncio.sleep(0.01)
    request.cancel()
    [left] = await asyncio.gather(request, return_exceptions=True)
    if isinstance(left, aiohttp.ClientResponse):  # its headers had come already
        left.close()
    [seen] = await observed.picker.sees(1)

    assert (seen.complete, seen.usage.known) == (False, False)


async def test_renamed_bodies_of_every_size(transport: Transport, mode: Mode) -> None:
    """Bodies of every size are renamed and measured, also if responses are not observed."""
    async with plane(transport, mode) as running:
        bodies = [
            json.dumps({"prompt": "x" * size, "model": "m"}).encode() for size in (0, 100, 62_000, 3_000_000)
        ]
        for body in bodies:
            async with running.client.post(
                "/v1/completions", data=BytesIO(body), headers=REWRITE
            ) as response:
                assert (response.status, await response.text()) == (200, running.addresses[1])

        wanted = [body.replace(b'"m"', b'"engine/name"') for body in bodies]
        received = running.upstreams[1].received
        assert [request.body for request in received] == [ask.body for ask in running.picker.asks] == wanted
        for request in received:
            assert request.headers.get("content-length", str(len(request.body))) == str(len(request.body))
        await _faultless(running)


@pytest.mark.parametrize("responses", ["skip", "none"])
async def test_streams_that_stay_open_without_bodies_end(transport: Transport, responses: Responses) -> None:
    """Observing a gateway that shows no response, or only its headers, holds nothing up."""
    async with plane(transport, "buffered", responses=responses, observe_responses=True) as running:
        for body in (b"{}", b""):
            async with running.client.post("/v1/completions", data=BytesIO(body)) as response:
                assert await response.text() == running.addresses[1]

        seen = await running.picker.sees(2)
        assert [found.status for found in seen] == [0 if responses == "skip" else 200] * 2
        await _faultless(running)


async def test_what_observing_costs(transport: Transport) -> None:
    """A picker that dies cuts the responses it observes: the price of staying on the stream."""
    async with (
        plane(transport, "duplex", observe_responses=True) as running,
        running.client.post("/stream", data=b"{}") as response,
    ):
        assert await response.content.readline() == b"data: first\n"
        await running.server.close()
        running.upstreams[1].release.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
