"""Client that asks a picker over ext_proc without a gateway, and sends the access log of the requests.

One HTTP/2 connection with as many streams as wanted, in pure frames: a client library's objects for 50,000
open streams would weigh more than what is measured. It behaves as Envoy does in the mode BUFFERED: headers
and body, the answer, then the picker ends the stream. Only for our own server and short bodies.

``SteadyClient`` sends such requests at a steady rate; an access log entry ends each of them.
"""

import asyncio
import itertools
import random
import ssl as tls
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, cast

from hpack import Decoder

from kvist_epp.extproc.pb import accesslog_pb2, ext_proc_pb2
from kvist_epp.http2 import frames
from kvist_epp.http2.call import ENVOY_HEADER
from kvist_epp.names import (
    ACCESS_LOG_METHOD,
    DESTINATION_HEADER,
    PROCESS_METHOD,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
)
from kvist_sim.bench.harness.churn import SYSTEMS, body
from kvist_sim.load import CHAT_PATH
from kvist_sim.workloads import text

TICK_SECONDS: Final = 0.01
SERVED_SECONDS: Final = 0.2
"""Seconds from a pick to the access log's entry, in place of an engine's answer."""
REST_SECONDS: Final = 10.0
"""Longest wait for the last answers."""
QUESTIONS: Final = 997
_HEADERS: Final = {":method": "POST", ":path": CHAT_PATH, "content-type": "application/json"}
LONGEST_BODY: Final = 60_000
"""Largest body in bytes: it fits in a stream's first window."""
GIVEN_WINDOW: Final = 1 << 24
"""Window in bytes that the client gives the picker per stream, and between two updates on the connection."""
PICKED: Final = 200
NO_ANSWER: Final = 0
_FRAME_BYTES: Final = frames.DEFAULT_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class PickAnswer:
    """The picker's answer to one request."""

    id: str
    status: int
    """PICKED, the status of an immediate answer, or NO_ANSWER for a stream that broke."""
    endpoint: str = ""
    """First endpoint of the answer."""
    session: str = ""
    """Session id for the access log."""


Done = Callable[[PickAnswer], None]


@dataclass(slots=True)
class _Stream:
    id: str
    session: str
    done: Done
    data: bytearray = field(default_factory=bytearray)


