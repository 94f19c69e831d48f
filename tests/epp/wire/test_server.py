"""The fast server on real sockets: gRPC's own client against it, slow readers, lost connections, drain."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import uvloop
from tests.epp.wire.h2 import ECHO, RECORD, Echo, Recorder, frame, grpc_fields

from kvist_epp.names import HEALTH_WATCH_METHOD
from kvist_epp.wire import frames as f
from kvist_epp.wire.call import Method, Sink
from kvist_epp.wire.limits import Limits
from kvist_epp.wire.server import serve_fast

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # absent from the stubs
LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Waiting(Recorder):
    """A recorder that can be waited for."""

    def __init__(self, sink: Sink, changed: asyncio.Event) -> None:
        super().__init__(sink)
        self._changed = changed

    def message(self, data: bytes) -> None:
        super().message(data)
        self._changed.set()

    def half_closed(self) -> None:
        super().half_closed()
        self._changed.set()

    def cancelled(self) -> None:
        super().cancelled()
        self._changed.set()


class Bench:
    """A running server and the calls it got on ``RECORD`` and the health watch."""

    def __init__(self) -> None:
        self.calls: list[Waiting] = []
        self.server: Any
        self._changed = asyncio.Event()

    def record(self, sink: Sink) -> Waiting:
        """The method behind ``RECORD``."""
        self.calls.append(Waiting(sink, self._changed))
        self._changed.set()
        return self.calls[-1]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something that happened to a call makes the condition true."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Bench]:
    """A server on a free port."""
    bench = Bench()
    limits.setdefault("sweep_seconds", 0.05)
    methods: dict[str, Method] = {ECHO: Echo, RECORD: bench.record, HEALTH_WATCH_METHOD: bench.record}
    bench.server = await serve_fast(methods, "127.0.0.1", 0, Limits(**limits))
    try:
        yield bench
    finally:
        await bench.server.close()


@asynccontextmanager
async def channel(bench: Bench) -> AsyncIterator[Any]:
    """gRPC's own client."""
    target = f"127.0.0.1:{bench.server.port}"
    async with grpc.aio.insecure_channel(target, options=LARGE) as opened:
        yield opened


