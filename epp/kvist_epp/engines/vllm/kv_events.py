"""Decode vLLM's KV event messages: msgpack to plain events. Pure.

Source of the format: ``vllm/distributed/kv_events.py`` (0.19 to 0.33). A batch is the array
``[ts, [event, ...], data_parallel_rank]``. An event is a map with the class name under ``"type"`` (0.26 on)
or a positional array that begins with the class name (before). Newer engines add fields; unknown ones are
ignored.

Events are normalised here, once, so that all other modules see a single form: hashes are unsigned 64-bit
ints, media are upper case, storage that other engines read, too, is a medium of its own, extra keys are split
into salt and media.

Engines with drafts of EAGLE or MTP compute a block's hash also of the L tokens behind it (0.33 on,
``num_hash_lookahead_tokens``), and use the block only before these. Its tokens here are then those from L
tokens behind its begin to L behind its end, so that a hash still names one text up to its last token:

    sent, L = 1          [a b c d] behind it e   [e f g h] behind it i
    normalised     a     [b c d e]               [f g h i]
"""

from typing import Annotated, Any, TypeAlias

import msgspec

from kvist_epp.engines.vllm.extra_keys import Media, read_extra_keys
from kvist_epp.errors import EventError
from kvist_epp.names import HOST_MEDIUM, LMCACHE_MEDIUM, SHARED_MEDIUM, STORAGE_MEDIUM

MASK: int = (1 << 64) - 1
GPU: str = "GPU"
CPU: str = HOST_MEDIUM
"""Host memory of one engine."""
STORAGE: str = STORAGE_MEDIUM
"""Storage of one engine, a disk; or the engine does not say whose."""
SHARED: str = SHARED_MEDIUM
"""Storage whose events have locality REMOTE (vLLM 0.31 on): other engines may read it, too."""
LMCACHE: str = LMCACHE_MEDIUM
"""A server of LMCache. Its connector's events say ``CPU``; endpoints say that it is one."""