class Direct(asyncio.Protocol):
    """One connection; ``async with await Direct.open(host, port) as direct``."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._decoder = Decoder()
        self._numbers = itertools.count(1, 2)
        self._asked: dict[int, _Stream] = {}
        self._window = frames.DEFAULT_WINDOW
        self._unsent: deque[bytes] = deque()
        self._taken = 0
        self._log: bytes | None = None
        self._settled = asyncio.Event()
        self._gone = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.max_streams = 2**31 - 1
        """Number of concurrent streams that the picker allows."""

    @classmethod
    async def open(cls, host: str, port: int, *, ssl: tls.SSLContext | None = None) -> Self:
        """Connect, and wait for the picker's settings. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port, ssl=ssl)
        await connection._settled.wait()
        if connection._gone.is_set():
            raise ConnectionResetError("the picker closed the connection at once")
        return connection

    @property
    def waiting(self) -> int:
        """Number of streams without an answer."""
        return len(self._asked)

    @property
    def closed(self) -> bool:
        """True if either side has closed the connection."""
        return self._gone.is_set()

    async def drained(self) -> None:
        """Wait until the socket accepts more data."""
        await self._drained.wait()

    def ask(self, name: str, headers: Mapping[str, str], body: bytes, done: Done) -> None:
        """Send one request; ``done`` is called once with the answer.

        ``headers`` has ``:method`` and ``:path``.
        """
        if len(body) > LONGEST_BODY:
            raise ValueError(f"a body of {len(body)} bytes; at most {LONGEST_BODY}")
        number = next(self._numbers)
        stream = number.to_bytes(4, "big")
        self._asked[number] = _Stream(name, headers.get(SESSION_HEADER, ""), done)
        self._write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, OPENING))
        self._send(stream, framed(head_message(name, headers)) + framed(body_message(body)))

    def ended(self, answers: Iterable[PickAnswer], status: int = 200) -> None:
        """Send access log entries for these requests."""
        if self._log is None:
            self._log = next(self._numbers).to_bytes(4, "big")
            self._write(frames.frame(frames.HEADERS, frames.END_HEADERS, self._log, LOG_OPENING))
        self._send(self._log, framed(log_message(answers, status)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._transport is not None:
            self._transport.abort()
        await self._gone.wait()

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        pairs = {frames.SETTING_ENABLE_PUSH: 0, frames.SETTING_INITIAL_WINDOW_SIZE: GIVEN_WINDOW}
        window = frames.window_update(frames.CONNECTION, 2 * GIVEN_WINDOW)
        self._transport.write(frames.PREFACE + frames.settings(pairs) + window)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Answer every open stream with NO_ANSWER."""
        self._transport = None
        self._gone.set()
        self._settled.set()
        self._drained.set()
        for number in list(self._asked):
            self._finish(number, broken=True)

    def pause_writing(self) -> None:
        """Stop writing: the socket is full."""
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def data_received(self, data: bytes) -> None:
        """Parse the frames."""
        data = self._buffer + data if self._buffer else data
        at, end = 0, len(data)
        while end - at >= 9:
            high, low, kind, flags, number = frames.frame_head(data, at)
            stop = at + 9 + (high << 16 | low)
            if stop > end:
                break
            self._frame(kind, flags, number, data[at + 9 : stop])
            at = stop
        self._buffer = data[at:]

    # -- frames

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.DATA:
            self._data(number, payload)
        elif kind == frames.HEADERS:
            self._headers(flags, number, payload)
        elif kind == frames.WINDOW_UPDATE and number == 0:
            self._window += int.from_bytes(payload, "big")
            self._flush()
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self._write(frames.frame(frames.PING, frames.ACK, frames.CONNECTION, payload))
        elif kind == frames.RST_STREAM:
            self._finish(number, broken=True)

    def _settings(self, payload: bytes) -> None:
        found = dict(frames.setting_pairs(payload))
        self.max_streams = found.get(frames.SETTING_MAX_CONCURRENT_STREAMS, self.max_streams)
        self._write(frames.SETTINGS_ACK)
        self._settled.set()

    def _data(self, number: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken > GIVEN_WINDOW:
            self._write(frames.window_update(frames.CONNECTION, self._taken))
            self._taken = 0
        if number in self._asked:
            self._asked[number].data += payload

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        fine = payload in {frames.RESPONSE, frames.TRAILERS_OK}
        if not fine:
            headers = [(str(name), str(value)) for name, value in self._decoder.decode(payload)]
            fine = ("grpc-status", "0") in headers
        if flags & frames.END_STREAM:
            self._write(frames.frame(frames.DATA, frames.END_STREAM, number.to_bytes(4, "big")))
            self._finish(number, broken=not fine)

    def _finish(self, number: int, *, broken: bool) -> None:
        stream = self._asked.pop(number, None)
        if stream is not None:
            stream.done(PickAnswer(stream.id, NO_ANSWER) if broken else _answer(stream))

    # -- sending

    def _send(self, stream: bytes, content: bytes) -> None:
        """DATA frames, as far as the connection's window goes; the rest waits."""
        for at in range(0, len(content), _FRAME_BYTES):
            self._unsent.append(frames.frame(frames.DATA, 0, stream, content[at : at + _FRAME_BYTES]))
        self._flush()

    def _flush(self) -> None:
        while self._unsent and len(self._unsent[0]) - 9 <= self._window:
            frame = self._unsent.popleft()
            self._window -= len(frame) - 9
            self._write(frame)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _opening(method: str) -> bytes:
    """Return the header block of a call; it is constant, so HPACK needs no state."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "picker",
        "te": "trailers",
        "content-type": "application/grpc",
        ENVOY_HEADER: "true",
    }
    return b"".join(frames.literal(key.encode(), value.encode()) for key, value in fields.items())


OPENING: Final = _opening(PROCESS_METHOD)
LOG_OPENING: Final = _opening(ACCESS_LOG_METHOD)


def framed(message: bytes) -> bytes:
    """Return a gRPC message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def head_message(name: str, headers: Mapping[str, str]) -> bytes:
    """Return the ext_proc message with a request's headers; ``name`` is its request id."""
    request = ext_proc_pb2.ProcessingRequest()
    request.protocol_config.request_body_mode = ext_proc_pb2.BUFFERED
    listed = request.request_headers.headers.headers
    for key, value in {**headers, REQUEST_ID_HEADER: name}.items():
        listed.add(key=key, raw_value=value.encode())
    return request.SerializeToString()


def body_message(body: bytes) -> bytes:
    """Return the ext_proc message with a whole body."""
    request = ext_proc_pb2.ProcessingRequest()
    request.request_body.body, request.request_body.end_of_stream = body, True
    return request.SerializeToString()


def log_message(answers: Iterable[PickAnswer], status: int) -> bytes:
    """Return a message of the access log with the ends of these requests."""
    message = accesslog_pb2.StreamAccessLogsMessage()
    for answer in answers:
        entry = accesslog_pb2.HTTPAccessLogEntry()
        host, _, port = answer.endpoint.rpartition(":")
        address = entry.common_properties.upstream_remote_address.socket_address
        address.address, address.port_value = host, int(port)
        entry.request.request_id = answer.id
        entry.request.request_headers[SESSION_HEADER] = answer.session
        entry.request.request_headers[DESTINATION_HEADER] = answer.endpoint
        entry.response.response_code.value = status
        message.http_logs.log_entry.append(entry.SerializeToString())
    return message.SerializeToString()


def _answer(stream: _Stream) -> PickAnswer:
    """From the last message of the stream: a pick, or an immediate answer."""
    last = b""
    at, data = 0, bytes(stream.data)
    while at < len(data):
        stop = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        last, at = data[at + 5 : stop], stop
    response = ext_proc_pb2.ProcessingResponse.FromString(last)
    if response.HasField("immediate_response"):
        return PickAnswer(stream.id, response.immediate_response.status.code)
    mutation = response.request_body.response.header_mutation
    headers = {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
    picked = headers.get(DESTINATION_HEADER, "").partition(",")[0]
    session = headers.get(SESSION_HEADER, stream.session)
    return PickAnswer(stream.id, PICKED if picked else NO_ANSWER, picked, session)


class AccessLogWriter:
    """Writes the access log of picked requests, a while after their pick."""

    def __init__(self, log: Direct, seconds: float = SERVED_SECONDS) -> None:
        """``seconds`` is how long an engine would have taken."""
        self._log, self._seconds = log, seconds
        self._clock = asyncio.get_running_loop().time
        self._served: deque[tuple[float, PickAnswer]] = deque()

    def picked(self, answer: PickAnswer) -> None:
        """Queue a request that was picked just now."""
        self._served.append((self._clock(), answer))

    def settle(self, *, rest: bool = False) -> None:
        """Report the end of requests whose time has come; with ``rest``, of all requests."""
        then = self._clock() - (0 if rest else self._seconds)
        due = []
        while self._served and self._served[0][0] <= then:
            due.append(self._served.popleft()[1])
        if due:
            self._log.ended(due)


class SteadyClient:
    """Sends requests over several connections in turn."""

    def __init__(self, connections: Sequence[Direct], rate: float) -> None:
        self._connections = itertools.cycle(connections)
        self._rate = rate
        self._clock = asyncio.get_running_loop().time
        self._log_writer = AccessLogWriter(connections[0])
        self.sent = 0
        self.statuses: Counter[int] = Counter()
        self.latencies = array("d")
        """Seconds to the answer, of each pick."""

    @property
    def waiting(self) -> int:
        """Number of requests without an answer."""
        return self.sent - sum(self.statuses.values())

    async def run(self, seconds: float) -> None:
        """Send for ``seconds``, then wait a limited time for the rest (see ``waiting``), and settle
        everything."""
        rng = random.Random("soak questions")
        questions = [text(rng, rng.randint(10, 80)) for _ in range(QUESTIONS)]
        begin = self._clock()
        while (passed := self._clock() - begin) < seconds:
            while self.sent < passed * self._rate:
                self._ask(body(rng.randrange(SYSTEMS), rng.choice(questions)))
            self._log_writer.settle()
            await asyncio.sleep(TICK_SECONDS)
        for _ in range(round(REST_SECONDS / TICK_SECONDS)):
            if not self.waiting:
                break
            await asyncio.sleep(TICK_SECONDS)
        self._log_writer.settle(rest=True)

    def _ask(self, content: bytes) -> None:
        begun = self._clock()
        self.sent += 1

        def done(answer: PickAnswer) -> None:
            now = self._clock()
            self.statuses[answer.status] += 1
            if answer.status == PICKED:
                self.latencies.append(now - begun)
                self._log_writer.picked(answer)

        next(self._connections).ask(f"soak-{self.sent}", _HEADERS, content, done)
