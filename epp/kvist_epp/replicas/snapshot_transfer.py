"""Copying of an index from one replica to another that starts, instead of replays of thousands of batches.

The server sends publisher by publisher, in slices of work between picks: the events of a publisher wait a few
milliseconds while its segments are recorded, and continue while the segments are encoded and sent. The client
grants chunks one by one, so that a slow client costs no memory.

The client holds back its publishers' live events from the start. Once the endpoints are known and every
replica found was dialled, a ready one of the same model is asked. Its snapshot is applied publisher by
publisher, and each publisher continues with its live events on its own. Whatever the snapshot lacks, or
contains in error, is replayed from the engines' buffers as usual.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from kvist_epp.errors import ProtocolError, ReplicaError, SnapshotError
from kvist_epp.http2.call import Sink
from kvist_epp.http2.tls import Certificates
from kvist_epp.index.snapshot.parts import Begin
from kvist_epp.index.snapshot.sections import Reader, Writer
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.publisher_feed import Position, PublisherFeed
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.names import REPLICA_SNAPSHOT_METHOD
from kvist_epp.replicas.messages import (
    Handshake,
    SnapshotRequest,
    decode_snapshot_request,
    encode_snapshot_request,
)
from kvist_epp.replicas.replica_connection import ReplicaAddress, RpcStream, open_stream
from kvist_epp.replicas.snapshot_chunks import ChunkReader, ChunkWriter
from kvist_epp.telemetry.counters import ReplicationStats

MAX_CLIENTS: Final = 4
"""Maximum number of snapshots sent at once."""
MAX_CREDIT: Final = 64
"""Chunks that a client may grant in advance: about 10 MB."""

_INVALID_ARGUMENT: Final = 3
_RESOURCE_EXHAUSTED: Final = 8
_FAILED_PRECONDITION: Final = 9

Chunks = Generator[bytes | None, None, None]
"""Yields chunks, None where other work may run in between, and …"""
_WAIT: Final = b"wait"
"""… this where other work must run first."""
_LAST: Final = b"last"
"""Default of ``next`` at the end of the generator."""


@dataclass(slots=True, eq=False)
class SnapshotServer:
    """Starts a ``SnapshotCall`` for each client."""

    handshake: Callable[[], Handshake]
    ingestor: Ingestor
    subscriber: Subscriber
    is_precise: Callable[[str], bool]
    """Whether what is known of an endpoint's cache, by its key, is accurate."""
    stats: ReplicationStats
    calls: "set[SnapshotCall]" = field(default_factory=set)

    def start(self, sink: Sink) -> "SnapshotCall":
        """Start a call of the ``Snapshot`` method."""
        return SnapshotCall(self, sink)

    def refusal(self, client: Handshake) -> tuple[int, str]:
        """Return the gRPC status and reason for which a client gets no snapshot; (0, "") if it gets one."""
        own = self.handshake()
        if (client.version, client.fingerprint) != (own.version, own.fingerprint):
            return _FAILED_PRECONDITION, "another protocol version, model or tokenizer"
        if not own.snapshot_ready:
            return _FAILED_PRECONDITION, "this replica is not ready"
        return (_RESOURCE_EXHAUSTED, "too many clients") if len(self.calls) >= MAX_CLIENTS else (0, "")


