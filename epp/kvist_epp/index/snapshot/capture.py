"""Records one publisher's part of the index, and restores it, both in steps between which picks run.

Recording changes nothing. Segments change, but their texts and hashes are replaced and never written to, so a
recorded reference stays as it was. Other publishers' events may be stored between two steps: they cannot move
or free a block that this publisher holds, nor one that such a block follows.

When restored, blocks go in through ``Storing``, as from events, at places given by path instead of by parent:
a snapshot also names blocks that the publisher does not hold but that held ones follow. A segment that is not
simply held from its first block on, on the GPU, is first held whole on a medium of its own, then where the
snapshot says, and at the end that medium is given up."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice, pairwise
from typing import Final

from kvist_epp.errors import SnapshotError
from kvist_epp.index.snapshot.parts import Content, Counted, Holding, WindowBlocks
from kvist_epp.index.tree.forest import Forest, Place
from kvist_epp.index.tree.holders import ONES, SEGMENT_BLOCKS, Presence
from kvist_epp.index.tree.segment import GPU, Segment
from kvist_epp.index.tree.storing import Storing
from kvist_epp.index.tree.windows import WindowGroup

WINDOW_NAMES: Final = 256
"""Blocks of a group with a window in one part, and in one step."""
STEP_SEGMENTS: Final = 64
"""Segments recorded or restored between two chances to let a pick run: about a tenth of a millisecond."""


@dataclass(slots=True, eq=False)
class Recorded:
    """One segment as it was."""

    segment: Segment
    parent: Recorded | None
    at: int
    hashes: tuple[int, ...]
    sizes: array[int]
    """At least as many as there are hashes."""
    text: bytes
    media: tuple[tuple[str, int], ...]
    names: tuple[int | None, ...] | None
    reach: int


class Capture:
    """``steps`` to its end, then the rest may be read."""

    def __init__(self, who: Presence, current: Callable[[], bool]) -> None:
        """``current``: whether the publisher is still there and was not forgotten."""
        self.segments: list[Recorded] = []
        """Parents before children."""
        self.copies: list[Counted] = []
        self.opaque: list[Counted] = []
        self.windows: list[WindowBlocks] = []
        self.blocks = 0
        self._who = who
        self._current = current
        self._seen: dict[Segment, Recorded] = {}

    def steps(self) -> Iterator[None]:
        """Records; yields now and then. It ends early, and not ``valid``, when the publisher is forgotten."""
        waiting = list(self._who.segments)
        while waiting and self._current():
            for segment in waiting[-STEP_SEGMENTS:]:
                self._record(segment)
            del waiting[-STEP_SEGMENTS:]
            yield
        if self.valid:
            self._finish()
            yield from self._record_windows()

    def _record_windows(self) -> Iterator[None]:
        for group, window in self._who.windows.items():
            if not window.whole:
                continue
            names = window.names()
            self.windows.append(WindowBlocks(group, window.needed, window.block_size))  # it may hold nothing
            while self.valid and (some := tuple(islice(names, WINDOW_NAMES))):
                self.windows.append(WindowBlocks(group, window.needed, window.block_size, some))
                yield

    @property
    def valid(self) -> bool:
        """Whether what was recorded is one publisher's, from one life."""
        return self._current()

    def _record(self, segment: Segment) -> None:
        path = []
        while segment not in self._seen and segment.parent is not None:
            path.append(segment)
            segment = segment.parent
        for below in reversed(path):
            self._seen[below] = recorded = self._one(below)
            self.segments.append(recorded)
            if recorded.parent is not None:
                recorded.parent.reach = max(recorded.parent.reach, below.at + 1)

    def _one(self, segment: Segment) -> Recorded:
        bit, length = self._who.bit, len(segment.hashes)
        media = tuple((name, mask) for name, on in segment.media() if (mask := on.mask(bit, length)))
        self.blocks += sum(mask.bit_count() for _, mask in media)
        alias = segment.alias.get(self._who) if segment.alias else None
        return Recorded(
            segment=segment,
            parent=self._seen.get(segment.parent) if segment.parent else None,
            at=segment.at,
            hashes=segment.hashes,
            sizes=segment.sizes,
            text=segment.text,
            media=media,
            names=None if alias is None else tuple(alias),
            reach=max((mask.bit_length() for _, mask in media), default=0),
        )

    def _finish(self) -> None:
        self.copies = [Counted(medium, name, extra) for (medium, name), extra in self._who.copies.items()]
        self.opaque = [
            Counted(medium, name, copies)
            for medium, blocks in self._who.opaque.items()
            for name, copies in blocks.items()
        ]
        _name_holes(self.segments)


