"""Load with a record of every request: the client's view, Envoy's choice of endpoint, the pickers' decisions.

Envoy reports its choice in response headers that `with_route_headers` adds to its configuration; the picker
and the engines do not know of them. ``PickLog`` reads the request logs of the pickers back.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvist_epp.names import DESTINATION_HEADER, REQUEST_ID_HEADER, SESSION_HEADER
from kvist_sim.http1 import Connection, Head, HttpError, request_bytes
from kvist_sim.load import CHAT_PATH, NO_ANSWER, OK
from kvist_sim.workloads import Arrival

_MARK: Final = b'"event":"request"'


class Line(msgspec.Struct):
    """Fields of a request log line (``kvist_epp.telemetry.request_log.RequestLine``) that the
    benchmarks read."""

    id: str
    session: str = ""
    outcome: str = ""
    mode: str = ""
    endpoint: str | None = None
    """First endpoint of the answer."""
    matched_tokens: int = 0
    waited_ms: float = 0.0
    """Milliseconds in the queue."""


_DECODER: Final = msgspec.json.Decoder(Line)


class PickLog:
    """One picker's JSON log; each ``read`` continues at the end of the one before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0

    def read(self) -> Iterator[Line]:
        """Yield request lines written since the last call; an incomplete line is left out."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                if _MARK in line and (found := _line(line)) is not None:
                    yield found


def _line(line: bytes) -> Line | None:
    """None for a line that a killed picker left half written, with the next one's beginning behind it."""
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None


UPSTREAM: Final = "x-bench-upstream"
PICKED: Final = "x-bench-picked"
SESSION: Final = "x-bench-session"
ATTEMPTS: Final = "x-bench-attempts"
_TOLD: Final = {
    UPSTREAM: "%UPSTREAM_REMOTE_ADDRESS%",
    PICKED: f"%REQ({DESTINATION_HEADER})%",
    SESSION: f"%REQ({SESSION_HEADER})%",
    ATTEMPTS: "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
}
_TAIL_BYTES: Final = 2_048
_END: Final = b"data: [DONE]"


@dataclass(slots=True)
class Record:
    """One request; times in seconds after the load began."""

    id: str
    """Value of ``x-request-id``."""
    began: float
    first: float | None = None
    """Time at which the head of the answer arrived; None if no byte arrived."""
    token: float | None = None
    """Time at which the first data of the answer arrived."""
    ended: float = 0.0
    status: int = NO_ANSWER
    whole: bool = False
    """True if the stream came to its end, ``[DONE]`` included."""
    upstream: str = ""
    """Endpoint that answered."""
    picked: str = ""
    """The picker's endpoints; empty if Envoy continued without a pick."""
    session: str = ""
    attempts: int = 0
    """Number of engines that Envoy tried."""
    prompt: int = 0
    cached: int = 0
    """Cached tokens reported by the engine."""
    error: str = ""

    @property
    def good(self) -> bool:
        """True for a complete answer with status 200."""
        return self.status == OK and self.whole

    @property
    def retried(self) -> bool:
        """True if more than one engine was tried."""
        return self.attempts > 1


def with_route_headers(config: dict[str, Any]) -> dict[str, Any]:
    """Return an Envoy configuration (of ``kvist_sim.envoy.config``) whose answers name endpoint and picks."""
    headers = [
        {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for key, value in _TOLD.items()
    ]
    for listener in config["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            for named in chain["filters"]:
                named["typed_config"]["route_config"]["response_headers_to_add"] = headers
    return config


class Recorder:
    """Sends requests to one address over HTTP/1.1 and records the results."""

    def __init__(
        self, host: str, port: int, *, headers: Callable[[Arrival], Mapping[str, str]] = lambda _arrival: {}
    ) -> None:
        """Use ``headers`` for further headers of a request besides its id."""
        self._host, self._port, self._headers = host, port, headers
        self._idle: list[Connection] = []
        self._clock = asyncio.get_running_loop().time
        self._zero = self._clock()
        self.records: list[Record] = []
        """Records in the order of sending."""
        self.running = 0
        self._stopped = False

    def stop(self) -> None:
        """Stop sending; ``run`` returns after the last answer."""
        self._stopped = True

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return self._clock() - self._zero

    async def run(self, plan: Iterable[Arrival], *, prefix: str = "r") -> None:
        """Send each arrival at its time, independent of answers, until the plan ends or ``stop`` is
        called."""
        begin = self.now
        async with asyncio.TaskGroup() as group:
            async for number, arrival in self._on_time(plan, begin):
                record = Record(f"{prefix}-{number}", self.now)
                self.records.append(record)
                group.create_task(self._send(record, arrival))

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _on_time(self, plan: Iterable[Arrival], begin: float) -> AsyncIterator[tuple[int, Arrival]]:
        for number, arrival in enumerate(plan):
            await asyncio.sleep(max(0.0, begin + arrival.at - self.now))
            if self._stopped:
                return
            yield number, arrival

    async def _send(self, record: Record, arrival: Arrival) -> None:
        answer = _Answer(self, record)
        self.running += 1
        try:
            connection = await self._take()
            named = {REQUEST_ID_HEADER: record.id, **self._headers(arrival)}
            request = request_bytes("POST", CHAT_PATH, f"{self._host}:{self._port}", arrival.body, named)
            await connection.exchange(request, answer.data, on_head=answer.head)
            record.whole = _END in answer.tail
            self._idle.append(connection)
        except (OSError, HttpError) as failure:
            record.error = f"{type(failure).__name__}: {failure}"
        except asyncio.CancelledError:
            record.error = "given up: the load ended"
            raise
        finally:
            self.running -= 1
            record.ended = self.now
            answer.close()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await Connection.open(self._host, self._port)


class _Answer:
    """Facts taken from an answer while it streams."""

    __slots__ = ("_record", "_recorder", "tail")

    def __init__(self, recorder: Recorder, record: Record) -> None:
        self._recorder, self._record = recorder, record
        self.tail = b""

    def head(self, head: Head) -> None:
        record = self._record
        record.first, record.status = self._recorder.now, head.status
        record.upstream, record.picked = _told(head, UPSTREAM), _told(head, PICKED)
        record.session = _told(head, SESSION)
        record.attempts = int(_told(head, ATTEMPTS) or 0)

    def data(self, data: bytes) -> None:
        if self._record.token is None:
            self._record.token = self._recorder.now
        self.tail = (self.tail + data)[-_TAIL_BYTES:]

    def close(self) -> None:
        if self._record.status == OK:
            self._record.prompt, self._record.cached = usage(self.tail)
        elif self._record.status != NO_ANSWER:
            self._record.error = f"HTTP {self._record.status}: {self.tail[:120].decode(errors='replace')}"


def _told(head: Head, name: str) -> str:
    value = head.headers.get(name, "")
    return "" if value == "-" else value


def usage(tail: bytes) -> tuple[int, int]:
    """Return prompt tokens and cached tokens from the end of a streamed answer; zeros without a usage."""
    at = tail.rfind(b'"usage":{')
    if at < 0:
        return 0, 0
    try:
        found, _ = json.JSONDecoder().raw_decode(tail[at + len(b'"usage":') :].decode("utf-8", "replace"))
    except json.JSONDecodeError:
        return 0, 0
    details = found.get("prompt_tokens_details") or {}
    return int(found.get("prompt_tokens") or 0), int(details.get("cached_tokens") or 0)
