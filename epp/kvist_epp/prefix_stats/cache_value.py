"""What an endpoint's cache is worth: tokens of prefill that blocks which nobody else holds saved. Pure.

A pick notes where in the index its match ends: the endpoint, a segment, a number of its blocks. Who else
holds those blocks is not asked then but when somebody wants to know, because a copy made a minute ago makes
the original worth nothing. All notes together then go up the tree once, so the work is bounded by the notes
and by the segments that the endpoints hold; it comes in small steps.

Notes are bounded: where a piece of the window has too many places, every second note is forgotten and the
others count twice. Blocks that were evicted and computed again begin anew, unless their segment outlived
them: then they count as those whose place they took.
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from kvist_epp.index.byte_index import Index
from kvist_epp.index.lookup import Found, Member
from kvist_epp.index.tree.holders import ONES
from kvist_epp.index.tree.segment import Segment
from kvist_epp.prefix_stats.window import Window

PLACES: Final = 2048
"""Distinct places that a piece of the window keeps: 40,000 in all, some 10 MB."""
STEP: Final = 64
"""Notes sorted in one step."""

Steps = Generator[None, None, "dict[str, EndpointCacheValue]"]
Ends = dict[Segment, dict[int, int]]
"""Segment → how many of its first blocks → how often that was matched."""
Masks = Mapping[Segment, int]


class EndpointCacheValue(msgspec.Struct, frozen=True):
    """Of one endpoint."""

    tokens: int = 0
    """Saved by blocks that only it holds now; without trusted events: by what only it had then."""
    exclusive_blocks: int = 0


class _Piece:
    """Half a minute of notes."""

    __slots__ = ("guessed", "places", "scale")

    def __init__(self) -> None:
        self.places: dict[tuple[str, Segment, int], int] = {}
        """(endpoint key, segment, blocks) → matches."""
        self.scale = 1
        """Matches that one note stands for."""
        self.guessed: dict[str, int] = {}
        """Tokens by endpoint key, in approximate mode."""


class CacheValue:
    """Notes of the last ten minutes."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        """``chance`` gives numbers from 0 up to 1."""
        self._window = Window(_Piece)
        self._chance = chance

    def __len__(self) -> int:
        """Places that are kept."""
        return sum(len(piece.places) for piece in self._window.all())

    def record(self, key: str, found: Found, member: Member | None, now: float) -> None:
        """A request goes to this endpoint, of which ``found`` was known."""
        holding = found.hits.get(key)
        if holding is None or member is None:
            return
        piece = self._window.at(now)
        if not member.precise:
            others = max((other.tokens for at, other in found.hits.items() if at != key), default=0)
            piece.guessed[key] = piece.guessed.get(key, 0) + max(0, holding.tokens - others)
            return
        publisher = member.publishers[holding.rank or 0]
        for matches in found.matches:
            if (end := matches.end(publisher)) is not None:
                self._note(piece, (key, *end))

    def forget(self, key: str) -> None:
        """The endpoint has left."""
        for piece in self._window.all():
            piece.guessed.pop(key, None)

    def compute(self, index: Index, publishers: Mapping[str, Sequence[int]], now: float) -> Steps:
        """Return the value of each endpoint's cache, by key; in short steps, between which all may change."""
        noted: dict[str, Ends] = {key: {} for key in publishers}
        guessed = dict.fromkeys(publishers, 0)
        for piece in self._window.live(now):
            for key, tokens in tuple(piece.guessed.items()):
                guessed[key] = guessed.get(key, 0) + tokens
            yield from _sorted(piece, noted)
        found = {}
        for key, numbers in publishers.items():
            masks: dict[Segment, int] = {}
            for segment, mask in index.exclusive(numbers):
                if mask:
                    masks[segment] = mask
                yield
            tokens = yield from saved(noted[key], masks)
            blocks = sum(map(int.bit_count, masks.values()))
            found[key] = EndpointCacheValue(tokens + guessed[key], blocks)
        return found

    def _note(self, piece: _Piece, place: tuple[str, Segment, int]) -> None:
        scale, places = piece.scale, piece.places
        if scale > 1 and self._chance() * scale >= 1:
            return
        places[place] = places.get(place, 0) + scale
        while len(piece.places) > PLACES:
            self._thin(piece)

    def _thin(self, piece: _Piece) -> None:
        """Half of the notes of each place stay; of an odd number one more, or not."""
        scale = piece.scale
        piece.scale = 2 * scale
        notes = ((place, weight // scale) for place, weight in piece.places.items())
        kept = ((place, count // 2 + (count % 2 and self._chance() < 0.5)) for place, count in notes)
        piece.places = {place: count * piece.scale for place, count in kept if count}


def _sorted(piece: _Piece, noted: Mapping[str, Ends]) -> Generator[None]:
    for number, ((key, segment, blocks), weight) in enumerate(tuple(piece.places.items())):
        if (ends := noted.get(key)) is not None:
            _add(ends, segment, blocks, weight)
        if not number % STEP:
            yield


def saved(ends: Ends, masks: Masks) -> Generator[None, None, int]:
    """Tokens of matches that ended there, as far as they are of blocks in the masks; ``ends`` is used up.

    The deepest segment first: its matches went through its parent too, up to where it hangs.
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
