"""Replicas on real sockets in one process: load trackers, load servers and connections, without a picker."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.http2.call import Method, Server
from kvist_epp.http2.grpc_server import serve_grpc
from kvist_epp.http2.server import serve_http2
from kvist_epp.http2.tls import Certificates
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.names import REPLICA_FOLLOW_METHOD
from kvist_epp.replicas.load_server import LoadServer
from kvist_epp.replicas.messages import Handshake
from kvist_epp.replicas.remote_load import RemoteLoad
from kvist_epp.replicas.replica_connection import ConnectionContext, ReplicaAddress, ReplicaConnection
from kvist_epp.telemetry.counters import ReplicationStats

HOST = "127.0.0.1"
POD = "ns/pod"
INTERVAL = 0.02


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the time limit of the test suite bounds the wait."""
    while not condition():
        await asyncio.sleep(0.005)


async def listen(
    methods: Mapping[str, Method], transport: str = "fast", tls: Certificates | None = None, port: int = 0
) -> Server:
    """Serve methods on either transport."""
    if transport == "grpc":
        return await serve_grpc(methods, HOST, port, tls=tls)
    return await serve_http2(methods, HOST, port, ssl=tls.context if tls else None)


@dataclass(eq=False)
class SocketReplica:
    """One replica with its port."""

    name: str
    certificates: Certificates | None = None
    log_entries: list[AccessLogEntry] = field(default_factory=list)
    port: int = 0
    server: Server | None = None
    tracker: LoadTracker = field(init=False)
    remote_load: RemoteLoad = field(init=False)
    load_server: LoadServer = field(init=False)
    context: ConnectionContext = field(init=False)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = time.monotonic
        stats = ReplicationStats()
        self.tracker = LoadTracker()
        self.remote_load = RemoteLoad(self.name, self.tracker, lambda key: key == POD)
        self.load_server = LoadServer(self.handshake, self.tracker, self.remote_load, stats, clock)
        self.tracker.add_listener(self.load_server)
        self.context = ConnectionContext(
            self.handshake,
            self.certificates,
            self.remote_load,
            stats,
            clock,
            on_log_entries=self.take,
            followed={},
        )

    def handshake(self) -> Handshake:
        """Return the handshake of this replica."""
        return Handshake(self.name, b"", snapshot_ready=True)

    def take(self, entries: Sequence[AccessLogEntry]) -> None:
        """Record access-log entries that were forwarded by another replica."""
        self.log_entries += entries

    def routed(self, *sessions: str) -> None:
        """Route requests to the endpoint."""
        for session in sessions:
            self.tracker.add(InFlightRequest(session, 100), POD, 100, time.monotonic())

    def end(self, session: str) -> None:
        """End a request of this replica."""
        request = self.tracker.table.find(session)
        assert request is not None
        self.tracker.end(request, time.monotonic())

    async def serve(self, transport: str = "fast") -> None:
        """Open the port: the same one as before, if it was open before."""
        methods: dict[str, Method] = {REPLICA_FOLLOW_METHOD: self.load_server.start}
        self.server = await listen(methods, transport, self.certificates, self.port)
        self.port = self.server.port

    async def close(self) -> None:
        """Close the port, as a process that ends does."""
        if self.server is not None:
            await self.server.close()

    def follow(self, port: int, host: str = HOST) -> ReplicaConnection:
        """Follow the replica at a port."""
        link = ReplicaConnection(ReplicaAddress(host, HOST, port), self.context)
        self.tasks.append(asyncio.create_task(link.run()))
        return link

    def follow_only(self, address: ReplicaAddress) -> ReplicaConnection:
        """Return a connection that the caller runs."""
        return ReplicaConnection(address, self.context)

    async def tick(self) -> None:
        """Send updates until cancelled."""
        while True:
            self.load_server.tick()
            self.remote_load.poll(time.monotonic())
            await asyncio.sleep(INTERVAL)


@asynccontextmanager
async def running_replicas(
    *names: str, transport: str = "fast", certificates: Sequence[Certificates | None] = ()
) -> AsyncIterator[list[SocketReplica]]:
    """Start replicas that listen and send updates; the test chooses which replicas they follow."""
    given = certificates or [None] * len(names)
    found = [SocketReplica(name, one) for name, one in zip(names, given, strict=True)]
    try:
        for one in found:
            await one.serve(transport)
            one.tasks.append(asyncio.create_task(one.tick()))
        yield found
    finally:
        for one in found:
            await ended(one.tasks)
            await one.close()


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
