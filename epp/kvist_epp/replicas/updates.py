"""What replicas tell each other about their load, as messages: plain data to bytes and back. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
from google.protobuf.message import DecodeError

from kvist_epp.errors import ProtocolError
from kvist_epp.extproc.access_log import Ended
from kvist_epp.index.byte_index import Root
from kvist_epp.load.endpoint_load import Request
from kvist_epp.replicas.pb import peers_pb2 as pb
from kvist_epp.replicas.prefixes import STEPS, Prefix

VERSION: Final = 1
"""Of the protocol. Load is exchanged with any version, an index only with the same."""


class Hello(NamedTuple):
    """Who speaks."""

    replica: str
    """Another one for each process."""
    fingerprint: bytes
    """Replicas of equal fingerprints give equal blocks equal bytes."""
    warm: bool
    """Its index may be taken."""
    version: int = VERSION


class Entry(msgspec.Struct, frozen=True):
    """A request that is open at the sender; ages are seconds before now."""

    number: int
    session: str
    endpoint: str
    """Endpoint key."""
    uncached: int
    remaining: int
    total: int
    age: float
    silent: float
    """Since something was heard of it."""
    progressed: bool
    prefix: Prefix | None = None
    """How its prompt begins, if much of that is new."""


class Update(msgspec.Struct, frozen=True):
    """One message of a replica to another one."""

    seq: int
    hello: Hello | None = None
    whole_begins: bool = False
    whole_ends: bool = False
    entries: Sequence[Entry] = ()
    gone: Sequence[int] = ()
    """Numbers."""
    ended: Sequence[Ended] = ()
    leaving: bool = False


class Heard(NamedTuple):
    """A follower's message: its ``hello``, or the update it has taken in."""

    hello: Hello | None
    seq: int


def encode_heard(hello: Hello | None = None, seq: int = 0) -> bytes:
    """A follower's message."""
    return pb.Heard(hello=hello and _hello(hello), seq=seq).SerializeToString()


def decode_heard(data: bytes) -> Heard:
    """Raises ProtocolError."""
    message = pb.Heard()
    _parse(message, data)
    return Heard(_hello_of(message), message.seq)


class Want(NamedTuple):
    """What a replica that starts asks for: everything at first, then only more chunks."""

    hello: Hello | None
    publishers: tuple[str, ...]
    """Whose blocks it wants."""
    chunks: int
    """How many more may be sent."""


def encode_want(chunks: int, hello: Hello | None = None, publishers: Iterable[str] = ()) -> bytes:
    """A message of a replica that starts."""
    want = pb.Want(hello=hello and _hello(hello), publishers=publishers, chunks=chunks)
    return want.SerializeToString()


def decode_want(data: bytes) -> Want:
    """Raises ProtocolError."""
    message = pb.Want()
    _parse(message, data)
    return Want(_hello_of(message), tuple(message.publishers), message.chunks)


def encode(
    seq: int,
    now: float,
    requests: Iterable[Request] = (),
    *,
    hello: Hello | None = None,
    whole: tuple[bool, bool] = (False, False),
    gone: Iterable[int] = (),
    ended: Iterable[Ended] = (),
    leaving: bool = False,
    prefix: Callable[[Request], Prefix | None] = lambda _request: None,
) -> bytes:
    """An update; ``requests`` are open, ``whole``: (what is open is told from here, up to here)."""
    update = pb.Update(
        hello=hello and _hello(hello),
        seq=seq,
        whole_begins=whole[0],
        whole_ends=whole[1],
        gone=gone,
        ended=[_ended(one) for one in ended],
        leaving=leaving,
    )
    rows = list(requests)
    if rows:
        _columns(update.routed, rows, now)
        _prefixes(update.routed, map(prefix, rows))
    return update.SerializeToString()


