"""Encode and decode snapshots of the index: parts to chunks of bounded size and back. Pure.

Each chunk carries a checksum, because an error that TCP misses would stay in the index for hours.
"""

from collections.abc import Iterator
from typing import Final
from zlib import crc32

from google.protobuf.message import DecodeError

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.parts import (
    Begin,
    Content,
    Counted,
    End,
    Extra,
    Holding,
    Part,
    WindowBlocks,
)
from kvist_epp.index.tree.holders import ONES
from kvist_epp.index.tree.segment import GPU
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock, DecodeBlockState
from kvist_epp.replicas.messages import decode_root, encode_root
from kvist_epp.replicas.pb import replication_pb2 as pb

CHUNK_BYTES: Final = 128 * 1024
"""Bytes of text at which a chunk is closed."""
CHUNK_PARTS: Final = 64
"""Parts at which a chunk is closed: about a millisecond of work on either side."""

_STATES: Final = (DecodeBlockState.PENDING, DecodeBlockState.REJECTED, DecodeBlockState.CREDITED)


class ChunkWriter:
    """Encodes the parts of one snapshot as chunks."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the last chunk."""
        self._parts = pb.Parts()
        self._size = 0

    def add(self, part: Part) -> bytes | None:
        """Add a part; return a chunk if the part filled one."""
        _encode(self._parts, part)
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
        for message in parts.part:
            yield _decode(message)
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


def _encode(parts: pb.Parts, part: Part) -> None:
    """Append a part to a message; the fields are set in place, which is faster than copying a message."""
    message = parts.part.add()
    if isinstance(part, Content):
        content = message.content
        content.number, content.parent, content.at = part.number, part.parent, part.at
        content.block_size, content.text = part.block_size, part.text
        content.hashes.extend(part.hashes)
        content.sizes.extend(part.sizes)
        if (root := encode_root(part.root)) is not None:
            content.root.CopyFrom(root)
    elif isinstance(part, Holding):
        holding = message.holding
        holding.content, holding.reach = part.content, part.reach
        holding.whole = part.media == ((GPU, ONES[part.reach]),)
        if not holding.whole:
            holding.tiers.extend(pb.Tier(medium=medium, mask=mask) for medium, mask in part.media)
        holding.names.extend(part.names or ())
    elif isinstance(part, Extra):
        copies, opaque = (
            [pb.Counted(medium=one.medium, name=one.name, copies=one.copies) for one in counted]
            for counted in (part.copies, part.opaque)
        )
        pending = map(_encode_decode_block, part.pending)
        windows = [
            pb.WindowBlocks(group=one.group, needed=one.needed, block_size=one.block_size, names=one.names)
            for one in part.windows
        ]
        message.extra.CopyFrom(pb.Extra(copies=copies, opaque=opaque, pending=pending, windows=windows))
    elif isinstance(part, Begin):
        begin = pb.Begin(publisher=part.publisher, next=part.next, mark=part.mark, group=part.group)
        message.begin.CopyFrom(begin)
    else:
        message.end.CopyFrom(pb.End(blocks=part.blocks, extras=part.extras))


def _encode_decode_block(block: DecodeBlock) -> pb.DecodeBlock:
    return pb.DecodeBlock(
        name=block.hash,
        parent=block.parent,
        root=encode_root(block.root),
        ids=block.tokens.ids,
        data=block.tokens.data,
        block_size=block.block_size,
        depth=block.depth,
        session=block.session,
        state=_STATES.index(block.state),
        copies=block.copies,
        media=block.media,
    )


def _decode(message: pb.Part) -> Part:
    kind = message.WhichOneof("kind")
    if kind == "content":
        content = message.content
        return Content(
            number=content.number,
            parent=content.parent,
            at=content.at,
            root=decode_root(content.root),
            block_size=content.block_size,
            hashes=tuple(content.hashes),
            sizes=tuple(content.sizes),
            text=content.text,
        )
    if kind == "holding":
        holding = message.holding
        if holding.reach >= len(ONES):
            raise SnapshotError("a holding has more blocks than a content may have")
        whole = ((GPU, ONES[holding.reach]),)
        return Holding(
            content=holding.content,
            reach=holding.reach,
            media=whole if holding.whole else tuple((tier.medium, tier.mask) for tier in holding.tiers),
            names=tuple(holding.names) or None,
        )
    if kind == "extra":
        extra = message.extra
        return Extra(
            copies=tuple(Counted(one.medium, one.name, one.copies) for one in extra.copies),
            opaque=tuple(Counted(one.medium, one.name, one.copies) for one in extra.opaque),
            pending=tuple(map(_decode_decode_block, extra.pending)),
            windows=tuple(
                WindowBlocks(one.group, one.needed, one.block_size, tuple(one.names)) for one in extra.windows
            ),
        )
    if kind == "begin":
        begin = message.begin
        group = begin.group if begin.HasField("group") else None
        return Begin(begin.publisher, begin.next, begin.mark, group)
    if kind == "end":
        return End(message.end.blocks, message.end.extras)
    raise SnapshotError("a part has an unknown kind")


def _decode_decode_block(message: pb.DecodeBlock) -> DecodeBlock:
    if message.state >= len(_STATES):
        raise SnapshotError("a block has an unknown state")
    return DecodeBlock(
        hash=message.name,
        parent=message.parent if message.HasField("parent") else None,
        root=decode_root(message.root),
        tokens=BlockTokens(list(message.ids), message.data),
        block_size=message.block_size,
        depth=message.depth if message.HasField("depth") else None,
        session=message.session if message.HasField("session") else None,
        state=_STATES[message.state],
        copies=message.copies,
        media=list(message.media),
    )