@asynccontextmanager
async def raw(bench: Bench) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection that has sent its preface."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.server.port)
    writer.write(f.PREFACE + f.settings({}))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def opening(stream: int, path: str) -> bytes:
    """HEADERS of a gRPC call, without any HPACK state."""
    block = b"".join(f.literal(name.encode(), value.encode()) for name, value in grpc_fields(path))
    return frame(f.HEADERS, f.END_HEADERS, stream, block)


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """Run an asynchronous test on asyncio's loop and on uvloop's."""

    def run(loop: str) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(test())

    run.__doc__ = test.__doc__
    return pytest.mark.parametrize("loop", LOOPS)(run)


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
    """A client that cancels is heard."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await call.write(b"first")
        await bench.until(lambda: bench.calls and bench.calls[0].events)
        call.cancel()
        await bench.until(lambda: bench.calls[0].events == [b"first", "cancelled"])


# -- connections


@on_both_loops
async def test_a_lost_connection_cancels_its_calls() -> None:
    """When the socket goes, every call on it is cancelled and the server forgets the connection."""
    async with serving() as bench:
        async with raw(bench) as (_, writer):
            writer.write(opening(1, RECORD) + opening(3, RECORD))
            await bench.until(lambda: len(bench.calls) == 2)
            writer.transport.abort()
        await bench.until(lambda: all(call.events == ["cancelled"] for call in bench.calls))
        assert await _gone(bench)


@on_both_loops
async def test_a_broken_rule_gets_goaway_then_the_end() -> None:
    """The client reads why it is cut off, then end of file."""
    async with serving() as bench, raw(bench) as (reader, writer):
        writer.write(frame(f.PUSH_PROMISE, 0, 1))
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.endswith(b"clients do not push")


@on_both_loops
async def test_an_http1_request_is_turned_away() -> None:
    """Whoever does not speak HTTP/2 is disconnected at once."""
    async with serving() as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"not an HTTP/2 client")
        writer.close()


@on_both_loops
async def test_connections_are_bounded() -> None:
    """One connection too many is closed at once; the others go on."""
    async with serving(connections=1) as bench, raw(bench) as (first, _):
        assert await first.readexactly(9)
        async with raw(bench) as (second, _):
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(second.read(), 10) == b""


@on_both_loops
async def test_a_slow_reader_is_bounded() -> None:
    """A client that does not read fills its socket, then its limits, and its calls end."""
    async with serving(connection_send_bytes=2_000_000) as bench, raw(bench) as (reader, writer):
        _shrink(writer)
        reader._limit = 1  # type: ignore[attr-defined]  # so that it stops reading the socket
        windows = f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 30})
        writer.write(windows + f.window_update(f.CONNECTION, 1 << 30) + opening(1, RECORD))
        await bench.until(lambda: bench.calls)
        call = bench.calls[0]
        for _ in range(1000):
            call.sink.send(bytes(100_000))
            await asyncio.sleep(0)
            if call.events:
                break
        assert call.events == ["cancelled"]


@on_both_loops
async def test_a_stalled_reader_is_cut_off() -> None:
    """A client that leaves its socket full for too long loses the connection."""
    async with serving(stall_seconds=0.2) as bench, raw(bench) as (reader, writer):
        reader._limit = 1  # type: ignore[attr-defined]  # so that it stops reading the socket
        windows = f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 30})
        writer.write(windows + f.window_update(f.CONNECTION, 1 << 30) + opening(1, RECORD))
        await bench.until(lambda: bench.calls)
        bench.calls[0].sink.send(bytes(20_000_000))
        await bench.until(lambda: bench.calls[0].events == ["cancelled"])


@on_both_loops
async def test_a_silent_client_is_cut_off() -> None:
    """A connection that never introduces itself is closed."""
    async with serving(handshake_seconds=0.1) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.server.port)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)
        assert await _gone(bench)
        writer.close()


@on_both_loops
async def test_an_idle_connection_is_told_to_go() -> None:
    """A connection without calls that says nothing for long gets GOAWAY, and is closed when it agrees."""
    async with serving(idle_seconds=0.1, linger_seconds=0.1) as bench, raw(bench) as (reader, writer):
        async with asyncio.timeout(10):
            await reader.readuntil(f.goaway(f.LARGEST_STREAM, f.NO_ERROR))
            ping = await reader.readexactly(17)
            writer.write(frame(f.PING, f.ACK, 0, ping[9:]))
            assert (await reader.read()).endswith(f.goaway(0, f.NO_ERROR))
            assert await _gone(bench)


@on_both_loops
async def test_a_client_that_ignores_goaway_is_cut_off() -> None:
    """Whether it is told to go for idleness or for an error, a client that stays is disconnected."""
    limits = {"idle_seconds": 0.1, "stall_seconds": 0.1, "linger_seconds": 0.1}
    async with serving(**limits) as bench, raw(bench), raw(bench) as (_, wrong):
        wrong.write(frame(f.PUSH_PROMISE, 0, 1))
        assert await _gone(bench)


# -- drain


@on_both_loops
async def test_drain_lets_running_calls_end() -> None:
    """A call that runs when the drain begins is answered, its client told to go, the port closed."""
    async with serving() as bench, channel(bench) as client:
        call = client.stream_stream(RECORD)()
        await call.write(b"ask")
        await bench.until(lambda: bench.calls and bench.calls[0].events)
        drained = asyncio.ensure_future(bench.server.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(OSError, match=r"refused|Connect"):
            await asyncio.open_connection("127.0.0.1", bench.server.port)
        assert not drained.done()
        bench.calls[0].sink.send(b"answer")
        bench.calls[0].sink.close()
        assert await call.read() == b"answer"
        await asyncio.wait_for(drained, 5)


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
        async with grpc.aio.insecure_channel(target) as client:
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


def _shrink(writer: asyncio.StreamWriter) -> None:
    """A small receive buffer, so that little is enough to fill the socket."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


async def _gone(bench: Bench) -> bool:
    """Whether the server comes to forget every connection."""
    await asyncio.wait_for(bench.server.gone(), 10)
    return repr(bench.server).endswith(" 0 connections>")