def _name_holes(segments: list[Recorded]) -> None:
    """Blocks on the way to others that the publisher does not hold must have names that mean nothing else to
    it: they are named as the others name them, or by a small number."""
    holes = [one for one in segments if _held(one) != ONES[one.reach]]
    if not holes:
        return
    own = {name for one in segments for name in _own_names(one)}
    fresh = (number for number in count(1) if number not in own)
    for one in holes:
        held, names = _held(one), one.names or one.hashes
        one.names = tuple(
            names[at] if held >> at & 1 else _unused(one.hashes[at], own, fresh) for at in range(one.reach)
        )


def _held(one: Recorded) -> int:
    mask = 0
    for _, on in one.media:
        mask |= on
    return mask


def _own_names(one: Recorded) -> Iterator[int]:
    held = _held(one)
    for at, name in enumerate((one.names or one.hashes)[: held.bit_length()]):
        if name is not None and held >> at & 1:
            yield name


def _unused(name: int, own: set[int], fresh: Iterator[int]) -> int:
    chosen = name if name not in own else next(fresh)
    own.add(chosen)
    return chosen


RESTORING: Final = "…"
"""A medium no engine can name (theirs are upper case)."""


class Restore:
    """One publisher; nothing of it may be believed before ``finish`` is through."""

    def __init__(
        self, forest: Forest, who: Presence, current: Callable[[], bool], windowed: dict[int, Presence]
    ) -> None:
        """``who`` holds nothing yet; ``current``: whether it is still there and was not forgotten.
        ``windowed``: publishers with windows, by bit, to which it is added if it has some."""
        self._forest = forest
        self._who = who
        self._current = current
        self._windowed = windowed
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
        """True while the publisher can be restored: it was not reset in the meantime."""
        return self._current()

    def hold(self, content: Content, holding: Holding) -> None:
        """Add the blocks of a content that the publisher holds. Raises SnapshotError if they are invalid."""
        self._who.restored = True
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

    def extra(
        self, copies: tuple[Counted, ...], opaque: tuple[Counted, ...], windows: tuple[WindowBlocks, ...]
    ) -> None:
        """Add further copies of blocks, opaque blocks, and those of groups with windows."""
        for one in copies:
            if self._forest.locate(self._who, one.name):
                self._who.copies[one.medium, one.name] = one.copies
        for one in opaque:
            for _ in range(one.copies):
                self._who.add_opaque(one.medium, one.name)
        for part in windows:
            window = self._who.windows.setdefault(part.group, WindowGroup(part.needed, part.block_size))
            window.add(part.names)
            self._windowed[self._who.bit] = self._who

    def finish(self) -> Iterator[None]:
        """Remove the temporary holdings of the restoration; yields regularly."""
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
            raise SnapshotError("the number of names or blocks of a holding differs from its content")
        if any(mask & ~ones or not mask or medium != medium.upper() for medium, mask in holding.media):
            raise SnapshotError("a holding names an invalid medium, or blocks that its content lacks")
        if content.number in self._names or len(set(names)) != len(names):
            raise SnapshotError("a holding repeats a content or the name of a block")

    def _place(self, content: Content) -> Place:
        if not content.parent:
            return self._forest.tree(content.root, content.block_size).root, -1
        names = self._names.get(content.parent, ())
        place = self._forest.locate(self._who, names[content.at]) if content.at < len(names) else None
        if place is None:
            raise SnapshotError("the parent block of a content was not sent")
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
