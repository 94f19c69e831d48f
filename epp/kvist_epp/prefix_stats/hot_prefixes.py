"""Which beginnings of prompts are hot: matched often within ten minutes, by more than one tenant. Pure.

A pick notes where in the index its prompt's longest match ends, whoever holds it, and whose request it was.
What is hot is worked out when somebody asks: counts go up the tree, a block is as hot as all that ends at it
or behind it, and the hottest blocks that fit a budget are told as whole beginnings. Heat never rises on the
way down, so the hottest blocks always are beginnings.

Each piece of the window counts a bounded number of places. When they are all taken, what comes is counted
where least was, and takes that place's name with the chance that keeps every sum of counts right in the mean
(D. Ting, Data Sketches for Disaggregated Subset Sum and Frequent Item Estimation, SIGMOD 2018): places asked
for often stay, and are counted exactly while few are asked for.

What one tenant alone has asked for, and what has a salt, is nobody else's: it is never told.
"""

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise
from random import Random
from typing import Final

import msgspec

from kvist_epp.index.tree.holders import ONES
from kvist_epp.index.tree.segment import Root, Segment
from kvist_epp.prefix_stats.window import Window

PLACES: Final = 128
"""That a piece of the window counts. To work out what is hot among 2,560 of them takes milliseconds, in which
no request is picked for."""

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
    """Of its last block."""
    sizes: tuple[int, ...]
    """Bytes of each block."""


class _Run(msgspec.Struct, frozen=True):
    """Blocks of a segment that are equally hot."""

    matches: int
    segment: Segment
    first: int
    end: int


class _Piece:
    """Counts of half a minute."""

    __slots__ = ("_least", "_level", "heats")

    def __init__(self) -> None:
        self.heats: dict[Place, Heat] = {}
        self._level = 0
        """The lowest count there is, or was."""
        self._least: list[Place] = []
        """Those that had it when they were looked for, and were not taken since."""

    def least(self) -> Place:
        """One of the lowest count; the caller raises that count."""
        while True:
            while self._least:
                place = self._least.pop()
                if self.heats[place].matches == self._level:
                    return place
            self._level = min(heat.matches for heat in self.heats.values())
            self._least = [place for place, heat in self.heats.items() if heat.matches == self._level]


class Hot:
    """Counts of the last ten minutes."""

    def __init__(self) -> None:
        self._window = Window(_Piece)
        self._dice = Random(0)

    def note(self, place: Place, tenant: str, now: float) -> None:
        """A prompt of this tenant was known up to here."""
        piece = self._window.at(now)
        heats = piece.heats
        if place in heats:
            heats[place].add(Heat(1, tenant))
        elif len(heats) < PLACES:
            heats[place] = Heat(1, tenant)
        else:
            least = piece.least()
            heats[least].matches += 1
            matches = heats[least].matches
            if self._dice.random() * matches < 1.0:
                del heats[least]
                heats[place] = Heat(matches, tenant)

    def beginnings(self, budget: int, now: float, masks: Masks | None = None) -> list[Beginning]:
        """The hottest prefixes, hottest first, of at most ``budget`` tokens in all.

        What two of them share is counted once: whoever computes one has that part of the other. With
        ``masks`` only those that end in blocks of the masks, and only such blocks count.
        """
        return [self.beginning(place, matches) for place, matches in self.places(budget, now, masks)]

    def beginning(self, place: Place, matches: int) -> Beginning:
        """All that comes before the end of a place."""
        return beginning(place, matches)

    def places(self, budget: int, now: float, masks: Masks | None = None) -> list[tuple[Place, int]]:
        """Where they end, and how often that was matched."""
        runs = _runs(_together(piece.heats for piece in self._window.live(now)))
        return list(_outermost(_within(budget, runs if masks is None else _masked(runs, masks))))


def _together(pieces: Iterable[Mapping[Place, Heat]]) -> dict[Segment, dict[int, Heat]]:
    """Counts by segment and number of blocks; those of other salts, and of segments that went, left out."""
    ends: dict[Segment, dict[int, Heat]] = {}
    for heats in pieces:
        for (segment, blocks), heat in heats.items():
            if segment.tree.key[1] is None and 0 < blocks <= len(segment.hashes):
                _add(ends, segment, blocks, heat)
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
    """Return the part of the runs that is in the masks: of each run the part up to the last such block."""
    for run in runs:
        mask = masks.get(run.segment, 0) & ONES[run.end] & ~ONES[run.first]
        if mask:
            first = (mask & -mask).bit_length() - 1
            yield _Run(run.matches, run.segment, first, mask.bit_length())


def _within(budget: int, runs: Iterator[_Run]) -> dict[Segment, tuple[int, int]]:
    """Return how far the hottest runs that fit reach, and their matches; the last one may be cut."""
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
