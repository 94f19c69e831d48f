"""An index copied over real sockets: engines that publish, a replica that has learned, and one that
starts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.epp.replicas.socket_replicas import HOST, ended, listen, until
from tests.fakes.learning import PROMPT, stored
from tests.fakes.vocabulary import Words

from kvist_epp.engines.vllm.kv_events import Batch, Event, Removed
from kvist_epp.errors import ReplicaError
from kvist_epp.http2.call import NO_TRACE_HEADERS, UNKNOWN_PEER, Call, Method, Server, Sink
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.subscriber import FollowedPublisher, Subscriber, SubscriberLimits
from kvist_epp.names import REPLICA_SNAPSHOT_METHOD
from kvist_epp.replicas import snapshot_chunks, snapshot_transfer
from kvist_epp.replicas.messages import Handshake, encode_snapshot_request
from kvist_epp.replicas.replica_connection import ReplicaAddress, open_stream
from kvist_epp.replicas.snapshot_transfer import SnapshotClient, SnapshotServer, SnapshotSource
from kvist_epp.telemetry.counters import ReplicationStats
from kvist_sim.publisher import Publisher, PublisherConfig

ANY = PublisherConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
CALM = SubscriberLimits(settle=60.0, check=60.0)
MODEL = b"the same model"
BLOCKS = 400
"""Blocks of each engine before a snapshot is requested: two events of two blocks per batch."""


def batch(*events: Event, ts: float = 1.0) -> Batch:
    return Batch(ts=ts, rank=0, events=list(events))


def chain(start: int, family: int = 0) -> Event:
    """Return an event with two more blocks of a prompt that repeats aaaabbbb."""
    shift = family * 100_000
    names = [shift + start + 1, shift + start + 2]
    return stored(names, shift + start if start else None, PROMPT)


@dataclass(eq=False)
class Replica:
    """A ingestor and a subscriber, with their snapshot server."""

    name: str
    fingerprint: bytes = MODEL
    warm: bool = True
    index: Index = field(default_factory=Index)
    stats: ReplicationStats = field(default_factory=ReplicationStats)
    limits: SubscriberLimits = CALM

    def __post_init__(self) -> None:
        self.ingestor = Ingestor(self.index, Words())
        self.subscriber = Subscriber(self.ingestor, limits=self.limits)
        self.snapshot_server = SnapshotServer(
            self.handshake, self.ingestor, self.subscriber, is_precise=lambda _: True, stats=self.stats
        )

    def handshake(self) -> Handshake:
        """Return the handshake of this replica."""
        return Handshake(self.name, self.fingerprint, self.warm)

    def follow(self, engines: Sequence[Publisher], *, replay: bool = True) -> None:
        """Subscribe to each engine as an endpoint of its own; all share the storage "volume"."""
        self.subscriber.follow(
            FollowedPublisher(
                *(f"ns/{at}", f"ns/{at}/0", 0, one.endpoint, one.replay_endpoint if replay else None),
                storage="volume",
            )
            for at, one in enumerate(engines)
        )

    def shared(self) -> tuple[int, int]:
        """Return the blocks in the shared storage, and how much of a long prompt matches it."""
        tiers = self.ingestor.tiers
        if (number := tiers.numbers.get("volume")) is None:
            return 0, 0
        hit = self.index.match((None, None), PROMPT * BLOCKS).of(number)
        return self.index.blocks(number).get("SHARED", 0), hit.tokens

    def tokens(self, at: int = 0) -> int:
        """Return how much of a long prompt matches one engine's publisher."""
        number = self.index.publisher(f"ns/{at}/0")
        return self.index.match((None, None), PROMPT * BLOCKS).of(number).tokens

    def blocks(self, at: int = 0) -> int:
        """Return the blocks that one engine's publisher holds."""
        return self.index.blocks(self.index.publisher(f"ns/{at}/0")).get("GPU", 0)

    async def holding(self, *blocks: int) -> None:
        """Wait until the publishers of the first engines hold these numbers of blocks."""
        await until(lambda: [self.blocks(at) for at in range(len(blocks))] == list(blocks))

    def paused(self) -> list[int]:
        """Return the publishers that are kept from learning."""
        feeds = [self.subscriber.feed(source) for source in self.subscriber.stats()]
        return [feed.pauses for feed in feeds if feed is not None and feed.pauses]

    async def warmed(self, *endpoints: int) -> None:
        """Wait until the first replays are complete."""
        await until(lambda: all(self.subscriber.warm(f"ns/{at}") for at in endpoints))


