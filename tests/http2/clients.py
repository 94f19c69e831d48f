"""Two gRPC clients with one face: grpcio in this process, grpc-go in one of its own."""

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
from tests.http2.binaries import binary

from kvist_epp.http2.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse
from kvist_epp.names import HEALTH_CHECK_METHOD, HEALTH_LIST_METHOD, HEALTH_WATCH_METHOD

SECONDS = 20
_LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # absent from the stubs
_STATUS = HealthCheckResponse.ServingStatus.Name


class Stream(Protocol):
    """One call with raw messages both ways."""

    async def send(self, data: bytes) -> None:
        """Send one message."""

    async def done(self) -> None:
        """Nothing more will be sent."""

    async def cancel(self) -> None:
        """Cancel the call."""

    async def read(self) -> bytes | None:
        """The next message; None at the end."""

    async def status(self) -> tuple[int, str]:
        """grpc-status and grpc-message, once the call has ended."""


class Client(Protocol):
    """A channel to one target."""

    async def open(self, method: str) -> Stream:
        """Begin a call."""

    async def check(self, service: str) -> dict[str, str] | int:
        """Health by service, or the status of the refusal."""

    async def list(self) -> dict[str, str]:
        """Every service's health."""

    async def watch(self, service: str) -> "Watch":
        """Follow a service's health."""


class Watch(Protocol):
    """A health watch."""

    async def next(self) -> str:
        """The next state's name."""


Connect = Callable[[str, Path | None], AbstractAsyncContextManager[Client]]
"""Opens a client to a target; with a PEM file to trust it speaks TLS."""


# -- grpcio


class _PythonStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, data: bytes) -> None:
        await self._call.write(data)

    async def done(self) -> None:
        await self._call.done_writing()

    async def cancel(self) -> None:
        self._call.cancel()

    async def read(self) -> bytes | None:
        try:
            found = await asyncio.wait_for(self._call.read(), SECONDS)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return None
        return None if found is _EOF else found

    async def status(self) -> tuple[int, str]:
        code = await asyncio.wait_for(self._call.code(), SECONDS)
        return code.value[0], await self._call.details()


class _PythonWatch:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def next(self) -> str:
        answer = await asyncio.wait_for(self._call.read(), SECONDS)
        return _STATUS(HealthCheckResponse.FromString(answer).status)


class _PythonClient:
    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def open(self, method: str) -> _PythonStream:
        return _PythonStream(self._channel.stream_stream(method)())

    async def check(self, service: str) -> dict[str, str] | int:
        request = HealthCheckRequest(service=service).SerializeToString()
        try:
            answer = await self._channel.unary_unary(HEALTH_CHECK_METHOD)(request, timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            code: int = error.code().value[0]
            return code
        return {service: _STATUS(HealthCheckResponse.FromString(answer).status)}

    async def list(self) -> dict[str, str]:
        answer = await self._channel.unary_unary(HEALTH_LIST_METHOD)(b"", timeout=SECONDS)
        statuses = HealthListResponse.FromString(answer).statuses
        return {name: _STATUS(state.status) for name, state in statuses.items()}

    async def watch(self, service: str) -> _PythonWatch:
        request = HealthCheckRequest(service=service).SerializeToString()
        return _PythonWatch(self._channel.unary_stream(HEALTH_WATCH_METHOD)(request))


@asynccontextmanager
async def python_client(target: str, authority: Path | None) -> AsyncIterator[Client]:
    """A client of grpc.aio."""
    async with _channel(target, authority) as channel:
        yield _PythonClient(channel)


def _channel(target: str, authority: Path | None) -> Any:
    if authority is None:
        return grpc.aio.insecure_channel(target, options=_LARGE)
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    return grpc.aio.secure_channel(target, credentials, options=_LARGE)


# -- grpc-go, on its leash: tests/http2/tools/grpcpeer


class _GoCall:
    def __init__(self, peer: "_GoClient", number: int) -> None:
        self._peer = peer
        self._number = number
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._end: dict[str, Any] | None = None

    async def send(self, data: bytes) -> None:
        await self._peer.tell(op="send", id=self._number, data=base64.b64encode(data).decode())

    async def done(self) -> None:
        await self._peer.tell(op="done", id=self._number)

    async def cancel(self) -> None:
        await self._peer.tell(op="cancel", id=self._number)

    async def read(self) -> bytes | None:
        event = await self.event()
        return base64.b64decode(event["data"] or "") if event["event"] == "message" else None

    async def status(self) -> tuple[int, str]:
        while self._end is None:
            await self.event()
        return self._end["code"], self._end["text"]

    async def next(self) -> str:
        (state,) = (await self.event())["health"].values()
        return str(state)

    async def event(self) -> dict[str, Any]:
        """Return the next event; the end again and again, once it has ended."""
        if self._end is not None:
            return self._end
        event = await asyncio.wait_for(self.events.get(), SECONDS)
        if event["event"] == "end":
            self._end = event
        return event


class _GoClient:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        self._stdin = process.stdin
        self._calls: dict[int, _GoCall] = {}
        self._numbers = itertools.count(1)

    async def open(self, method: str) -> _GoCall:
        return await self._begin(op="open", method=method)

    async def check(self, service: str) -> dict[str, str] | int:
        event = await (await self._begin(op="check", service=service)).event()
        return event["health"] if event["event"] == "health" else int(event["code"])

    async def list(self) -> dict[str, str]:
        event = await (await self._begin(op="list")).event()
        found: dict[str, str] = event["health"]
        return found

    async def watch(self, service: str) -> _GoCall:
        return await self._begin(op="watch", service=service)

    async def tell(self, **command: Any) -> None:
        """One line to the program."""
        self._stdin.write(json.dumps(command).encode() + b"\n")
        await self._stdin.drain()

    async def hear(self, lines: asyncio.StreamReader) -> None:
        """Hand the program's lines to their calls, until it ends."""
        while line := await lines.readline():
            event = json.loads(line)
            self._calls[event["id"]].events.put_nowait(event)

    async def _begin(self, **command: Any) -> _GoCall:
        number = next(self._numbers)
        call = self._calls[number] = _GoCall(self, number)
        await self.tell(id=number, **command)
        return call


@asynccontextmanager
async def go_client(target: str, authority: Path | None) -> AsyncIterator[Client]:
    """A client of grpc-go."""
    trust = ["-ca", str(authority)] if authority else []
    process = await asyncio.create_subprocess_exec(
        binary("grpcpeer"),
        "-target",
        target,
        *trust,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=128 << 20,
    )
    client = _GoClient(process)
    assert process.stdout is not None
    hearing = asyncio.ensure_future(client.hear(process.stdout))
    try:
        yield client
    finally:
        client._stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await hearing
