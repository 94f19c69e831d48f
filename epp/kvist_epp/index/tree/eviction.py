"""Which blocks of a prompt an engine's host memory removes next.

vLLM's host memory removes the blocks that were unused for longest, and of those that one request has used
the last one first (``v1/kv_offload/cpu/policies/lru.py``: a request that ends ranks its blocks from its end
to its beginning). So the blocks before the one that was removed last are next, up to a block that another
prompt has used since. Such a prompt goes on from there, and what goes on in host memory was used later than
all that was removed.

Example: of a prompt of the blocks A B C D E, E and then D were removed, and nothing since. C is next, then B.
If another prompt, A B X, is in host memory, too, then it was used later, and so were A and B: only C is next.
"""

from collections.abc import Iterator
from typing import Final

from kvist_epp.index.tree.forest import Place
from kvist_epp.index.tree.holders import Presence
from kvist_epp.index.tree.segment import Children, Segment

MOST_BRANCHES: Final = 64
"""Ways on from a block that are looked at; of more, one is taken for used."""


def next_evicted(who: Presence, medium: str, removed: Place, end: tuple[Segment, int]) -> int:
    """Return how many blocks before the one that a publisher has ``removed`` last from a medium are the next
    that go; 0 if that block is not on the path to ``end``, a segment and a number of its blocks."""
    segment, count = end
    while segment is not removed[0]:
        if segment.parent is None:
            return 0
        segment, count = segment.parent, segment.at + 1
    at = removed[1]
    if at >= count:
        return 0
    blocks = 0
    while True:
        before, position = (segment, at - 1) if at else (segment.parent, segment.at)
        after = segment if before is not segment else None
        if before is None or position < 0 or not _held(who, medium, before, position):
            return blocks
        if _branches(who, medium, before, position, after):
            return blocks
        blocks, segment, at = blocks + 1, before, position


def _branches(who: Presence, medium: str, segment: Segment, at: int, after: Segment | None) -> bool:
    """Return whether a prompt that is on the medium goes on from a block another way than to ``after``; None:
    to the next block of the segment."""
    if after is not None and at + 1 < len(segment.hashes) and _held(who, medium, segment, at + 1):
        return True
    for number, other in enumerate(_following(segment.children, at)):
        if number == MOST_BRANCHES or (other is not after and _held(who, medium, other, 0)):
            return True
    return False


def _held(who: Presence, medium: str, segment: Segment, at: int) -> bool:
    holders = segment.on(medium)
    return holders is not None and bool(holders.mask(who.bit, len(segment.hashes)) >> at & 1)


def _following(children: Children, at: int) -> Iterator[Segment]:
    """Yield all children after the block at ``at``."""
    if isinstance(children, Segment):
        if children.at == at:
            yield children
        return
    for by_prefix in (children or {}).get(at, {}).values():
        for found in by_prefix.values():
            if isinstance(found, Segment):
                yield from _twins(found)
                continue
            for by_block in found.values():
                for first in by_block.values():
                    yield from _twins(first)


def _twins(segment: Segment | None) -> Iterator[Segment]:
    while segment is not None:
        yield segment
        segment = segment.twin
