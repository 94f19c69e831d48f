"""The fast server on real sockets: gRPC's own client against it, drain."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from tests.epp.http2.h2 import ECHO, RECORD
from tests.epp.http2.served import (
    EOF,
    channel,
    grpc_channel,
    on_both_loops,
    serving,
)

from kvist_epp.names import HEALTH_WATCH_METHOD

# -- gRPC's own client


@on_both_loops
async def test_grpc_unary_call() -> None:
    """A unary call of gRPC's own client gets its answer."""
    async with serving() as bench, channel(bench) as client:
        assert await client.unary_unary(ECHO)(b"hello") == b"hello"


@on_both_loops
async def test_grpc_stream_of_messages_both_ways() -> None:
    """Messages of a stream go to and fro one by one, of sizes around every limit of frames and prefixes."""
    sizes = [0, 1, 5, 16_379, 16_380, 16_384, 65_530, 65_536, 1_000_000]
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(ECHO)()
        for size in sizes:
            await call.write(bytes(size))
            assert len(await call.read()) == size
        await call.done_writing()
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK


@on_both_loops
async def test_grpc_large_messages_both_ways() -> None:
    """Five megabytes arrive and return whole, past every flow-control window."""
    content = bytes(range(256)) * 20_000
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(ECHO)()
        for _ in range(2):
            await call.write(content)
        await call.done_writing()
        assert [await call.read() for _ in range(2)] == [content, content]


@on_both_loops
async def test_grpc_many_calls_at_once() -> None:
    """Five hundred calls on one connection each get their own answer."""
    async with serving() as bench, channel(bench) as client:
        echo = client.unary_unary(ECHO)
        texts = [b"%d" % number * (number % 700) for number in range(500)]
        assert await asyncio.gather(*(echo(text) for text in texts)) == texts


@on_both_loops
async def test_grpc_status_and_message() -> None:
    """An error status and its message reach the client, also from a method that does not exist."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await bench.until(lambda: bench.calls)
        bench.calls[0].sink.close(8, "zu viel: 100%")
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == "zu viel: 100%"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.unary_unary("/no.Such/Thing")(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


@on_both_loops
async def test_grpc_early_end() -> None:
    """A call that ends before its client does still delivers its answer and status."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await call.write(b"first")
        await bench.until(lambda: bench.calls and bench.calls[0].events)
        bench.calls[0].sink.send(b"answer")
        bench.calls[0].sink.close()
        assert await call.read() == b"answer"
        assert await call.code() is grpc.StatusCode.OK


@on_both_loops
async def test_grpc_cancel_reaches_the_call() -> None:
    """A client's cancellation reaches the call."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await call.write(b"first")
        await bench.until(lambda: bench.calls and bench.calls[0].events)
        call.cancel()
        await bench.until(lambda: bench.calls[0].events == [b"first", "cancelled"])


# -- drain


@on_both_loops
async def test_drain_lets_running_calls_end() -> None:
    """A call that runs when the drain begins is answered, its client gets GOAWAY, the port is closed."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await call.write(b"ask")
        await bench.until(lambda: bench.calls and bench.calls[0].events)
        drained = asyncio.ensure_future(bench.server.drain(10))
        await asyncio.sleep(0)
        assert not drained.done()
        bench.calls[0].sink.send(b"answer")
        bench.calls[0].sink.close()
        assert await call.read() == b"answer"
        await asyncio.wait_for(drained, 5)
        with pytest.raises(OSError, match=r"refused|Connect"):
            await asyncio.open_connection("127.0.0.1", bench.server.port)


@on_both_loops
async def test_a_latecomer_is_served_and_sent_away() -> None:
    """A gateway that connects in the middle of a drain, as its health checks do each second, is answered and
    sent away before the next sweep, and the drain ends."""
    async with serving(sweep_seconds=3600) as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await bench.until(lambda: bench.calls)
        drained = asyncio.ensure_future(bench.server.drain(60))
        async with channel(bench) as latecomer:
            assert await latecomer.unary_unary(ECHO)(b"am I late?") == b"am I late?"
            bench.calls[0].sink.close()
            assert await call.code() is grpc.StatusCode.OK
            await asyncio.wait_for(drained, 5)


@on_both_loops
async def test_a_silent_connection_does_not_hold_up_a_drain() -> None:
    """A connection that never introduced itself is cut off soon after the drain has begun."""
    async with serving(linger_seconds=0.1) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.server.port)
        drained = asyncio.ensure_future(bench.server.drain(60))
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)
        await asyncio.wait_for(drained, 10)
        writer.close()


@on_both_loops
async def test_drain_ends_at_its_grace() -> None:
    """A call that does not end is cancelled when the grace is over."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await call.write(b"ask")
        await bench.until(lambda: bench.calls and bench.calls[0].events)
        await bench.server.drain(0.05)
        assert bench.calls[0].events == [b"ask", "cancelled"]
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


@on_both_loops
async def test_drain_does_not_wait_for_watchers() -> None:
    """A health watch, which never ends by itself, does not hold up a drain."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(HEALTH_WATCH_METHOD)()
        await call.write(b"")
        await bench.until(lambda: bench.calls and bench.calls[0].events)
        await asyncio.wait_for(bench.server.drain(60), 10)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


@on_both_loops
async def test_no_call_is_lost_in_a_drain() -> None:
    """Calls that race with the drain are served, or refused so that the client may retry."""
    async with serving() as first, serving() as second:
        target = f"ipv4:127.0.0.1:{first.server.port},127.0.0.1:{second.server.port}"
        async with grpc_channel(target) as client:
            echo: Any = client.unary_unary(ECHO, None, None)
            assert await echo(b"warm") == b"warm"

            async def ask(number: int) -> bytes:
                answer: bytes = await echo(b"%d" % number, wait_for_ready=True)
                return answer

            calls = []
            for number in range(200):
                calls.append(asyncio.ensure_future(ask(number)))
                if number == 100:
                    drained = asyncio.ensure_future(first.server.drain(10))
                await asyncio.sleep(0)  # let it begin
            assert await asyncio.gather(*calls) == [b"%d" % number for number in range(200)]
            await asyncio.wait_for(drained, 10)


@on_both_loops
async def test_close_is_idempotent() -> None:
    """Closing twice, or after a drain, is no error."""
    async with serving() as bench:
        await bench.server.drain(0)
        await bench.server.close()
