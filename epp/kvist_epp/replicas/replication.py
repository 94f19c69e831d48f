"""Connect the exchange between replicas with the picker, and start and stop it.

The app opens it with ``--replicas``. Its only connections are the director's (events and ended requests
that were not routed here), the load tracker's and the lookup's.
"""

import asyncio
import hashlib
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any, Final

from kvist_epp.app.process import Shutdown, listen
from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import hostport
from kvist_epp.errors import CertificateError, SettingsError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.http2.call import Method
from kvist_epp.http2.tls import Certificates
from kvist_epp.load.in_flight import Attempt, RequestListener
from kvist_epp.names import REPLICA_FOLLOW_METHOD, REPLICA_PORT, REPLICA_SNAPSHOT_METHOD
from kvist_epp.prompt.model import Model
from kvist_epp.replicas.load_server import LoadServer
from kvist_epp.replicas.messages import Handshake
from kvist_epp.replicas.prompt_digests import URGENT_TOKENS
from kvist_epp.replicas.remote_load import RemoteLoad, ReplicaState
from kvist_epp.replicas.replica_connection import (
    ConnectionContext,
    ConnectionState,
    ReplicaConnection,
    ReplicaDirectory,
)
from kvist_epp.replicas.snapshot_transfer import SnapshotClient, SnapshotServer, SnapshotSource
from kvist_epp.settings.settings import Settings
from kvist_epp.settings.validation import is_loopback_only, parse_replica_names
from kvist_epp.telemetry.counters import ReplicationReport, ReplicationStats

POLL_SECONDS: Final = 0.5
"""Interval in which silent replicas and old requests are looked for."""
URGENT_SECONDS: Final = 0.02
"""Delay from a long new prompt to the update that announces it: several at once share an update."""
FAREWELL_SECONDS: Final = 1.0
"""Time that a replica which shuts down waits for the others to acknowledge its farewell."""

logger = logging.getLogger(__name__)


