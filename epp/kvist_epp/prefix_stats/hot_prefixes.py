"""Hot prefixes: those matched often within ten minutes, by the requests of more than one tenant. Pure.

After each pick the position in the index where the prompt's longest match ends is recorded, whichever
endpoint holds it, together with the tenant. The hot prefixes are computed on demand: counts are added up
towards the root, so that a block is as hot as all matches that end at it or behind it, and the hottest blocks
that fit a budget are returned as whole prefixes. A block is never hotter than its parent, so the hottest
blocks always form prefixes.

Each slot of the window counts a bounded number of places. When all are taken, a new place is counted where
the count is lowest, and takes over that place's name with the probability that keeps every sum of counts
unbiased (D. Ting, Data Sketches for Disaggregated Subset Sum and Frequent Item Estimation, SIGMOD 2018).
Frequently matched places therefore stay, and counts are exact while there are few places.

Prefixes that a single tenant requests, and those with a cache salt, are private and never returned.
"""

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from random import Random
from typing import Final

import msgspec

from kvist_epp.index.media_marks import ITEM
from kvist_epp.index.tree.holders import ONES
from kvist_epp.index.tree.segment import Root, Segment
from kvist_epp.prefix_stats.window import Window

PLACES: Final = 128
"""Places counted in one slot of the window. Computing the hot prefixes among 2,560 places takes
milliseconds, during which no request is picked for."""

Place = tuple[Segment, int]
"""A segment, and the number of its first blocks that matched."""
Masks = Mapping[Segment, int]
"""A selection of blocks: a bit mask for each segment."""


class MatchCount(msgspec.Struct):
    """Number of matches, and whether several tenants caused them."""

    matches: int
    tenant: str
    shared: bool = False
    """True if requests of other tenants matched, too."""

    def add(self, other: "MatchCount") -> None:
        """Add another count to this one."""
        self.matches += other.matches
        self.shared = self.shared or other.shared or other.tenant != self.tenant


class HotPrefix(msgspec.Struct, frozen=True):
    """Text of a hot prefix, and how often it was matched."""

    root: Root
    text: bytes
    """Rendered prompt from its first byte on; a whole number of blocks."""
    tokens: int
    matches: int
    """Matches of the last block."""
    sizes: tuple[int, ...]
    """Bytes of each block."""


class _Run(msgspec.Struct, frozen=True):
    """Consecutive blocks of a segment with equal counts."""

    matches: int
    segment: Segment
    first: int
    end: int


class _PlaceCounts:
    """Counts of half a minute."""

    __slots__ = ("_level", "_lowest", "counts")

    def __init__(self) -> None:
        self.counts: dict[Place, MatchCount] = {}
        self._level = 0
        """The lowest count, now or earlier."""
        self._lowest: list[Place] = []
        """Places that had this count at the last search and were not returned since."""

    def lowest(self) -> Place:
        """Return a place with the lowest count; the caller raises that count."""
        while True:
            while self._lowest:
                place = self._lowest.pop()
                if self.counts[place].matches == self._level:
                    return place
            self._level = min(count.matches for count in self.counts.values())
            self._lowest = [place for place, count in self.counts.items() if count.matches == self._level]


