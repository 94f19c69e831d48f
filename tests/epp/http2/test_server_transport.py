"""Connections on real sockets: broken rules, slow readers, silence, loss; what a peer may keep busy."""

import asyncio
import contextlib
import socket

from tests.epp.http2.h2 import RECORD, frame
from tests.epp.http2.served import Bench, connect, gone, on_both_loops, opening, raw, serving

from kvist_epp.http2 import frames as f


@on_both_loops
async def test_a_lost_connection_cancels_its_calls() -> None:
    """A lost socket cancels every call on it, and the server forgets the connection."""
    async with serving() as bench:
        async with raw(bench) as (_, writer):
            writer.write(opening(1, RECORD) + opening(3, RECORD))
            await bench.until(lambda: len(bench.calls) == 2)
            writer.transport.abort()
        await bench.until(lambda: all(call.events == ["cancelled"] for call in bench.calls))
        assert await gone(bench)


@on_both_loops
async def test_a_broken_rule_gets_goaway_then_the_end() -> None:
    """The client reads why it is cut off, then end of file."""
    async with serving() as bench, raw(bench) as (reader, writer):
        writer.write(frame(f.PUSH_PROMISE, 0, 1))
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.endswith(b"a client must not send PUSH_PROMISE")


@on_both_loops
async def test_an_http1_request_is_turned_away() -> None:
    """A client that does not speak HTTP/2 is disconnected at once."""
    async with serving() as bench:
        reader, writer = await connect(bench)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"the client does not speak HTTP/2")
        writer.close()


@on_both_loops
async def test_connections_are_bounded() -> None:
    """One connection too many is closed at once; the others go on."""
    async with serving(connections=1) as bench, raw(bench) as (first, _):
        assert await first.readexactly(9)
        with contextlib.suppress(ConnectionError):
            async with raw(bench) as (second, _):
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
        assert await gone(bench)
        writer.close()


@on_both_loops
async def test_an_idle_connection_gets_goaway() -> None:
    """A connection without calls that says nothing for long gets GOAWAY, and is closed when it agrees."""
    async with serving(idle_seconds=0.1, linger_seconds=0.1) as bench, raw(bench) as (reader, writer):
        async with asyncio.timeout(10):
            await reader.readuntil(f.goaway(f.LARGEST_STREAM, f.NO_ERROR))
            ping = await reader.readexactly(17)
            writer.write(frame(f.PING, f.ACK, 0, ping[9:]))
            assert (await reader.read()).endswith(f.goaway(0, f.NO_ERROR))
            assert await gone(bench)


@on_both_loops
async def test_a_client_that_ignores_goaway_is_cut_off() -> None:
    """A client that stays after GOAWAY, for idleness or for an error, is disconnected."""
    limits = {"idle_seconds": 0.1, "stall_seconds": 0.1, "linger_seconds": 0.1}
    async with serving(**limits) as bench, raw(bench), raw(bench) as (_, wrong):
        wrong.write(frame(f.PUSH_PROMISE, 0, 1))
        assert await gone(bench)


