"""Holders: which publishers hold which blocks of one segment on one medium; and what is kept of each
publisher.

Nearly every holder holds a segment from its first block on: all of it, or as far as its request went,
or what eviction (tail first) has left. So holders are kept as bit sets by the length of that run, and finding
the holders of the first m blocks costs the same for ten or a thousand of them. Only a holder with
a hole has a block mask of its own.

A holder is named by one bit (``1 << slot``); a mask has one bit for each block of the segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvist_epp.index.tree.segment import Segment
    from kvist_epp.index.tree.windows import WindowGroup


class Presence:
    """One publisher between two resets: when it is forgotten, a new presence with another bit replaces it."""

    __slots__ = (
        "bit",
        "copies",
        "counts",
        "drops",
        "evicted",
        "name",
        "opaque",
        "own",
        "restored",
        "segments",
        "windows",
    )

    name: str
    bit: int
    """Its bit in every ``Holders``; 0 until it holds something, so that pods that are gone use none."""
    counts: dict[str, int]
    """Medium → blocks held there, opaque ones included."""
    evicted: dict[str, int]
    """By medium other than the GPU: the hash of the block that its engine has evicted last."""
    segments: set[Segment]
    """Where it holds something: what a reset has to visit."""
    copies: dict[tuple[str, int], int]
    """(medium, hash) → copies beyond the first. vLLM stores a block twice when two requests compute it."""
    own: dict[int, Segment]
    """Hashes that mean another block to this publisher than to the others."""
    opaque: dict[str, dict[int, int]]
    """Medium → hash → copies, of blocks that never match (media, embeddings, and all that follows them)."""
    windows: dict[int, WindowGroup]
    """KV cache groups with a window, by their number."""
    drops: bool
    """Its engine computes the last block of each hit again (``index.last_block``)."""
    restored: bool
    """Its beginning is in a snapshot of another replica, and not in events."""

    def __init__(self, name: str, *, drops: bool = False) -> None:
        self.name = name
        self.bit = 0
        self.counts = {}
        self.evicted = {}
        self.segments = set()
        self.copies = {}
        self.own = {}
        self.opaque = {}
        self.windows = {}
        self.drops = drops
        self.restored = False

    def count(self, medium: str, change: int) -> None:
        """Adds to the number of blocks held on a medium."""
        self.counts[medium] = self.counts.get(medium, 0) + change

    def copy(self, medium: str, name: int) -> None:
        """Count a further copy of a block that is held already."""
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
        """Remove copies and opaque blocks on one medium; on the GPU also what groups with windows hold."""
        self.restored &= medium != "GPU"
        for window in self.windows.values() if medium == "GPU" else ():
            window.held.clear()
            window.whole = True
        self.evicted.pop(medium, None)
        self.copies = {key: extra for key, extra in self.copies.items() if key[0] != medium}
        if blocks := self.opaque.pop(medium, None):
            self.count(medium, -len(blocks))

    def retire(self) -> None:
        """Drop all but ``segments`` and ``bit``, which are needed until its blocks are removed."""
        self.counts, self.copies, self.own, self.opaque, self.windows = {}, {}, {}, {}, {}


SEGMENT_BLOCKS: Final = 64
ONES: Final = tuple((1 << count) - 1 for count in range(SEGMENT_BLOCKS + 1))
"""``ONES[n]``: the mask of the first n blocks."""


def leading(mask: int) -> int:
    """Return how many blocks from the first on are in the mask without a gap."""
    return (~mask & (mask + 1)).bit_length() - 1


def each(bits: int) -> Iterator[int]:
    """The single bits of a bit set, lowest first."""
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit


class Holders:
    """Each holder is in at most one place: ``full``, one of ``runs``, or ``part``."""

    __slots__ = ("full", "part", "runs")

    full: int
    """Holders of every block of the segment."""
    runs: dict[int, int] | None
    """Run length → holders of exactly that many blocks from the first one (at least one, not all)."""
    part: dict[int, int] | None
    """Holder → its mask, when that has a hole."""

    def __init__(self) -> None:
        self.full = 0
        self.runs = None
        self.part = None

    def __bool__(self) -> bool:
        return bool(self.full or self.runs or self.part)

    def mask(self, bit: int, length: int) -> int:
        """Blocks of one holder; ``length`` is the segment's, in blocks."""
        if self.full & bit:
            return ONES[length]
        if self.runs:
            for run, bits in self.runs.items():
                if bits & bit:
                    return ONES[run]
        return self.part.get(bit, 0) if self.part else 0

    def alike(self, bits: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield these publishers in sets that hold the same blocks, with the mask of these: 0 for the set
        that holds none. ``length`` is the segment's, in blocks."""
        if some := self.full & bits:
            yield some, ONES[length]
            bits ^= some
        for run, holders in (self.runs or {}).items():
            if some := holders & bits:
                yield some, ONES[run]
                bits ^= some
        for bit, mask in (self.part or {}).items():
            if bit & bits:
                yield bit, mask
                bits ^= bit
        if bits:
            yield bits, 0

    def everybody(self) -> int:
        """Bit set of those that hold at least one block."""
        bits = self.full
        for run in (self.runs or {}).values():
            bits |= run
        for bit in self.part or ():
            bits |= bit
        return bits

    def joined(self, bits: int, length: int) -> int:
        """Mask of the blocks that any of these holders holds."""
        if self.full & bits:
            return ONES[length]
        mask = 0
        if self.runs:
            mask = ONES[max((run for run, some in self.runs.items() if some & bits), default=0)]
        for bit, some in (self.part or {}).items():
            if bit & bits:
                mask |= some
        return mask

    def covering(self, count: int) -> int:
        """Bit set of those that hold the first ``count`` blocks."""
        bits = self.full
        if self.runs:
            for run, some in self.runs.items():
                if run >= count:
                    bits |= some
        if self.part:
            wanted = ONES[count]
            for bit, mask in self.part.items():
                if mask & wanted == wanted:
                    bits |= bit
        return bits

    def shorter(self, count: int) -> Iterator[tuple[int, int]]:
        """(holders, run) of those that hold just the first ``run`` blocks in a row, 0 < run < ``count``."""
        for run, bits in (self.runs or {}).items():
            if run < count:
                yield bits, run
        for bit, mask in (self.part or {}).items():
            run = leading(mask)
            if 0 < run < count:
                yield bit, run

    def reach(self, length: int) -> int:
        """Number of blocks up to the last one with a holder."""
        if self.full:
            return length
        far = max(self.runs) if self.runs else 0
        for mask in (self.part or {}).values():
            far = max(far, mask.bit_length())
        return far

    def add(self, bit: int, mask: int, length: int) -> int:
        """The holder now holds the mask's blocks too; returns what it held before."""
        if self.full & bit:
            return ONES[length]
        before = self.take(bit, length) if self.runs or self.part else 0
        self._put(bit, before | mask, length)
        return before

    def remove(self, bit: int, mask: int, length: int) -> int:
        """The holder no longer holds the mask's blocks; returns what it held before."""
        before = self.take(bit, length)
        if after := before & ~mask:
            self._put(bit, after, length)
        return before

    def take(self, bit: int, length: int) -> int:
        """Remove a holder; return the mask of what it held."""
        if self.full & bit:
            self.full ^= bit
            return ONES[length]
        if self.runs:
            for run, bits in self.runs.items():
                if bits & bit:
                    self._leave_run(run, bits ^ bit)
                    return ONES[run]
        if self.part and bit in self.part:
            mask = self.part.pop(bit)
            self.part = self.part or None
            return mask
        return 0

    def grow(self, length: int) -> None:
        """Note that the segment grows beyond its present ``length``: no publisher holds all of it now."""
        if self.full:
            runs = self.runs = self.runs or {}
            runs[length] = self.full
            self.full = 0

    def shrink(self, length: int) -> None:
        """Note that the segment keeps its first ``length`` blocks; the others had no holder."""
        if self.runs and (bits := self.runs.get(length)):
            self.full = bits
            self._leave_run(length, 0)

    def _put(self, bit: int, mask: int, length: int) -> None:
        if mask == ONES[length]:
            self.full |= bit
        elif mask & (mask + 1):
            part = self.part = self.part or {}
            part[bit] = mask
        else:
            runs = self.runs = self.runs or {}
            run = mask.bit_length()
            runs[run] = runs.get(run, 0) | bit

    def _leave_run(self, run: int, bits: int) -> None:
        runs = self.runs
        if runs is None:
            return
        if bits:
            runs[run] = bits
            return
        del runs[run]
        if not runs:
            self.runs = None
