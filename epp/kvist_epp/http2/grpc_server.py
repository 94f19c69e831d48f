"""A server of the methods on grpc.aio: the reference for tests of the HTTP/2 server, and the fallback.

Every method is served as a stream of raw bytes that ends with one answer: more answers may precede it, and
the protocol does not distinguish the kinds of methods. grpc sends that last answer and the status in one
batch, which matters: once Envoy has let the request go, it may pass response bytes to a stream whose end it
has not seen yet, and those are lost.
"""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from kvist_epp.http2.call import ENVOY_HEADER, NO_TRACE_HEADERS, Call, Method, Server
from kvist_epp.http2.tls import Certificates, TlsMaterial
from kvist_epp.names import TRACE_PARENT_HEADER, TRACE_STATE_HEADER

# Read by grpc when it is imported. Its fork handlers run in every child process that is only started to
# execute another program, and sometimes abort it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

MAX_MESSAGE_BYTES: Final = 33 * 1024 * 1024
"""Largest message accepted: grpc's own 4 MiB is less than a long prompt in BUFFERED mode."""

_Context = Any  # grpc.aio.ServicerContext[bytes, bytes], which cannot be subscripted at run time


async def serve_grpc(
    methods: Mapping[str, Method],
    host: str,
    port: int,
    message_bytes: int = MAX_MESSAGE_BYTES,
    *,
    tls: Certificates | None = None,
    lasting: Collection[str] = (),
) -> Server:
    """Listen on ``host:port`` (port 0: the system chooses); raises OSError when it cannot.

    Plaintext without ``tls``. grpc accepts TLS 1.2 and later whatever ``tls`` says: Python cannot set it.
    ``lasting`` names the methods whose calls never end by themselves; `drain` ends them.
    """
    options = (
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.so_reuseport", 0),
    )
    server = grpc.aio.server(options=options)
    lasting_sinks: set[_QueueSink] = set()
    for path, method in methods.items():
        kept = lasting_sinks if path in lasting else None
        server.add_generic_rpc_handlers([_handler(path, method, kept)])
    await _check_free(host, port)
    try:
        address = f"{host}:{port}"
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}") from error
    await server.start()
    return _GrpcServer(server, bound, lasting_sinks)


async def _check_free(host: str, port: int) -> None:
    """Raise OSError if the port is taken: grpc would report it on stderr in lines of its own."""
    if port:
        loop = asyncio.get_running_loop()
        probe = await loop.create_server(asyncio.Protocol, host.strip("[]"), port, start_serving=False)
        probe.close()


def _credentials(tls: Certificates) -> grpc.ServerCredentials:
    """Return credentials that grpc requests at each handshake, on its own thread; ``None`` is unchanged."""
    given = tls.material

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        current = tls.material
        if current is given:
            return None
        given = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        changed,  # type: ignore[arg-type]  # the stubs do not know that it may return None
        require_client_authentication=bool(given.clients),
    )


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.chain)], root_certificates=material.clients or None
    )


class _GrpcServer:
    def __init__(self, server: grpc.aio.Server, port: int, lasting: set["_QueueSink"]) -> None:
        self._server = server
        self.port = port
        self._lasting = lasting

    async def drain(self, grace_seconds: float) -> None:
        stopped = asyncio.ensure_future(self._server.stop(grace_seconds))
        for sink in list(self._lasting):
            sink.close(_UNAVAILABLE, "the server is going away")
        await stopped

    async def close(self) -> None:
        await self._server.stop(None)


def _handler(path: str, method: Method, kept: set["_QueueSink"] | None) -> Any:
    _, service, name = path.split("/")
    handler = grpc.stream_unary_rpc_method_handler(_behaviour(method, kept))
    return grpc.method_handlers_generic_handler(service, {name: handler})


def _behaviour(method: Method, kept: set["_QueueSink"] | None) -> Callable[[Any, _Context], Awaitable[bytes]]:
    async def run(_: object, context: _Context) -> bytes:
        sink = _QueueSink(dict(context.invocation_metadata() or ()), context.peer())
        if kept is not None:
            kept.add(sink)
        call = method(sink)
        reader = asyncio.ensure_future(_read(context, call, sink))
        try:
            return await sink.pump(context)
        except asyncio.CancelledError:
            call.on_cancelled()
            raise
        finally:
            reader.cancel()
            if kept is not None:
                kept.discard(sink)

    return run


async def _read(context: _Context, call: Call, sink: "_QueueSink") -> None:
    while not sink.closed:
        data = await context.read()
        if sink.closed:
            return
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
            call.on_half_closed()
            return
        call.on_message(data)


class _QueueSink:
    """A sink whose answers wait until grpc has taken the one before."""

    def __init__(self, metadata: Mapping[str, str], peer: str) -> None:
        self.trace_headers = _trace_headers(metadata)
        self.from_envoy = ENVOY_HEADER in metadata
        self.peer = peer
        self._queue: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._status = (0, "")
        self.closed = False

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        if not self.closed:
            self._queue.append(b"".join((data, content)) if content else data)
            self._changed.set()

    def close(self, status: int = 0, message: str = "") -> None:
        if not self.closed:
            self.closed = True
            self._status = (status, message)
            self._changed.set()

    async def pump(self, context: _Context) -> bytes:
        """Write all answers but the last, set the status, and return the last: grpc sends both together.

        A call that ends without any answer returns an empty one; peers take it for a message they do not
        know, after everything that they waited for.
        """
        while not self.closed or len(self._queue) > 1:
            if len(self._queue) > (1 if self.closed else 0):
                await context.write(self._queue.popleft())
            else:
                self._changed.clear()
                await self._changed.wait()
        status, message = self._status
        if status:
            await context.abort(_STATUS[status], message)
        return self._queue.popleft() if self._queue else b""


def _trace_headers(metadata: Mapping[str, str]) -> Mapping[str, str]:
    if TRACE_PARENT_HEADER not in metadata:
        return NO_TRACE_HEADERS
    return {name: metadata[name] for name in (TRACE_PARENT_HEADER, TRACE_STATE_HEADER) if name in metadata}


_UNAVAILABLE: Final = 14
_STATUS: Final = {code.value[0]: code for code in grpc.StatusCode}
