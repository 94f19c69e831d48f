"""One publisher's blocks that were born in decode and are not credited (yet).

They are known, so that their children are neither unknown nor credited, but not in the index.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

from kvist_epp.engines.vllm.kv_events import GPU
from kvist_epp.kvevents.canonical import Piece


class DecodeBlockState(Enum):
    """A block that was computed in decode."""

    PENDING = "pending"
    REJECTED = "rejected"
    """Not canonical, or nobody could check it. Its children are rejected too."""
    CREDITED = "credited"
    """In the index; kept here until a child has shown that the boundary between them is canonical."""


@dataclass(slots=True, eq=False)
class DecodeBlock:
    """One block born in decode."""

    name: int
    """Its hash."""
    parent: int | None
    root: tuple[str | None, str | None]
    """(adapter, salt); counts only for a block without parent."""
    piece: Piece
    block_size: int
    depth: int | None
    """Tokens from the root to its end."""
    session: str | None = None
    state: DecodeBlockState = DecodeBlockState.PENDING
    copies: int = 1
    """How often the engine stored it and did not remove it (two requests may store the same block)."""
    media: list[str] = field(default_factory=list)
    """Offload tiers that hold it as well."""


class DecodeBlockTable:
    """The table of one publisher."""

    def __init__(self) -> None:
        self._blocks: dict[int, DecodeBlock] = {}
        self._children: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Blocks in the table, in any state."""
        return len(self._blocks)

    def all(self) -> list[DecodeBlock]:
        """The blocks, in any state, in the order they came."""
        return list(self._blocks.values())

    def get(self, name: int | None) -> DecodeBlock | None:
        """The block of this hash."""
        return self._blocks.get(name) if name is not None else None

    def uncredited(self, name: int | None) -> DecodeBlock | None:
        """The block of this hash, unless it is in the index."""
        born = self._blocks.get(name) if name is not None else None
        return None if born is None or born.state is DecodeBlockState.CREDITED else born

    def add(self, born: DecodeBlock) -> None:
        """Takes in a block that is not in the table."""
        self._blocks[born.name] = born
        if born.parent is not None:
            self._children.setdefault(born.parent, []).append(born.name)

    def drop(self, born: DecodeBlock) -> None:
        """The block leaves the table, with all its copies."""
        del self._blocks[born.name]
        if born.parent is not None:
            siblings = self._children[born.parent]
            siblings.remove(born.name)
            if not siblings:
                del self._children[born.parent]

    def removed(self, name: int, medium: str) -> bool:
        """The engine dropped one copy; returns whether that was all there was to it (not in the index)."""
        born = self._blocks.get(name)
        if born is None:
            return False
        if medium != GPU:
            if born.state is not DecodeBlockState.CREDITED and medium in born.media:
                born.media.remove(medium)
            return born.state is not DecodeBlockState.CREDITED
        born.copies -= 1
        if born.copies == 0:
            self.drop(born)
        return born.state is not DecodeBlockState.CREDITED

    def clear(self) -> None:
        """The pool was emptied, or the publisher forgotten."""
        self._blocks.clear()
        self._children.clear()

    def above(self, born: DecodeBlock) -> Iterator[DecodeBlock]:
        """Its ancestors that are in the table and not in the index, nearest first."""
        parent = self.uncredited(born.parent)
        while parent is not None:
            yield parent
            parent = self.uncredited(parent.parent)

    def run(self, born: DecodeBlock, limit: int) -> list[DecodeBlock]:
        """Return pending blocks in a chain, from the topmost pending ancestor of ``born`` on.

        ``limit``: bytes of text after which no block is added, but for the second: it may settle the first.
        """
        pending = takewhile(lambda block: block.state is DecodeBlockState.PENDING, self.above(born))
        chain = [born, *pending][::-1]
        while (below := self._pending_child(chain[-1])) is not None and _size(chain) < limit:
            chain.append(below)
        while len(chain) > 2 and _size(chain[:-1]) >= limit:
            chain.pop()
        return chain

    def _pending_child(self, born: DecodeBlock) -> DecodeBlock | None:
        for name in self._children.get(born.name, ()):
            child = self._blocks[name]
            if child.state is DecodeBlockState.PENDING:
                return child
        return None


def _size(chain: list[DecodeBlock]) -> int:
    return sum(len(born.piece.data) for born in chain)
