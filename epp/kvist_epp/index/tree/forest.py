"""All trees, and the small changes that keep them consistent.

Between two calls it always holds that

- a block lives as long as a publisher holds it or a descendant of it (unheld blocks at a segment's end may
  stay until they are half of it: eviction takes one block at a time, and often the block comes back);
- ``nodes[h]`` is a living segment with ``h`` among its ``hashes``;
- what a publisher calls a block is in ``Segment.alias`` where it differs from ``hashes``, and in its
  ``Presence.own`` where ``nodes`` would lead elsewhere;
- a publisher has at most one name for a block. Blocks of equal bytes and different tokens are
  separate nodes (``Segment.twin``).
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import contains, delitem, itemgetter
from typing import Final

from kvist_epp.index.tree.holders import ONES, Presence, each
from kvist_epp.index.tree.segment import GPU, Root, Segment, Tree, attach, detach

SHARDS: Final = 256
SHIFT: Final = 56
"""The upper bits choose the shard: the lower ones choose the place in it, and would all be equal."""
_UPPER: Final = 7 if sys.byteorder == "little" else 0
"""Place of the upper 8 bits among the bytes of a hash."""


class HashIndex:
    """A mapping of engine hashes to segments, for millions of hashes, without long pauses.

    One dictionary of a million entries stops everything for 50 to 70 ms whenever it grows, one of four
    million for half a second, and picks wait for that. A few hundred small ones do the same work a
    millisecond at a time. Hashes are below 2 ** 64.
    """

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: tuple[dict[int, Segment], ...] = tuple({} for _ in range(SHARDS))

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def items(self) -> Iterator[tuple[int, Segment]]:
        """All of them."""
        return chain.from_iterable(shard.items() for shard in self._shards)

    def get(self, name: int) -> Segment | None:
        """The segment of this name."""
        return self._shards[name >> SHIFT].get(name)

    def shards(self, names: Sequence[int]) -> tuple[dict[int, Segment], ...]:
        """Return the dictionary of each name, and one more.

        The upper bits are read from memory: a shift of a number of 64 bits makes another number. Iterators
        written in C then do with all names what takes several times as long in a loop.
        """
        numbers = array("Q", names).tobytes()[_UPPER::8]
        found: tuple[dict[int, Segment], ...] = itemgetter(*numbers, 0)(self._shards)
        return found

    def any_of(self, names: Sequence[int]) -> bool:
        """Whether one of these names is known."""
        return any(map(contains, self.shards(names), names))

    def claim_all(self, names: Sequence[int], segment: Segment) -> bool:
        """Map these hashes, of which no two are equal, to a segment that has none of them yet.

        Returns False, and changes nothing, if one is known. To ask first and to write afterwards would read
        each place of the dictionaries twice, and memory is what this waits for.
        """
        shards = self.shards(names)
        found = list(map(dict.setdefault, shards, names, repeat(segment)))
        if found.count(segment) == len(found):
            return True
        for shard, name, other in zip(shards, names, found, strict=False):
            if other is segment:
                del shard[name]
        return False

    def claim(self, name: int, segment: Segment) -> bool:
        """Map a hash that is not mapped to this segment; return whether it is the segment's."""
        return self._shards[name >> SHIFT].setdefault(name, segment) is segment

    def claim_new(self, name: int, segment: Segment) -> bool:
        """Map a hash to this segment; return False, and change nothing, if it is mapped already."""
        shard = self._shards[name >> SHIFT]
        if name in shard:
            return False
        shard[name] = segment
        return True

    def drop(self, names: Sequence[int], segment: Segment) -> None:
        """Remove these names of this segment; names that lead to other segments stay."""
        if not segment.shadowed:  # all of its names lead to it
            deque(map(delitem, self.shards(names), names), 0)
            return
        for name in names:
            shard = self._shards[name >> SHIFT]
            if shard.get(name) is segment:
                del shard[name]


Place = tuple[Segment, int]
"""A block: its segment and its position there; (tree root, -1) is the place before the first block."""


def path_up(segment: Segment, count: int) -> Iterator[tuple[Segment, int]]:
    """Yield the first ``count`` blocks of a segment, then those before them, segment by segment up to the
    root: each as a segment and a number of its blocks."""
    yield segment, count
    while segment.parent is not None and segment.at >= 0:
        segment, count = segment.parent, segment.at + 1
        yield segment, count


