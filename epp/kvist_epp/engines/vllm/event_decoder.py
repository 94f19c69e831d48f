"""KV event messages for one vocabulary: tokens are read as the bytes that they stand for. Pure.

Most of a message is token ids, 16 to 64 a block, of which only the bytes are needed. An integer made of each
one, and its bytes looked up, was half of the cost of ingestion. msgspec reads the values of an enumeration
with a table, from number to member, that it takes from the class; with the bytes of the tokens as members,
the numbers of a message become bytes in one step.

Members of an enumeration are not bytes otherwise, so this depends on how msgspec builds its table. It is
tried when a decoder is made; where it does not work, integers are read, as by ``kv_events.decode``, which
also reads every message that is not as usual: it defines what both return.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvist_epp.engines.vllm.kv_events import (
    GPU,
    Batch,
    Cleared,
    ClearedArray,
    ClearedMap,
    Event,
    RemovedArray,
    RemovedFields,
    RemovedMap,
    StoredArray,
    StoredFields,
    StoredMap,
    decode,
    normal_removed,
    normal_stored,
)

_FAILURES = (msgspec.MsgspecError, ValueError, RecursionError)


class _Twin(bytes):
    """Bytes of a token that another token has, too: only equal to itself, so that it has its own id."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class EventDecoder:
    """Decodes the messages of engines that use one vocabulary.

    The batches are those of ``kv_events.decode``, but that

    - an event of several blocks on the GPU has ``pieces`` and no ``token_ids``, if all its ids exist; others
      have both, but for those with tokens behind their blocks,
    - neighbouring removals of one medium and group are one event.
    """

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        """``pieces``: bytes of each token id, b"" where the id does not exist."""
        self._ids: dict[bytes, int] = {}
        """By piece."""
        members: dict[int, bytes] = {}
        for token, piece in enumerate(pieces):
            if piece:
                member = _Twin(piece) if piece in self._ids else piece
                self._ids[member] = token
                members[token] = member
        self._readers = _readers(members)

    def decode(self, payload: bytes) -> Batch:
        """Decode a message of either form.

        Raises EventError if it is not msgpack or not a batch; an event that cannot be decoded is only
        counted.
        """
        for read in self._readers:
            try:
                batch = read(payload)
                return Batch(ts=batch.ts, rank=batch.rank, events=self._events(batch.events))
            except _FAILURES:
                continue
        return decode(payload)

    def ids(self, pieces: Sequence[bytes]) -> list[int]:
        """Return the ids of tokens that this decoder has read."""
        return list(map(self._ids.__getitem__, pieces))

    def _events(self, wires: Sequence[Any]) -> list[Event]:
        events: list[Event] = []
        first: RemovedFields | None = None
        """First removal of the present run."""
        hashes: list[int | bytes] = []
        count = 0
        for wire in wires:
            if isinstance(wire, RemovedFields):
                if first is not None:
                    if (
                        wire.medium == first.medium
                        and wire.group_idx == first.group_idx
                        and wire.locality == first.locality
                    ):
                        hashes += wire.block_hashes
                        count += 1
                        continue
                    events.append(normal_removed(first, hashes, count))
                first, hashes, count = wire, wire.block_hashes, 1
                continue
            if first is not None:
                events.append(normal_removed(first, hashes, count))
                first = None
            events.append(self._stored(wire) if isinstance(wire, StoredFields) else Cleared())
        if first is not None:
            events.append(normal_removed(first, hashes, count))
        return events

    def _stored(self, wire: StoredFields) -> Event:
        pieces: list[Any] = wire.token_ids  # see _readers
        behind: list[list[Any]] | None = wire.lookahead_token_ids
        if len(wire.block_hashes) > 1 and (wire.medium is None or wire.medium.upper() == GPU):
            return normal_stored(wire, pieces, behind, are_pieces=True)
        if behind:
            return normal_stored(wire, self.ids(pieces), list(map(self.ids, behind)))
        return normal_stored(wire, self.ids(pieces), None, pieces=pieces)  # whose ids are to be checked


def _readers(members: dict[int, bytes]) -> tuple[Callable[[bytes], Any], ...]:
    """Return decoders of both forms that read token ids as these bytes; none if msgspec does not do so."""

    class Tokens(enum.Enum):
        MEMBER = 0

    table: Any = Tokens
    table._value2member_map_ = members  # what msgspec reads
    try:
        readers = tuple(_reader(table, form) for form in ("map", "array"))
        some = [*members][:1] + [*members][-1:]
        sample = [0.0, [["BlockStored", [1], None, some, len(some)]]]
        found = readers[1](msgspec.msgpack.encode(sample)).events[0].token_ids
        table._value2member_map_ = {}  # msgspec has its own table now
        works = bool(some) and all(a is members[b] for a, b in zip(found, some, strict=True))
    except (*_FAILURES, TypeError, AttributeError):
        return ()
    return readers if works else ()


def _reader(table: Any, form: str) -> Callable[[bytes], Any]:
    stored: Any = StoredMap if form == "map" else StoredArray
    other: Any = (RemovedMap | ClearedMap) if form == "map" else (RemovedArray | ClearedArray)
    texts: Any = msgspec.defstruct(
        stored.__name__,
        [("token_ids", list[table]), ("lookahead_token_ids", list[list[table]] | None, None)],
        bases=(stored,),
        tag="BlockStored",
        array_like=form == "array",
        gc=False,
    )
    batch: Any = msgspec.defstruct(
        "Batch",
        [("ts", float), ("events", list[texts | other]), ("rank", int | None, None)],
        array_like=True,
    )
    read: Callable[[bytes], Any] = msgspec.msgpack.Decoder(batch).decode
    return read
