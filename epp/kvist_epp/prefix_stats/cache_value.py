"""Value of an endpoint's cache: tokens of prefill saved by blocks that no other endpoint holds. Pure.

Each pick records where in the index its match ends: the endpoint, a segment, and the number of its blocks
matched. Which other endpoints hold those blocks is determined only when the values are computed, because a
copy made a minute ago makes the original worthless. The computation adds all recorded matches up towards the
root once, so its work is bounded by the recorded places and the segments that the endpoints hold. It runs in
short steps.

Memory is bounded: when a slot of the window has too many places, half of its matches are removed at random,
and each that stays counts twice. Blocks that were evicted and computed again start from zero, unless their
segment outlived them; then they inherit the matches of the blocks they replace.
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Found
from kvist_epp.index.tree.holders import ONES
from kvist_epp.index.tree.segment import Segment
from kvist_epp.prefix_stats.window import Window

PLACES: Final = 2048
"""Distinct places kept in a slot of the window: 40,000 in all, some 10 MB."""
STEP: Final = 64
"""Places sorted in one step."""

Steps = Generator[None, None, "dict[str, EndpointCacheValue]"]
Ends = dict[Segment, dict[int, int]]
"""Segment → number of its first blocks → number of matches that ended there."""
Masks = Mapping[Segment, int]


class EndpointCacheValue(msgspec.Struct, frozen=True):
    """Value of one endpoint's cache."""

    tokens: int = 0
    """Tokens saved by blocks that only this endpoint holds now; in approximate mode, by those that only this
    endpoint held at the time of the pick."""
    exclusive_blocks: int = 0
    """Number of blocks that only this endpoint holds."""


class _SlotMatches:
    """Matches of half a minute."""

    __slots__ = ("approximate", "places", "scale")

    def __init__(self) -> None:
        self.places: dict[tuple[str, Segment, int], int] = {}
        """(endpoint key, segment, blocks) → matches."""
        self.scale = 1
        """Matches that one recorded match stands for."""
        self.approximate: dict[str, int] = {}
        """Tokens by endpoint key, in approximate mode."""


class CacheValue:
    """Matches of the last ten minutes, and the values computed from them."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        """``chance`` returns random numbers from 0 up to, but not including, 1."""
        self._window = Window(_SlotMatches)
        self._chance = chance

    def __len__(self) -> int:
        return sum(len(slot.places) for slot in self._window.all())

    def record(self, key: str, found: Found, member: Member | None, now: float) -> None:
        """Record that a request with the matches ``found`` goes to this endpoint."""
        holding = found.hits.get(key)
        if holding is None or member is None or (member.precise and not holding.indexed):
            return
        slot = self._window.current(now)
        if not member.precise:
            others = max((other.tokens for at, other in found.hits.items() if at != key), default=0)
            slot.approximate[key] = slot.approximate.get(key, 0) + max(0, holding.tokens - others)
            return
        publisher = member.publishers[holding.rank or 0]
        for matches in found.matches:
            if (end := matches.end(publisher)) is not None:
                self._record_place(slot, (key, *end))

    def remove(self, key: str) -> None:
        """Remove an endpoint that has left."""
        for slot in self._window.all():
            slot.approximate.pop(key, None)

    def compute(self, index: Index, publishers: Mapping[str, Sequence[int]], now: float) -> Steps:
        """Return the value of each endpoint's cache, by key.

        A generator of short steps; the index and the endpoints may change between them.
        """
        ends: dict[str, Ends] = {key: {} for key in publishers}
        approximate = dict.fromkeys(publishers, 0)
        for slot in self._window.live(now):
            for key, tokens in tuple(slot.approximate.items()):
                approximate[key] = approximate.get(key, 0) + tokens
            for number, ((key, segment, blocks), weight) in enumerate(tuple(slot.places.items())):
                if (own := ends.get(key)) is not None:
                    _add(own, segment, blocks, weight)
                if not number % STEP:
                    yield
        values = {}
        for key, numbers in publishers.items():
            masks: dict[Segment, int] = {}
            for segment, mask in index.exclusive(numbers):
                if mask:
                    masks[segment] = mask
                yield
            tokens = yield from saved_tokens(ends[key], masks)
            blocks = sum(map(int.bit_count, masks.values()))
            values[key] = EndpointCacheValue(tokens + approximate[key], blocks)
        return values

    def _record_place(self, slot: _SlotMatches, place: tuple[str, Segment, int]) -> None:
        scale, places = slot.scale, slot.places
        if scale > 1 and self._chance() * scale >= 1:
            return
        places[place] = places.get(place, 0) + scale
        while len(slot.places) > PLACES:
            self._halve(slot)

    def _halve(self, slot: _SlotMatches) -> None:
        """Keep half of the matches of each place; half of an odd number is rounded up or down at random."""
        scale = slot.scale
        slot.scale = 2 * scale
        counts = ((place, weight // scale) for place, weight in slot.places.items())
        kept = ((place, count // 2 + (count % 2 and self._chance() < 0.5)) for place, count in counts)
        slot.places = {place: count * slot.scale for place, count in kept if count}


def saved_tokens(ends: Ends, masks: Masks) -> Generator[None, None, int]:
    """Return the tokens of all matches in ``ends``, counting only blocks in the masks; ``ends`` is used up.

    Segments are visited deepest first: a match that ends in a segment also passed through its parent, up to
    the block where the segment is attached.
    """
    todo = [(-segment.base, id(segment), segment) for segment in ends]
    heapify(todo)
    tokens = 0
    while todo:
        segment = heappop(todo)[2]
        counts, parent = ends.pop(segment), segment.parent
        mask, size = masks.get(segment, 0), segment.tree.block_size
        if mask:
            tokens += size * sum((mask & ONES[n]).bit_count() * weight for n, weight in counts.items())
        if parent is not None and parent.parent is not None:
            if parent not in ends:
                heappush(todo, (-parent.base, id(parent), parent))
            _add(ends, parent, segment.at + 1, sum(counts.values()))
        yield
    return tokens


def _add(ends: Ends, segment: Segment, blocks: int, weight: int) -> None:
    counts = ends.setdefault(segment, {})
    counts[blocks] = counts.get(blocks, 0) + weight