def last_bytes(place: Place, limit: int) -> bytes:
    """Return up to ``limit`` last bytes of the text that ends with a block."""
    segment, at = place
    texts = [segment.text[: segment.offset(at + 1)]]
    size = len(texts[0])
    while size < limit and segment.parent is not None:
        at, segment = segment.at, segment.parent
        texts.append(segment.text[: segment.offset(at + 1)])
        size += len(texts[-1])
    return b"".join(reversed(texts))[max(0, size - limit) :]


def held_on(who: Presence, segment: Segment, medium: str) -> int:
    """Mask of the blocks of a segment that a publisher holds on one medium."""
    holders = segment.on(medium)
    return 0 if holders is None else holders.mask(who.bit, len(segment.hashes))


def _child(segment: Segment, at: int) -> Segment:
    """Return a new segment for what follows the block at ``at``, not attached yet."""
    return Segment(segment.tree, segment, at, segment.base + at + 1)


class Forest:
    """All trees and the names of their blocks."""

    __slots__ = ("nodes", "segments", "trees")

    nodes: HashIndex
    """Engine hash → segment, for the publishers that have nothing else in ``Presence.own``."""
    segments: int
    trees: dict[Root, dict[int, Tree]]
    """Root → block size in tokens → tree."""

    def __init__(self) -> None:
        self.nodes = HashIndex()
        self.segments = 0
        self.trees = {}

    def tree(self, root: Root, block_size: int) -> Tree:
        """The tree of a root and block size, made when absent; it goes with its last segment."""
        trees = self.trees.setdefault(root, {})
        if block_size not in trees:
            trees[block_size] = Tree(root, block_size)
        return trees[block_size]

    def locate(self, who: Presence, name: int) -> Place | None:
        """The block a hash means to a publisher; None unless it holds it on some medium."""
        segment = (who.own.get(name) if who.own else None) or self.nodes.get(name)
        if segment is None:
            return None
        names = segment.alias.get(who, segment.hashes) if segment.alias else segment.hashes
        if names[-1] == name:
            at = len(names) - 1
        elif name in names:
            at = names.index(name)
        else:
            return None
        if segment.gpu.full & who.bit or segment.held(who.bit) >> at & 1:
            return segment, at
        return None

    def is_alone(self, who: Presence, others: int, name: int) -> bool:
        """Return whether a block that a publisher holds is on none of ``others``, a bit set, and on no
        slower medium of its own."""
        place = self.locate(who, name)
        if place is None:
            return False
        segment, at = place
        length = len(segment.hashes)
        mask = segment.gpu.joined(others, length)
        for holders in (segment.lower or {}).values():
            mask |= holders.joined(others | who.bit, length)
        return not mask >> at & 1

    def hold(self, who: Presence, segment: Segment, low: int, names: tuple[int, ...], medium: str) -> None:
        """The publisher holds the blocks from position ``low`` on, as many as ``names`` has."""
        mask = ONES[len(names)] << low
        again = segment.ensure(medium).add(who.bit, mask, len(segment.hashes)) & mask
        if again != mask:
            who.count(medium, (mask & ~again).bit_count())
            who.segments.add(segment)
        for bit in each(again):
            who.copy(medium, names[bit.bit_length() - 1 - low])

    def unhold(self, who: Presence, segment: Segment, mask: int, medium: str) -> int:
        """The publisher no longer holds these blocks on this medium; returns how many it held."""
        holders = segment.gpu if medium == GPU else segment.on(medium)
        before = holders.remove(who.bit, mask, len(segment.hashes)) if holders else 0
        gone = before & mask
        if not gone:
            return 0
        who.counts[medium] -= gone.bit_count()
        if medium != GPU and not holders:
            segment.leave_medium(medium)
        left = segment.held(who.bit) if segment.lower or medium != GPU else before ^ gone
        if who.own or segment.alias:
            self._unname(who, segment, gone & ~left)
        if not left:
            who.segments.discard(segment)
        if not segment.gpu.full:
            self.prune(segment)
        return gone.bit_count()

    def release(self, who: Presence, segment: Segment, at: int, name: int) -> None:
        """The publisher no longer holds this block anywhere, nor any copy of it."""
        for medium in [medium for medium, _ in segment.media()]:
            who.copies.pop((medium, name), None)
            self.unhold(who, segment, 1 << at, medium)

    def drop(self, who: Presence, segment: Segment) -> None:
        """Remove a retired publisher from this segment; its own records are gone already."""
        for medium, holders in list(segment.media()):
            holders.take(who.bit, len(segment.hashes))
            if medium != GPU and not holders:
                segment.leave_medium(medium)
        if segment.alias:
            segment.alias.pop(who, None)
            segment.alias = segment.alias or None
        self.prune(segment)

    def append_own(self, who: Presence, segment: Segment, at: int, name: int, block: bytes) -> bool:
        """Add a new block on the GPU to the end of a segment that only this publisher holds as a whole there.

        Returns False, and changes nothing, in any other case. Most blocks of answers come so, one at a time,
        and ``add`` and ``hold`` would take several times as long.
        """
        if (
            at + 1 != len(segment.hashes)
            or segment.gpu.full != who.bit
            or segment.alias
            or segment.shadowed
            or name in who.own
            or not segment.has_room()
            or not self.nodes.claim_new(name, segment)
        ):
            return False
        for holders in (segment.lower or {}).values():
            holders.grow(at + 1)
        segment.text += block
        segment.sizes.append(len(block))
        segment.hashes += (name,)
        who.counts[GPU] += 1
        return True

    def add(self, segment: Segment, at: int, names: tuple[int, ...], blocks: Sequence[bytes]) -> Place:
        """Add blocks after the one at ``at``: to the same segment if it ``has_room``, else in a new child."""
        target, low = self.place_after(segment, at)
        self.append(target, names, blocks)
        return target, low

    def add_child(self, segment: Segment, at: int, names: tuple[int, ...], blocks: Sequence[bytes]) -> Place:
        """New blocks in a segment of their own, after the block at ``at``."""
        new = _child(segment, at)
        self.append(new, names, blocks)
        return new, 0

    def place_after(self, segment: Segment, at: int) -> Place:
        """Return where new blocks after the one at ``at`` belong: behind it in its segment if it
        ``has_room``, else in a new segment, which becomes a child with its first blocks (``append``)."""
        if self.has_room(segment, at):
            return segment, at + 1
        return _child(segment, at), 0

    def append(self, segment: Segment, names: tuple[int, ...], blocks: Sequence[bytes]) -> None:
        """Add blocks to the end of a segment; one that had none becomes a child of its parent."""
        new = not segment.hashes
        segment.extend(blocks, names)
        if new and segment.parent is not None:
            attach(segment.parent, segment)
            self.segments += 1

    def has_room(self, segment: Segment, at: int) -> bool:
        """Whether a block after the one at ``at`` may go into the segment; unheld blocks there make way."""
        if at + 1 < len(segment.hashes) and segment.reach() == at + 1:
            self.nodes.drop(segment.cut(at + 1), segment)
        return at + 1 == len(segment.hashes) and segment.has_room()

    def name(self, who: Presence, segment: Segment, at: int, name: int) -> None:
        """Map a publisher's hash to the block."""
        usual = segment.hashes[at] == name
        if not usual or name in who.own or not self.nodes.claim(name, segment):
            who.own[name] = segment
            segment.shadowed |= usual
        if not usual or (segment.alias and who in segment.alias):
            segment.names_of(who)[at] = name

    def _unname(self, who: Presence, segment: Segment, mask: int) -> None:
        names = segment.alias.get(who) if segment.alias else None
        for bit in each(mask):
            at = bit.bit_length() - 1
            name = segment.hashes[at] if names is None else names[at]
            if names is not None:
                names[at] = None
            if name is not None and who.own.get(name) is segment and (names is None or name not in names):
                del who.own[name]
        if segment.alias and names is not None and not any(name is not None for name in names):
            del segment.alias[who]
            segment.alias = segment.alias or None

    def prune(self, segment: Segment) -> None:
        """Free the blocks without holders at the segment's end, or the whole segment and then its parents."""
        while segment.parent is not None:
            reach = segment.reach()
            if reach * 2 > len(segment.hashes):
                return
            if reach:
                self.nodes.drop(segment.cut(reach), segment)
                return
            parent = segment.parent
            detach(parent, segment)
            self.nodes.drop(segment.cut(0), segment)  # who still refers to it keeps none of its text
            self.segments -= 1
            segment = parent
        tree = segment.tree
        if segment.children is None and self.trees.get(tree.key, {}).get(tree.block_size) is tree:
            del self.trees[tree.key][tree.block_size]
            del tree.root  # it knows the tree: without this, both would wait for the garbage collector
            if not self.trees[tree.key]:
                del self.trees[tree.key]
