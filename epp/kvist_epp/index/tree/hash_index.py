"""Engine hash → segment, for millions of hashes, without a long pause.

One dictionary of a million entries stops everything for 50 to 70 ms whenever it grows, one of four million
for half a second, and picks wait for that. A few hundred small ones do the same work a millisecond at a time.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from kvist_epp.index.tree.segment import Segment

SHARDS: Final = 256
SHIFT: Final = 56
"""The upper bits choose the shard: the lower ones choose the place in it, and would all be equal."""


class HashIndex:
    """A mapping, as far as one is needed."""

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
        return self._shards[name >> SHIFT & 255].get(name)

    def any_of(self, names: Iterable[int]) -> bool:
        """Whether one of these names is known."""
        shards = self._shards
        for name in names:  # noqa: SIM110  # a generator expression in any() takes twice as long
            if name in shards[name >> SHIFT & 255]:
                return True
        return False

    def put(self, names: Iterable[int], segment: Segment) -> None:
        """Map these hashes to this segment."""
        shards = self._shards
        for name in names:
            shards[name >> SHIFT & 255][name] = segment

    def claim(self, name: int, segment: Segment) -> bool:
        """Map a hash that is not mapped to this segment; return whether it is the segment's."""
        return self._shards[name >> SHIFT & 255].setdefault(name, segment) is segment

    def drop(self, names: Iterable[int], segment: Segment) -> None:
        """These names do not lead to this segment any more; those that lead elsewhere stay."""
        shards = self._shards
        for name in names:
            shard = shards[name >> SHIFT & 255]
            if shard.get(name) is segment:
                del shard[name]
