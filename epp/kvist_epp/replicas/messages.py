"""Messages in which replicas exchange load, and requests for a snapshot: plain data to bytes and back. Pure.

The format is ``protos/kvist_epp/replicas/pb/replication.proto``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
from google.protobuf.message import DecodeError

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import AccessLogEntry
from kvist_epp.index.byte_index import Root
from kvist_epp.load.in_flight import Attempt
from kvist_epp.replicas.pb import replication_pb2 as pb
from kvist_epp.replicas.prompt_digests import MAX_STEPS, PromptDigests

VERSION: Final = 1
"""Version of the protocol. Load is exchanged with any version, an index only with the same one."""


class Handshake(NamedTuple):
    """First message of either side: the identity of the sender."""

    replica: str
    """Id of the replica, unique to a process."""
    fingerprint: bytes
    """Digest of the vocabulary: replicas with equal fingerprints decode equal blocks to equal bytes."""
    snapshot_ready: bool
    """Whether the index of the sender is complete enough to be copied."""
    version: int = VERSION
    metrics_port: int = 0
    """Port of the sender's pages; 0: not announced, as by earlier releases."""


class RemoteRequest(msgspec.Struct, frozen=True):
    """A request that is open at the sender; ages are in seconds before the update was made."""

    number: int
    session: str
    endpoint: str
    """Endpoint key."""
    uncached: int
    remaining: int
    total: int
    age: float
    idle: float
    """Seconds since the last event of the request."""
    progressed: bool
    digests: PromptDigests | None = None
    """Digests of the prompt, if much of it is new to the endpoint."""


class LoadUpdate(msgspec.Struct, frozen=True):
    """One update of a replica's load to a follower; the fields are those of the protobuf message."""

    seq: int
    handshake: Handshake | None = None
    full_begins: bool = False
    full_ends: bool = False
    requests: Sequence[RemoteRequest] = ()
    ended_numbers: Sequence[int] = ()
    log_entries: Sequence[AccessLogEntry] = ()
    leaving: bool = False


class Ack(NamedTuple):
    """Message of a follower: its handshake first, then the number of each update it has processed."""

    handshake: Handshake | None
    seq: int


class SnapshotRequest(NamedTuple):
    """Message of a replica that copies an index: everything in the first, then only more chunks."""

    handshake: Handshake | None
    publishers: tuple[str, ...]
    """Publishers whose blocks are requested."""
    chunks: int
    """Chunks that may be sent beyond those allowed before."""


def encode_ack(handshake: Handshake | None = None, seq: int = 0) -> bytes:
    """Encode a message of a follower."""
    return pb.Ack(handshake=handshake and _encode_handshake(handshake), seq=seq).SerializeToString()


def decode_ack(data: bytes) -> Ack:
    """Decode a message of a follower. Raises ProtocolError."""
    message = pb.Ack()
    _parse(message, data)
    return Ack(_decode_handshake(message), message.seq)


def encode_snapshot_request(
    chunks: int, handshake: Handshake | None = None, publishers: Iterable[str] = ()
) -> bytes:
    """Encode a message of a replica that copies an index."""
    request = pb.SnapshotRequest(
        handshake=handshake and _encode_handshake(handshake), publishers=publishers, chunks=chunks
    )
    return request.SerializeToString()


def decode_snapshot_request(data: bytes) -> SnapshotRequest:
    """Decode a message of a replica that copies an index. Raises ProtocolError."""
    message = pb.SnapshotRequest()
    _parse(message, data)
    return SnapshotRequest(_decode_handshake(message), tuple(message.publishers), message.chunks)


def encode_update(
    seq: int,
    now: float,
    attempts: Iterable[Attempt] = (),
    *,
    handshake: Handshake | None = None,
    full: tuple[bool, bool] = (False, False),
    ended_numbers: Iterable[int] = (),
    log_entries: Iterable[AccessLogEntry] = (),
    leaving: bool = False,
    digests_of: Callable[[Attempt], PromptDigests | None] = lambda _attempt: None,
) -> bytes:
    """Encode an update of open ``requests``; ``full``: whether the full list begins and ends with it."""
    update = pb.LoadUpdate(
        handshake=handshake and _encode_handshake(handshake),
        seq=seq,
        full_begins=full[0],
        full_ends=full[1],
        ended_numbers=ended_numbers,
        log_entries=[
            pb.LogEntry(
                session=entry.session or "",
                request_id=entry.request_id or "",
                upstream=entry.upstream or "",
                status=max(entry.status, 0),
                seconds=entry.seconds,
            )
            for entry in log_entries
        ],
        leaving=leaving,
    )
    rows = list(attempts)
    if rows:
        _fill_columns(update.requests, rows, now)
        for number, digests in enumerate(map(digests_of, rows)):
            if digests is not None:
                root = encode_root(digests.root)
                update.requests.digests.add(
                    row=number, root=root, prefixes=digests.prefixes, whole=digests.whole
                )
    return update.SerializeToString()


