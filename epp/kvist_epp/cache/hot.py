"""Which beginnings of prompts are hot: matched often within ten minutes, by more than one tenant. Pure.

A pick notes where in the index its prompt's longest match ends, whoever holds it, and whose request it was.
What is hot is worked out when somebody asks: notes go up the tree, a block is as hot as all that ends at it
or behind it, and the hottest blocks that fit a budget are told as whole beginnings. Heat never rises on the
way down, so the hottest blocks always are beginnings.

What one tenant alone has asked for, and what has a salt, is nobody else's: it is never told.
"""

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise
from random import Random
from typing import Final

import msgspec

from kvist_epp.cache.tree.holders import ONES
from kvist_epp.cache.tree.segment import Root, Segment
from kvist_epp.window import Window

NOTES: Final = 128
"""That a piece of the window keeps: of more a fair sample (A. Waterman's reservoir, in D. Knuth, The Art of
Computer Programming, 3.4.2). What is hot enough to be told is seen in 2,560 notes, and to work that out takes
milliseconds, in which no request is picked for."""

Place = tuple[Segment, int]
"""A segment, and how many of its first blocks."""
Masks = Mapping[Segment, int]
"""Some of the blocks of some segments."""


class Heat(msgspec.Struct):
    """How often, and by whom."""

    matches: int
    tenant: str
    shared: bool = False
    """By others than this tenant too."""

    def add(self, other: "Heat") -> None:
        """Both together."""
        self.matches += other.matches
        self.shared = self.shared or other.shared or other.tenant != self.tenant


class Beginning(msgspec.Struct, frozen=True):
    """A hot beginning of prompts."""

    root: Root
    text: bytes
    """Rendered, from the first byte; a whole number of blocks."""
    tokens: int
    matches: int
    """Of its last block, in the notes that were kept."""
    sizes: tuple[int, ...]
    """Bytes of each block."""


class _Run(msgspec.Struct, frozen=True):
    """Blocks of a segment that are equally hot."""

    matches: int
    segment: Segment
    first: int
    end: int


class _Piece:
    __slots__ = ("notes", "seen")

    def __init__(self) -> None:
        self.notes: list[tuple[Place, str]] = []
        self.seen = 0


class Hot:
    """Notes of the last ten minutes."""

    def __init__(self) -> None:
        self._window = Window(_Piece)
        self._dice = Random(0)

    def note(self, place: Place, tenant: str, now: float) -> None:
        """A prompt of this tenant was known up to here."""
        piece = self._window.at(now)
        piece.seen += 1
        if len(piece.notes) < NOTES:
            piece.notes.append((place, tenant))
        elif (at := self._dice.randrange(piece.seen)) < NOTES:
            piece.notes[at] = place, tenant

    def beginnings(self, budget: int, now: float, masks: Masks | None = None) -> list[Beginning]:
        """The hottest beginnings, hottest first, that are no more than ``budget`` tokens in all.

        What two of them share is counted once: whoever computes one has that part of the other. With
        ``masks`` only those that end in blocks of the masks, and only such blocks count.
        """
        return [self.beginning(place, matches) for place, matches in self.places(budget, now, masks)]

    def beginning(self, place: Place, matches: int) -> Beginning:
        """All that comes before the end of a place."""
        return beginning(place, matches)

    def places(self, budget: int, now: float, masks: Masks | None = None) -> list[tuple[Place, int]]:
        """Where they end, and how often that was matched."""
        runs = _runs(_together(piece.notes for piece in self._window.live(now)))
        return list(_outermost(_within(budget, runs if masks is None else _masked(runs, masks))))


def _together(pieces: Iterable[Iterable[tuple[Place, str]]]) -> dict[Segment, dict[int, Heat]]:
    """Notes by segment and number of blocks; those of other salts, and of segments that went, left out."""
    ends: dict[Segment, dict[int, Heat]] = {}
    for notes in pieces:
        for (segment, blocks), tenant in notes:
            if segment.tree.key[1] is None and 0 < blocks <= len(segment.hashes):
                _add(ends, segment, blocks, Heat(1, tenant))
    return ends


def _add(ends: dict[Segment, dict[int, Heat]], segment: Segment, blocks: int, heat: Heat) -> None:
    counts = ends.setdefault(segment, {})
    if blocks in counts:
        counts[blocks].add(heat)
    else:
        counts[blocks] = Heat(heat.matches, heat.tenant, heat.shared)


def _runs(ends: dict[Segment, dict[int, Heat]]) -> Iterator[_Run]:
    """Shared heat of every block, deepest segment first; ``ends`` is used up."""
    todo = [(-segment.base, id(segment), segment) for segment in ends]
    heapify(todo)
    while todo:
        segment = heappop(todo)[2]
        whole: Heat | None = None
        for end, first in pairwise([*sorted(ends[segment], reverse=True), 0]):
            whole = _sum(whole, ends[segment][end])
            if whole.shared:
                yield _Run(whole.matches, segment, first, end)
        parent = segment.parent
        if whole is not None and parent is not None and parent.parent is not None:
            if parent not in ends:
                heappush(todo, (-parent.base, id(parent), parent))
            _add(ends, parent, segment.at + 1, whole)


def _sum(whole: Heat | None, heat: Heat) -> Heat:
    if whole is None:
        return heat
    whole.add(heat)
    return whole


def _masked(runs: Iterator[_Run], masks: Masks) -> Iterator[_Run]:
    """What of the runs is in the masks: of each run the part up to the last such block."""
    for run in runs:
        mask = masks.get(run.segment, 0) & ONES[run.end] & ~ONES[run.first]
        if mask:
            first = (mask & -mask).bit_length() - 1
            yield _Run(run.matches, run.segment, first, mask.bit_length())


def _within(budget: int, runs: Iterator[_Run]) -> dict[Segment, tuple[int, int]]:
    """How far the hottest runs that fit reach, and their matches; as many blocks of the last one as do."""
    reach: dict[Segment, tuple[int, int]] = {}
    for run in sorted(runs, key=lambda run: (-run.matches, run.segment.base + run.first)):
        size = run.segment.tree.block_size
        blocks = min(run.end - run.first, budget // size)
        if blocks:
            reach[run.segment] = run.first + blocks, run.matches
            budget -= blocks * size
        if blocks < run.end - run.first:
            break
    return reach


def _outermost(reach: Mapping[Segment, tuple[int, int]]) -> Iterator[tuple[Place, int]]:
    """Without those that another one goes on from, at their end or behind it."""
    passed: dict[Segment | None, int] = {}
    for segment in reach:
        passed[segment.parent] = max(segment.at + 1, passed.get(segment.parent, 0))
    for segment, (blocks, matches) in reach.items():
        if passed.get(segment, 0) < blocks:
            yield (segment, blocks), matches


def beginning(place: Place, matches: int) -> Beginning:
    """All that comes before the end of a place."""
    segment, blocks = place
    size, key = segment.tree.block_size, segment.tree.key
    tokens = (segment.base + blocks) * size
    text, sizes = segment.text[: segment.offset(blocks)], tuple(segment.sizes[:blocks])
    while segment.parent is not None:
        blocks, segment = segment.at + 1, segment.parent
        text = segment.text[: segment.offset(blocks)] + text
        sizes = (*segment.sizes[:blocks], *sizes)
    return Beginning(key, text, tokens, matches, sizes)
