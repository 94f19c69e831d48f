"""Connections to the other replicas: gRPC streams, and the load of each replica that is followed over one.

The names of ``--replicas`` are resolved again and again, and each address gets one connection. A connection
dials its address, applies the updates it receives, and dials again when the stream breaks. No other module
imports grpc, except the server of ``--transport=grpc``.
"""

import asyncio
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from kvist_epp.errors import ProtocolError, ReplicaError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.http2.tls import Certificates
from kvist_epp.names import REPLICA_FOLLOW_METHOD
from kvist_epp.replicas.messages import Handshake, LoadUpdate, decode_update, encode_ack
from kvist_epp.replicas.remote_load import SILENCE_SECONDS, RemoteLoad
from kvist_epp.settings.validation import HostPort
from kvist_epp.telemetry.counters import ReplicationStats
from kvist_kube.backoff import backoff_seconds

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


CONNECT_SECONDS: Final = 2.0
"""Time limit for connecting and for the first update."""
RETRY_SECONDS: Final = (0.1, 2.0)
"""Delay before a broken connection is dialled again: the first, and the longest after doubling."""
DUPLICATE_SECONDS: Final = 5.0
"""Delay before an address is tried again that led to a replica followed elsewhere (at its other IP
version)."""
RESOLVE_SECONDS: Final = 3.0
"""Interval in which names are resolved again."""
MAX_ADDRESSES: Final = 256
"""Maximum number of addresses dialled; a name with more is not a headless Service of replicas."""

logger = logging.getLogger(__name__)


class ConnectionState(Enum):
    """Result of dialling an address."""

    NEW = "new"
    FOLLOWED = "followed"
    SELF = "self"
    DUPLICATE = "duplicate"
    """A replica that is followed at another address."""
    LEFT = "left"
    """A replica that said farewell."""
    BROKEN = "broken"


@dataclass(slots=True, eq=False)
class ConnectionContext:
    """Dependencies that all connections share."""

    handshake: Callable[[], Handshake]
    certificates: Certificates | None
    remote_load: RemoteLoad
    stats: ReplicationStats
    clock: Callable[[], float]
    on_log_entries: Callable[[Sequence[AccessLogEntry]], None]
    """Called with access-log entries of this replica's requests that a gateway sent to another replica."""
    followed: dict[str, "ReplicaConnection"]
    """Connections that follow a replica, by its id."""


