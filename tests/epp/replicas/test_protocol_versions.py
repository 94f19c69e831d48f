"""Replicas of revision 4ff51b7 and of this one understand each other during a rolling upgrade.

``golden/protocol-1.json`` holds the messages that 4ff51b7 sends in the scenario below. Reading them shows
that this revision understands the old one; sending the same bytes in the same scenario shows the reverse.
"""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest
from tests.fakes.copying import heard

from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.index.byte_index import Index
from kvist_epp.index.snapshot.parts import Begin, Part
from kvist_epp.index.snapshot.sections import Writer
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock, DecodeBlockState
from kvist_epp.load.in_flight import Attempt, InFlightRequest, RequestListener
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.names import REPLICA_FOLLOW_METHOD, REPLICA_SNAPSHOT_METHOD
from kvist_epp.replicas.load_server import UpdateStream
from kvist_epp.replicas.messages import (
    Handshake,
    decode_ack,
    decode_snapshot_request,
    decode_update,
    encode_ack,
    encode_snapshot_request,
)
from kvist_epp.replicas.prompt_digests import STEP_BYTES, PromptDigests
from kvist_epp.replicas.remote_load import RemoteLoad
from kvist_epp.replicas.snapshot_chunks import ChunkReader, ChunkWriter
from kvist_epp.replicas.snapshot_transfer import SnapshotServer
from kvist_epp.telemetry.counters import ReplicationStats

GOLDEN: Final = json.loads((Path(__file__).parent / "golden" / "protocol-1.json").read_text())
HANDSHAKE: Final = Handshake("old", b"\x01\x02\x03", snapshot_ready=True, version=1)
LOG_ENTRY: Final = AccessLogEntry("new.9", "request-9", "10.0.0.1:8000", 200)
PROMPT: Final = b"p" * (2 * STEP_BYTES + 1)
ROOT: Final = (None, None)
DECODED: Final = DecodeBlock(
    hash=901,
    parent=105,
    root=ROOT,
    tokens=BlockTokens([7, 8], b"xy"),
    block_size=16,
    depth=96,
    session="old.1",
    state=DecodeBlockState.CREDITED,
    copies=2,
    media=["CPU"],
)


def golden(name: str) -> bytes:
    """One recorded message."""
    return bytes.fromhex(GOLDEN[name])


def recorded(name: str) -> list[bytes]:
    """A recorded row of messages."""
    return [bytes.fromhex(one) for one in GOLDEN[name]]


