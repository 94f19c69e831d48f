"""Tests of the relays: they lose, reorder and interrupt exactly as requested."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvist_sim.ports import free_ports
from kvist_sim.relays import EventRelay, MessageFaults, TcpRelay

SECONDS = 10


@given(st.integers(0, 200), st.floats(0, 1), st.floats(0, 1), st.integers(0, 20), st.integers())
def test_faults_drop_the_given_share_and_duplicate_nothing(
    count: int, drop: float, swap: float, burst: int, seed: int
) -> None:
    """The output is the input without the dropped messages; after the end, all pass in order."""
    faults = MessageFaults(seed)
    faults.begin(drop=drop, swap=swap, burst=burst)
    out = [message for n in range(count) for message in faults.through([b"%d" % n])]
    faults.end()
    after = [message for n in range(count, count + 3) for message in faults.through([b"%d" % n])]
    numbers = [int(message[0]) for message in (*out, *after)]

    assert len(numbers) == len(set(numbers)) == count + 3 - faults.dropped
    assert faults.dropped >= min(burst, count)
    assert numbers[-2:] == [count + 1, count + 2]
    assert sum(before > now for before, now in itertools.pairwise(numbers)) <= faults.swapped


def test_without_orders_everything_passes() -> None:
    """A relay without faults passes every message unchanged."""
    faults = MessageFaults()

    assert [faults.through([b"a"]), faults.through([b"b"])] == [[[b"a"]], [[b"b"]]]


async def test_events_pass_the_relay_and_are_dropped_on_demand() -> None:
    """From an engine's PUB to a picker's SUB; a burst is lost, the next one arrives."""
    engine_port, port = free_ports(2)
    with zmq.Context() as context, context.socket(zmq.XPUB) as engine, context.socket(zmq.SUB) as picker:
        for socket in (engine, picker):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, SECONDS * 1000)
        picker.setsockopt(zmq.SUBSCRIBE, b"")
        engine.bind(f"tcp://127.0.0.1:{engine_port}")
        async with EventRelay(engine_port, port) as relay:
            picker.connect(f"tcp://127.0.0.1:{port}")
            await asyncio.to_thread(engine.recv)  # the relay has subscribed
            first = await _until_heard(engine, picker)
            relay.faults.begin(drop=0.0, swap=0.0, burst=2)
            for number in range(3):
                engine.send_multipart([b"", b"late", b"%d" % number])
            got = await asyncio.to_thread(picker.recv_multipart)
            while got[1] == b"first":  # those that were under way
                got = await asyncio.to_thread(picker.recv_multipart)

    assert first[1] == b"first"
    assert got == [b"", b"late", b"2"]
    assert relay.faults.dropped == 2


async def _until_heard(engine: zmq.Socket[bytes], picker: zmq.Socket[bytes]) -> list[bytes]:
    """Send until a message arrives, because a subscription takes a moment to be in force."""
    for _ in range(1000):
        engine.send_multipart([b"", b"first", b""])
        if await asyncio.to_thread(picker.poll, 10):
            return picker.recv_multipart()
    raise AssertionError("nothing passes the relay")


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that sends everything back; its port."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*serving, return_exceptions=True)


async def test_a_parted_link_passes_nothing_and_heals_without_loss() -> None:
    """The connection stays, and its bytes arrive later, as with packets that are dropped and sent again."""
    async with echo() as port, TcpRelay(port) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"before")
        assert await asyncio.wait_for(reader.readexactly(6), SECONDS) == b"before"

        relay.part()
        writer.write(b"during")
        late = await asyncio.open_connection("127.0.0.1", relay.port)
        late[1].write(b"new")
        waiting = [asyncio.create_task(one.readexactly(n)) for one, n in ((reader, 6), (late[0], 3))]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done

        relay.heal()
        answers = await asyncio.wait_for(asyncio.gather(*waiting), SECONDS)
        for end in (writer, late[1]):
            end.close()
            await end.wait_closed()

    assert answers == [b"during", b"new"]
    assert relay.connections == 2


async def test_a_connection_without_a_server_closes() -> None:
    """Without the other side the connection ends, as it would without a relay."""
    (port,) = free_ports(1)
    async with TcpRelay(port) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        try:
            ended = await asyncio.wait_for(reader.read(1), SECONDS)
        except ConnectionResetError:
            ended = b""
        writer.close()

    assert ended == b""
