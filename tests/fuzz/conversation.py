"""A client that does anything, step by step; after each it is seen whether the connection is still sound.

Hypothesis chooses the steps in ``test_conversations.py``; ``play`` reads them from bytes, for atheris.
"""

from typing import Final

from hpack import Encoder
from tests.epp.http2.h2 import get_fields, grpc_fields, message

from kvist_epp.http2 import frames as f
from kvist_epp.http2.call import Sink
from kvist_epp.http2.http2_connection import Http2Connection
from kvist_epp.http2.limits import Limits, PortStats, Rate
from kvist_epp.http2.stream_table import STREAM_BYTES

ECHO: Final = "/t/Echo"
KEEP: Final = "/t/Keep"
LASTING: Final = "/t/Lasting"
CRASH: Final = "/t/Crash"
PATHS: Final = (ECHO, KEEP, LASTING, CRASH, "/t/Unknown")

FEW: Final = Rate(60, 1.0)
LIMITS: Final = Limits(
    streams=6,
    held_bytes=60_000,
    header_bytes=2000,
    continuations=3,
    message_bytes=20_000,
    stream_window=30_000,
    connection_window=90_000,
    stream_send_bytes=40_000,
    connection_send_bytes=70_000,
    resets=FEW,
    pings=FEW,
    settings=FEW,
    empty_frames=FEW,
    control_frames=Rate(200, 1.0),
)
KNOWN: Final = 200
"""Choices of a stream below this mean one that was opened, the newest first."""
_MOST_STEPS: Final = 200
_AFTERMATH: Final = 5
"""Steps after the end of a connection: it must stay deaf."""


class Call:
    """A call of the test that checks that no method is called after its end."""

    def __init__(self, sink: Sink, path: str) -> None:
        self.sink = sink
        self.path = path
        self.closed = False
        self.half = 0
        self.gone = 0
        self.wrong: list[str] = []

    def on_message(self, data: bytes) -> None:
        """A message; the echo answers it, the crasher fails."""
        self._expect(not self.half, "a message after the half-close")
        if self.path == CRASH:
            raise ValueError("as asked")
        if self.path == ECHO:
            self.sink.send(data)

    def on_half_closed(self) -> None:
        """The client's end; the echo ends too."""
        self._expect(not self.half, "half-closed twice")
        self.half += 1
        if self.path == ECHO:
            self.close()

    def on_cancelled(self) -> None:
        """The end from outside."""
        self._expect(True, "")
        self.gone += 1

    def close(self, status: int = 0) -> None:
        """The end from inside."""
        self.closed = True
        self.sink.close(status, "" if status == 0 else "why not")

    def _expect(self, right: bool, wrong: str) -> None:
        if not right:
            self.wrong.append(wrong)
        if self.closed or self.gone:
            self.wrong.append("called after its end")


