"""gRPC streams to other replicas, on grpc.aio.

No other module imports grpc, except the server of ``--transport=grpc``.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from kvist_epp.errors import ReplicaError
from kvist_epp.http2.tls import Certificates

# grpc reads both variables when it is imported. Its fork handlers run in every child process that is started
# only to execute another program, and now and then abort it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# grpc writes log lines of its own to stderr, between ours; the errors contain the same information.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Largest message accepted; updates and chunks are far smaller."""
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class ReplicaAddress(NamedTuple):
    """An address at which a replica may listen."""

    host: str
    """Name that resolved to the address, which the replica's certificate must be valid for; or the
    address."""
    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


class RpcStream:
    """One bidirectional call that carries raw messages."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self, timeout: float) -> bytes | None:
        """Return the next message, or None when the other side has ended the call with status OK.

        Raises ReplicaError, also when no message comes within ``timeout`` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                data = await self._call.read()
                if data is not grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
                    return bytes(data)
                await self._raise_unless_ok()
        except TimeoutError as error:
            raise ReplicaError(f"no message for {timeout:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise ReplicaError(_reason(error.code(), error.details())) from error
        return None

    async def write(self, data: bytes, timeout: float) -> None:
        """Send a message. Raises ReplicaError, also when it is not taken within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._call.write(data)
        except TimeoutError as error:
            raise ReplicaError(f"a message could not be sent for {timeout:g} s") from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            await self._raise_unless_ok()
            raise ReplicaError("the call has ended") from error

    async def _raise_unless_ok(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise ReplicaError(_reason(code, await self._call.details()))


@asynccontextmanager
async def open_stream(
    address: ReplicaAddress, method: str, certificates: Certificates | None
) -> AsyncIterator[RpcStream]:
    """Call ``method`` over a connection of its own; the call and the connection end with the context.

    With ``certificates`` both sides present one of the authority in ``ca.crt``; the current ones are used.
    """
    target = f"{'ipv6' if ':' in address.ip else 'ipv4'}:{address}"
    if certificates is None:
        channel: Any = grpc.aio.insecure_channel(target, options=OPTIONS)
    else:
        material = certificates.material
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.chain)
        options = (*OPTIONS, ("grpc.ssl_target_name_override", address.host))
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    async with channel:
        call = channel.stream_stream(method)()
        try:
            yield RpcStream(call)
        finally:
            call.cancel()


def _reason(code: grpc.StatusCode, details: str | None) -> str:
    if details == "Internal error from Core":  # a failed write has replaced the real reason
        return "the other side ended the call during a write: is this the --replica-port of a replica?"
    reason = (details or "no reason given").removeprefix("failed to connect to all addresses; last error: ")
    return f"{code.name.lower().replace('_', ' ')}: {reason[:300]}"
