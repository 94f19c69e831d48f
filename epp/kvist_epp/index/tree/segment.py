"""The tree's parts: up to 64 consecutive blocks joined into one segment, and how children hang on it.

A block is a node of the tree; nodes of a chain share one ``Segment`` so that a prompt is compared
thousands of bytes at a time and a block costs little more than its text. Children hang at the block
they follow. A segment is never split: a chain that parts from it in the middle hangs there, and a
publisher that holds only the shared part is in the segment's ``Holders`` with a shorter run.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from kvist_epp.index.tree.holders import ONES, SEGMENT_BLOCKS, Holders

if TYPE_CHECKING:
    from kvist_epp.index.tree.holders import Presence

GPU: Final = "GPU"

Root = tuple[str | None, str | None]
"""(LoRA adapter name or None, cache salt or None)"""


class Tree:
    """All chains of one root and one block size."""

    __slots__ = ("block_size", "key", "root")

    def __init__(self, key: Root, block_size: int) -> None:
        self.key = key
        self.block_size = block_size
        self.root = Segment(self, None, -1, 0)


class Segment:
    """Up to 64 consecutive blocks. The root of a tree is a segment without blocks."""

    __slots__ = (
        "alias",
        "at",
        "base",
        "children",
        "gpu",
        "hashes",
        "lower",
        "parent",
        "shadowed",
        "sizes",
        "text",
        "tree",
        "twin",
    )

    text: bytes
    """The blocks' bytes, joined."""
    sizes: array[int]
    """Bytes of each block."""
    hashes: tuple[int, ...]
    """The name of each block: the hash of the engine that stored it first; no name comes twice."""
    base: int
    """Blocks between the tree's root and this segment."""
    at: int
    """Position in ``parent`` of the block that the first block follows; -1: the root."""
    children: Children
    twin: Segment | None
    """The next child of the same parent block that begins with the same bytes: other tokens, same text."""
    gpu: Holders
    lower: dict[str, Holders] | None
    """Holders on media other than the GPU's memory."""
    alias: dict[Presence, list[int | None]] | None
    """Presence → its own hashes for the blocks it holds, when they are not (all) those of ``hashes``."""
    shadowed: bool
    """One of ``hashes`` means another block, or none, to most publishers: look it up per publisher only.

    Every name of a segment that is not shadowed leads to it.
    """

    def __init__(self, tree: Tree, parent: Segment | None, at: int, base: int) -> None:
        self.tree = tree
        self.parent = parent
        self.at = at
        self.base = base
        self.text = b""
        self.sizes = array("I")
        self.hashes = ()
        self.children = None
        self.twin = None
        self.gpu = Holders()
        self.lower = None
        self.alias = None
        self.shadowed = False

    def __repr__(self) -> str:
        return f"<Segment of {len(self.hashes)} blocks at {self.base}, {len(self.text)} bytes>"

    def media(self) -> Iterator[tuple[str, Holders]]:
        """Every medium on which a publisher holds some of it."""
        if self.gpu:
            yield GPU, self.gpu
        if self.lower:
            yield from self.lower.items()

    def on(self, medium: str) -> Holders | None:
        """The holders on one medium, if there can be any."""
        return self.gpu if medium == GPU else self.lower.get(medium) if self.lower else None

    def ensure(self, medium: str) -> Holders:
        """The holders on one medium, made when absent."""
        if medium == GPU:
            return self.gpu
        lower = self.lower = self.lower or {}
        return lower.setdefault(medium, Holders())

    def leave_medium(self, medium: str) -> None:
        """Remove a medium on which nothing is held."""
        if self.lower:
            del self.lower[medium]
            self.lower = self.lower or None

    def names_of(self, who: Presence) -> list[int | None]:
        """Return a publisher's hashes of the blocks, as a list of its own to write to."""
        alias = self.alias = self.alias or {}
        if who not in alias:
            mask = self.held(who.bit)
            alias[who] = [name if mask >> at & 1 else None for at, name in enumerate(self.hashes)]
        return alias[who]

    def bit_of(self, who: Presence, name: int) -> int:
        """The mask bit of the block a publisher calls by this name; 0: none."""
        names = self.alias.get(who, self.hashes) if self.alias else self.hashes
        try:
            return 1 << names.index(name)
        except ValueError:
            return 0

    def run_of(self, who: Presence, names: Sequence[int], start: int) -> tuple[int, int]:
        """Return the mask of the blocks that a publisher calls by ``names`` from ``start`` on, and the number
        of these names, at least one.

        Names that follow are taken, too, if they are in the order of eviction, the last of a chain first.
        """
        if self.shadowed or self.alias:
            return self.bit_of(who, names[start]), 1
        at = self.hashes.index(names[start])
        mine, theirs = self.hashes[at::-1], tuple(names[start : start + at + 1])
        count = len(theirs)
        if mine[:count] != theirs:
            count = next(n for n, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other)
        return ONES[count] << at + 1 - count, count

    def held(self, bit: int) -> int:
        """Mask of the blocks that one holder holds on any medium."""
        length = len(self.hashes)
        mask = self.gpu.mask(bit, length)
        for holders in (self.lower or {}).values():
            mask |= holders.mask(bit, length)
        return mask

    def exclusive(self, own: int, others: int) -> int:
        """Mask of the blocks that some of ``own`` hold, on any medium, and none of ``others``."""
        if self.gpu.full & others:
            return 0
        length = len(self.hashes)
        mask = taken = 0
        for _, holders in self.media():
            mask |= holders.joined(own, length)
            taken |= holders.joined(others, length)
        return mask & ~taken

    def offset(self, count: int) -> int:
        """Bytes of the first ``count`` blocks."""
        return len(self.text) if count == len(self.sizes) else sum(self.sizes[:count])

    def block(self, position: int) -> bytes:
        """The bytes of one block."""
        start = self.offset(position)
        return self.text[start : start + self.sizes[position]]

    def extend(self, blocks: Sequence[bytes], hashes: tuple[int, ...]) -> None:
        """Blocks are added after the last one."""
        for _, holders in self.media():
            holders.grow(len(self.hashes))
        self.text += b"".join(blocks)
        self.sizes += array("I", list(map(len, blocks)))
        self.hashes += hashes
        for names in (self.alias or {}).values():
            names.extend([None] * len(hashes))

    def cut(self, length: int) -> tuple[int, ...]:
        """Keep the first ``length`` blocks, the others have no holder; return the hashes of the others."""
        gone = self.hashes[length:]
        self.text = self.text[: self.offset(length)]
        self.sizes = self.sizes[:length]
        self.hashes = self.hashes[:length]
        for _, holders in self.media():
            holders.shrink(length)
        for names in (self.alias or {}).values():
            del names[length:]
        return gone

    def reach(self) -> int:
        """Number of blocks up to the last one with a holder or a child."""
        length = len(self.hashes)
        far = self.gpu.reach(length)
        if far < length:
            for holders in (self.lower or {}).values():
                far = max(far, holders.reach(length))
            far = max(far, last_position(self.children) + 1)
        return far

    def has_room(self) -> bool:
        """Whether a block may be added after the last one (a child there would otherwise be overtaken)."""
        length = len(self.hashes)
        return 0 < length < SEGMENT_BLOCKS and last_position(self.children) < length - 1

    def matching(self, prompt: bytes, start: int, end: int) -> int:
        """Return how many whole blocks equal ``prompt[start:end]`` from its start on."""
        text = self.text
        if not prompt.startswith(text[: self.sizes[0]], start, end):
            return 0
        ends = list(accumulate(self.sizes))
        low, high = 0, bisect_right(ends, end - start)
        while low < high:
            middle = (low + high + 1) // 2
            done = ends[low - 1] if low else 0
            if text.startswith(prompt[start + done : start + ends[middle - 1]], done):
                low = middle
            else:
                high = middle - 1
        return low