class Conversation:
    """One connection and the client's half of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stats = PortStats(LIMITS.held_bytes)
        self.calls: list[Call] = []
        self.connection = Http2Connection(
            {path: self._method(path) for path in PATHS[:-1]},
            LIMITS,
            clock=lambda: self.now,
            lasting=(LASTING,),
            stats=self.stats,
        )
        self._encoder = Encoder()
        self._pending = bytearray()
        self._out = bytearray()
        self._opened = [1]
        self._at_end: int | None = None
        self._after = 0
        # Small, so that answers wait.
        self.feed(f.PREFACE + f.settings({f.SETTING_INITIAL_WINDOW_SIZE: 3000}))
        self.open(KNOWN + 1, PATHS.index(KEEP), 0)

    def _method(self, path: str) -> "Method":
        return Method(self.calls, path)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to learn from this connection."""
        return self._after > _AFTERMATH

    # -- steps

    def stream(self, choice: int) -> int:
        """The stream a choice means: one of those opened, or any number above."""
        return self._opened[-1 - choice % len(self._opened)] if choice < KNOWN else choice - KNOWN

    def feed(self, sent: bytes, whole: int = 255) -> None:
        """Send bytes; of all that is on its way only ``whole`` in 255 arrives now."""
        self._pending += sent
        count = len(self._pending) * whole // 255
        chunk = bytes(self._pending[:count])
        del self._pending[:count]
        self.connection.receive(chunk)
        self._check()

    def frame(self, kind: int, flags: int, choice: int, payload: bytes, whole: int = 255) -> None:
        """Any frame, on the stream that the choice means."""
        number = self.stream(choice) & 0xFFFFFFFF
        self.feed(f.frame(kind, flags, number.to_bytes(4, "big"), payload), whole)

    def open(self, choice: int, path: int, flags: int, extra: bytes = b"") -> None:
        """HEADERS of a call, or of a plain request; ``extra`` is put behind its header block.

        Below ``KNOWN`` the choice means the next number that is due.
        """
        fields = grpc_fields(PATHS[path]) if path < len(PATHS) else get_fields()
        block: bytes = self._encoder.encode(fields)
        if choice < KNOWN:
            self._opened = [*self._opened[-7:], self._opened[-1] + 2]
            choice = 0
        self.frame(f.HEADERS, flags | f.END_HEADERS, choice, block + extra)

    def say(self, choice: int, size: int, missing: int, ends: bool) -> None:
        """A message of ``size`` bytes of which the last ``missing`` do not come, in DATA of 16 KiB."""
        content = message(bytes(size))
        content = content[: len(content) - missing]
        for at in range(0, max(len(content), 1), f.DEFAULT_FRAME_BYTES):
            piece = content[at : at + f.DEFAULT_FRAME_BYTES]
            last = ends and at + f.DEFAULT_FRAME_BYTES >= len(content)
            self.frame(f.DATA, f.END_STREAM if last else 0, choice, piece)

    def answer(self, which: int, size: int) -> None:
        """A call sends a message."""
        if self.calls:
            self.calls[which % len(self.calls)].sink.send(bytes(size))
            self._check()

    def close(self, which: int, status: int) -> None:
        """A call ends itself."""
        if self.calls:
            call = self.calls[which % len(self.calls)]
            if not call.gone:
                call.close(status)
            self._check()

    def take(self, most: int) -> None:
        """The socket takes something."""
        self._out += b"".join(self.connection.outbox.take(most))
        self._check()

    def park(self, beyond: int = 0) -> None:
        """The socket is full, and so many bytes wait before it."""
        self.connection.outbox.park(beyond)
        self._check()

    def wait(self, seconds: float) -> None:
        """Time passes, and the server looks."""
        self.now += seconds
        self.connection.check_streams(self.now)
        self._check()

    def drain(self) -> None:
        """Drain the server; the client agrees."""
        self.connection.drain()
        self.feed(f.frame(f.PING, f.ACK, f.CONNECTION, b"kvistbye"))

    def end(self) -> None:
        """Deliver the rest, then lose the connection: every call has ended exactly once."""
        self.feed(b"")
        self.take(1 << 30)
        self._check_frames()
        self.connection.on_lost()
        assert self.stats.held == 0
        assert self.connection.streams == 0
        for call in self.calls:
            assert call.closed + call.gone == 1, (call.path, call.closed, call.gone)

    # -- what must hold

    def _check(self) -> None:
        connection = self.connection
        assert self.stats.connections_ended["internal"] == 0, "an exception left the connection's rules"
        for call in self.calls:
            assert call.wrong == [], (call.path, call.wrong)
        if self._at_end is not None:
            assert len(self.calls) == self._at_end, "a call began after the end"
            self._after += 1
        elif connection.closing:
            self._at_end = len(self.calls)
        self._check_sums()

    def _check_sums(self) -> None:
        connection, streams = self.connection, list(self.connection._open.values())
        share, outbox, known = connection.memory, connection.outbox, connection.stream_table
        assert len(streams) <= LIMITS.streams
        kept = sum(stream._held + stream._delivered for stream in streams)
        assert share.receiving == kept + STREAM_BYTES * len(streams)
        waiting = sum(stream.waiting_bytes for stream in streams)
        assert outbox.waiting_bytes == waiting
        assert share.unsent == waiting + outbox.parked
        assert self.stats.held == share.receiving + share.unsent
        assert self.stats.held <= LIMITS.held_bytes + LIMITS.connection_send_bytes + 2 * 65_536
        assert outbox.size + waiting <= LIMITS.connection_send_bytes + 2 * f.DEFAULT_FRAME_BYTES
        if not connection.closing:
            assert known._running == sum(not stream.sent and not stream.lasting for stream in streams)
            assert set(known._answered) == {stream.number for stream in streams if stream.sent}

    def _check_frames(self) -> None:
        """The answer is whole frames; nothing follows the end of a stream, or the GOAWAY of an error."""
        ended: set[int] = set()
        over = False
        at = 0
        while at < len(self._out):
            size = int.from_bytes(self._out[at : at + 3], "big")
            kind, flags = self._out[at + 3], self._out[at + 4]
            stream = int.from_bytes(self._out[at + 5 : at + 9], "big")
            assert not over, "something follows the last GOAWAY"
            if stream:
                assert stream not in ended or kind == f.RST_STREAM, "something follows a stream's end"
            if kind == f.RST_STREAM or (kind in (f.DATA, f.HEADERS) and flags & f.END_STREAM):
                ended.add(stream)
            over = kind == f.GOAWAY and int.from_bytes(self._out[at + 13 : at + 17], "big") != f.NO_ERROR
            at += 9 + size
        assert at == len(self._out), "half a frame"