@dataclass
class Stage:
    """Engines, a replica that has learned their blocks, and a new one."""

    engines: list[Publisher]
    old: Replica
    new: Replica
    server: Server

    def start(
        self, *sources: SnapshotSource, tried: Callable[[], None] = lambda: None
    ) -> "asyncio.Task[None]":
        """Start the copy in the new replica, by default from the old one."""
        given = sources or (self.source(),)
        start = SnapshotClient(
            self.new.ingestor,
            self.new.subscriber,
            handshake=self.new.handshake,
            sources=lambda: given,
            certificates=None,
            stats=self.new.stats,
        )
        self.new.follow(self.engines)
        listed = asyncio.Event()
        listed.set()

        async def dialled() -> None:
            tried()

        return asyncio.create_task(start.run(listed, dialled))

    def source(self, handshake: Handshake | None = None) -> SnapshotSource:
        """Return the old replica as a source."""
        return ReplicaAddress(HOST, HOST, self.server.port), handshake or self.old.handshake()


Tamper = Callable[[Sink], Sink]


@asynccontextmanager
async def stage(
    engines: int = 2,
    *,
    tamper: Tamper = lambda sink: sink,
    transport: str = "fast",
    config: PublisherConfig = ANY,
    limits: SubscriberLimits = CALM,
) -> AsyncIterator[Stage]:
    """Start engines, two by default, of 400 blocks each; ``tamper`` wraps the sink of the snapshot server."""
    publishers = [Publisher(config, 0) for _ in range(engines)]
    old, new = Replica("old"), Replica("new", limits=limits)
    server = None
    try:
        for family, one in enumerate(publishers):
            for start in range(0, BLOCKS, 2):
                one.publish(batch(chain(start, family)))
        old.follow(publishers)
        await old.warmed(*range(engines))

        def start_giving(sink: Sink) -> Call:
            return old.snapshot_server.start(tamper(sink))

        methods: dict[str, Method] = {REPLICA_SNAPSHOT_METHOD: start_giving}
        server = await listen(methods, transport)
        yield Stage(publishers, old, new, server)
    finally:
        if server is not None:
            await server.close()
        for replica in (old, new):
            await replica.subscriber.close()
        for one in publishers:
            one.close()


