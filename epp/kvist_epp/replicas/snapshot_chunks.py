"""Encode and decode snapshots of the index: parts to chunks of bounded size and back. Pure.

Each chunk carries a checksum, because an error that TCP misses would stay in the index for hours.
"""

from collections.abc import Callable, Iterator
from typing import Final
from zlib import crc32

from google.protobuf.message import DecodeError

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.parts import Begin, Content, Counted, End, Extra, Holding, Part
from kvist_epp.index.tree.holders import ONES
from kvist_epp.index.tree.segment import GPU
from kvist_epp.kvevents.canonical import Piece
from kvist_epp.kvevents.decode_blocks import Born, State
from kvist_epp.replicas.messages import read_root, write_root
from kvist_epp.replicas.pb import replication_pb2 as pb

CHUNK_BYTES: Final = 128 * 1024
"""Bytes of text at which a chunk is closed."""
CHUNK_PARTS: Final = 64
"""Parts at which a chunk is closed: about a millisecond of work on either side."""

_STATES: Final = (State.PENDING, State.REJECTED, State.CREDITED)


class ChunkWriter:
    """Encodes the parts of one snapshot as chunks."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the last chunk."""
        self._parts = pb.Parts()
        self._size = 0

    def add(self, part: Part) -> bytes | None:
        """Add a part; return a chunk if the part filled one."""
        wire = self._parts.part.add()
        _WRITERS[type(part)](wire, part)
        if isinstance(part, Content):
            self._size += len(part.text)
        full = self._size >= CHUNK_BYTES or len(self._parts.part) >= CHUNK_PARTS
        return self._close() if full else None

    def finish(self) -> bytes:
        """Return the last chunk: the remaining parts, and the mark that nothing follows."""
        self._parts.last = True
        return self._close()

    def _close(self) -> bytes:
        self.number += 1
        self._parts.number = self.number
        body = self._parts.SerializeToString()
        self._parts, self._size = pb.Parts(), 0
        return pb.Chunk(crc=crc32(body), body=body).SerializeToString()


class ChunkReader:
    """Decodes the chunks of one snapshot."""

    def __init__(self) -> None:
        self.complete = False
        """Whether the last chunk was decoded."""
        self._number = 0

    def parts(self, data: bytes) -> Iterator[Part]:
        """Yield the parts of one chunk.

        Raises SnapshotError: before the first part, unless a part itself is invalid.
        """
        parts = self._open(data)
        for wire in parts.part:
            kind = wire.WhichOneof("kind")
            if kind is None:
                raise SnapshotError("a part has an unknown kind")
            yield _READERS[kind](getattr(wire, kind))
        self.complete = parts.last

    def _open(self, data: bytes) -> pb.Parts:
        chunk, parts = pb.Chunk(), pb.Parts()
        try:
            chunk.ParseFromString(data)
            if crc32(chunk.body) != chunk.crc:
                raise SnapshotError("the checksum of a chunk is wrong")
            parts.ParseFromString(chunk.body)
        except DecodeError as error:
            raise SnapshotError("a chunk cannot be decoded") from error
        self._number += 1
        if parts.number != self._number or self.complete:
            raise SnapshotError("a chunk is out of order")
        return parts


def _write_begin(wire: pb.Part, part: Begin) -> None:
    wire.begin.publisher, wire.begin.next, wire.begin.mark = part.publisher, part.next, part.mark
    if part.group is not None:
        wire.begin.group = part.group


def _read_begin(wire: pb.Begin) -> Begin:
    return Begin(wire.publisher, wire.next, wire.mark, wire.group if wire.HasField("group") else None)


def _write_content(wire: pb.Part, part: Content) -> None:
    content = wire.content
    content.number, content.parent, content.at = part.number, part.parent, part.at
    content.block_size, content.text = part.block_size, part.text
    content.hashes.extend(part.hashes)
    content.sizes.extend(part.sizes)
    if part.root != (None, None):
        write_root(content.root, part.root)


def _read_content(wire: pb.Content) -> Content:
    root = read_root(wire.root) if wire.HasField("root") else (None, None)
    return Content(
        number=wire.number,
        parent=wire.parent,
        at=wire.at,
        root=root,
        block_size=wire.block_size,
        hashes=tuple(wire.hashes),
        sizes=tuple(wire.sizes),
        text=wire.text,
    )


def _write_holding(wire: pb.Part, part: Holding) -> None:
    holding = wire.holding
    holding.content, holding.reach = part.content, part.reach
    holding.whole = part.media == ((GPU, ONES[part.reach]),)
    if not holding.whole:
        for medium, mask in part.media:
            holding.tiers.add(medium=medium, mask=mask)
    if part.names is not None:
        holding.names.extend(part.names)


def _read_holding(wire: pb.Holding) -> Holding:
    if wire.reach >= len(ONES):
        raise SnapshotError("a holding has more blocks than its content")
    media = tuple((tier.medium, tier.mask) for tier in wire.tiers)
    return Holding(
        content=wire.content,
        reach=wire.reach,
        media=((GPU, ONES[wire.reach]),) if wire.whole else media,
        names=tuple(wire.names) or None,
    )


def _write_extra(wire: pb.Part, part: Extra) -> None:
    wire.extra.SetInParent()
    for one in part.copies:
        wire.extra.copies.add(medium=one.medium, name=one.name, copies=one.copies)
    for one in part.opaque:
        wire.extra.opaque.add(medium=one.medium, name=one.name, copies=one.copies)
    for block in part.pending:
        _write_decode_block(wire.extra.pending.add(), block)


def _read_extra(wire: pb.Extra) -> Extra:
    return Extra(
        copies=tuple(Counted(one.medium, one.name, one.copies) for one in wire.copies),
        opaque=tuple(Counted(one.medium, one.name, one.copies) for one in wire.opaque),
        pending=tuple(map(_read_decode_block, wire.pending)),
    )


def _write_decode_block(wire: pb.DecodeBlock, block: Born) -> None:
    wire.name, wire.data, wire.block_size = block.name, block.piece.data, block.block_size
    wire.ids.extend(block.piece.ids)
    wire.state, wire.copies = _STATES.index(block.state), block.copies
    wire.media.extend(block.media)
    write_root(wire.root, block.root)
    if block.parent is not None:
        wire.parent = block.parent
    if block.depth is not None:
        wire.depth = block.depth
    if block.session is not None:
        wire.session = block.session


def _read_decode_block(wire: pb.DecodeBlock) -> Born:
    if wire.state >= len(_STATES):
        raise SnapshotError("a block has an unknown state")
    return Born(
        name=wire.name,
        parent=wire.parent if wire.HasField("parent") else None,
        root=read_root(wire.root),
        piece=Piece(list(wire.ids), wire.data),
        block_size=wire.block_size,
        depth=wire.depth if wire.HasField("depth") else None,
        session=wire.session if wire.HasField("session") else None,
        state=_STATES[wire.state],
        copies=wire.copies,
        media=list(wire.media),
    )


def _write_end(wire: pb.Part, part: End) -> None:
    wire.end.blocks, wire.end.extras = part.blocks, part.extras
    wire.end.SetInParent()


def _read_end(wire: pb.End) -> End:
    return End(wire.blocks, wire.extras)


_WRITERS: Final[dict[type, Callable[..., None]]] = {
    Begin: _write_begin,
    Content: _write_content,
    Holding: _write_holding,
    Extra: _write_extra,
    End: _write_end,
}
_READERS: Final[dict[str, Callable[..., Part]]] = {
    "begin": _read_begin,
    "content": _read_content,
    "holding": _read_holding,
    "extra": _read_extra,
    "end": _read_end,
}