class Changes(RequestListener):
    """Keeps what was routed or has ended."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    def on_routed(self, attempt: Attempt) -> None:
        """Keep the attempt."""
        self.attempts.append(attempt)

    def on_ended(self, attempt: Attempt) -> None:
        """Keep the attempt."""
        self.attempts.append(attempt)


def updates_sent() -> list[bytes]:
    """The updates of the scenario: two requests, then progress, an end and a third one, then a farewell."""
    changes = Changes()
    tracker = LoadTracker(default_rate=1000.0, listeners=[changes])
    old = tracker.add(InFlightRequest("old.1", 6000), "ns/a", 5000, 10.0)
    client = tracker.add(InFlightRequest("client", 32), "ns/b", 16, 10.5)
    digests = {old: PromptDigests.compute(("adapter", None), PROMPT)}
    stream = UpdateStream(tracker.own, deque([LOG_ENTRY]), digests.get)
    updates = [stream.poll(11.0, handshake=HANDSHAKE)]
    stream.on_ack(1, 11.01)
    changes.attempts.clear()
    tracker.on_progress(old, 1000, 11.5, computed=4000)
    tracker.end(client.request, 11.6)
    tracker.add(InFlightRequest("old.2", 200), "ns/a", 100, 11.7)
    stream.add_changes(changes.attempts)
    updates.append(stream.poll(12.0))
    stream.on_ack(2, 12.01)
    updates.append(stream.poll(13.0, leaving=True))
    return [update or b"" for update in updates]


def filled() -> Index:
    """One publisher: five blocks, two of them offloaded, one stored twice, and one that never matches."""
    index = Index()
    publisher = index.publisher("ns/a/0")
    hashes = list(range(101, 106))
    blocks = [b"block %d " % at for at in range(5)]
    index.stored(publisher, ROOT, None, hashes, blocks, block_size=16)
    index.held(publisher, hashes[:2], "CPU")
    index.stored(publisher, ROOT, 102, [103], blocks[2:3], block_size=16)
    index.opaque(publisher, 105, [900])
    return index


def chunks_sent(index: Index) -> list[bytes]:
    """The snapshot of the scenario."""
    writer, chunk_writer = Writer(), ChunkWriter()
    capture = index.capture(index.publisher("ns/a/0"))
    for _ in capture.steps():
        pass
    parts: Sequence[Part] = [Begin("ns/a/0", 42, b"mark", 0), *writer.section(capture, [DECODED])]
    return [chunk for part in parts if (chunk := chunk_writer.add(part))] + [chunk_writer.finish()]


def receiver() -> tuple[LoadTracker, RemoteLoad]:
    """A replica of this revision, called ``new``, that the old one connects to."""
    tracker = LoadTracker(default_rate=1000.0)
    remote = RemoteLoad("new", tracker, {"ns/a", "ns/b"}.__contains__)
    remote.on_connected("old", 100.0)
    return tracker, remote


def test_the_method_names_are_those_of_the_old_revision() -> None:
    """Replicas call each other by these paths."""
    assert REPLICA_FOLLOW_METHOD == "/kvist.epp.peers.v1.Peers/Follow"
    assert REPLICA_SNAPSHOT_METHOD == "/kvist.epp.peers.v1.Peers/Snapshot"


def test_the_messages_of_a_follower_are_the_same_in_both_revisions() -> None:
    """Handshakes and acknowledgements are read and written byte for byte."""
    assert decode_ack(golden("handshake")) == (HANDSHAKE, 0)
    assert decode_ack(golden("ack")) == (None, 2)
    assert encode_ack(HANDSHAKE) == golden("handshake")
    assert encode_ack(seq=2) == golden("ack")


def test_an_old_replica_can_read_the_updates_of_this_revision() -> None:
    """The scenario yields exactly the bytes that the old revision sends and reads."""
    assert updates_sent() == recorded("updates")


def test_the_load_of_an_old_replica_is_counted() -> None:
    """Requests with their tokens, the endpoint of a long prefix, an end, a forwarded entry and the
    farewell."""
    tracker, remote = receiver()
    first, second, last = (decode_update(one) for one in recorded("updates"))
    remote.apply("old", first, 100.0)
    before = (tracker.running("ns/a"), tracker.running("ns/b"), tracker.load("ns/a").backlog_tokens)
    matched = remote.prefixes.match(("adapter", None), PROMPT + b"more")
    remote.apply("old", second, 101.0)
    after = (tracker.running("ns/a"), tracker.running("ns/b"))
    remote.apply("old", last, 102.0)

    assert (first.handshake, before) == (HANDSHAKE, (1, 1, 4000.0))
    assert matched == {"ns/a": 2 * STEP_BYTES}
    assert (after, second.log_entries) == ((2, 0), [LOG_ENTRY])
    assert (last.leaving, remote.counts()) == (True, {"heard": 0, "silent": 0, "left": 1})
    remote.end_orphan("old.1", 103.0)
    assert tracker.running("ns/a") == 1


def test_both_revisions_request_snapshots_alike_and_grant_them_to_each_other() -> None:
    """The request names the publishers and the credit; the version and the fingerprint are equal."""
    request = decode_snapshot_request(golden("snapshot_request"))
    anything: Any = SimpleNamespace()
    server = SnapshotServer(
        lambda: HANDSHAKE._replace(replica="new"),
        ingestor=anything,
        subscriber=anything,
        is_precise=lambda _: True,
        stats=ReplicationStats(),
    )

    assert server.refusal(request.handshake or HANDSHAKE._replace(version=0)) == (0, "")
    assert request == (HANDSHAKE, ("ns/a/0", "ns/b/0"), 16)
    assert encode_snapshot_request(16, HANDSHAKE, ["ns/a/0", "ns/b/0"]) == golden("snapshot_request")
    assert encode_snapshot_request(1) == golden("more_chunks")


def test_an_old_replica_can_read_the_snapshot_of_this_revision() -> None:
    """An equal index yields exactly the bytes that the old revision sends and reads."""
    assert chunks_sent(filled()) == recorded("chunks")


def test_the_snapshot_of_an_old_replica_gives_the_same_index() -> None:
    """Blocks, tiers, copies and blocks that never match are restored."""
    reader, index = ChunkReader(), Index()
    index.publisher("ns/a/0")
    parts = [part for chunk in recorded("chunks") for part in reader.parts(chunk)]
    complete = heard(index, parts)

    assert (reader.complete, complete) == (True, ["ns/a/0"])
    assert repr(parts[0]) == repr(Begin("ns/a/0", 42, b"mark", 0))
    assert [repr(block) for part in parts for block in getattr(part, "pending", ())] == [repr(DECODED)]
    assert index.blocks(index.publisher("ns/a/0")) == filled().blocks(0)


@pytest.mark.parametrize("update", recorded("updates"))
def test_fields_of_a_later_version_are_ignored(update: bytes) -> None:
    """An unknown field at the end of a message, here number 100, changes nothing."""
    assert repr(decode_update(update + b"\xa2\x06\x03new")) == repr(decode_update(update))


def test_load_is_exchanged_with_any_version_and_an_index_with_the_same_only() -> None:
    """The version is part of the handshake; a later one is read, and refused a snapshot."""
    later = HANDSHAKE._replace(version=2)
    anything: Any = SimpleNamespace()
    server = SnapshotServer(
        lambda: HANDSHAKE, anything, anything, is_precise=lambda _: True, stats=ReplicationStats()
    )
    _, remote = receiver()
    update = msgspec.structs.replace(decode_update(recorded("updates")[0]), handshake=later)
    remote.apply("old", update, 100.0)

    assert (len(remote), update.handshake) == (2, later)
    assert server.refusal(later)[1] == "another protocol version, model or tokenizer"