def _columns(routed: pb.Routed, rows: Sequence[Request], now: float) -> None:
    keys: dict[str, int] = {}
    routed.number.extend([row.number for row in rows])
    routed.session.extend([row.session for row in rows])
    routed.endpoint.extend([keys.setdefault(row.load.key, len(keys)) for row in rows])
    routed.endpoint_keys.extend(keys)
    routed.uncached.extend([int(row.uncached) for row in rows])
    routed.remaining.extend([int(row.remaining) for row in rows])
    routed.total.extend([row.total for row in rows])
    routed.age_ms.extend([max(0, int((now - row.routed_at) * 1000 + 0.5)) for row in rows])
    routed.silent_ms.extend([max(0, int((now - row.heard_at) * 1000 + 0.5)) for row in rows])
    routed.progressed.extend([row.progressed for row in rows])


def _prefixes(routed: pb.Routed, prefixes: Iterable[Prefix | None]) -> None:
    for row, prefix in enumerate(prefixes):
        if prefix is not None:
            told = routed.prefixes.add(row=row, digests=prefix.digests, whole=prefix.whole)
            write_root(told.root, prefix.root)


def decode(data: bytes) -> Update:
    """Raises ProtocolError."""
    message = pb.Update()
    _parse(message, data)
    return Update(
        seq=message.seq,
        hello=_hello_of(message),
        whole_begins=message.whole_begins,
        whole_ends=message.whole_ends,
        entries=_entries(message.routed),
        gone=list(message.gone),
        ended=[_ended_of(one) for one in message.ended],
        leaving=message.leaving,
    )


def write_root(wire: pb.Root, root: Root) -> None:
    """An index root as a message."""
    if root[0] is not None:
        wire.adapter = root[0]
    if root[1] is not None:
        wire.salt = root[1]


def read_root(wire: pb.Root) -> Root:
    """A message as an index root."""
    return (
        wire.adapter if wire.HasField("adapter") else None,
        wire.salt if wire.HasField("salt") else None,
    )


def _entries(routed: pb.Routed) -> list[Entry]:
    keys = list(routed.endpoint_keys)
    prefixes = {
        one.row: Prefix(read_root(one.root), tuple(one.digests[:STEPS]), one.whole) for one in routed.prefixes
    }
    columns = (
        routed.number,
        routed.session,
        routed.endpoint,
        routed.uncached,
        routed.remaining,
        routed.total,
        routed.age_ms,
        routed.silent_ms,
        routed.progressed,
        map(prefixes.get, range(len(routed.number))),
    )
    try:
        return [
            Entry(
                number,
                session,
                keys[at],
                uncached,
                left,
                total,
                age / 1000,
                silent / 1000,
                progressed,
                prefix,
            )
            for number, session, at, uncached, left, total, age, silent, progressed, prefix in zip(
                *columns, strict=True
            )
        ]
    except (ValueError, IndexError) as error:
        raise ProtocolError("a peer's update whose columns do not go together") from error


def _ended(one: Ended) -> pb.Ended:
    return pb.Ended(
        session=one.session or "",
        request_id=one.request_id or "",
        upstream=one.upstream or "",
        status=max(one.status, 0),
    )


def _ended_of(one: pb.Ended) -> Ended:
    return Ended(
        session=one.session or None,
        request_id=one.request_id or None,
        upstream=one.upstream or None,
        destination=None,
        status=one.status,
        ttfb_seconds=None,
        duration_seconds=None,
    )


def _parse(message: pb.Update | pb.Heard | pb.Want, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ProtocolError(f"a peer's message of {len(data)} bytes cannot be decoded") from error


def _hello(hello: Hello) -> pb.Hello:
    return pb.Hello(
        replica=hello.replica, version=hello.version, fingerprint=hello.fingerprint, warm=hello.warm
    )


def _hello_of(message: pb.Update | pb.Heard | pb.Want) -> Hello | None:
    if not message.HasField("hello"):
        return None
    hello = message.hello
    if not hello.replica:
        raise ProtocolError("a peer that does not say its name")
    return Hello(hello.replica, hello.fingerprint, hello.warm, hello.version)