class Method:
    """Starts calls of one path and keeps them."""

    def __init__(self, calls: list[Call], path: str) -> None:
        self._calls = calls
        self._path = path

    def __call__(self, sink: Sink) -> Call:
        self._calls.append(Call(sink, self._path))
        return self._calls[-1]


class Script:
    """Numbers and bytes read from a byte string; zeros when it is at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def number(self, size: int = 1) -> int:
        """An integer of so many bytes."""
        return int.from_bytes(self.bytes(size), "big")

    def bytes(self, size: int) -> bytes:
        """Return this number of bytes, fewer at the end."""
        found = self._data[self._at : self._at + size]
        self._at += size
        return found


def play(data: bytes) -> None:
    """Read steps from bytes and do them; raises AssertionError when the connection is not sound."""
    script, conversation = Script(data), Conversation()
    for _ in range(_MOST_STEPS):
        if script.left <= 0 or conversation.over:
            break
        _STEPS[script.number() % len(_STEPS)](conversation, script)
    conversation.end()


def _stream(script: Script) -> int:
    """Mostly one that is open."""
    number = script.number()
    return number if number < KNOWN else KNOWN + script.number(4)


_STEPS = (
    lambda c, s: c.feed(s.bytes(s.number()), s.number()),
    lambda c, s: c.frame(s.number() % 12, s.number(), _stream(s), s.bytes(s.number()), s.number()),
    lambda c, s: c.open(_stream(s), s.number() % 6, s.number() & 0x29, s.bytes(s.number() % 16)),
    lambda c, s: c.open(_stream(s), s.number() % 6, 0),
    lambda c, s: c.say(_stream(s), s.number(2), s.number() % 6, bool(s.number() & 1)),
    lambda c, s: c.frame(f.DATA, s.number() & 9, _stream(s), s.bytes(s.number())),
    lambda c, s: c.frame(f.RST_STREAM, 0, _stream(s), bytes(4)),
    lambda c, s: c.frame(f.WINDOW_UPDATE, 0, _stream(s), s.number(4).to_bytes(4, "big")),
    lambda c, s: c.feed(f.settings({s.number() % 8: s.number(4) & 0xFFFFFFFF})),
    lambda c, s: c.answer(s.number(), s.number(2)),
    lambda c, s: c.close(s.number(), s.number() % 17),
    lambda c, s: c.take(s.number(2)),
    lambda c, s: c.park(s.number(2)),
    lambda c, s: c.wait(s.number() / 4),
    lambda c, _: c.drain(),
)
