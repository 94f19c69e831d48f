"""An HTTP/2 client in bytes, for tests of the server connection: frames by hand, answers taken apart."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hpack import Decoder, Encoder

from kvist_epp.http2 import frames
from kvist_epp.http2.call import Method, Sink
from kvist_epp.http2.http2_connection import Http2Connection
from kvist_epp.http2.limits import Limits, PortStats
from kvist_epp.http2.stream_table import STREAM_BYTES

Fields = Sequence[tuple[str, str]]

ECHO = "/test.Echo/Both"
RECORD = "/test.Record/Both"
LASTING = "/test.Record/Forever"


class Frame(NamedTuple):
    """One frame of the server's answer."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error code of RST_STREAM or GOAWAY."""
        return int.from_bytes(
            self.payload[:4] if self.kind == frames.RST_STREAM else self.payload[4:8], "big"
        )

    @property
    def number(self) -> int:
        """The payload as one number: a window increment."""
        return int.from_bytes(self.payload, "big")


class Recorder:
    """A call that writes down what happens to it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.events: list[Any] = []

    def on_message(self, data: bytes) -> None:
        self.events.append(data)

    def on_half_closed(self) -> None:
        self.events.append("half closed")

    def on_cancelled(self) -> None:
        self.events.append("cancelled")


class Echo:
    """A call that sends back each message and ends when the client does."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def on_message(self, data: bytes) -> None:
        self._sink.send(data)

    def on_half_closed(self) -> None:
        self._sink.close()

    def on_cancelled(self) -> None:
        pass


class Client:
    """A connection under test and the client's half of it; ``now`` is its clock, in seconds."""

    def __init__(
        self,
        *,
        methods: dict[str, Method] | None = None,
        greet: bool = True,
        wake: Callable[[], None] = lambda: None,
        stats: PortStats | None = None,
        **limits: Any,
    ) -> None:
        bounds = Limits(**limits)
        self.stats = stats or PortStats(bounds.held_bytes)
        self.now = 0.0
        self.calls: list[Recorder] = []
        table: dict[str, Method] = {ECHO: Echo, RECORD: self._record, LASTING: self._record}
        self.connection = Http2Connection(
            methods or table,
            bounds,
            wake=wake,
            clock=lambda: self.now,
            lasting=(LASTING,),
            stats=self.stats,
        )
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._unparsed = b""
        if greet:
            self.send(frames.PREFACE + frames.settings({}))

    def _record(self, sink: Sink) -> Recorder:
        self.calls.append(Recorder(sink))
        return self.calls[-1]

    @property
    def held(self) -> int:
        """Bytes that the port holds, but for what its open streams cost by themselves."""
        return self.stats.held - STREAM_BYTES * self.connection.streams

    def send(self, *chunks: bytes) -> list[Frame]:
        """Feed bytes and take the answer apart."""
        self.connection.receive(b"".join(chunks))
        return self.answer()

    def answer(self) -> list[Frame]:
        """Return the frames that the server has to send now."""
        self._unparsed += b"".join(self.connection.outbox.take())
        found = []
        while len(self._unparsed) >= 9:
            size = int.from_bytes(self._unparsed[:3], "big")
            kind, flags = self._unparsed[3], self._unparsed[4]
            stream = int.from_bytes(self._unparsed[5:9], "big")
            found.append(Frame(kind, flags, stream, self._unparsed[9 : 9 + size]))
            self._unparsed = self._unparsed[9 + size :]
        assert self._unparsed == b""
        return found

    def block(self, fields: Fields) -> bytes:
        """A header block; uses the dynamic table as real clients do."""
        encoded: bytes = self._encoder.encode(list(fields))
        return encoded

    def fields(self, frame: Frame) -> list[tuple[str, str]]:
        """The header fields of a HEADERS frame of the server; decode each frame once, in order."""
        return [(str(name), str(value)) for name, value in self._decoder.decode(frame.payload)]

    def request(self, stream: int = 1, path: str = ECHO, *, more: Fields = (), ends: bool = False) -> bytes:
        """A HEADERS frame that opens a gRPC call."""
        flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
        return frame(frames.HEADERS, flags, stream, self.block([*grpc_fields(path), *more]))


def grpc_fields(path: str = ECHO) -> list[tuple[str, str]]:
    """Return the header fields that every gRPC client sends."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "picker"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]


def get_fields(path: str = "/metrics", method: str = "GET") -> list[tuple[str, str]]:
    """A plain request."""
    return [(":method", method), (":scheme", "http"), (":path", path), (":authority", "picker")]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return frames.frame(kind, flags, stream.to_bytes(4, "big"), payload)


def data(stream: int, payload: bytes, *, ends: bool = False) -> bytes:
    """DATA frames of at most 16 KiB each."""
    size = frames.DEFAULT_FRAME_BYTES
    pieces = [payload[at : at + size] for at in range(0, len(payload), size)] or [b""]
    last = len(pieces) - 1
    return b"".join(
        frame(frames.DATA, frames.END_STREAM if ends and at == last else 0, stream, piece)
        for at, piece in enumerate(pieces)
    )


def message(content: bytes) -> bytes:
    """A gRPC message with its prefix."""
    return b"\0" + len(content).to_bytes(4, "big") + content


def messages(answer: Iterable[Frame], stream: int = 1) -> list[bytes]:
    """The gRPC messages in DATA frames of one stream."""
    rest = b"".join(found.payload for found in answer if found.kind == frames.DATA and found.stream == stream)
    found = []
    while rest:
        size = int.from_bytes(rest[1:5], "big")
        found.append(rest[5 : 5 + size])
        rest = rest[5 + size :]
    return found


def kinds(answer: Iterable[Frame]) -> list[int]:
    """The frames' types."""
    return [found.kind for found in answer]


def ending(answer: Sequence[Frame]) -> tuple[int, int]:
    """Type and error code of the last frame, which is RST_STREAM or GOAWAY."""
    assert answer, "no answer"
    assert answer[-1].kind in (frames.RST_STREAM, frames.GOAWAY), answer
    return answer[-1].kind, answer[-1].code
