"""One publisher's part of the index, recorded while its events wait. Changes nothing.

Segments change, but their texts and hashes are replaced, never written to; so what is recorded is a reference
and stays as it was. Recording is done in steps. Between them other publishers' events may be learned: they
cannot move or free a block that this publisher holds, nor one that such a block follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from kvist_epp.index.snapshot.parts import Counted
from kvist_epp.index.tree.holders import ONES
from kvist_epp.index.tree.presence import Presence
from kvist_epp.index.tree.segment import Segment

STEP_SEGMENTS = 64
"""Segments recorded between two chances to let a pick run: about a tenth of a millisecond."""


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