Several = dict[int, dict[bytes, Segment]]
"""Two or more children whose first blocks differ though their prefixes have one hash: size of the block →
the block → child."""
Siblings = dict[int, dict[int, Segment | Several]]
"""Children after one block: size of a prefix of their first block (``prefix_size``) → its hash → child.

The hash is Python's, which takes less memory than the prefix; the block itself is compared afterwards.
"""
Fork = dict[int, Siblings]
"""Position of a block → the children after it."""
Children = None | Segment | Fork
"""Most segments have no child or one; only the others pay for a dictionary."""


def last_position(children: Children) -> int:
    """The last block that has a child; -1: none has."""
    if children is None:
        return -1
    return children.at if isinstance(children, Segment) else max(children)


def prefix_size(size: int) -> int:
    """Return how many bytes of a block of ``size`` bytes its place among siblings depends on.

    This is the largest power of two that is not above ``size`` (0 for an empty block): 16 tokens give blocks
    of a hundred different sizes, which fall into three or four classes here, and a lookup tries each class
    once. A prefix is more than half of its block, so that blocks that begin alike, as those of one chat
    template do, still differ in it.

    Example: the blocks ``b"The quick"`` and ``b"The quiet b"``, of 9 and 11 bytes, both have a prefix of
    8 bytes, ``b"The quic"`` and ``b"The quie"``.
    """
    return 1 << size.bit_length() >> 1


