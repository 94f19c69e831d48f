"""What the index keeps for each publisher besides its bits in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist_epp.index.tree.segment import Segment


class Presence:
    """One publisher between two resets: a new one, with another bit, takes over when it is forgotten."""

    __slots__ = ("bit", "copies", "counts", "name", "opaque", "own", "segments")

    name: str
    bit: int
    """Its bit in every ``Holders``; 0 until it holds something, so that pods that are gone use none."""
    counts: dict[str, int]
    """Medium → blocks held there, opaque ones included."""
    segments: set[Segment]
    """Where it holds something: what a reset has to visit."""
    copies: dict[tuple[str, int], int]
    """(medium, hash) → copies beyond the first. vLLM stores a block twice when two requests compute it."""
    own: dict[int, Segment]
    """Hashes that mean another block to this publisher than to the others."""
    opaque: dict[str, dict[int, int]]
    """Medium → hash → copies, of blocks that never match (media, embeddings, and all that follows them)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bit = 0
        self.counts = {}
        self.segments = set()
        self.copies = {}
        self.own = {}
        self.opaque = {}

    def count(self, medium: str, change: int) -> None:
        """Adds to the number of blocks held on a medium."""
        self.counts[medium] = self.counts.get(medium, 0) + change

    def copy(self, medium: str, name: int) -> None:
        """A block that is held already was stored once more."""
        self.copies[medium, name] = self.copies.get((medium, name), 0) + 1

    def drop_copy(self, medium: str, name: int) -> bool:
        """Takes one of several copies away; False: there was but one."""
        extra = self.copies.get((medium, name), 0)
        if extra > 1:
            self.copies[medium, name] = extra - 1
        elif extra:
            del self.copies[medium, name]
        return extra > 0

    def knows_opaque(self, name: int) -> bool:
        """Whether it holds an opaque block of this hash on any medium."""
        return any(name in blocks for blocks in self.opaque.values())

    def add_opaque(self, medium: str, name: int) -> None:
        """One more copy of an opaque block."""
        blocks = self.opaque.setdefault(medium, {})
        if name not in blocks:
            self.count(medium, 1)
        blocks[name] = blocks.get(name, 0) + 1

    def drop_opaque(self, medium: str, name: int) -> bool:
        """Takes a copy of an opaque block away; False: it holds none."""
        blocks = self.opaque.get(medium, {})
        if name not in blocks:
            return False
        if blocks[name] > 1:
            blocks[name] -= 1
            return True
        del blocks[name]
        self.count(medium, -1)
        if not blocks:
            del self.opaque[medium]
        return True

    def forget_opaque(self, names: Sequence[int]) -> None:
        """These hashes mean blocks of text now."""
        for medium in [
            medium for medium, blocks in self.opaque.items() if not blocks.keys().isdisjoint(names)
        ]:
            for name in names:
                while self.drop_opaque(medium, name):
                    pass

    def clear_medium(self, medium: str) -> None:
        """Forgets copies and opaque blocks on one medium."""
        self.copies = {key: extra for key, extra in self.copies.items() if key[0] != medium}
        if blocks := self.opaque.pop(medium, None):
            self.count(medium, -len(blocks))

    def retire(self) -> None:
        """Only ``segments`` and ``bit`` are needed after this."""
        self.counts, self.copies, self.own, self.opaque = {}, {}, {}, {}
