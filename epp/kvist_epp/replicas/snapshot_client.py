"""Copy the index of another replica at startup, instead of replaying thousands of batches of each engine.

Publishers' live events are held back from the start. Once the endpoints are known and every replica found was
dialled, a ready one of the same model is asked. Its snapshot is applied publisher by publisher, and each
publisher continues with its live events on its own. Whatever the snapshot lacks, or contains in error, is
replayed from the engines' buffers as usual.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from time import perf_counter
from typing import Final

from kvist_epp.errors import ReplicaError, SnapshotError
from kvist_epp.http2.tls import Certificates
from kvist_epp.index.snapshot.parts import Begin
from kvist_epp.index.snapshot.read import Reader
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.intake import Position
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.names import REPLICA_SNAPSHOT_METHOD
from kvist_epp.replicas.messages import Handshake, encode_snapshot_request
from kvist_epp.replicas.replication_stats import ReplicationStats
from kvist_epp.replicas.rpc_client import ReplicaAddress, RpcStream, open_stream
from kvist_epp.replicas.snapshot_chunks import ChunkReader

DISCOVERY_SECONDS: Final = 3.0
"""Time limit for the other replicas to answer, once the endpoints are known."""
SNAPSHOT_SECONDS: Final = 30.0
"""Time limit for one snapshot."""
CHUNK_SECONDS: Final = 3.0
"""Time limit for one chunk."""
CREDIT: Final = 16
"""Chunks that may be in flight: 2 MB."""
SLICE_SECONDS: Final = 0.002
"""Work before the event loop runs again; health checks and events wait no longer than this."""

logger = logging.getLogger(__name__)

SnapshotSource = tuple[ReplicaAddress, Handshake]
"""A replica that answered, and its address."""


class SnapshotClient:
    """Copies an index once in the life of a process."""

    def __init__(
        self,
        ingestor: Ingestor,
        subscriber: Subscriber,
        *,
        handshake: Callable[[], Handshake],
        sources: Callable[[], Iterable[SnapshotSource]],
        certificates: Certificates | None,
        stats: ReplicationStats,
    ) -> None:
        """``sources`` returns the replicas that may have an index, as far as they are known. Publishers that
        ``subscriber`` follows from now on wait."""
        self.activity = "looking for other replicas"
        """Description of the work in progress; empty when it is over."""
        self._ingestor = ingestor
        self._subscriber = subscriber
        self._handshake = handshake
        self._sources = sources
        self._certificates = certificates
        self._stats = stats
        subscriber.wait()

    async def run(self, listed: asyncio.Event, all_tried: Callable[[], Awaitable[None]]) -> None:
        """Copy an index if there is one.

        ``listed`` is set once the endpoints are known; ``all_tried`` waits until every replica was dialled.
        """
        try:
            await listed.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCOVERY_SECONDS):
                    await all_tried()
            own = self._handshake()
            for address, other in list(self._sources()):
                if not self._subscriber.waiting():
                    return
                same = (other.version, other.fingerprint) == (own.version, own.fingerprint)
                if other.snapshot_ready and same and await self._try_source(address, other.replica):
                    return
        finally:
            self.activity = ""
            self._subscriber.resume()

    async def _try_source(self, address: ReplicaAddress, replica: str) -> bool:
        self.activity = f"copying the index of replica {replica}"
        stats, started = self._stats, perf_counter()
        try:
            async with asyncio.timeout(SNAPSHOT_SECONDS):
                await self._copy(address)
        except (ReplicaError, SnapshotError, TimeoutError) as error:
            stats.snapshots["failed"] += 1
            logger.warning("copying the index of replica %s failed: %s", replica, str(error) or "timeout")
            return False
        stats.snapshots["taken"] += 1
        stats.snapshot_seconds = perf_counter() - started
        logger.info(
            "the index of replica %s was copied: %d blocks of %d publishers in %.1f s",
            replica,
            stats.snapshot_blocks,
            stats.snapshot_publishers,
            stats.snapshot_seconds,
        )
        return True

    async def _copy(self, address: ReplicaAddress) -> None:
        reader = Reader(self._ingestor, self._subscriber.waits, self._on_section_complete)
        publishers = self._subscriber.waiting()
        try:
            async with open_stream(address, REPLICA_SNAPSHOT_METHOD, self._certificates) as stream:
                request = encode_snapshot_request(CREDIT, self._handshake(), publishers)
                await stream.write(request, CHUNK_SECONDS)
                await self._read_chunks(stream, reader)
        finally:
            reader.close()
            self._stats.snapshot_blocks = reader.blocks

    async def _read_chunks(self, stream: RpcStream, reader: Reader) -> None:
        chunk_reader, due = ChunkReader(), perf_counter() + SLICE_SECONDS
        while not chunk_reader.complete:
            chunk = await stream.read(CHUNK_SECONDS)
            if chunk is None:
                raise ReplicaError("the other side ended the call before the last chunk")
            self._stats.on_received(len(chunk))
            for part in chunk_reader.parts(chunk):
                for _ in reader.feed(part):
                    due = await _yield_if_due(due)
                due = await _yield_if_due(due)
            if not chunk_reader.complete:
                await stream.write(encode_snapshot_request(1), CHUNK_SECONDS)

    def _on_section_complete(self, begin: Begin) -> None:
        feed = self._subscriber.feed(begin.publisher)
        if feed is not None:
            feed.adopt(Position(begin.next, begin.mark))
            self._stats.snapshot_publishers += 1


async def _yield_if_due(due: float) -> float:
    """Let the event loop run if the time has come; return the next time."""
    if perf_counter() < due:
        return due
    await asyncio.sleep(0)
    return perf_counter() + SLICE_SECONDS