def _shrink(writer: asyncio.StreamWriter) -> None:
    """A small receive buffer, so that little is enough to fill the socket."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


# -- silence


@on_both_loops
async def test_a_silent_connection_gets_a_ping_and_stays_open_when_it_answers() -> None:
    """A connection without a byte for a while gets a PING; its answer keeps the connection open, however
    often."""
    limits = {"keepalive_seconds": 0.1, "keepalive_timeout_seconds": 5}
    async with serving(**limits) as bench, raw(bench) as (reader, writer):
        writer.write(opening(1, RECORD))
        for _ in range(3):
            head = await asyncio.wait_for(reader.readuntil(b"kvist up"), 10)
            assert head[-17:-8] == frame(f.PING, 0, 0, bytes(8))[:9]
            writer.write(frame(f.PING, f.ACK, 0, b"kvist up"))
        assert ended(bench) == {}


@on_both_loops
async def test_an_unresponsive_connection_is_closed() -> None:
    """The half-open connection of a vanished host is cut, and its calls are cancelled."""
    limits = {"keepalive_seconds": 0.1, "keepalive_timeout_seconds": 0.2}
    async with serving(**limits) as bench, raw(bench) as (_, writer):
        writer.write(opening(1, RECORD))
        await bench.until(lambda: bench.calls and bench.calls[0].events == ["cancelled"])
        assert await gone(bench)
        assert ended(bench) == {"keepalive": 1}


@on_both_loops
async def test_an_idle_connection_is_idle_though_it_answers() -> None:
    """PING keeps a connection alive and does not make it busy."""
    limits = {"keepalive_seconds": 0.05, "idle_seconds": 0.3, "stall_seconds": 0.2}
    async with serving(**limits) as bench, raw(bench) as (reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            async with asyncio.timeout(10):
                while await reader.readuntil(b"kvist up"):
                    writer.write(frame(f.PING, f.ACK, 0, b"kvist up"))
        assert await gone(bench)
        assert ended(bench) == {"idle": 1}


@on_both_loops
async def test_an_introduction_byte_by_byte_takes_too_long() -> None:
    """A client that sends its preface byte by byte is cut off in time, however busy it seems."""
    async with serving(handshake_seconds=0.3) as bench:
        reader, writer = await connect(bench)
        left = asyncio.ensure_future(reader.read())
        for byte in f.PREFACE + bytes(100):
            writer.write(bytes((byte,)))
            await asyncio.wait((left,), timeout=0.05)
            if left.done():
                break
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(left, 10)
        assert await gone(bench)
        assert ended(bench) == {"handshake": 1}
        writer.transport.abort()


@on_both_loops
async def test_a_stalled_message_is_given_up() -> None:
    """Half a message and then nothing: the call ends, the connection goes on."""
    async with serving(stall_seconds=0.2) as bench, raw(bench) as (_, writer):
        writer.write(opening(1, RECORD) + frame(f.DATA, 0, 1, b"\0\0\0\1\0half"))
        await bench.until(lambda: bench.calls and bench.calls[0].events == ["cancelled"])
        writer.write(opening(3, RECORD))
        await bench.until(lambda: len(bench.calls) == 2)
        assert bench.server.stats.streams_ended["stalled-receiving"] == 1


# -- crowds


@on_both_loops
async def test_a_new_connection_replaces_the_idlest() -> None:
    """A new connection to a full port replaces the one longest without a call, never a busy one."""
    async with (
        serving(connections=2, handshake_seconds=0.2) as bench,
        raw(bench) as (idle, _),
        raw(bench) as (_, busy),
    ):
        busy.write(opening(1, RECORD))
        await bench.until(lambda: bench.calls)
        assert await idle.readexactly(9)
        await until_idle(bench, 0.2)
        async with raw(bench) as (_, newcomer):
            newcomer.write(opening(1, RECORD))
            await bench.until(lambda: len(bench.calls) == 2)
            await cut_off(idle)
            with contextlib.suppress(ConnectionError):  # over TLS already while connecting
                async with raw(bench) as (one_more, _):
                    await cut_off(one_more)
        assert bench.calls[0].events == []
        assert ended(bench) == {"idle": 1, "too-many": 1}


@on_both_loops
async def test_a_full_socket_counts_as_held() -> None:
    """Answers behind a socket that takes nothing count for the port, and are dropped with it."""
    async with serving(stall_seconds=60) as bench, raw(bench) as (reader, writer):
        _shrink(writer)
        reader._limit = 1  # type: ignore[attr-defined]  # so that it stops reading the socket
        windows = f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 30})
        writer.write(windows + f.window_update(f.CONNECTION, 1 << 30) + opening(1, RECORD))
        await bench.until(lambda: bench.calls)
        bench.calls[0].sink.send(bytes(20_000_000))
        await asyncio.sleep(0)
        load = bench.server.stats.load()
        assert (load.connections, load.streams) == (1, 1)
        assert load.unsent_bytes > 10_000_000
        assert bench.server.stats.held == load.receiving_bytes + load.unsent_bytes
        writer.transport.abort()
        assert await gone(bench)
        assert bench.server.stats.held == 0


def ended(bench: Bench) -> dict[str, int]:
    """Why connections were ended, so far."""
    return {reason: count for reason, count in bench.server.stats.connections_ended.items() if count}


async def cut_off(reader: asyncio.StreamReader) -> None:
    """Wait until the server has ended it."""
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)


async def until_idle(bench: Bench, seconds: float) -> None:
    """Wait until some connection has been without a call for so long."""
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(10):
        while max(link.idle_for(clock()) for link in bench.server.transports) <= seconds:
            await asyncio.sleep(0.02)
