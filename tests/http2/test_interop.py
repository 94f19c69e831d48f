"""Real gRPC clients against the real server: what gateways and probes do, in plaintext and over TLS."""

import asyncio
from pathlib import Path

import pytest
from tests.epp.extproc import messages
from tests.http2.clients import Connect, Stream
from tests.http2.picker_port import ENGINE, opened

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.accesslog_pb2 import (
    HTTPAccessLogEntry,
    HTTPRequestProperties,
    StreamAccessLogsMessage,
)
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import ACCESS_LOG_METHOD, LIVENESS, PROCESS_METHOD, READINESS

BODILESS = messages.request_headers(end=True)


async def picked(stream: Stream) -> str:
    """The destination that a bodiless request gets."""
    await stream.send(BODILESS)
    await stream.done()
    answer = pb.ProcessingResponse.FromString(await stream.read() or b"")
    common = answer.request_headers.response
    return messages.set_headers(common)["x-gateway-destination-endpoint"]


async def test_health(connect: Connect, tls: Certificates | None, authority: Path | None) -> None:
    """Check, List and Watch of grpc.health.v1, the latter through a change; an unknown name is NOT_FOUND."""
    async with opened(tls) as port, connect(port.target, authority) as client:
        assert await client.check("") == {"": "SERVING"}
        assert await client.check("nobody") == 5
        assert await client.list() == dict.fromkeys((LIVENESS, *READINESS), "SERVING")
        watch = await client.watch("")
        assert await watch.next() == "SERVING"
        port.health.set(False)
        assert await watch.next() == "NOT_SERVING"
        assert await client.check(LIVENESS) == {LIVENESS: "SERVING"}


async def test_a_pick(connect: Connect, tls: Certificates | None, authority: Path | None) -> None:
    """An ext_proc stream is answered with the engine and ends with status OK."""
    async with opened(tls) as port, connect(port.target, authority) as client:
        stream = await client.open(PROCESS_METHOD)
        assert await picked(stream) == ENGINE
        assert await stream.read() is None
        assert await stream.status() == (0, "")
        assert port.asked[0].path == "/v1/completions"


async def test_a_large_body_in_one_message(
    connect: Connect, tls: Certificates | None, authority: Path | None
) -> None:
    """BUFFERED: 32 MiB arrive whole."""
    body = bytes(range(256)) * (1 << 17)
    async with opened(tls) as port, connect(port.target, authority) as client:
        stream = await client.open(PROCESS_METHOD)
        await stream.send(messages.request_headers(messages.config(pb.BUFFERED)))
        assert await stream.read() is not None
        await stream.send(messages.request_body(body))
        answer = pb.ProcessingResponse.FromString(await stream.read() or b"")
        common = answer.request_body.response
        assert messages.set_headers(common)["x-gateway-destination-endpoint"] == ENGINE
        assert (await stream.status())[0] == 0
        assert port.asked[0].body == body
        assert port.server.stats.held == 0


async def test_a_large_body_there_and_back(
    connect: Connect, tls: Certificates | None, authority: Path | None
) -> None:
    """FULL_DUPLEX_STREAMED: five megabytes in chunks come back in chunks, past every flow-control window."""
    body = bytes(range(256)) * 20_000
    async with opened(tls) as port, connect(port.target, authority) as client:
        stream = await client.open(PROCESS_METHOD)
        await stream.send(messages.request_headers(messages.config(pb.FULL_DUPLEX_STREAMED)))
        for at in range(0, len(body), 60_000):
            await stream.send(messages.request_body(body[at : at + 60_000], end=at + 60_000 >= len(body)))
        echoed = b""
        while (message := await stream.read()) is not None:
            answer = pb.ProcessingResponse.FromString(message)
            echoed += answer.request_body.response.body_mutation.streamed_response.body
        assert echoed == body
        assert (await stream.status())[0] == 0
        assert port.asked[0].body == body


async def test_a_message_too_large(
    connect: Connect, tls: Certificates | None, authority: Path | None
) -> None:
    """Beyond --max-message-bytes a call ends with RESOURCE_EXHAUSTED, and the connection goes on."""
    async with opened(tls) as port, connect(port.target, authority) as client:
        stream = await client.open(PROCESS_METHOD)
        await stream.send(messages.request_headers(messages.config(pb.BUFFERED)))
        assert await stream.read() is not None
        await stream.send(messages.request_body(bytes(34 << 20)))
        code, text = await stream.status()
        assert (code, "over" in text) == (8, True)
        assert await picked(await client.open(PROCESS_METHOD)) == ENGINE


