"""Which publishers hold how much of a prompt: the walk down the tree, and its result.

The walk carries bit sets of publishers, never publishers one by one, so that a prompt a thousand pods
hold costs what it costs for ten. Where several children go on with the same bytes (other token splits
of the same text) all are tried; a publisher's hit is its best.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from kvist_epp.index.tree.holders import ONES, Holders, each, leading
from kvist_epp.index.tree.segment import Segment, Tree, continuations

Loads = tuple["Loads | None", int, str, int]
"""Blocks to load from slower media on the path: (those before, holders, medium, blocks)."""
Group = tuple[int, int, int, Loads | None, Segment]
"""(holders, tokens, bytes, loads, segment of the last block)"""
Reached = tuple[int, int, Loads | None]
"""Holders of the path so far: (on the GPU alone, with loads from slower media, those loads)."""


NO_BITS: Final[Mapping[int, int]] = MappingProxyType({})
_FEW: Final = 8
"""Publishers for each holder from which on the holders are taken out one by one."""


class Hit(msgspec.Struct, frozen=True, gc=False):
    """Length of the prompt's prefix that one publisher holds without a gap."""

    tokens: int = 0
    """All of them, whatever the medium; never the prompt's last token, which the engine always computes."""
    bytes: int = 0
    """Number of the prompt's bytes that these tokens cover."""
    lower: Mapping[str, int] = {}
    """How many of ``tokens`` are not in GPU memory, by the medium they must be loaded from."""


MISS = Hit()


class Matches(msgspec.Struct, eq=False):
    """A snapshot: later changes of the index do not show in it."""

    groups: list[Group] = []
    """Most tokens first."""
    bits: Mapping[int, int] = NO_BITS
    """Publisher number → its bit in the groups."""
    _publishers: Mapping[int, int] = NO_BITS
    """The reverse."""
    _hits: dict[int, Hit] = {}
    """By group: hits without loads are the same for all its holders."""

    def __repr__(self) -> str:
        return f"<Matches {len(self.groups)} groups, best {self.best} tokens>"

    @property
    def best(self) -> int:
        """The most tokens that a publisher holds."""
        return self.groups[0][1] if self.groups else 0

    def publishers(self, without: int = 0) -> list[int]:
        """Return the publishers that hold any part of the prompt, but not those with the bits ``without``."""
        anybody = 0
        for group in self.groups:
            anybody |= group[0]
        anybody &= ~without
        if anybody.bit_count() * _FEW <= len(self.bits):  # taking out a bit takes longer than testing one
            return [self._publishers[bit] for bit in each(anybody)]
        return [publisher for publisher, bit in self.bits.items() if bit & anybody]

    def of(self, publisher: int) -> Hit:
        """Return the best hit of one publisher: most tokens, then least to load, then most bytes."""
        bit = self.bits.get(publisher, 0)
        best, least = MISS, (0, 0)
        for index, (holders, tokens, size, loads, segment) in enumerate(self.groups):
            if tokens < best.tokens:
                break
            if holders & bit:
                lower = _loads_of(bit, loads, segment.tree.block_size) if loads else {}
                rank = (sum(lower.values()), -size)
                if best is MISS or rank < least:
                    best, least = Hit(tokens, size, lower) if lower else self._plain(index), rank
        return best

    def _plain(self, index: int) -> Hit:
        hit = self._hits.get(index)
        if hit is None:
            hit = self._hits[index] = Hit(*self.groups[index][1:3])
        return hit

    def end(self, publisher: int) -> tuple[Segment, int] | None:
        """Return where the longest hit of one publisher ends, as a segment and a number of its blocks; None
        without a hit."""
        bit = self.bits.get(publisher, 0)
        for holders, tokens, _, _, segment in self.groups:
            if holders & bit:
                return segment, tokens // segment.tree.block_size - segment.base
        return None


def tokens_of(group: Group) -> int:
    """Return the tokens that the holders of a group hold; the sort key of groups."""
    return group[1]


def loaders(loads: Loads | None) -> int:
    """Return the publishers that load something."""
    bits = 0
    while loads is not None:
        bits |= loads[1]
        loads = loads[0]
    return bits


def _loads_of(bit: int, loads: Loads | None, block_size: int) -> dict[str, int]:
    total: dict[str, int] = {}
    while loads is not None:
        loads, holders, medium, blocks = loads
        if holders & bit:
            total[medium] = total.get(medium, 0) + blocks * block_size
    return total


def _with_load(loads: Loads | None, holders: int, medium: str, blocks: int) -> Loads:
    if loads is not None and loads[1] == holders and loads[2] == medium:
        return (loads[0], holders, medium, loads[3] + blocks)
    return (loads, holders, medium, blocks)


def search(tree: Tree, prompt: bytes, live: int) -> list[Group]:
    """Return every group of holders of a prefix of the prompt in one tree.

    The last byte is left out: vLLM always computes the last token, so a prompt that ends with a block's
    last byte gives one block less (``KVCacheManager.get_computed_blocks``).
    """
    end = len(prompt) - 1
    if end < 0 or not (begins := continuations(tree.root.children, -1, prompt, 0, end)):
        return []
    walk = _Walk(tree.block_size, prompt, end, [(first, 0, (live, 0, None)) for first in begins])
    walk.run()
    return walk.groups