class HotPrefixes:
    """Counts of matches in the last ten minutes."""

    def __init__(self) -> None:
        self._window = Window(_PlaceCounts)
        self._random = Random(0)

    def record(self, place: Place, tenant: str, now: float) -> None:
        """Record that the match of a prompt of this tenant ended here."""
        slot = self._window.current(now)
        counts = slot.counts
        if place in counts:
            counts[place].add(MatchCount(1, tenant))
        elif len(counts) < PLACES:
            counts[place] = MatchCount(1, tenant)
        else:
            lowest = slot.lowest()
            counts[lowest].matches += 1
            matches = counts[lowest].matches
            if self._random.random() * matches < 1.0:
                del counts[lowest]
                counts[place] = MatchCount(matches, tenant)

    def hottest(self, budget: int, now: float, masks: Masks | None = None) -> list[HotPrefix]:
        """Return the hottest prefixes, hottest first, of at most ``budget`` tokens in all.

        Blocks that two prefixes share count once against the budget. With ``masks``, only prefixes that end
        in masked blocks are returned, and only such blocks count.
        """
        found = [self.prefix_at(place, matches) for place, matches in self.places(budget, now, masks)]
        return [prefix for prefix in found if prefix is not None]

    def prefix_at(self, place: Place, matches: int) -> HotPrefix | None:
        """Return the prefix that ends at a place, or before its first medium, which is no text; None: it
        begins with one."""
        segment, blocks = place
        size, key = segment.tree.block_size, segment.tree.key
        tokens = (segment.base + blocks) * size
        text, sizes = segment.text[: segment.offset(blocks)], tuple(segment.sizes[:blocks])
        while segment.parent is not None:
            blocks, segment = segment.at + 1, segment.parent
            text = segment.text[: segment.offset(blocks)] + text
            sizes = (*segment.sizes[:blocks], *sizes)
        if (media := text.find(ITEM)) >= 0:
            ends = [end for end in accumulate(sizes) if end <= media]
            if not ends:
                return None
            text, tokens, sizes = text[: ends[-1]], len(ends) * size, sizes[: len(ends)]
        return HotPrefix(key, text, tokens, matches, sizes)

    def places(self, budget: int, now: float, masks: Masks | None = None) -> list[tuple[Place, int]]:
        """Return where the hottest prefixes end, and the matches of their last blocks; see ``hottest``."""
        runs = _shared_runs(_sums(slot.counts for slot in self._window.live(now)))
        return list(_leaves(_hottest_within(budget, runs if masks is None else _masked(runs, masks))))


def _sums(slots: Iterable[Mapping[Place, MatchCount]]) -> dict[Segment, dict[int, MatchCount]]:
    """Return counts by segment and number of blocks, without those of salted or removed segments."""
    ends: dict[Segment, dict[int, MatchCount]] = {}
    for counts in slots:
        for (segment, blocks), count in counts.items():
            if segment.tree.key[1] is None and 0 < blocks <= len(segment.hashes):
                _add(ends, segment, blocks, count)
    return ends


def _add(
    ends: dict[Segment, dict[int, MatchCount]], segment: Segment, blocks: int, count: MatchCount
) -> None:
    counts = ends.setdefault(segment, {})
    if blocks in counts:
        counts[blocks].add(count)
    else:
        counts[blocks] = MatchCount(count.matches, count.tenant, count.shared)


def _shared_runs(ends: dict[Segment, dict[int, MatchCount]]) -> Iterator[_Run]:
    """Yield the blocks that several tenants matched, deepest segment first; ``ends`` is used up."""
    todo = [(-segment.base, id(segment), segment) for segment in ends]
    heapify(todo)
    while todo:
        segment = heappop(todo)[2]
        total: MatchCount | None = None
        for end, first in pairwise([*sorted(ends[segment], reverse=True), 0]):
            if total is None:
                total = ends[segment][end]
            else:
                total.add(ends[segment][end])
            if total.shared:
                yield _Run(total.matches, segment, first, end)
        parent = segment.parent
        if total is not None and parent is not None and parent.parent is not None:
            if parent not in ends:
                heappush(todo, (-parent.base, id(parent), parent))
            _add(ends, parent, segment.at + 1, total)


def _masked(runs: Iterator[_Run], masks: Masks) -> Iterator[_Run]:
    """Yield the part of each run that lies in the masks, up to the last masked block."""
    for run in runs:
        mask = masks.get(run.segment, 0) & ONES[run.end] & ~ONES[run.first]
        if mask:
            first = (mask & -mask).bit_length() - 1
            yield _Run(run.matches, run.segment, first, mask.bit_length())


def _hottest_within(budget: int, runs: Iterator[_Run]) -> dict[Segment, tuple[int, int]]:
    """Return (blocks, matches) by segment for the hottest runs that fit; the last run may be cut."""
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


def _leaves(reach: Mapping[Segment, tuple[int, int]]) -> Iterator[tuple[Place, int]]:
    """Yield the places that no other selected prefix continues."""
    continued: dict[Segment | None, int] = {}
    for segment in reach:
        continued[segment.parent] = max(segment.at + 1, continued.get(segment.parent, 0))
    for segment, (blocks, matches) in reach.items():
        if continued.get(segment, 0) < blocks:
            yield (segment, blocks), matches