async def test_many_streams_at_once(
    connect: Connect, tls: Certificates | None, authority: Path | None
) -> None:
    """Five hundred requests wait together and are all answered."""
    async with opened(tls) as port, connect(port.target, authority) as client:
        port.defers = True
        asking = [asyncio.ensure_future(picked(await client.open(PROCESS_METHOD))) for _ in range(500)]
        await port.until(lambda: len(port.waiting) == 500)
        assert port.server.stats.load().streams == 500
        port.decide()
        assert await asyncio.gather(*asking) == [ENGINE] * 500


async def test_a_cancelled_call(connect: Connect, tls: Certificates | None, authority: Path | None) -> None:
    """A request that is given up while it waits stops waiting at once; its neighbours do not."""
    async with opened(tls) as port, connect(port.target, authority) as client:
        port.defers = True
        one, other = await client.open(PROCESS_METHOD), await client.open(PROCESS_METHOD)
        for stream in (one, other):
            await stream.send(BODILESS)
        await port.until(lambda: len(port.waiting) == 2)
        await one.cancel()
        await port.until(lambda: sum(future.cancelled() for future in port.waiting) == 1)
        port.decide()
        assert await other.read() is not None
        assert (await one.status())[0] == 1
        assert (await other.status())[0] == 0


async def test_an_access_log(connect: Connect, tls: Certificates | None, authority: Path | None) -> None:
    """Entries arrive while the stream is open, and it ends well when the gateway ends it."""
    request = HTTPRequestProperties(request_id="r", request_headers={"x-session-id": "s"})
    entry = HTTPAccessLogEntry(request=request).SerializeToString()
    logs = StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry] * 100)
    message = StreamAccessLogsMessage(http_logs=logs).SerializeToString()
    async with opened(tls) as port, connect(port.target, authority) as client:
        stream = await client.open(ACCESS_LOG_METHOD)
        for count in (1, 2, 3):
            await stream.send(message)
            await port.until(lambda count=count: len(port.ended) == 100 * count)  # type: ignore[misc]
        await stream.done()
        assert await stream.read() == b""
        assert await stream.read() is None
        assert await stream.status() == (0, "")
        assert {entry.session for entry in port.ended} == {"s"}


async def test_a_drain(connect: Connect, tls: Certificates | None, authority: Path | None) -> None:
    """GOAWAY: what waits is answered, what comes later is served on a new connection, then all is over."""
    async with opened(tls) as port, connect(port.target, authority) as client:
        port.defers = True
        waiting = await client.open(PROCESS_METHOD)
        await waiting.send(BODILESS)
        await port.until(lambda: port.waiting)
        drained = asyncio.ensure_future(port.server.drain(15))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(picked(await client.open(PROCESS_METHOD)))
        await port.until(lambda: len(port.waiting) == 2)
        port.decide()
        assert await waiting.read() is not None
        assert (await waiting.status())[0] == 0
        assert await late == ENGINE
        await asyncio.wait_for(drained, 20)
        refused = await client.open(PROCESS_METHOD)
        assert (await refused.status())[0] == 14


async def test_a_quiet_client_is_kept(
    connect: Connect, tls: Certificates | None, authority: Path | None
) -> None:
    """Our PING is answered by gRPC's clients, so a quiet connection outlives any number of them."""
    limits = {"keepalive_seconds": 0.2, "keepalive_timeout_seconds": 5.0, "sweep_seconds": 0.05}
    async with opened(tls, **limits) as port, connect(port.target, authority) as client:
        watch = await client.watch("")
        assert await watch.next() == "SERVING"
        (link,) = port.server.transports
        asked = 0
        async with asyncio.timeout(20):
            while asked < 3:
                before = link._active_at
                while link._active_at == before:
                    await asyncio.sleep(0.02)
                asked += 1
        port.health.set(False)
        assert await watch.next() == "NOT_SERVING"


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_384, 65_535, 65_536, 1 << 20])
async def test_messages_around_every_limit(
    connect: Connect, tls: Certificates | None, authority: Path | None, size: int
) -> None:
    """Bodies around the sizes of frames and windows arrive as they were sent."""
    async with opened(tls) as port, connect(port.target, authority) as client:
        stream = await client.open(PROCESS_METHOD)
        await stream.send(messages.request_headers(messages.config(pb.BUFFERED)))
        assert await stream.read() is not None
        await stream.send(messages.request_body(b"x" * size))
        assert await stream.read() is not None
        assert port.asked[0].body == b"x" * size
