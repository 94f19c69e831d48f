"""Blocks that one publisher's engine computed in decode and that are not credited, or not finally. Pure.

They are known here, so that their children are neither orphans nor credited, but they are not in the index.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import accumulate, takewhile

import msgspec

from kvist_epp.engines.vllm.kv_events import GPU


class BlockTokens(msgspec.Struct, frozen=True, gc=False):
    """Token ids of one block and the bytes that they decode to."""

    ids: Sequence[int]
    data: bytes


class DecodeBlockState(Enum):
    """State of a block that was computed in decode."""

    PENDING = "pending"
    REJECTED = "rejected"
    """Not canonical, or it could not be checked. Its children are rejected, too."""
    CREDITED = "credited"
    """In the index; kept here until a child has shown that the boundary between the two is canonical."""


class DecodeBlock(msgspec.Struct, eq=False, gc=False):
    """One block that was computed in decode."""

    hash: int
    parent: int | None
    root: tuple[str | None, str | None]
    """(adapter, salt); has a meaning only for a block without parent."""
    tokens: BlockTokens
    block_size: int
    depth: int | None
    """Tokens from the root to the end of the block."""
    session: str | None = None
    state: DecodeBlockState = DecodeBlockState.PENDING
    copies: int = 1
    """Times that the engine stored the block on the GPU minus removals: two requests may store the same
    block."""
    media: list[str] = []
    """Slower tiers that hold the block, too, as far as it was not credited when they stored it."""


class DecodeBlockTable:
    """Blocks of one publisher by hash."""

    def __init__(self) -> None:
        self._blocks: dict[int, DecodeBlock] = {}
        self._children: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Return the number of blocks, in any state."""
        return len(self._blocks)

    def copies(self) -> tuple[DecodeBlock, ...]:
        """Return the blocks in any state, as they are now, oldest first; later changes do not show."""
        blocks = self._blocks.values()
        return tuple([msgspec.structs.replace(block, media=list(block.media)) for block in blocks])

    def get(self, block_hash: int | None) -> DecodeBlock | None:
        """Return the block of this hash, if there is one."""
        return None if block_hash is None else self._blocks.get(block_hash)

    def uncredited(self, block_hash: int | None) -> DecodeBlock | None:
        """Return the block of this hash, unless it is in the index."""
        block = self._blocks.get(block_hash) if block_hash is not None else None
        return None if block is None or block.state is DecodeBlockState.CREDITED else block

    def add(self, block: DecodeBlock) -> None:
        """Add a block; one of the same hash, which meant another one, leaves the table."""
        if (before := self._blocks.get(block.hash)) is not None:
            self.remove(before)
        self._blocks[block.hash] = block
        if block.parent is not None:
            self._children.setdefault(block.parent, []).append(block.hash)

    def remove(self, block: DecodeBlock) -> None:
        """Remove a block with all its copies."""
        del self._blocks[block.hash]
        if block.parent is not None:
            siblings = self._children[block.parent]
            siblings.remove(block.hash)
            if not siblings:
                del self._children[block.parent]

    def on_removed(self, block_hash: int, medium: str) -> bool:
        """Remove one copy, as the engine did; return True if the block is not in the index either."""
        block = self._blocks.get(block_hash)
        if block is None or (not block.copies if medium == GPU else medium not in block.media):
            return False
        credited = block.state is DecodeBlockState.CREDITED
        if medium == GPU:
            block.copies -= 1
        else:
            block.media.remove(medium)
        pending = block.state is DecodeBlockState.PENDING
        if not block.copies and not (block.media and (pending or medium != GPU)):
            self.remove(block)
        return not credited

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()
        self._children.clear()

    def ancestors(self, block: DecodeBlock) -> Iterator[DecodeBlock]:
        """Yield the ancestors that are in the table and not in the index, nearest first."""
        seen = {block.hash}  # an engine that names a block as its own ancestor must not hold up the others
        parent = self.uncredited(block.parent)
        while parent is not None and parent.hash not in seen:
            yield parent
            seen.add(parent.hash)
            parent = self.uncredited(parent.parent)

    def pending_chain(self, block: DecodeBlock, limit: int) -> list[DecodeBlock]:
        """Return pending blocks in a chain, from the topmost pending ancestor of ``block`` on.

        ``limit``: bytes of text after which no block is added, except a second one, which may settle the
        first.
        """
        pending = takewhile(lambda other: other.state is DecodeBlockState.PENDING, self.ancestors(block))
        chain = [block, *pending][::-1]
        lengths = list(accumulate(len(block.tokens.data) for block in chain))
        enough = bisect_left(lengths, limit) + 1
        if enough <= len(chain):
            return chain[: max(2, enough)]
        length = lengths[-1]
        # As many blocks as bytes at most: of blocks without text a damaged snapshot may have a circle.
        while max(length, len(chain)) < limit and (child := self._pending_child(chain[-1])) is not None:
            chain.append(child)
            length += len(child.tokens.data)
        return chain

    def _pending_child(self, block: DecodeBlock) -> DecodeBlock | None:
        children = map(self._blocks.__getitem__, self._children.get(block.hash, ()))
        return next((child for child in children if child.state is DecodeBlockState.PENDING), None)
