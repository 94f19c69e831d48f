"""The endpoints behind a set of publishers, taken from it at once. Pure.

Of a common system prompt a thousand endpoints hold the same blocks. Looking at one after the other takes
0.7 us for each; here a bit set of publishers becomes a list of endpoints by operations on arrays.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from kvist_epp.index.tree.holders import each
from kvist_epp.index.tree.matches import Group, Hit, Loads, loaders, loads_of

MANY: Final = 32
"""Endpoints of a pool from which on this is faster than looking at each; and endpoints that load the same
from slower tiers."""
_FEW: Final = 4
"""Bits that are taken out of a set one by one."""


class AlikeEndpoints:
    """Endpoints by the bit of their publisher: those with one publisher each, whose events are trusted."""

    def __init__(self) -> None:
        self.bits = 0
        """The bits of all of them."""
        self._keys: Any = np.empty(0, dtype=object)
        """Endpoint keys by the position of the bit."""
        self._made_of: Mapping[int, int] | None = None

    def forget(self) -> None:
        """Make the table anew before the next use: an endpoint has changed."""
        self._made_of = None

    def update(self, publishers: Iterable[tuple[int, str]], bits: Mapping[int, int]) -> None:
        """Make the table of these publishers and endpoints, unless it is of the same bits already."""
        if bits is self._made_of:
            return
        self._made_of, self.bits = bits, 0
        places = {bits[number].bit_length() - 1: key for number, key in publishers if number in bits}
        self._keys = np.empty(max(places, default=-1) + 1, dtype=object)
        for place, key in places.items():
            self._keys[place] = key
            self.bits |= 1 << place

    def keys(self, holders: int) -> list[str]:
        """Return the endpoints of these bits, which must be among ``bits``."""
        if holders.bit_count() <= _FEW:
            return [self._keys[bit.bit_length() - 1] for bit in each(holders)]
        packed = np.frombuffer(holders.to_bytes((holders.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        places = np.unpackbits(packed, bitorder="little").nonzero()[0]
        found: list[str] = self._keys[places].tolist()
        return found

    def of(self, groups: Iterable[Group]) -> Iterator[tuple[int, Hit]]:
        """Yield endpoints that hold the same, as bits, with what they hold.

        ``groups``: most tokens first. Left out are those that hold as many tokens by two groups, and those of
        which few load the same from slower tiers: what counts there is a question of each.
        """
        seen = 0
        for run in _runs(groups):
            once = twice = 0
            for group in run:
                twice |= once & group[0]
                once |= group[0]
            for group in run:
                alone = group[0] & ~(seen | twice) & self.bits
                _, tokens, size, loads, segment = group
                if plain := alone & ~loaders(loads):
                    yield plain, Hit(tokens, size)
                for some in _loading_alike(alone & ~plain, loads):
                    yield some, Hit(tokens, size, loads_of(some & -some, loads, segment.tree.block_size))
            seen |= once


def _loading_alike(holders: int, loads: Loads | None) -> list[int]:
    """Return those of these holders that load the same, in sets that are large enough."""
    found = [holders] if holders.bit_count() >= MANY else []
    while found and loads is not None:
        loads, some, _, _ = loads
        split = [part for same in found for part in (same & some, same & ~some)]
        found = [same for same in split if same.bit_count() >= MANY]
    return found


def _runs(groups: Iterable[Group]) -> Iterator[list[Group]]:
    """Yield the groups of equal tokens together."""
    run: list[Group] = []
    for group in groups:
        if run and run[0][1] != group[1]:
            yield run
            run = []
        run.append(group)
    if run:
        yield run