class SnapshotCall:
    """One client: a ``Call`` of the ``Snapshot`` method, and a job of the subscriber's scheduler."""

    __slots__ = ("_chunks", "_credit", "_server", "_sink", "_started")

    def __init__(self, server: SnapshotServer, sink: Sink) -> None:
        self._server = server
        self._sink = sink
        self._credit = 0
        self._started = False
        self._chunks: Chunks | None = None

    def on_message(self, data: bytes) -> None:
        """Handle the first request, then grants of more chunks."""
        try:
            request = decode_snapshot_request(data)
            if not self._started:
                self._begin(request)
        except ProtocolError as error:
            self._close(_INVALID_ARGUMENT, str(error))
        else:
            self._credit = min(self._credit + request.chunks, MAX_CREDIT)
            if self._chunks is not None and self._credit:
                self._server.subscriber.scheduler.add(self)

    def on_half_closed(self) -> None:
        """Close the call, since the client needs no more."""
        self._close()

    def on_cancelled(self) -> None:
        """Stop sending, since the client has gone."""
        self._stop()

    def work(self, deadline: float) -> bool:
        """Encode and send until ``deadline`` or until the client's credit is used up.

        Returns whether there is more to do now.
        """
        chunks = self._chunks
        while chunks is not None and self._credit and perf_counter() < deadline:
            chunk = next(chunks, _LAST)
            if chunk == _LAST:
                self._stop()  # the client ends the call, since it may be about to grant more chunks
                return False
            if chunk == _WAIT:
                return True
            if chunk is not None:
                self._credit -= 1
                self._server.stats.on_sent(len(chunk))
                self._sink.send(chunk)
        return chunks is not None and self._credit > 0

    def _begin(self, request: SnapshotRequest) -> None:
        if request.handshake is None:
            raise ProtocolError("a snapshot request lacks a handshake")
        status, reason = self._server.refusal(request.handshake)
        if reason:
            self._close(status, reason)
            return
        self._started = True
        self._server.calls.add(self)
        self._chunks = self._snapshot(request.publishers)

    def _snapshot(self, publishers: tuple[str, ...]) -> Chunks:
        writer, chunk_writer = Writer(), ChunkWriter()
        subscriber = self._server.subscriber
        # storages come first: events of a publisher whose section is complete may add to them
        for storage, sharers in self._server.ingestor.tiers.sharers(publishers).items():
            feeds = [feed for one in sharers if (feed := subscriber.feed(one)) is not None]
            yield from self._storage(storage, feeds, writer, chunk_writer)
        for source in publishers:
            feed = subscriber.feed(source)
            if feed is not None and self._server.is_precise(feed.endpoint):
                yield from self._section(source, feed, writer, chunk_writer)
        self._server.stats.snapshots["given"] += 1
        yield chunk_writer.finish()

    def _section(self, source: str, feed: PublisherFeed, writer: Writer, chunk_writer: ChunkWriter) -> Chunks:
        feed.pause()
        try:
            while not feed.between_steps and self._server.subscriber.feed(source) is feed:
                yield _WAIT
            position, captured = feed.position, self._server.ingestor.capture(source)
            for _ in captured.capture.steps():
                yield None
        finally:
            feed.unpause()
        if position is not None and captured.capture.valid:
            yield chunk_writer.add(Begin(source, position.next, position.mark, captured.group))
            for part in writer.section(captured.capture, captured.pending):
                yield chunk_writer.add(part)

    def _storage(
        self, storage: str, feeds: Sequence[PublisherFeed], writer: Writer, chunk_writer: ChunkWriter
    ) -> Chunks:
        """Yield the section of a storage, while none of the engines that share it changes it."""
        for feed in feeds:
            feed.pause()
        try:
            while not all(feed.between_steps for feed in feeds):
                yield _WAIT
            captured = self._server.ingestor.capture(storage)
            for _ in captured.capture.steps():
                yield None
        finally:
            for feed in feeds:
                feed.unpause()
        if captured.capture.valid:
            yield chunk_writer.add(Begin(storage, 0, b"", captured.group))
            for part in writer.section(captured.capture, captured.pending):
                yield chunk_writer.add(part)

    def _close(self, status: int = 0, reason: str = "") -> None:
        self._stop()
        self._sink.close(status, reason)

    def _stop(self) -> None:
        chunks, self._chunks = self._chunks, None
        self._server.calls.discard(self)
        self._server.subscriber.scheduler.remove(self)
        if chunks is not None:
            chunks.close()


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
        subscriber.wait_for_snapshots()

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
                if not self._subscriber.waiting_for_snapshot():
                    return
                same = (other.version, other.fingerprint) == (own.version, own.fingerprint)
                if other.snapshot_ready and same and await self._try_source(address, other.replica):
                    return
        finally:
            self.activity = ""
            self._subscriber.skip_snapshots()

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
        reader = Reader(self._ingestor, self._wanted, self._on_section_complete)
        publishers = self._subscriber.waiting_for_snapshot()
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

    def _wanted(self, source: str) -> bool:
        return self._subscriber.waits_for_snapshot(source) or self._ingestor.tiers.shared(source) is not None

    def _on_section_complete(self, begin: Begin) -> None:
        feed = self._subscriber.feed(begin.publisher)
        if feed is not None:
            feed.adopt_snapshot(Position(begin.next, begin.mark))
            self._stats.snapshot_publishers += 1


async def _yield_if_due(due: float) -> float:
    """Let the event loop run if the time has come; return the next time."""
    if perf_counter() < due:
        return due
    await asyncio.sleep(0)
    return perf_counter() + SLICE_SECONDS
