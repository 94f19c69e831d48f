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

from kvist_epp.index.tree.forest import Place, held_on, path_up
from kvist_epp.index.tree.holders import ONES, Presence
from kvist_epp.index.tree.segment import Children, Segment

MOST_BRANCHES: Final = 64
"""Ways on from a block that are looked at; of more, one is taken for used."""


def next_evicted(who: Presence, medium: str, removed: Place, end: tuple[Segment, int], limit: int) -> int:
    """Return how many blocks before the one that a publisher has ``removed`` last from a medium are the next
    that go, up to ``limit``; 0 if that block is not on the path to ``end``, a segment and a number of its
    blocks.

    The time is linear in the segments of the path, not in its blocks: a long prompt has thousands.
    """
    segment, at = removed
    if at >= next((count for one, count in path_up(*end) if one is segment), 0):
        return 0
    blocks = 0
    while blocks < limit:
        start = _start_of_run(who, medium, segment, at)
        blocks += at - start
        if start > 0 or segment.parent is None or segment.at < 0:
            break
        if not _is_only_way(who, medium, segment):
            break
        segment, at = segment.parent, segment.at
        blocks += 1
    return min(blocks, limit)


def _start_of_run(who: Presence, medium: str, segment: Segment, at: int) -> int:
    """Return the first of the blocks before ``at`` that a publisher holds without a gap, and after which no
    other prompt goes on."""
    start = (ONES[at] & ~held_on(who, segment, medium)).bit_length()
    children = segment.children
    places = (children.at,) if isinstance(children, Segment) else children or ()
    for place in sorted((place for place in places if start <= place < at), reverse=True):
        if _goes_on(who, medium, segment, place, None):
            return place + 1
    return start


def _is_only_way(who: Presence, medium: str, child: Segment) -> bool:
    """Return whether a publisher holds the block that a segment follows, and no other way on from there."""
    parent, at = child.parent, child.at
    if parent is None or not (held := held_on(who, parent, medium)) >> at & 1:
        return False
    return not (held >> at + 1 & 1 or _goes_on(who, medium, parent, at, child))


def _goes_on(who: Presence, medium: str, segment: Segment, at: int, but: Segment | None) -> bool:
    """Return whether a publisher holds a child after a block, ``but`` one."""
    for number, child in enumerate(_following(segment.children, at)):
        if number == MOST_BRANCHES or (child is not but and held_on(who, child, medium) & 1):
            return True
    return False


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