class Replication(RequestListener):
    """All parts of the exchange; ``start`` starts them."""

    def __init__(
        self,
        settings: Settings,
        registry: EndpointRegistry,
        ready: Callable[[], bool] = bool,
    ) -> None:
        """``ready``: whether this replica is ready, so that its index may be copied.

        Raises SettingsError: the certificates cannot be used.
        """
        director, clock = registry.director, registry.clock
        certificates = _certificates(settings)
        self.ready = ready
        self.stats = ReplicationStats()
        self.remote_load = RemoteLoad(
            director.replica, director.tracker, director.lookup.members.__contains__
        )
        self.load_server = LoadServer(self._handshake, director.tracker, self.remote_load, self.stats, clock)
        self._settings = settings
        self._registry = registry
        self._director = director
        self._certificates = certificates
        self._clock = clock
        self._completion = CompletionHandler(director, clock)
        self._fingerprint = fingerprint(director.model)
        self._listed = asyncio.Event()
        self._metrics_port = 0
        """Port of this replica's pages, by ``start``."""
        self._urgent = asyncio.Event()
        """Set when a prompt was routed that the other replicas should know of at once."""
        context = ConnectionContext(
            self._handshake,
            certificates,
            self.remote_load,
            self.stats,
            clock,
            on_log_entries=self._on_forwarded_entries,
            followed={},
        )
        self.directory = ReplicaDirectory(
            parse_replica_names(settings.replicas), lambda address: ReplicaConnection(address, context)
        )
        self._snapshot_server: SnapshotServer | None = None
        self._snapshot_client: SnapshotClient | None = None
        ingestor, subscriber = registry.ingestor, registry.subscriber
        if ingestor is not None and subscriber is not None:
            members = director.lookup.members
            self._snapshot_server = SnapshotServer(
                self._handshake,
                ingestor,
                subscriber,
                is_precise=lambda key: key in members and members[key].precise,
                stats=self.stats,
            )
            self._snapshot_client = SnapshotClient(
                ingestor,
                subscriber,
                handshake=self._handshake,
                sources=self._sources,
                certificates=certificates,
                stats=self.stats,
            )

    def methods(self) -> dict[str, Method]:
        """Return the gRPC methods served to other replicas."""
        found: dict[str, Method] = {REPLICA_FOLLOW_METHOD: self.load_server.start}
        if self._snapshot_server is not None:
            found[REPLICA_SNAPSHOT_METHOD] = self._snapshot_server.start
        return found

    def waiting(self) -> str:
        """Return what must finish before this replica may be ready; empty if nothing must."""
        return self._snapshot_client.activity if self._snapshot_client is not None else ""

    def report(self) -> ReplicationReport:
        """Return the figures for the metrics page."""
        remote = self.remote_load
        return ReplicationReport(self.stats, remote.counts(), len(remote), self.load_server.lag())

    def document(self) -> dict[str, Any]:
        """Return the page ``/debug/peers``: other replicas, addresses, followers and the last snapshot."""
        now, stats = self._clock(), self.stats
        return {
            "replica": self._director.replica,
            "fingerprint": self._fingerprint.hex()[:16],
            "problem": self.directory.problem,
            "waiting_for": self.waiting(),
            "replicas": [
                {
                    "replica": one.replica,
                    "state": one.state.value,
                    "requests": len(one.attempts),
                    "on_unknown_endpoints": len(one.unplaced),
                    "heard_seconds_ago": round(now - one.heard_at, 3),
                }
                for one in self.remote_load.replicas.values()
            ],
            "addresses": [
                {
                    "address": str(one.address),
                    "host": one.address.host,
                    "state": one.state.value,
                    "replica": one.handshake and one.handshake.replica,
                    "problem": one.problem,
                }
                for one in self.directory.connections.values()
            ],
            "followers": {
                name: {"round_trip_seconds": call.updates.round_trip, "waits": call.updates.in_flight}
                for name, call in self.load_server.followers.items()
            },
            "snapshot": {
                "seconds": round(stats.snapshot_seconds, 3),
                "blocks": stats.snapshot_blocks,
                "publishers": stats.snapshot_publishers,
                **stats.snapshots,
            },
        }

    def page_addresses(self) -> dict[str, str]:
        """Return the base URL of each other replica's pages by its id; empty for a replica that is silent, or
        has not announced its port."""
        found = {
            name: "" for name, one in self.remote_load.replicas.items() if one.state is not ReplicaState.LEFT
        }
        for address, handshake in self._sources():
            if handshake.metrics_port:
                found[handshake.replica] = f"http://{hostport(address.ip, handshake.metrics_port)}"
        return found

    async def run(self) -> None:
        """Send updates to followers and look after the other replicas' requests until cancelled."""
        poll_at = 0.0
        while True:
            if self._registry.fleet is not None:
                self._listed.set()
            self.load_server.tick()
            if (now := self._clock()) >= poll_at:
                self.remote_load.poll(now)
                self._director.set_other_replicas(sum(1 for _ in self._sources()))
                poll_at = now + POLL_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.gossip_interval):
                    await self._urgent.wait()
                    self._urgent.clear()
                    await asyncio.sleep(URGENT_SECONDS)

    async def copy_index(self) -> None:
        """Copy the index of another replica, if one has it."""
        if self._snapshot_client is not None:
            await self._snapshot_client.run(self._listed, self.directory.all_tried)

    async def leave(self) -> None:
        """Send the followers the open requests and a farewell; wait a bounded time for the acknowledgement.

        This replica must not route requests after this.
        """
        until = self._clock() + FAREWELL_SECONDS
        self.load_server.tick(leaving=True)
        while self._clock() < until and not self.load_server.farewell_complete:
            await asyncio.sleep(0.01)
            self.load_server.tick(leaving=True)

    async def start(self, shutdown: Shutdown, stack: AsyncExitStack, metrics_port: int) -> None:
        """Listen on ``--replica-port`` and follow the other replicas until ``stack`` is closed.

        ``metrics_port``: open port of this replica's pages, which it announces. Raises SettingsError.
        """
        settings, director = self._settings, self._director
        self._metrics_port = metrics_port
        plaintext = not (settings.replica_cert_path or settings.replica_insecure)
        loopback = plaintext and is_loopback_only(settings.replicas, settings.host, os.environ)
        await listen(
            replace(settings, host=settings.host or ("localhost" if loopback else "")),
            self.methods(),
            settings.replica_port,
            "--replica-port",
            self._certificates,
            name=REPLICA_PORT,
            stack=stack,
            port_stats=director.metrics.ports,
        )
        self.attach()
        shutdown.start_task(stack, self.run(), "replication")
        shutdown.start_task(stack, self.directory.run(), "replica addresses")
        if self._certificates is not None:
            shutdown.start_task(stack, self._certificates.run(), "replica certificates")
        copying = asyncio.create_task(self.copy_index(), name="copy of an index")
        stack.push_async_callback(_stop_copying, copying)

    def attach(self) -> None:
        """Hear of requests, and have prompts in flight at other replicas found."""
        director = self._director
        director.tracker.add_listener(self)
        director.tracker.add_listener(self.load_server)
        director.lookup.remote_prefixes = self.remote_load.prefixes.match
        director.progress.on_remote_prompt_computed = self.remote_load.forget_prompt
        director.metrics.gauges.replication = self.report

    def forward_end(self, entry: AccessLogEntry) -> None:
        """Forward an access-log entry of a request that was not routed here."""
        self.stats.forwarded["sent"] += self.remote_load.forward(entry, self._clock())

    def on_routed(self, attempt: Attempt) -> None:
        """Send an update soon after a long new prompt was routed, so that the other replicas know of it."""
        request = attempt.request
        if request.prompt is not None and request.tokens - request.indexed_tokens >= URGENT_TOKENS:
            self._urgent.set()

    def _handshake(self) -> Handshake:
        return Handshake(
            self._director.replica, self._fingerprint, self.ready(), metrics_port=self._metrics_port
        )

    def _sources(self) -> Iterator[SnapshotSource]:
        for connection in list(self.directory.connections.values()):
            if connection.state is ConnectionState.FOLLOWED and connection.handshake is not None:
                yield connection.address, connection.handshake

    def _on_forwarded_entries(self, entries: Sequence[AccessLogEntry]) -> None:
        """Apply access-log entries that a gateway sent to another replica."""
        for entry in entries:
            session = entry.session or ""
            if self._director.table.find(session, entry.request_id or "") is not None:
                self._completion.on_access_log([entry])
            else:
                self.remote_load.end_orphan(session, self._clock())


async def _stop_copying(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("copying the index of another replica failed", exc_info=error)


def _certificates(settings: Settings) -> Certificates | None:
    path = settings.replica_cert_path
    if not path:
        return None
    try:
        found = Certificates(cert_path=path, client_ca_path=path)
    except CertificateError as error:
        raise SettingsError(f"--replica-cert-path: {error}") from error
    if not found.material.ca:
        raise SettingsError(f"--replica-cert-path: no ca.crt in {path}")
    return found


def fingerprint(model: Model | None) -> bytes:
    """Return a digest that is equal where equal tokens have equal bytes; empty if no blocks are learned."""
    if model is None or not model.faithful:
        return b""
    digest = hashlib.sha256(array("I", map(len, model.pieces)).tobytes())
    digest.update(b"".join(model.pieces))
    return digest.digest()