class ReplicaConnection:
    """Follows one address until it turns out to be this replica's own, or is not wanted any longer."""

    def __init__(self, address: ReplicaAddress, context: ConnectionContext) -> None:
        self.address = address
        self.state = ConnectionState.NEW
        self.problem = ""
        """Reason for which the last stream broke; empty while one is open."""
        self.handshake: Handshake | None = None
        """Handshake of the replica that answered last."""
        self.wanted = True
        """Set to False to end ``run`` when the present stream ends."""
        self.tried = asyncio.Event()
        """Set once the address was dialled, whatever the result."""
        self._context = context
        self._failures = 0

    async def run(self) -> None:
        """Follow the address, again after each break."""
        while self.wanted:
            await self._dial()
            if self.state is ConnectionState.SELF:
                return
            self._failures += 1
            first, longest = RETRY_SECONDS
            delay = backoff_seconds(self._failures, first=first, longest=longest)
            if self.state is ConnectionState.DUPLICATE:
                delay = DUPLICATE_SECONDS
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))

    async def _dial(self) -> None:
        context = self._context
        try:
            async with open_stream(self.address, REPLICA_FOLLOW_METHOD, context.certificates) as stream:
                await self._follow(stream)
        except (ReplicaError, ProtocolError, OSError) as error:
            self._on_broken(str(error))
        except Exception as error:
            logger.exception(
                "following the replica at %s failed", self.address
            )  # a defect must not end the other streams
            self._on_broken(type(error).__name__)
        finally:
            if self.handshake is not None and context.followed.get(self.handshake.replica) is self:
                del context.followed[self.handshake.replica]

    def _on_broken(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("the connection to the replica at %s broke: %s", self.address, problem)
        self.problem = problem
        self._context.stats.broken += self.state is ConnectionState.FOLLOWED
        self.state = ConnectionState.BROKEN
        self.tried.set()

    async def _follow(self, stream: RpcStream) -> None:
        await stream.write(encode_ack(self._context.handshake()), CONNECT_SECONDS)
        update = await self._read(stream, CONNECT_SECONDS)
        self.state = self._on_first_update(update)
        self.tried.set()
        while self.state is ConnectionState.FOLLOWED and update is not None:
            self._apply(update)
            await stream.write(encode_ack(seq=update.seq), SILENCE_SECONDS)
            if update.leaving:
                self.state = ConnectionState.LEFT
                return
            update = await self._read(stream, SILENCE_SECONDS)
        if self.state is ConnectionState.FOLLOWED:
            raise ReplicaError("the other side ended the call")

    async def _read(self, stream: RpcStream, timeout: float) -> LoadUpdate | None:
        data = await stream.read(timeout)
        if not data:
            return None
        self._context.stats.on_received(len(data))
        return decode_update(data)

    def _on_first_update(self, update: LoadUpdate | None) -> ConnectionState:
        if update is None or update.handshake is None:
            raise ProtocolError("the other side is not a replica of the picker")
        self.handshake = update.handshake
        replica = update.handshake.replica
        if replica == self._context.handshake().replica:
            return ConnectionState.SELF
        if self._context.followed.setdefault(replica, self) is not self:
            return ConnectionState.DUPLICATE
        logger.info("receiving the load of replica %s at %s", replica, self.address)
        self.problem, self._failures = "", 0
        self._context.remote_load.on_connected(replica, self._context.clock())
        return ConnectionState.FOLLOWED

    def _apply(self, update: LoadUpdate) -> None:
        assert self.handshake is not None
        self._context.remote_load.apply(self.handshake.replica, update, self._context.clock())
        if update.log_entries:
            self._context.stats.forwarded["received"] += len(update.log_entries)
            self._context.on_log_entries(update.log_entries)


class ReplicaDirectory:
    """Keeps a connection running for each address that the names resolve to."""

    def __init__(
        self, names: Sequence[HostPort], connect: Callable[[ReplicaAddress], ReplicaConnection]
    ) -> None:
        self.connections: dict[ReplicaAddress, ReplicaConnection] = {}
        self.problem = ""
        """Reason for which a name could not be resolved last time; empty if all could."""
        self._resolved = asyncio.Event()
        self._names = names
        self._connect = connect
        self._tasks: dict[ReplicaAddress, asyncio.Task[None]] = {}

    async def all_tried(self) -> None:
        """Wait until the names were resolved once and every address found then was dialled once."""
        await self._resolved.wait()
        for connection in list(self.connections.values()):
            await connection.tried.wait()

    async def run(self) -> None:
        """Resolve the names until cancelled; the connections end with it."""
        try:
            while True:
                await self._resolve_all()
                await asyncio.sleep(RESOLVE_SECONDS * random.uniform(0.9, 1.1))
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._tasks.clear()
            self.connections.clear()

    async def _resolve_all(self) -> None:
        found: set[ReplicaAddress] = set()
        problems = []
        for host, port in self._names:
            try:
                found |= await resolve(host, port)
            except OSError as error:
                problems.append(f"{host}: {error.strerror or error}")
        problem = "; ".join(problems)
        if problem and problem != self.problem:
            logger.warning("cannot resolve a name in --replicas: %s", problem)
        self.problem = problem
        self.update(found, keep=bool(problem))
        self._resolved.set()

    def update(self, found: set[ReplicaAddress], *, keep: bool) -> None:
        """Start connections to new addresses; one whose address is gone ends when its stream does.

        ``keep``: a name could not be resolved, so that addresses that are missing are kept.
        """
        for address, connection in list(self.connections.items()):
            connection.wanted = keep or address in found
            if self._tasks[address].done() and not connection.wanted:
                del self.connections[address], self._tasks[address]
        for address in sorted(found - self.connections.keys())[: MAX_ADDRESSES - len(self.connections)]:
            connection = self.connections[address] = self._connect(address)
            self._tasks[address] = asyncio.create_task(connection.run(), name=f"replica {address}")


async def resolve(host: str, port: int) -> set[ReplicaAddress]:
    """Return the addresses that a name resolves to now. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {ReplicaAddress(host, str(sockaddr[0]), port) for *_, sockaddr in found}