def _fill_columns(columns: pb.RequestColumns, rows: Sequence[Attempt], now: float) -> None:
    keys: dict[str, int] = {}
    columns.number.extend([row.number for row in rows])
    columns.session.extend([row.request.session for row in rows])
    columns.endpoint.extend([keys.setdefault(row.load.key, len(keys)) for row in rows])
    columns.endpoint_keys.extend(keys)
    columns.uncached.extend([int(row.uncached) for row in rows])
    columns.remaining.extend([int(row.backlog) for row in rows])
    columns.total.extend([row.request.tokens for row in rows])
    columns.age_ms.extend([max(0, int((now - row.routed_at) * 1000 + 0.5)) for row in rows])
    columns.idle_ms.extend([max(0, int((now - row.last_event_at) * 1000 + 0.5)) for row in rows])
    columns.progressed.extend([row.progressed for row in rows])


def decode_update(data: bytes) -> LoadUpdate:
    """Decode an update. Raises ProtocolError."""
    message = pb.LoadUpdate()
    _parse(message, data)
    return LoadUpdate(
        seq=message.seq,
        handshake=_decode_handshake(message),
        full_begins=message.full_begins,
        full_ends=message.full_ends,
        requests=_read_columns(message.requests),
        ended_numbers=list(message.ended_numbers),
        log_entries=[
            AccessLogEntry(
                session=entry.session or None,
                request_id=entry.request_id or None,
                upstream=entry.upstream or None,
                status=entry.status,
                seconds=entry.seconds if entry.HasField("seconds") else None,
            )
            for entry in message.log_entries
        ],
        leaving=message.leaving,
    )


def _read_columns(columns: pb.RequestColumns) -> list[RemoteRequest]:
    keys = list(columns.endpoint_keys)
    digests = {
        one.row: PromptDigests(decode_root(one.root), tuple(one.prefixes[:MAX_STEPS]), one.whole)
        for one in columns.digests
    }
    rows = zip(
        columns.number,
        columns.session,
        columns.endpoint,
        columns.uncached,
        columns.remaining,
        columns.total,
        columns.age_ms,
        columns.idle_ms,
        columns.progressed,
        map(digests.get, range(len(columns.number))),
        strict=True,
    )
    try:
        return [
            RemoteRequest(
                number, session, keys[at], uncached, left, total, age / 1000, idle / 1000, progressed, found
            )
            for number, session, at, uncached, left, total, age, idle, progressed, found in rows
        ]
    except (ValueError, IndexError) as error:
        raise ProtocolError("the columns of a replica's update do not match") from error


def encode_root(root: Root) -> pb.Root | None:
    """Return an index root as a message; None, which is an absent field, for the usual empty one."""
    return None if root == (None, None) else pb.Root(adapter=root[0], salt=root[1])


def decode_root(message: pb.Root) -> Root:
    """Return the index root that a message contains."""
    return (
        message.adapter if message.HasField("adapter") else None,
        message.salt if message.HasField("salt") else None,
    )


def _parse(message: pb.LoadUpdate | pb.Ack | pb.SnapshotRequest, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ProtocolError(f"a replica's message of {len(data)} bytes cannot be decoded") from error


def _encode_handshake(handshake: Handshake) -> pb.Handshake:
    return pb.Handshake(
        replica=handshake.replica,
        version=handshake.version,
        fingerprint=handshake.fingerprint,
        snapshot_ready=handshake.snapshot_ready,
        metrics_port=handshake.metrics_port,
    )


def _decode_handshake(message: pb.LoadUpdate | pb.Ack | pb.SnapshotRequest) -> Handshake | None:
    if not message.HasField("handshake"):
        return None
    found = message.handshake
    if not found.replica:
        raise ProtocolError("the handshake of a replica lacks its id")
    return Handshake(
        found.replica, found.fingerprint, found.snapshot_ready, found.version, found.metrics_port
    )