@pytest.mark.parametrize("transport", ["fast", "grpc"])
async def test_a_new_replica_copies_the_index_and_continues_with_live_events(transport: str) -> None:
    """The engines replay only the last batch and what followed it, not everything from 0."""
    async with stage(transport=transport) as found:
        await found.start()
        await found.new.warmed(0, 1)
        for one, family in zip(found.engines, (0, 1), strict=True):
            one.publish(batch(chain(BLOCKS, family), Removed(hashes=[family * 100_000 + 7])))
        for replica in (found.old, found.new):
            await replica.holding(BLOCKS + 1, BLOCKS + 1)

        assert [found.new.tokens(at) for at in (0, 1)] == [6 * 4, 6 * 4]
        for one in found.engines:
            assert one.replays == [0, BLOCKS // 2 - 1]
        assert found.new.stats.snapshots == {"given": 0, "taken": 1, "failed": 0}
        assert (found.new.stats.snapshot_blocks, found.new.stats.snapshot_publishers) == (BLOCKS, 2)
        stats = found.new.subscriber.stats().values()
        assert [(one.resets, one.gaps, one.orphans) for one in stats] == [(0, 0, 0)] * 2


async def test_a_new_replica_knows_what_engines_share() -> None:
    """The blocks of a shared storage are copied with those of the engines that share it, although the GPU
    that had them has lost them; they are leased, and live events add to them."""
    async with stage(1) as found:
        [engine] = found.engines
        engine.publish(
            batch(
                stored([2], 1, PROMPT[4:], session=None, medium="SHARED"),
                stored([1], None, PROMPT[:4], session=None, medium="SHARED"),
                Removed(hashes=[1, 2]),
            )
        )
        engine.publish(batch(Removed(hashes=[BLOCKS])))  # the last batch is replayed in any case
        await found.old.holding(BLOCKS - 3)
        before = found.new.shared()
        await found.start()
        await found.new.warmed(0)
        copied = found.new.shared()
        engine.publish(batch(stored([3], 2, PROMPT[:4], session=None, medium="SHARED")))
        await until(lambda: found.new.shared() == (3, 12))

        assert (before, copied) == ((0, 0), (2, 8))
        assert found.new.stats.snapshots["taken"] == 1
        assert found.new.stats.snapshot_publishers == 1
        assert len(found.new.ingestor.tiers.storages["volume"].leases) == 3
        assert engine.replays == [0, BLOCKS // 2 + 1]
        assert not found.old.paused()


async def test_a_client_may_grant_more_chunks_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Grants that arrive after the last chunk are ignored."""
    monkeypatch.setattr(snapshot_chunks, "CHUNK_PARTS", 1)
    async with stage(3) as found:
        await found.start()

        assert found.new.stats.snapshots == {"given": 0, "taken": 1, "failed": 0}
        assert found.new.stats.messages["received"] > 2 * snapshot_transfer.CREDIT
        assert not found.old.snapshot_server.calls


async def test_events_published_during_the_copy_are_not_lost() -> None:
    """Events before, during and after the recording of a publisher count once each."""
    async with stage(1, tamper=Slow) as found:
        task = found.start()
        for start in range(BLOCKS, 2 * BLOCKS - 4, 2):
            found.engines[0].publish(batch(chain(start)))
            await asyncio.sleep(0)
        await task
        await until(lambda: found.new.blocks() == found.old.blocks() == 2 * BLOCKS - 4)

        assert found.new.tokens() == found.old.tokens()
        assert found.new.index.stats()["copies"] == 0


async def test_blocks_of_an_engine_that_restarts_during_the_copy_are_dropped() -> None:
    """The replay shows that the snapshot is older than the restart, and the engine is learned from the
    start."""
    async with stage(1) as found:
        old_life = found.engines[0]
        config = PublisherConfig(endpoint=old_life.endpoint, replay_endpoint=old_life.replay_endpoint or "")
        old_life.close()
        found.engines[0] = Publisher(config, 0)
        for start in range(0, 600, 2):
            found.engines[0].publish(batch(chain(start, 7), ts=99.0))
        found.old.subscriber.skip_snapshots()
        await found.start()
        await found.new.warmed(0)
        await until(lambda: found.new.blocks() == 600)

        assert found.new.subscriber.stats()["ns/0/0"].restarts <= 1


async def test_without_a_suitable_replica_the_engines_replay() -> None:
    """No replica may answer, be ready, or have the same model."""
    async with stage(1) as found:
        strangers = (
            found.source(Handshake("cold", MODEL, snapshot_ready=False)),
            found.source(Handshake("other", b"another model", snapshot_ready=True)),
            found.source(Handshake("later", MODEL, snapshot_ready=True, version=2)),
            (ReplicaAddress(HOST, HOST, 1), found.old.handshake()),
        )
        await found.start(*strangers)
        await found.new.warmed(0)

        assert (found.new.blocks(), found.engines[0].replays) == (BLOCKS, [0, 0])
        assert found.new.stats.snapshots == {"given": 0, "taken": 0, "failed": 1}


async def test_a_replica_that_is_not_ready_refuses() -> None:
    """The handshake may be outdated; the refusal counts, and the next replica is asked."""
    async with stage(1) as found:
        handshake = found.old.handshake()
        found.old.warm = False
        await found.start(found.source(handshake))
        found.old.warm = True
        found.old.fingerprint = b"changed"
        async with open_stream(found.source()[0], REPLICA_SNAPSHOT_METHOD, None) as stream:
            await stream.write(encode_snapshot_request(1, handshake, ["ns/0/0"]), 5)
            with pytest.raises(ReplicaError, match="another protocol version, model or tokenizer"):
                await stream.read(5)
        await found.new.warmed(0)

        assert (found.new.blocks(), found.new.stats.snapshots["failed"]) == (BLOCKS, 1)


class Sinking:
    """A sink that passes messages on."""

    trace_headers = NO_TRACE_HEADERS
    from_envoy = False
    peer = UNKNOWN_PEER

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.sent = 0

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        """Pass one more chunk on."""
        self.sent += 1
        self.sink.send(data)

    def close(self, status: int = 0, message: str = "") -> None:
        """Pass the end on."""
        self.sink.close(status, message)


class Slow(Sinking):
    """A sink that delays each chunk a little."""

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        """Pass the chunk on later."""
        self.sent += 1
        asyncio.get_running_loop().call_later(0.02 * self.sent, self.sink.send, data)


class Corrupting(Sinking):
    """A sink that changes a byte of the second chunk."""

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        """Change one byte of the second chunk."""
        middle = len(data) // 2
        changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        super().send(changed if self.sent == 1 else data)


class Silent(Sinking):
    """A sink that sends one chunk and nothing more."""

    def send(self, data: bytes, content: bytes | memoryview = b"") -> None:
        """Pass the first chunk on alone."""
        self.sent += 1
        if self.sent == 1:
            self.sink.send(data)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small chunks, one at a time, and short time limits, so that much can happen between two chunks."""
    monkeypatch.setattr(snapshot_chunks, "CHUNK_PARTS", 4)
    monkeypatch.setattr(snapshot_transfer, "CREDIT", 1)
    monkeypatch.setattr(snapshot_transfer, "CHUNK_SECONDS", 0.3)


async def replaced(found: Stage) -> None:
    """Check that complete publishers are kept, and that the engines replayed the others, each block once."""
    engines = len(found.engines)
    await found.new.warmed(*range(engines))
    await found.new.holding(*[BLOCKS] * engines)

    assert found.new.stats.snapshots == {"given": 0, "taken": 0, "failed": 1}
    asked = [one.replays[1] for one in found.engines]
    assert asked.count(0) == engines - found.new.stats.snapshot_publishers > 0
    assert [found.new.tokens(at) for at in range(engines)] == [found.old.tokens(at) for at in range(engines)]
    assert found.new.index.stats()["copies"] == 0
    await until(lambda: not found.old.snapshot_server.calls)
    assert found.old.paused() == []


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("tamper", [Corrupting, Silent])
async def test_a_snapshot_that_stalls_or_is_corrupt_is_replaced_by_replays(tamper: Tamper) -> None:
    """A byte changes on the way, or the other replica hangs."""
    async with stage(6, tamper=tamper) as found:
        await found.start()
        await replaced(found)


@pytest.mark.usefixtures("hasty")
async def test_a_snapshot_whose_server_dies_is_replaced_by_replays() -> None:
    """The other replica is killed in the middle, and its connections are reset."""
    async with stage(6, tamper=Silent) as found:
        task = found.start()
        await until(lambda: found.new.stats.messages["received"])
        await found.server.close()
        await task
        await replaced(found)


@pytest.mark.usefixtures("hasty")
async def test_a_second_replica_is_used_when_the_first_breaks_off() -> None:
    """The second one is asked for the publishers that are still missing."""
    sinks: list[type[Sinking]] = [Silent, Sinking]

    def first_silent(sink: Sink) -> Sink:
        return sinks.pop(0)(sink)

    async with stage(4, tamper=first_silent) as found:
        await found.start(found.source(), found.source())
        await found.new.warmed(*range(4))

        assert found.new.stats.snapshots == {"given": 0, "taken": 1, "failed": 1}
        assert [one.replays[1] for one in found.engines] == [BLOCKS // 2 - 1] * 4


@pytest.mark.usefixtures("hasty")
async def test_a_cancelled_copy_leaves_no_publisher_waiting() -> None:
    """If the copy is cancelled, publishers continue on both sides."""
    async with stage(2, tamper=Silent) as found:
        task = found.start()
        await until(lambda: found.new.stats.messages["received"])
        await ended([task])
        await until(lambda: not found.old.snapshot_server.calls)
        await found.new.warmed(0, 1)

        assert [found.new.blocks(at) for at in (0, 1)] == [BLOCKS] * 2
        assert found.old.paused() == []


async def test_a_client_is_sent_no_more_chunks_than_it_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow client costs the chunks in flight, and its publishers learn meanwhile."""
    monkeypatch.setattr(snapshot_chunks, "CHUNK_PARTS", 2)
    sinks: list[Sinking] = []

    def counting(sink: Sink) -> Sink:
        sinks.append(Sinking(sink))
        return sinks[-1]

    async with stage(1, tamper=counting) as found:
        async with open_stream(found.source()[0], REPLICA_SNAPSHOT_METHOD, None) as stream:
            await stream.write(encode_snapshot_request(2, found.new.handshake(), ["ns/0/0"]), 5)
            await stream.read(5)
            await stream.read(5)
            found.engines[0].publish(batch(chain(BLOCKS)))
            await until(lambda: found.old.blocks() == BLOCKS + 2)
            before = sinks[0].sent
            await stream.write(encode_snapshot_request(1), 5)
            await stream.read(5)
        await until(lambda: not found.old.snapshot_server.calls)

        assert (before, sinks[0].sent) == (2, 3)


async def test_clients_are_limited_and_strangers_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few clients get the index at once; a request that lacks a handshake gets nothing."""
    monkeypatch.setattr(snapshot_transfer, "MAX_CLIENTS", 1)
    async with stage(1) as found:
        address = found.source()[0]
        want = encode_snapshot_request(0, found.new.handshake(), ["ns/0/0"])
        async with open_stream(address, REPLICA_SNAPSHOT_METHOD, None) as first:
            await first.write(want, 5)
            await until(lambda: found.old.snapshot_server.calls)
            refused = (
                (want, "too many"),
                (encode_snapshot_request(1), "lacks a handshake"),
                (b"\xff", "cannot be decoded"),
            )
            for message, why in refused:
                async with open_stream(address, REPLICA_SNAPSHOT_METHOD, None) as other:
                    await other.write(message, 5)
                    with pytest.raises(ReplicaError, match=why):
                        await other.read(5)


@pytest.mark.usefixtures("hasty")
async def test_an_endpoint_that_leaves_during_the_copy_is_skipped() -> None:
    """The endpoint may leave on either side; the others are copied all the same."""
    async with stage(3) as found:
        task = found.start()
        await until(lambda: found.new.stats.messages["received"])
        found.old.follow(found.engines[:2])
        found.new.follow(found.engines[:2])
        await task
        await found.new.warmed(0, 1)

        assert [found.new.blocks(at) for at in (0, 1)] == [BLOCKS] * 2
        assert found.new.index.stats()["publishers"] == 2
