"""The other gRPC methods, and messages that are no messages, on both servers."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tests.data_plane.stub import StubPicker, Transport

from kvist_epp.extproc.pb.accesslog_pb2 import StreamAccessLogsMessage
from kvist_epp.http2.call import ENVOY_HEADER, Server
from kvist_epp.http2.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse
from kvist_epp.names import (
    ACCESS_LOG_METHOD,
    HEALTH_CHECK_METHOD,
    HEALTH_LIST_METHOD,
    HEALTH_WATCH_METHOD,
    LIVENESS,
    PROCESS_METHOD,
    READINESS,
)

Channel = Any  # grpc.aio.Channel, whose stubs ask for arguments that have defaults
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.fixture
def picker() -> StubPicker:
    """Return the picker behind the server."""
    return StubPicker()


@pytest.fixture
async def server(picker: StubPicker, transport: Transport) -> AsyncIterator[Server]:
    """Serve the picker on a port."""
    running = await picker.serve(transport)
    yield running
    await running.close()


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[Channel]:
    """A client's channel to it."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened


async def _status(channel: Channel, service: str) -> int:
    request = HealthCheckRequest(service=service).SerializeToString()
    return HealthCheckResponse.FromString(await channel.unary_unary(HEALTH_CHECK_METHOD)(request)).status


@pytest.mark.parametrize("service", READINESS)
async def test_readiness_names_follow_readiness(picker: StubPicker, channel: Channel, service: str) -> None:
    """Every readiness name turns NOT_SERVING when the picker is no longer ready."""
    assert await _status(channel, service) == SERVING
    picker.health.set(False)
    assert await _status(channel, service) == NOT_SERVING


async def test_liveness_always_serves(picker: StubPicker, channel: Channel) -> None:
    """Liveness does not depend on readiness."""
    picker.health.set(False)
    assert await _status(channel, LIVENESS) == SERVING


async def test_unknown_names_are_not_found(channel: Channel) -> None:
    """A health check for an unknown service answers NOT_FOUND."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _status(channel, "nobody")

    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_watch_reports_every_change(picker: StubPicker, channel: Channel) -> None:
    """A watch begins with the present state and follows it, until its client leaves."""
    watch = channel.unary_stream(HEALTH_WATCH_METHOD)(b"")
    seen = [HealthCheckResponse.FromString(await watch.read()).status]
    for ready in (False, True):
        picker.health.set(ready)
        seen.append(HealthCheckResponse.FromString(await watch.read()).status)
    watch.cancel()

    assert seen == [SERVING, NOT_SERVING, SERVING]


async def test_list_has_all_names(channel: Channel) -> None:
    """A list answers all five names at once."""
    answer = HealthListResponse.FromString(await channel.unary_unary(HEALTH_LIST_METHOD)(b""))

    assert {name: found.status for name, found in answer.statuses.items()} == dict.fromkeys(
        (LIVENESS, *READINESS), SERVING
    )


@pytest.mark.parametrize("method", [PROCESS_METHOD, HEALTH_CHECK_METHOD, HEALTH_WATCH_METHOD])
async def test_undecodable_messages_are_refused(channel: Channel, method: str) -> None:
    """Bytes that are no protobuf end their call with INVALID_ARGUMENT, and the next call works."""
    call = channel.stream_stream(method)()
    await call.write(b"\xff\xff\xff")

    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert await _status(channel, LIVENESS) == SERVING


async def test_garbage_in_the_access_log_is_counted_and_skipped(picker: StubPicker, channel: Channel) -> None:
    """An access-log stream survives messages and entries that are not protobuf, and the valid ones are
    reported."""
    logs = StreamAccessLogsMessage.HTTPAccessLogEntries
    good = StreamAccessLogsMessage(http_logs=logs(log_entry=[b"\xff", b"\x22\x04\x0a\x02\x08\x07"]))
    call = channel.stream_unary(ACCESS_LOG_METHOD)()
    await call.write(b"\xff\xff\xff")
    await call.write(good.SerializeToString())
    await call.done_writing()
    await call

    assert [entry.status for entry in picker.ended] == [7]
    assert picker.protocol_errors == ["access-log-message", "access-log-entry"]


async def test_a_half_closed_stream_still_gets_its_pick(picker: StubPicker, channel: Channel) -> None:
    """A client that sends all and ends its side is answered, then the stream ends well."""
    picker.picks("10.0.0.1:80")
    call = channel.stream_stream(PROCESS_METHOD)(metadata=((ENVOY_HEADER, "true"),))
    await call.write(b"\x12\x02\x18\x01")
    await call.done_writing()
    answers = [answer async for answer in call]

    assert len(answers) == 1
    assert b"10.0.0.1:80" in answers[0]
    assert await call.code() == grpc.StatusCode.OK


async def test_unknown_methods_are_unimplemented(channel: Channel) -> None:
    """A method that is not in the table answers UNIMPLEMENTED."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/a.Service/Method")(b"")

    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
