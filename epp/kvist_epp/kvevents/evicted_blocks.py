"""Blocks that were evicted and are computed again: a larger cache, or other routing, would have kept them.

Pure. An engine reports the hash of each block that it evicts, and of each that it computes. A block that is
computed although it had been evicted, and that no endpoint holds meanwhile, was asked for again.

One block in eight is looked at, chosen by its hash, and counts for eight. Evicted hashes are kept in a table
of fixed size without chains: a new one takes the slot of an older one. After N more evictions a block is
still known with probability exp(-N / 2,097,152), so the count is an estimate from below: it loses less than a
tenth while fewer than 200,000 blocks are evicted between an eviction and the next request for it.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from kvist_epp.index.byte_index import Index

SAMPLE: Final = 8
"""Blocks of which one is looked at, a power of two. All of them would cost 0.2 us for each evicted block, a
quarter of what its removal from the index takes."""
UNSAMPLED: Final = SAMPLE - 1
"""Bits of a hash that are 0 in a block that is looked at."""
SLOTS: Final = 1 << 18
"""Blocks that are remembered at most, a power of two: 2 MiB."""
MISSES: Final = 4
"""Sampled blocks in a row that were not evicted, after which the rest of a chain is new text: eviction takes
chains from their end, so evicted blocks are the first of what is computed. Some slots may have been taken
over."""


class EvictedBlocks:
    """The blocks evicted last, of all publishers."""

    __slots__ = ("_index", "_mask", "_slots", "requested_tokens")

    def __init__(self, index: Index, slots: int = SLOTS) -> None:
        """``slots`` is a power of two."""
        self._index = index
        self._slots = array("Q", bytes(8 * slots))
        self._mask = slots - 1
        self.requested_tokens = 0
        """Estimate of the tokens of evicted blocks that were computed again while no endpoint held them."""

    def on_removed(self, hashes: Sequence[int]) -> None:
        """Remember blocks that a publisher evicted from some medium."""
        slots, mask = self._slots, self._mask
        for name in [name for name in hashes if not name & UNSAMPLED]:
            slots[name // SAMPLE & mask] = name

    def on_stored(self, publisher: int, hashes: Sequence[int], block_size: int) -> None:
        """Count those of a computed chain, which is in the index already, that were evicted everywhere."""
        if found := self._take(hashes):
            self.requested_tokens += self._index.unshared(publisher, found) * block_size * SAMPLE

    def _take(self, hashes: Sequence[int]) -> list[int]:
        """Return the evicted blocks of a chain, and forget them: they are cached again."""
        slots, mask, found, misses = self._slots, self._mask, list[int](), 0
        for name in hashes:
            if name & UNSAMPLED:
                continue
            if slots[at := name // SAMPLE & mask] == name:
                slots[at] = misses = 0
                found.append(name)
            elif (misses := misses + 1) == MISSES:
                break
        return found
