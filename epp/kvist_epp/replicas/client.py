"""Calls to other replicas, on grpc.aio: beside ``wire/grpc_server.py`` the only module that imports grpc."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from kvist_epp.errors import PeerError
from kvist_epp.http2.tls import Certificates

# Read by grpc when it is imported. Its fork handlers run in every child that is only started to become
# another program, and now and then abort it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# It writes lines of its own to stderr, between ours; what they say is in the errors as well.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Largest message taken in; updates and chunks are far below it."""
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class Address(NamedTuple):
    """Where a replica may be."""

    host: str
    """The name that led here, which its certificate must be good for; or the address itself."""
    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


class Conversation:
    """One bidirectional call, of raw messages."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self, patience: float) -> bytes | None:
        """The next message; None when the other side has ended well. Raises PeerError, also when ``patience``
        seconds bring nothing."""
        try:
            async with asyncio.timeout(patience):
                data = await self._call.read()
                if data is not grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
                    return bytes(data)
                await self._raise_unless_ok()
        except TimeoutError as error:
            raise PeerError(f"silent for {patience:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise PeerError(_reason(error.code(), error.details())) from error
        return None

    async def write(self, data: bytes, patience: float) -> None:
        """Sends a message. Raises PeerError."""
        try:
            async with asyncio.timeout(patience):
                await self._call.write(data)
        except TimeoutError as error:
            raise PeerError(f"took nothing for {patience:g} s") from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            await self._raise_unless_ok()
            raise PeerError("the conversation is over") from error

    async def _raise_unless_ok(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise PeerError(_reason(code, await self._call.details()))


@asynccontextmanager
async def conversation(
    address: Address, method: str, certificates: Certificates | None
) -> AsyncIterator[Conversation]:
    """A call of ``method``, over a connection of its own, that ends with the context.

    With ``certificates`` both sides show one of the authority in ``ca.crt``; those current now are used.
    """
    async with _channel(address, certificates) as channel:
        call = channel.stream_stream(method)()
        try:
            yield Conversation(call)
        finally:
            call.cancel()


def _channel(address: Address, certificates: Certificates | None) -> Any:
    family = "ipv6" if ":" in address.ip else "ipv4"
    target = f"{family}:{address}"
    if certificates is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    material = certificates.material
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.chain)
    options = (*OPTIONS, ("grpc.ssl_target_name_override", address.host))
    return grpc.aio.secure_channel(target, credentials, options=options)


def _reason(code: grpc.StatusCode, details: str | None) -> str:
    if details == "Internal error from Core":  # a write that failed has overwritten the real reason
        return "it ended the call while it was spoken to: is it the --peer-port of a replica?"
    why = (details or "no reason given").removeprefix("failed to connect to all addresses; last error: ")
    return f"{code.name.lower().replace('_', ' ')}: {why[:300]}"
