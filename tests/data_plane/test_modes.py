"""Body modes that other gateways may choose, and responses that are observed, through a real Envoy."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any, get_args

import pytest
from tests.data_plane.plane import Plane, Tweak, ext_proc, plane
from tests.data_plane.stub import Transport

from kvist_epp.extproc.session import STREAMED_LOOKAHEAD_BYTES
from kvist_sim.envoy import Json, Mode

BODY = os.urandom(300_000)


def _processing(**modes: Any) -> Tweak:
    def change(settings: Json) -> None:
        early = modes.pop("early", None)
        ext_proc(settings)["processing_mode"] |= modes
        if early is not None:
            ext_proc(settings)["send_body_without_waiting_for_header_response"] = early

    return change


async def _post(running: Plane, body: bytes) -> None:
    async with running.client.post("/v1/completions", data=BytesIO(body)) as response:
        assert (response.status, await response.text()) == (200, running.addresses[1])
    assert body in [request.body for request in running.upstreams[1].received]
    stats = await running.filter_stats()
    assert (stats["spurious_msgs_received"], stats["streams_failed"]) == (0, 0)


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
async def test_modes_that_show_no_body_are_picked_for_by_headers(transport: Transport, mode: str) -> None:
    """If headers must be answered before the body is seen, the pick request is partial and the pick
    counts."""
    async with plane(transport, "buffered", tweak=_processing(request_body_mode=mode)) as running:
        await _post(running, BODY)

        ask = running.picker.asks[0]
        assert (ask.body, ask.partial) == (b"", True)


@pytest.mark.parametrize("observe_responses", [False, True], ids=["", "observed"])
@pytest.mark.parametrize("mode", get_args(Mode))
async def test_a_websocket_is_picked_for_by_its_headers(
    transport: Transport, mode: Mode, observe_responses: bool
) -> None:
    """In every mode the request of a WebSocket, whose body does not end, reaches the endpoint that was
    picked, and messages of any size pass both ways."""
    async with plane(transport, mode, observe_responses=observe_responses) as running:
        async with running.client.ws_connect("/v1/realtime?model=a", max_msg_size=0) as socket:
            for data in (b"first", BODY, b"last"):
                await socket.send_bytes(data)
                assert await socket.receive_bytes() == data

        [request] = running.upstreams[1].received
        assert (request.method, request.headers["upgrade"]) == ("GET", "websocket")
        [ask] = running.picker.asks
        assert (ask.method, ask.path, ask.body, ask.websocket) == ("GET", "/v1/realtime", b"", True)
        stats = await running.filter_stats()
        assert (stats["spurious_msgs_received"], stats["streams_failed"]) == (0, 0)


@pytest.mark.parametrize("early", [False, True], ids=["waiting", "early"])
async def test_streamed_bodies_arrive_once(transport: Transport, early: bool) -> None:
    """However many at a time: Envoy sent the beginning of one body in a hundred twice when the stream ended
    with the pick while a chunk waited for its answer."""
    tweak = _processing(request_body_mode="STREAMED", early=early)
    async with plane(transport, "buffered", tweak=tweak) as running:
        for _ in range(10):
            bodies = [os.urandom(size) for size in (1, 300_000, 400_000, 500_000) * 2]
            await asyncio.gather(*(_post(running, body) for body in bodies))

        received = [request.body for request in running.upstreams[1].received]
        assert len(received) == 80


async def test_an_early_streamed_body_is_seen_whole(transport: Transport) -> None:
    """STREAMED with the body sent before the headers are answered shows the whole body."""
    tweak = _processing(request_body_mode="STREAMED", early=True)
    async with plane(transport, "buffered", tweak=tweak) as running:
        await _post(running, BODY)

        ask = running.picker.asks[0]
        assert (ask.body, ask.partial) == (BODY, False)


async def test_an_early_streamed_body_is_cut_before_envoy_stops_reading(transport: Transport) -> None:
    """A STREAMED body longer than Envoy's default buffer is picked for by its beginning."""
    body = os.urandom(4 * STREAMED_LOOKAHEAD_BYTES)

    def small_buffer(settings: Json) -> None:
        _processing(request_body_mode="STREAMED", early=True)(settings)
        settings["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 1 << 20

    async with plane(transport, "buffered", tweak=small_buffer) as running:
        await _post(running, body)

        ask = running.picker.asks[0]
        assert (ask.body, ask.partial) == (body[: len(ask.body)], True)
        assert STREAMED_LOOKAHEAD_BYTES <= len(ask.body) < len(body)


async def test_a_partly_buffered_body_within_the_limit_is_whole(transport: Transport) -> None:
    """BUFFERED_PARTIAL within Envoy's limit is as good as BUFFERED."""
    async with plane(
        transport, "buffered", tweak=_processing(request_body_mode="BUFFERED_PARTIAL")
    ) as running:
        await _post(running, BODY)

        ask = running.picker.asks[0]
        assert (ask.body, ask.partial) == (BODY, False)


async def test_a_partly_buffered_body_beyond_the_limit_is_partial(transport: Transport) -> None:
    """BUFFERED_PARTIAL beyond Envoy's limit shows a beginning, says so, and all of it arrives."""
    async with plane(
        transport,
        "buffered",
        tweak=_processing(request_body_mode="BUFFERED_PARTIAL"),
        body_limit_bytes=65_536,
    ) as running:
        await _post(running, BODY)

        ask = running.picker.asks[0]
        assert ask.partial
        assert ask.body == BODY[: len(ask.body)]


async def test_a_body_over_the_limit_is_refused_by_envoy(transport: Transport) -> None:
    """A BUFFERED body over the gateway's limit gets 413 and reaches neither picker nor engine."""
    async with plane(transport, "buffered", body_limit_bytes=65_536) as running:
        async with running.client.post("/v1/completions", data=BODY) as response:
            assert response.status == 413

        assert running.picker.asks == []
        assert [upstream.received for upstream in running.upstreams] == [[], []]


@pytest.mark.parametrize(
    "response_modes",
    [
        {"response_header_mode": "SKIP", "response_body_mode": "NONE", "response_trailer_mode": "SKIP"},
        {"response_body_mode": "NONE"},
        {"response_body_mode": "STREAMED", "response_trailer_mode": "SKIP"},
        {"response_body_mode": "BUFFERED", "response_trailer_mode": "SKIP"},
    ],
    ids=["skip", "none", "streamed", "buffered"],
)
@pytest.mark.parametrize("observe", [False, True], ids=["left", "observed"])
async def test_full_duplex_requests_with_any_response_mode(
    transport: Transport, response_modes: Json, observe: bool
) -> None:
    """A full-duplex request ends well whatever the gateway sends of the response, observed or not."""
    tweak = _processing(**response_modes)
    async with plane(transport, "duplex", tweak=tweak, observe_responses=observe) as running:
        for body in (BODY, b"", b"x"):
            await _post(running, body)


@pytest.mark.parametrize(
    ("mode", "observe", "whole"),
    [("buffered", False, True), ("streamed", False, True), ("duplex", True, True), ("duplex", False, False)],
)
async def test_an_engine_that_answers_too_early(
    transport: Transport, mode: Mode, observe: bool, whole: bool
) -> None:
    """A 401 before the request was read reaches the client; only FULL_DUPLEX_STREAMED, and only behind a
    long body, may lose what it says: Envoy gave it to a stream that was ending. Observed it is kept."""
    async with (
        _early() as port,
        plane(
            transport, mode, tweak=lambda settings: _add(settings, port), observe_responses=observe
        ) as running,
    ):
        running.picker.picks(f"127.0.0.1:{port}")
        for size in (1_000, 3_000_000):
            async with running.client.post("/v1/completions", data=BytesIO(bytes(size))) as response:
                assert response.status == 401
                said = await response.text()
                assert said == "who are you?" or (not whole and size > 1_000 and said == "")


def _add(settings: Json, port: int) -> None:
    """One more endpoint for the pool."""
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    assignment = settings["static_resources"]["clusters"][0]["load_assignment"]
    assignment["endpoints"][0]["lb_endpoints"].append({"endpoint": {"address": address}})


@contextlib.asynccontextmanager
async def _early() -> AsyncIterator[int]:
    """Yield the port of an engine that rejects every client."""
    talks: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(
        lambda reader, writer: talks.add(asyncio.create_task(_unauthorized(reader, writer))), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]
    for talk in talks:
        talk.cancel()
    await asyncio.gather(*talks, return_exceptions=True)


async def _unauthorized(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers at the headers, then reads on."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 12\r\nconnection: close\r\n\r\nwho are you?"
        )
        await writer.drain()
        while await reader.read(65_536):
            pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("window", [None, 65_535], ids=["wide", "narrow"])
async def test_quick_responses_are_not_lost_when_the_stream_ends(
    transport: Transport, window: int | None
) -> None:
    """An upstream that answers at once loses nothing to the end of a full-duplex stream.

    Envoy passes response bytes to a stream whose end it has not seen, and they are lost: the end must
    come with the last chunk, also when flow control holds that back.
    """

    def narrow(settings: Json) -> None:
        if window is not None:
            options = settings["static_resources"]["clusters"][1]["typed_extension_protocol_options"]
            (http,) = options.values()
            sizes = {"initial_stream_window_size": window, "initial_connection_window_size": window}
            http["explicit_http_config"]["http2_protocol_options"] = sizes

    async with plane(transport, "duplex", tweak=narrow) as running:
        sizes = (0, 1, 62_000, 450_000) * 25
        await asyncio.gather(*(_post(running, BODY[:1] * size) for size in sizes))


async def test_picks_observed_but_not_shown_are_ignored(transport: Transport) -> None:
    """In Envoy's observability mode nothing is asked, and the request goes its own way."""

    def observe(settings: Json) -> None:
        ext_proc(settings)["observability_mode"] = True
        ext_proc(settings)["processing_mode"] |= {"request_body_mode": "NONE"}

    async with plane(transport, "buffered", tweak=observe) as running:
        async with running.client.post("/v1/completions", data=BODY) as response:
            assert response.status == 200

        assert running.picker.asks == []