class Stored(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """BlockStored: blocks that became reusable, in chain order.

    ``token_ids`` is empty and ``block_size`` 0 for the placeholders of offload tiers, which name blocks by
    hash only.
    """

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    block_size: int
    """Tokens a block."""
    medium: str = GPU
    lora: str | None = None
    """Adapter name; ``lora_id=N`` from engines that send only the number."""
    group: int | None = None
    kind: str | None = None
    """KV cache spec kind: full_attention, sliding_window, …"""
    window: int | None = None
    """Tokens of the sliding window, of a group that has one."""
    salt: str | None = None
    """Cache salt; known only when the event begins at token 0."""
    opaque_from: int | None = None
    """Index of the first block of which tokens and media are not all: prompt embeddings, unknown keys."""
    media: Media = ()
    """Place of the first token of each medium, counted from the event's first token, and its identifier."""
    session: str | None = None
    """``X-Session-ID`` of the request that caused the event (0.32 on)."""
    pieces: list[bytes] | None = None
    """Bytes of each token, in place of ``token_ids`` or besides them, where an ``EventDecoder`` has read
    them."""
    head: list[Any] = []
    """Tokens that precede these at the begin of a prompt, where hashes cover tokens behind their blocks; ids
    or bytes as the others."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids if self.pieces is None else self.pieces)

    def parts(self, most: int) -> list["Stored"]:
        """Return the event in equal parts of at most ``most`` blocks.

        No part has a single block, which would look like a block computed in decode.
        """
        blocks = len(self.hashes)
        if blocks <= most:
            return [self]
        width = -(-blocks // -(-blocks // most))
        return [self.slice(start, min(start + width, blocks)) for start in range(0, blocks, width)]

    def slice(self, start: int, end: int) -> "Stored":
        """Return the event of the blocks from ``start`` up to ``end``."""
        opaque_from = None if self.opaque_from is None else max(0, self.opaque_from - start)
        first, last = start * self.block_size, end * self.block_size
        return msgspec.structs.replace(
            self,
            hashes=self.hashes[start:end],
            parent=self.hashes[start - 1] if start else self.parent,
            token_ids=self.token_ids[first:last],
            pieces=None if self.pieces is None else self.pieces[first:last],
            opaque_from=opaque_from if opaque_from is not None and opaque_from < end - start else None,
            media=tuple([(at - first, identifier) for at, identifier in self.media if first <= at < last]),
            head=[] if start else self.head,
        )


class Removed(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """BlockRemoved: blocks that can no longer be reused."""

    hashes: list[int]
    medium: str = GPU
    group: int | None = None
    events: int = 1
    """Number of the engine's events that were merged to this one."""


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """AllBlocksCleared: the GPU pool was emptied."""


Event: TypeAlias = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One message: the changes of one engine step."""

    ts: float
    """Seconds since the epoch, by the engine's clock."""
    rank: int | None = None
    events: list[Event]
    unknown: int = 0
    """Number of events of unknown types."""
    malformed: int = 0
    """Number of events of known types that could not be decoded; the others of the batch are valid."""


_Hash: TypeAlias = int | bytes
_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class StoredFields(msgspec.Struct, gc=False):
    """Fields of BlockStored as engines send them."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_TokenId]
    block_size: _TokenId
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[_TokenId]] | None = None


class RemovedFields(msgspec.Struct, gc=False):
    """Fields of BlockRemoved as engines send them."""

    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class StoredMap(StoredFields, gc=False, tag="BlockStored", omit_defaults=True):
    """BlockStored as a map."""


class StoredArray(StoredFields, gc=False, tag="BlockStored", array_like=True):
    """BlockStored as an array."""


class RemovedMap(RemovedFields, gc=False, tag="BlockRemoved", omit_defaults=True):
    """BlockRemoved as a map."""


class RemovedArray(RemovedFields, gc=False, tag="BlockRemoved", array_like=True):
    """BlockRemoved as an array."""


class ClearedMap(msgspec.Struct, gc=False, tag="AllBlocksCleared"):
    """AllBlocksCleared as a map."""


class ClearedArray(msgspec.Struct, gc=False, tag="AllBlocksCleared", array_like=True):
    """AllBlocksCleared as an array."""


_MapEvent: TypeAlias = StoredMap | RemovedMap | ClearedMap
_ArrayEvent: TypeAlias = StoredArray | RemovedArray | ClearedArray


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_MapEvent]
    rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ArrayEvent]
    rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


class _RankOnly(msgspec.Struct, array_like=True):
    ts: msgspec.Raw
    events: msgspec.Raw
    rank: int | None = None


_rank_only = msgspec.msgpack.Decoder(_RankOnly).decode
_map_batch = msgspec.msgpack.Decoder(_MapBatch).decode
_array_batch = msgspec.msgpack.Decoder(_ArrayBatch).decode
_raw_batch = msgspec.msgpack.Decoder(_RawBatch).decode
_map_event = msgspec.msgpack.Decoder(_MapEvent).decode
_array_event = msgspec.msgpack.Decoder(_ArrayEvent).decode

_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode(payload: bytes) -> Batch:
    """Decode a message of either form.

    Raises EventError if it is not msgpack or not a batch; an event that cannot be decoded is only counted.
    """
    for whole in (_map_batch, _array_batch):
        try:
            batch = whole(payload)
            return Batch(ts=batch.ts, rank=batch.rank, events=list(map(_normal, batch.events)))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue  # a form, a type or an event this decoder does not know: the next one is more tolerant
    return _one_by_one(payload)


def rank_of(payload: bytes) -> int | None:
    """Return the data-parallel rank of a batch without decoding its events; None if it cannot be read."""
    try:
        return _rank_only(payload).rank
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _one_by_one(payload: bytes) -> Batch:
    try:
        raw = _raw_batch(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EventError(f"not a batch of KV events ({len(payload)} bytes)") from error
    events: list[Event] = []
    unknown = malformed = 0
    for item in raw.events:
        event = _tolerant(item)
        if event is not None:
            events.append(event)
        elif _is_unknown(item):
            unknown += 1
        else:
            malformed += 1
    return Batch(ts=raw.ts, rank=raw.rank, events=events, unknown=unknown, malformed=malformed)


def _tolerant(item: msgspec.Raw) -> Event | None:
    for one in (_map_event, _array_event):
        try:
            return _normal(one(item))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return None


def _is_unknown(item: msgspec.Raw) -> bool:
    try:
        event = msgspec.msgpack.decode(item)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    tag = event.get("type") if isinstance(event, dict) else None
    if isinstance(event, list) and event:
        tag = event[0]
    return isinstance(tag, str) and tag not in _TYPES


def _normal(wire: _MapEvent | _ArrayEvent) -> Event:
    if isinstance(wire, StoredFields):
        return normal_stored(wire, wire.token_ids, wire.lookahead_token_ids)
    if isinstance(wire, RemovedFields):
        return normal_removed(wire, wire.block_hashes)
    return Cleared()


def normal_removed(wire: RemovedFields, hashes: list[_Hash], events: int = 1) -> Removed:
    """Return the event of these hashes, which may be those of several events like ``wire``."""
    medium = _medium(wire.medium, wire.locality)
    return Removed(hashes=_hashes(hashes), medium=medium, group=wire.group_idx, events=events)


def normal_stored(
    wire: StoredFields,
    tokens: list[Any],
    behind: list[list[Any]] | None,
    *,
    are_pieces: bool = False,
    pieces: list[bytes] | None = None,
) -> Stored:
    """Return the event with these tokens, and those behind each block: ids, or the bytes that they stand for
    (``are_pieces``). ``pieces``: the bytes besides the ids, where there are no tokens behind."""
    parent = wire.parent_block_hash
    head: list[Any] = []
    salt, opaque_from = None, None
    media: Media = ()
    further = 0
    if behind and len(tokens) == len(wire.block_hashes) * wire.block_size:  # else it is of no use anyway
        further = _further(wire, behind)
        head = tokens[:further] if parent is None else []
        tokens = tokens[further:] + behind[-1]
    lora = wire.lora_name
    if lora is None and wire.lora_id is not None:
        lora = f"lora_id={wire.lora_id}"
    if wire.extra_keys is not None:
        salt, opaque_from, media = read_extra_keys(
            wire.extra_keys, wire.lora_name, wire.block_size, at_root=parent is None, further=further
        )
    return Stored(
        hashes=_hashes(wire.block_hashes),
        parent=None if parent is None else _hash(parent),
        token_ids=[] if are_pieces else tokens,
        block_size=wire.block_size,
        medium=_medium(wire.medium, wire.locality),
        lora=lora,
        group=wire.group_idx,
        kind=wire.kv_cache_spec_kind,
        window=wire.kv_cache_spec_sliding_window,
        salt=salt,
        opaque_from=opaque_from,
        media=media,
        session=wire.session_id,
        pieces=tokens if are_pieces else pieces,
        head=head,
    )


def _further(wire: StoredFields, behind: list[list[Any]]) -> int:
    """Return how many tokens behind each block its hash covers.

    Raises ValueError if they are not as many for each: which text a hash names is not known then.
    """
    sizes = set(map(len, behind))
    if len(behind) != len(wire.block_hashes) or len(sizes) != 1 or max(sizes) > wire.block_size:
        raise ValueError("the tokens behind blocks do not match the blocks")
    return sizes.pop()


def _medium(medium: str | None, locality: str | None) -> str:
    name = GPU if medium is None else medium.upper()
    return SHARED if locality == "REMOTE" and name == STORAGE else name


def _hashes(hashes: list[_Hash]) -> list[int]:
    if len(hashes) == 1:  # an eviction: as many messages' events as blocks
        return hashes if type(hashes[0]) is int and hashes[0] >= 0 else [_hash(hashes[0])]  # type: ignore[return-value]
    try:
        if min(hashes, default=0) >= 0:  # type: ignore[operator]  # mixed or bytes raise: read one by one
            return hashes  # type: ignore[return-value]
    except TypeError:
        pass
    return list(map(_hash, hashes))


def _hash(value: _Hash) -> int:
    """Return the last 8 bytes, as the engine itself shortens hashes (``maybe_convert_block_hash``)."""
    if isinstance(value, int):
        return value & MASK
    if not value:
        raise ValueError("an empty block hash")
    return int.from_bytes(value[-8:], "big")
