"""Copies and operations of the receive and send paths grow linearly with the bytes, not with the square.

No clock: bytes are counted where they are copied, and Python's operations where they are run.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from tests.epp.http2.h2 import RECORD, Client, data, frame, message

from kvist_epp.http2 import frame_reader, grpc_stream
from kvist_epp.http2 import frames as f


class Copied:
    """Counts the bytes that were copied."""

    def __init__(self) -> None:
        self.bytes = 0

    def count(self, made: Any) -> Any:
        """Count the bytes of a new object."""
        self.bytes += len(made)
        return made

    def kinds(self) -> tuple[type[bytes], type[bytearray]]:
        """``bytes`` and ``bytearray`` whose every copy counts: made of another, sliced, joined, extended."""
        meter = self

        class Bytes(bytes):
            def __new__(cls, *arguments: Any) -> "Bytes":
                made: Bytes = meter.count(super().__new__(cls, *arguments))
                return made

            def __getitem__(self, key: Any) -> Any:
                return Bytes(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

            def __add__(self, other: Any) -> "Bytes":
                return Bytes(bytes(self).__add__(other))

            def __radd__(self, other: Any) -> "Bytes":
                return Bytes(other + bytes(self))

        class Bytearray(bytearray):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                meter.bytes += len(self)

            def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # it has no __add__ of its own
                meter.bytes += len(other)
                return super().__iadd__(other)

            def __getitem__(self, key: Any) -> Any:
                found = super().__getitem__(key)
                return meter.count(found) if isinstance(key, slice) else found

        return Bytes, Bytearray


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Copied:
    """Counts what ``frame_reader`` and ``grpc_stream`` copy of chunks made by ``metered``."""
    meter = Copied()
    kinds = meter.kinds()
    for module in (frame_reader, grpc_stream):
        for name, kind in zip(("bytes", "bytearray"), kinds, strict=True):
            monkeypatch.setattr(module, name, kind, raising=False)
    return meter


def metered(chunk: bytes) -> bytes:
    """A chunk whose copies count; not itself."""
    made: bytes = frame_reader.bytes(chunk)  # type: ignore[attr-defined]  # put there by the fixture
    return made


@contextmanager
def operations() -> Iterator[list[int]]:
    """Counts the byte codes of kvist_epp that run inside."""
    count = [0]

    def trace(now: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if event == "call":
            if "kvist_epp" not in now.f_code.co_filename:
                return None
            now.f_trace_opcodes, now.f_trace_lines = True, False
        elif event == "opcode":
            count[0] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def cut(stream: bytes, size: int) -> list[bytes]:
    """Pieces of so many bytes."""
    return [stream[at : at + size] for at in range(0, len(stream), size)]


FRAMES = {
    "large frames": lambda content: data(1, content),
    "frames of 100": lambda content: b"".join(frame(f.DATA, 0, 1, piece) for piece in cut(content, 100)),
    "frames of one": lambda content: b"".join(frame(f.DATA, 0, 1, piece) for piece in cut(content, 1)),
    "padded frames": lambda content: b"".join(
        frame(f.DATA, f.PADDED, 1, b"\x04" + piece + bytes(4)) for piece in cut(content, 1000)
    ),
}


@pytest.mark.parametrize("framed", FRAMES)
@pytest.mark.parametrize("read", [1, 7, 1460, 1 << 20])
def test_a_message_is_copied_a_few_times(copied: Copied, framed: str, read: int) -> None:
    """However it is framed and read: at most four copies of each byte; seven where padding is taken off."""
    content = bytes(range(256)) * 80
    sent = FRAMES[framed](message(content))
    client = Client()
    client.send(client.request(1, RECORD))
    chunks = [metered(piece) for piece in cut(sent, read)]
    copied.bytes = 0
    for chunk in chunks:
        client.connection.receive(chunk)
    assert client.calls[0].events == [content]
    assert 0 < copied.bytes <= (7 if framed == "padded frames" else 4) * len(sent)


def received(count: int, framed: str, read: int) -> int:
    """Operations to receive a message of ``count`` bytes."""
    client = Client()
    client.send(client.request(1, RECORD))
    chunks = cut(FRAMES[framed](message(bytes(count))), read)
    with operations() as done:
        for chunk in chunks:
            client.connection.receive(chunk)
    assert client.calls[0].events == [bytes(count)]
    return done[0]


@pytest.mark.parametrize(("framed", "read"), [("frames of one", 1 << 20), ("large frames", 1)])
def test_receiving_costs_what_is_received(framed: str, read: int) -> None:
    """Twice the bytes in pieces of one cost twice the operations."""
    assert received(4000, framed, read) < 2.2 * received(2000, framed, read)


def sent(count: int, streams: int, step: int) -> int:
    """Operations to send a message on each of ``streams`` streams; ``step`` opens the connection's window."""
    client = Client()
    opened = [client.request(number, RECORD) for number in range(1, 2 * streams, 2)]
    client.send(f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 1 << 24}), *opened)
    for call in client.calls:
        call.sink.send(bytes(f.DEFAULT_WINDOW + count))
    client.connection.outbox.take()
    update = f.window_update(f.CONNECTION, step)
    with operations() as done:
        for _ in range(0, streams * count, step):
            client.connection.receive(update)
            client.connection.outbox.take()
    return done[0]


def test_sending_window_by_window_costs_what_is_sent() -> None:
    """Twice the bytes through a window opened in small steps cost twice the operations."""
    assert sent(4000, 1, 10) < 2.2 * sent(2000, 1, 10)


def test_a_window_costs_the_same_with_many_streams_waiting() -> None:
    """Streams that wait for the connection's window cost nothing while it opens for others."""
    assert sent(20, 100, 10) < 2.2 * sent(20, 50, 10)


def ended(streams: int) -> int:
    """Operations to answer ``streams`` streams in a drain, the clients of which do not end them."""
    client = Client()
    client.send(*(client.request(number, RECORD) for number in range(1, 2 * streams, 2)))
    client.connection.drain()
    ping = client.answer()[-1]
    client.send(frame(f.PING, f.ACK, 0, ping.payload))
    with operations() as done:
        for call in client.calls:
            call.sink.close()
    return done[0]


def test_a_drain_costs_what_it_ends() -> None:
    """Each call that ends in a drain costs the same, however many are left."""
    assert ended(200) < 2.2 * ended(100)


def refused(streams: int) -> int:
    """Operations to refuse a hundred streams when so many are open."""
    client = Client(streams=streams)
    client.send(*(client.request(number, RECORD) for number in range(1, 2 * streams, 2)))
    more = [client.request(number, RECORD) for number in range(2 * streams + 1, 2 * streams + 201, 2)]
    with operations() as done:
        client.connection.receive(b"".join(more))
    assert client.connection.streams == streams
    return done[0]


def test_a_refusal_does_not_look_at_the_others() -> None:
    """To refuse a stream costs the same, however many are open."""
    assert refused(400) < 1.1 * refused(100)
