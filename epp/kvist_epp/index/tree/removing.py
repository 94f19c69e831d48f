"""Removes blocks that one publisher's engine has evicted."""

from collections.abc import Sequence

from kvist_epp.index.tree.forest import Forest
from kvist_epp.index.tree.holders import Presence


def remove(forest: Forest, who: Presence, hashes: Sequence[int], medium: str) -> int:
    """Remove blocks from a medium; one stored several times goes with its last copy. Returns how many of them
    the publisher held."""
    if who.copies or who.opaque or who.own:
        return sum(_remove_one(forest, who, name, medium) for name in hashes)
    known, at, segment, mask, nodes = 0, 0, None, 0, forest.nodes
    while at < len(hashes):
        if nodes.get(hashes[at]) is not segment:
            if segment is not None:
                known += forest.unhold(who, segment, mask, medium)
            # Asked again: with its last child, the block itself may have left just now.
            segment, mask = nodes.get(hashes[at]), 0
        if segment is None:
            at += 1
            continue
        blocks, count = segment.run_of(who, hashes, at)
        mask |= blocks
        at += count
    if segment is not None:
        known += forest.unhold(who, segment, mask, medium)
    return known


def _remove_one(forest: Forest, who: Presence, name: int, medium: str) -> int:
    if who.drop_copy(medium, name) or who.drop_opaque(medium, name):
        return 1
    segment = who.own.get(name) or forest.nodes.get(name)
    return forest.unhold(who, segment, segment.bit_of(who, name), medium) if segment else 0
