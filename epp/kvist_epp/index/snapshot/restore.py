"""One publisher's section back into the index, holding by holding, in steps.

Blocks go in through ``Storing``, as from events, at places told by path instead of by parent: a snapshot also
names blocks that nobody holds but that held ones follow. A segment that is not simply held from its first
block on, on the GPU, is first held whole on a medium of its own, then where the snapshot says, and at the end
that medium is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Final

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.parts import Content, Counted, Holding
from kvist_epp.index.tree.forest import Forest, Place
from kvist_epp.index.tree.holders import ONES, SEGMENT_BLOCKS
from kvist_epp.index.tree.presence import Presence
from kvist_epp.index.tree.segment import GPU
from kvist_epp.index.tree.storing import Storing

RESTORING: Final = "…"
"""A medium no engine can name (theirs are upper case)."""
STEP_SEGMENTS: Final = 64


class Restore:
    """One publisher; nothing of it may be believed before ``finish`` is through."""

    def __init__(self, forest: Forest, who: Presence, current: Callable[[], bool]) -> None:
        """``who`` holds nothing yet; ``current``: whether it is still there and was not forgotten."""
        self._forest = forest
        self._who = who
        self._current = current
        self._names: dict[int, tuple[int, ...]] = {}
        """Content's number → what the publisher calls its blocks."""
        self._mixed = False
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """Held so far, each medium by itself."""
        return self._blocks

    @property
    def valid(self) -> bool:
        """Whether it goes on; a publisher that was forgotten meanwhile is not restored."""
        return self._current()

    def hold(self, content: Content, holding: Holding) -> None:
        """The publisher holds this of a content. Raises SnapshotError when that cannot be."""
        names = content.hashes[: holding.reach] if holding.names is None else holding.names
        self._check(content, holding, names)
        place = self._place(content)
        self._names[content.number] = names
        simple = holding.media == ((GPU, ONES[len(names)]),)
        blocks = _blocks(content, len(names))
        Storing(self._forest, self._who, GPU if simple else RESTORING, names, blocks, place).run()
        self._blocks += sum(mask.bit_count() for _, mask in holding.media)
        if not simple:
            self._mixed = True
            for medium, mask in holding.media:
                self._hold_some(names, medium, mask)

    def extra(self, copies: tuple[Counted, ...], opaque: tuple[Counted, ...]) -> None:
        """Further copies, and blocks that never match."""
        for one in copies:
            if self._forest.locate(self._who, one.name):
                self._who.copies[one.medium, one.name] = one.copies
        for one in opaque:
            for _ in range(one.copies):
                self._who.add_opaque(one.medium, one.name)

    def finish(self) -> Iterator[None]:
        """Gives up what was held on the way only; yields now and then."""
        segments = list(self._who.segments) if self._mixed else []
        for at, segment in enumerate(segments):
            if at % STEP_SEGMENTS == 0:
                yield
            if not self._current():
                return
            self._forest.unhold(self._who, segment, ONES[len(segment.hashes)], RESTORING)

    def holds(self, name: int) -> bool:
        """Whether a block of this name is in the index."""
        return self._forest.locate(self._who, name) is not None

    def _check(self, content: Content, holding: Holding, names: tuple[int, ...]) -> None:
        ones = ONES[len(names)]
        if not 0 < len(names) == holding.reach <= len(content.hashes) <= SEGMENT_BLOCKS:
            raise SnapshotError("a holding does not fit its content")
        if any(mask & ~ones or not mask or medium != medium.upper() for medium, mask in holding.media):
            raise SnapshotError("a holding has blocks its content has not, or an unknown medium")
        if content.number in self._names or len(set(names)) != len(names):
            raise SnapshotError("a content is held twice, or two blocks have one name")

    def _place(self, content: Content) -> Place:
        if not content.parent:
            return self._forest.tree(content.root, content.block_size).root, -1
        names = self._names.get(content.parent, ())
        place = self._forest.locate(self._who, names[content.at]) if content.at < len(names) else None
        if place is None:
            raise SnapshotError("a content follows a block that was not told")
        return place

    def _hold_some(self, names: tuple[int, ...], medium: str, mask: int) -> None:
        for at, name in enumerate(names):
            place = self._forest.locate(self._who, name) if mask >> at & 1 else None
            if place is not None:
                self._forest.hold(self._who, *place, (name,), medium)


def _blocks(content: Content, count: int) -> list[bytes]:
    text = content.text
    ends = accumulate(content.sizes[:count], initial=0)
    return [text[start:end] for start, end in pairwise(ends)]