def child(children: Children, at: int, block: bytes) -> Segment | None:
    """The first child after the block at ``at`` that begins with ``block``; others have equal text."""
    if isinstance(children, Segment):
        return children if children.at == at and children.block(0) == block else None
    if children is None or at not in children:
        return None
    size = prefix_size(len(block))
    found = children[at].get(size, {}).get(hash(block[:size]))
    if isinstance(found, dict):
        return found.get(len(block), {}).get(block)
    return found if found is not None and found.block(0) == block else None


def continuations(children: Children, at: int, prompt: bytes, start: int, end: int) -> list[Segment]:
    """Return the children after the block at ``at`` that may go on with ``prompt[start:end]``, in any
    split."""
    if isinstance(children, Segment):
        return [children] if children.at == at else []
    several: list[Segment] = []
    if children is None or (siblings := children.get(at)) is None:
        return several
    for length, by_prefix in siblings.items():
        found = by_prefix.get(hash(prompt[start : start + length]))
        if found is None:
            continue
        if isinstance(found, dict):
            several += _among(found, prompt, start, end)
        elif prompt.startswith(found.text[: found.sizes[0]], start, end):
            while found is not None:
                several.append(found)
                found = found.twin
    return several


def _among(several: Several, prompt: bytes, start: int, end: int) -> Iterator[Segment]:
    for size, by_block in several.items():
        if start + size <= end:
            found = by_block.get(prompt[start : start + size])
            while found is not None:
                yield found
                found = found.twin


def attach(parent: Segment, new: Segment) -> None:
    """Hangs a segment at its place."""
    children = parent.children
    if children is None:
        parent.children = new
        return
    if isinstance(children, Segment):
        fork: Fork = {}
        parent.children = fork
        _insert(fork, children)
    else:
        fork = children
    _insert(fork, new)


def _insert(fork: Fork, new: Segment) -> None:
    block = new.block(0)
    size = prefix_size(len(block))
    by_prefix, prefix = fork.setdefault(new.at, {}).setdefault(size, {}), hash(block[:size])
    found = by_prefix.get(prefix)
    if isinstance(found, Segment) and (other := found.block(0)) != block:
        found = by_prefix[prefix] = {len(other): {other: found}}
    if isinstance(found, dict):
        by_block = found.setdefault(len(block), {})
        new.twin = by_block.get(block)
        by_block[block] = new
    else:
        new.twin = found
        by_prefix[prefix] = new


def detach(parent: Segment, old: Segment) -> None:
    """Takes a segment from its place; empty dictionaries go with it."""
    children = parent.children
    if children is None or isinstance(children, Segment):
        parent.children = None
        return
    block = old.block(0)
    size = prefix_size(len(block))
    siblings = children[old.at]
    by_prefix, prefix = siblings[size], hash(block[:size])
    found = by_prefix[prefix]
    left = _without(found, old) if isinstance(found, Segment) else _fewer(found, block, old)
    if left is not None:
        by_prefix[prefix] = left
        return
    del by_prefix[prefix]
    if not by_prefix:
        del siblings[size]
    if not siblings:
        del children[old.at]
    parent.children = children or None


def _without(first: Segment, old: Segment) -> Segment | None:
    """Return the first of children of equal text from which one is taken."""
    after, old.twin = old.twin, None
    if first is old:
        return after
    one = first
    while one.twin is not old and one.twin is not None:
        one = one.twin
    one.twin = after
    return first


def _fewer(several: Several, block: bytes, old: Segment) -> Segment | Several:
    """Return what is left of several children when one is taken; a single block needs no dictionary."""
    by_block = several[len(block)]
    left = _without(by_block[block], old)
    if left is not None:
        by_block[block] = left
        return several
    del by_block[block]
    if not by_block:
        del several[len(block)]
    if len(several) == 1:
        (blocks,) = several.values()
        if len(blocks) == 1:
            return next(iter(blocks.values()))
    return several
