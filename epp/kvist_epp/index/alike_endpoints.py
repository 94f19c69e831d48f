"""The endpoints behind a set of publishers, taken from it at once. Pure.

Of a common system prompt a thousand endpoints hold the same blocks. Looking at one after the other takes
0.7 us for each; here a bit set of publishers becomes a list of endpoints by operations on arrays.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvist_epp.index.tree.holders import each
from kvist_epp.index.tree.matches import Group, Hit, Loads, loaders, tokens_of

MANY: Final = 32
"""Endpoints of a pool from which on this is faster than looking at each."""
_ROWS: Final = 256
"""Rows of a matrix, whose size is the square of the endpoints otherwise."""
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
        found: list[str] = self._keys[_flags([holders])[0].nonzero()[0]].tolist()
        return found

    def of(self, groups: Iterable[Group]) -> Iterator[tuple[int, Hit]]:
        """Yield endpoints that hold the same, as bits, with what they hold.

        ``groups``: most tokens first. Left out are those that hold as many tokens by two groups: which of
        these counts is a question of each.
        """
        seen = 0
        for _, same_tokens in groupby(groups, tokens_of):
            run, once, twice = list(same_tokens), 0, 0
            for group in run:
                twice |= once & group[0]
                once |= group[0]
            for group in run:
                alone = group[0] & ~(seen | twice) & self.bits
                _, tokens, size, loads, segment = group
                if plain := alone & ~loaders(loads):
                    yield plain, Hit(tokens, size)
                if some := alone & ~plain:
                    for same, lower in _loading_alike(some, loads, segment.tree.block_size):
                        yield same, Hit(tokens, size, lower)
            seen |= once


def _loading_alike(
    holders: int, loads: Loads | None, block_size: int
) -> Iterator[tuple[int, Mapping[str, int]]]:
    """Yield those of these holders that load the same, with the tokens by medium.

    ``loads`` names those that load some blocks of the path, for each of hundreds of its parts. What each
    loads in all is the product of the numbers of blocks with the matrix of these bits.
    """
    parts: dict[str, tuple[list[int], list[int]]] = {}
    while loads is not None:
        loads, some, medium, blocks = loads
        if some & holders:
            bits, tokens = parts.setdefault(medium, ([], []))
            bits.append(some & holders)
            tokens.append(blocks * block_size)
    width = holders.bit_length()
    totals = [
        sum(
            np.array(tokens[at : at + _ROWS]) @ _flags(bits[at : at + _ROWS], width).astype(np.int64)
            for at in range(0, len(bits), _ROWS)
        )
        for bits, tokens in parts.values()
    ]
    places = _flags([holders])[0].nonzero()[0]
    rows = np.array(totals).T[places]
    found: dict[tuple[int, ...], int] = {}
    if (rows == rows[0]).all():
        found[tuple(rows[0].tolist())] = holders
    else:
        for place, row in zip(places.tolist(), map(tuple, rows.tolist()), strict=True):
            found[row] = found.get(row, 0) | 1 << place
    for loaded, same in found.items():
        yield same, {medium: count for medium, count in zip(parts, loaded, strict=True) if count}


def _flags(sets: Sequence[int], width: int = 0) -> NDArray[np.uint8]:
    """Return the bits of these sets, a row each and the lowest first; ``width``: bits of a row, at least."""
    size = (max(width, sets[0].bit_length()) + 7) // 8
    packed = np.frombuffer(b"".join([bits.to_bytes(size, "little") for bits in sets]), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(sets), size), axis=1, bitorder="little")
