"""The fast server on real sockets, for tests: on both event loops, in plaintext and over TLS."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import pytest
import uvloop
from tests.epp.http2.certificates import client_context, self_made
from tests.epp.http2.h2 import ECHO, RECORD, Echo, Recorder, frame, grpc_fields

from kvist_epp.http2 import frames as f
from kvist_epp.http2.call import Method, Sink
from kvist_epp.http2.limits import Limits
from kvist_epp.http2.server import Http2Server, serve_http2
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import HEALTH_WATCH_METHOD, LASTING_METHODS

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
FORMS = [f"{loop}{tls}" for loop in LOOPS for tls in ("", "-tls")]
TLS: ContextVar[Certificates | None] = ContextVar("TLS", default=None)
"""Of the test that runs; None: plaintext."""
EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # absent from the stubs
LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Waiting(Recorder):
    """A recorder that can be waited for."""

    def __init__(self, sink: Sink, changed: asyncio.Event) -> None:
        super().__init__(sink)
        self._changed = changed

    def on_message(self, data: bytes) -> None:
        super().on_message(data)
        self._changed.set()

    def on_half_closed(self) -> None:
        super().on_half_closed()
        self._changed.set()

    def on_cancelled(self) -> None:
        super().on_cancelled()
        self._changed.set()


class Bench:
    """A running server and the calls it got on ``RECORD`` and the health watch."""

    def __init__(self) -> None:
        self.calls: list[Waiting] = []
        self.server: Http2Server
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
    ssl = tls.context if (tls := TLS.get()) else None
    bounds = Limits(**limits)
    bench.server = await serve_http2(methods, "127.0.0.1", 0, bounds, ssl=ssl, lasting=LASTING_METHODS)
    try:
        yield bench
    finally:
        await bench.server.close()


@asynccontextmanager
async def channel(bench: Bench) -> AsyncIterator[Any]:
    """gRPC's own client."""
    async with grpc_channel(f"127.0.0.1:{bench.server.port}") as opened:
        yield opened


def grpc_channel(target: str) -> Any:
    """gRPC's own channel, over TLS when the test is."""
    if (tls := TLS.get()) is None:
        return grpc.aio.insecure_channel(target, options=LARGE)
    options = [*LARGE, ("grpc.ssl_target_name_override", "localhost")]
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(tls.material.ca), options=options)


async def connect(bench: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection, over TLS when the test is."""
    return await asyncio.open_connection("127.0.0.1", bench.server.port, ssl=client_context(TLS.get()))


@asynccontextmanager
async def raw(bench: Bench) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection that has sent its preface."""
    reader, writer = await connect(bench)
    writer.write(f.PREFACE + f.settings({}))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # over TLS a close would wait for what was never read
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def opening(stream: int, path: str) -> bytes:
    """HEADERS of a gRPC call, without any HPACK state."""
    block = b"".join(f.literal(name.encode(), value.encode()) for name, value in grpc_fields(path))
    return frame(f.HEADERS, f.END_HEADERS, stream, block)


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """Run an asynchronous test on asyncio's loop and on uvloop's, in plaintext and over TLS."""

    def run(form: str) -> None:
        loop, _, tls = form.partition("-")
        TLS.set(self_made() if tls else None)
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(test())

    run.__doc__ = test.__doc__
    return pytest.mark.parametrize("form", FORMS)(run)


async def gone(bench: Bench) -> bool:
    """Whether the server comes to forget every connection."""
    await asyncio.wait_for(bench.server._empty.wait(), 10)
    return repr(bench.server).endswith(" 0 connections>")