class _Walk(msgspec.Struct, eq=False):
    """One match in one tree."""

    block_size: int
    prompt: bytes
    end: int
    todo: list[tuple[Segment, int, Reached]]
    """(next segment, its offset in the prompt, holders so far)"""
    groups: list[Group] = []

    def run(self) -> None:
        """Follow the segments until no publisher holds the next."""
        prompt, end, todo = self.prompt, self.end, self.todo
        while todo:
            segment, start, reached = self._ahead(*todo.pop())
            if prompt.startswith(segment.text, start, end):
                count = len(segment.hashes)
            elif not (count := segment.matching(prompt, start, end)):
                continue
            further = _further(segment, count, reached)
            if further[0] | further[1]:
                self._found(segment, start, count, *further)
            if further[:2] != reached[:2]:
                self._shorter(segment, start, count, reached, further)
            if segment.children is not None:
                self._follow(segment, start, count, reached, further)

    def _ahead(self, segment: Segment, start: int, reached: Reached) -> tuple[Segment, int, Reached]:
        """Goes straight down while the only way on is held whole, on the GPU, by all that got here."""
        prompt, end, (alive, low, _) = self.prompt, self.end, reached
        below, after = segment, start
        while not (low or below.lower or alive & ~below.gpu.full) and prompt.startswith(
            below.text, after, end
        ):
            segment, start = below, after
            children = segment.children
            if not isinstance(children, Segment) or children.at + 1 != len(segment.hashes):
                break
            below, after = children, start + len(segment.text)
        return segment, start, reached

    def _found(
        self, segment: Segment, start: int, count: int, alive: int, low: int, loads: Loads | None
    ) -> None:
        """These hold everything up to and with the first ``count`` blocks of the segment."""
        holders = alive | low
        tokens = (segment.base + count) * self.block_size
        groups = self.groups
        if groups and groups[-1][1] < tokens and not groups[-1][0] & ~holders:
            groups.pop()  # the same holders, now further down
        groups.append((holders, tokens, start + segment.offset(count), loads, segment))

    def _shorter(self, segment: Segment, start: int, count: int, reached: Reached, further: Reached) -> None:
        """Add groups of the holders that hold fewer than the first ``count`` blocks."""
        missing = (reached[0] | reached[1]) & ~(further[0] | further[1])
        loads = reached[2]
        tiered = missing & _anybody(segment.lower)
        for holders, run in segment.gpu.shorter(count):
            if some := holders & missing & ~tiered:
                self._found(segment, start, run, some, 0, loads)
        for placed in _placements(segment, tiered):
            if run := leading(placed.held & ONES[count]):
                self._found(segment, start, run, 0, placed.holders, _loading(placed, run, loads))

    def _follow(self, segment: Segment, start: int, count: int, reached: Reached, further: Reached) -> None:
        """Add the children after, or (in other token splits) inside, the first ``count`` blocks."""
        children = segment.children
        places = (children.at,) if isinstance(children, Segment) else children or ()
        for at in places:
            if at >= count:
                continue
            here = further if at == count - 1 else _further(segment, at + 1, reached)
            if here[0] | here[1]:
                offset = start + segment.offset(at + 1)
                for child in continuations(children, at, self.prompt, offset, self.end):
                    self.todo.append((child, offset, here))


def _further(segment: Segment, count: int, reached: Reached) -> Reached:
    """Return which publishers that reached the segment also hold its first ``count`` blocks."""
    alive, low, loads = reached
    gpu = segment.gpu
    on_gpu = gpu.covering(count) if gpu.runs or gpu.part else gpu.full
    straight = alive & on_gpu
    if segment.lower is None:
        return straight, low & on_gpu, loads
    return _tiers(segment, count, (straight, low & on_gpu, loads), (alive | low) & ~on_gpu)


def _tiers(segment: Segment, count: int, sure: Reached, rest: int) -> Reached:
    """Adds those of ``rest`` that hold the first ``count`` blocks on the GPU and slower media together."""
    straight, low, loads = sure
    lower = segment.lower or {}
    mixed = segment.gpu.everybody()
    for medium in sorted(lower):
        if whole := rest & ~mixed & lower[medium].covering(count):
            loads = _with_load(loads, whole, medium, count)
            low |= whole
            rest &= ~whole
        mixed |= lower[medium].everybody()
    for placed in _placements(segment, rest & _anybody(lower)):
        if leading(placed.held) >= count:
            loads = _loading(placed, count, loads)
            low |= placed.holders
    return straight, low, loads


class _Placement(NamedTuple):
    """Publishers that hold the same blocks of a segment on each medium."""

    holders: int
    held: int
    """Mask of the blocks on any medium."""
    gpu: int
    """Mask of the blocks on the GPU."""
    lower: tuple[tuple[str, int], ...] = ()
    """Slower media, and the masks of the blocks there."""


def _placements(segment: Segment, bits: int) -> list[_Placement]:
    """Return these publishers by what they hold of a segment, the same together: of a system prompt that all
    engines have copied to host memory, hundreds hold the same."""
    length = len(segment.hashes)
    found = [_Placement(some, mask, mask) for some, mask in segment.gpu.alike(bits, length)]
    for medium, holders in sorted((segment.lower or {}).items()):
        found = [
            _Placement(same, placed.held | mask, placed.gpu, (*placed.lower, (medium, mask)))
            for placed in found
            for same, mask in holders.alike(placed.holders, length)
        ]
    return found


def _loading(placed: _Placement, count: int, loads: Loads | None) -> Loads | None:
    """Return what these must load of the first ``count`` blocks: those not on the GPU, by medium."""
    need = ONES[count] & ~placed.gpu
    for medium, mask in placed.lower:
        if there := mask & need:
            loads = _with_load(loads, placed.holders, medium, there.bit_count())
            need &= ~there
    return loads


def _anybody(lower: dict[str, Holders] | None) -> int:
    bits = 0
    for holders in (lower or {}).values():
        bits |= holders.everybody()
    return bits
