"""KV cache groups whose layers look back a window only, and what they leave of a hit.

Models that mix kinds of attention have several KV cache groups. The index follows the blocks of the one that
attends to the whole prefix. Layers with a sliding window need just the last blocks before the point where a
prompt goes on, and layers with a state (Mamba) that of the last block. Engines keep little more of them, and
remove it sooner, so that such a group often lacks blocks that the first one has. vLLM uses the longest prefix
at whose end every group has what it needs (``HybridKVCacheCoordinator.find_longest_cache_hit``, 0.33).

With drafts of EAGLE or MTP an engine may compute the last block again (``index.last_block``). It leaves the
block out first, and then looks for the prefix that the other groups allow.

Example: a window needs two blocks; of a prompt A B C D E the first group holds all, the other one A, B and D.
E is missing, so no hit ends there; C is missing, so none ends at D or at C: A B is the hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import filterfalse

from kvist_epp.index.tree.forest import path_up
from kvist_epp.index.tree.holders import Presence, each
from kvist_epp.index.tree.matches import Group, loaders, tokens_of
from kvist_epp.index.tree.segment import Segment


class WindowGroup:
    """The blocks of one publisher in one group; several copies of one are counted."""

    __slots__ = ("block_size", "held", "needed", "whole")

    def __init__(self, needed: int, block_size: int, *, whole: bool = True) -> None:
        """``needed``: blocks in a row before the end of a hit, of ``block_size`` tokens.

        ``whole``: all of its events are known since the publisher's beginning, which a snapshot of an older
        replica lacks (``Presence.restored``). A window that is not whole never shortens a hit.
        """
        self.needed = max(1, needed)
        self.block_size = block_size
        self.whole = whole
        self.held: Counter[int] = Counter()
        """Hash → copies."""

    def add(self, names: Iterable[int]) -> None:
        """Add a copy of each of these blocks."""
        self.held.update(names)

    def remove(self, names: Iterable[int]) -> None:
        """Remove a copy of each of these blocks."""
        held = self.held
        for name in names:
            copies = held.get(name, 0)
            if copies > 1:
                held[name] = copies - 1
            elif copies:
                del held[name]

    def names(self) -> Iterator[int]:
        """Return the hash of each block, as often as there are copies."""
        return self.held.elements()

    def longest(self, path: _Path, length: int) -> int:
        """Return the most blocks of a path, up to ``length``, at whose end the group has what it needs.

        A block that is missing rules out every end within the window's length after it, so that the first
        one of a window that is missing is where the next may end.
        """
        there = self.held.__contains__
        while length:
            first = max(0, length - self.needed)
            if path.name(first) not in self.held:
                length = path.leap(first, self.needed, there)
                continue
            names = path.names(first, length)
            missing = next(filterfalse(there, names), None)
            if missing is None:
                break
            length = first + names.index(missing)
        return length


def store_window(who: Presence, group: int, names: Iterable[int], needed: int, block_size: int) -> None:
    """Add blocks to a publisher's group with a window; see ``Index.window_stored``."""
    window = who.windows.get(group)
    if window is None or window.block_size < block_size:
        window = who.windows[group] = WindowGroup(needed, block_size, whole=not who.restored)
    if window.block_size == block_size:
        window.add(names)


def remove_window(who: Presence, group: int | None, names: Iterable[int]) -> bool:
    """Remove blocks from a publisher's group with a window; return whether there is one."""
    window = None if group is None else who.windows.get(group)
    if window is not None:
        window.remove(names)
    return window is not None


class _Path:
    """The hashes of the blocks up to the end of a match, read from there back to the root as needed."""

    def __init__(self, who: Presence, segment: Segment, count: int) -> None:
        self.length = segment.base + count
        self._who = who
        self._rest = path_up(segment, count)
        self._names: list[int | None] = []
        """The last block first."""

    def name(self, at: int) -> int | None:
        """Return what the publisher calls block number ``at``, counted from the root."""
        back = self.length - at
        if back > len(self._names):
            self._read(back)
        return self._names[back - 1]

    def names(self, start: int, end: int) -> list[int | None]:
        """Return what it calls the blocks from number ``start`` up to ``end``."""
        self._read(self.length - start)
        found = self._names[self.length - end : self.length - start]
        found.reverse()
        return found

    def leap(self, missing: int, step: int, there: Callable[[object], bool]) -> int:
        """Return the last of the blocks ``missing``, ``missing - step`` and so on of which ``there`` is false
        without an exception before."""
        self._read(self.length)
        names = self._names[self.length - 1 - missing :: step]
        found = next(filter(there, names), None)
        return missing - step * ((len(names) if found is None else names.index(found)) - 1)

    def _read(self, blocks: int) -> None:
        """Read the names of so many blocks before the end."""
        while len(self._names) < blocks:
            segment, count = next(self._rest)
            names = segment.alias.get(self._who, segment.hashes) if segment.alias else segment.hashes
            self._names.extend(reversed(names[:count]))


def within_windows(groups: list[Group], windowed: Mapping[int, Presence]) -> list[Group]:
    """Return the groups of a match with those publishers that have windows where their engines' hits end.

    Most tokens come first, in ``groups`` and in the result. ``windowed``: the publishers by their bits. A hit
    with blocks to load from slower media stays as it is: what the other groups hold there is not known.
    """
    bits = sum(windowed)
    found: list[Group] = []
    seen: list[tuple[dict[Segment, int], int]] = []
    """Of each group so far: the blocks on its path, by segment, and the publishers that were cut back there.
    A publisher is in the groups above its own end, too, where it would be cut back to the same place."""
    for holders, tokens, size, loads, segment in groups:
        some = holders & bits & ~loaders(loads)
        if rest := holders & ~some:
            found.append((rest, tokens, size, loads, segment))
        if not some:
            continue
        count = tokens // segment.tree.block_size - segment.base
        for path, done in seen:
            if path.get(segment, 0) >= count:
                some &= ~done
        for length, ending in _ends(some, windowed, segment, count).items():
            if length:
                end, less = _back(segment, count, segment.base + count - length)
                found.append((ending, length * segment.tree.block_size, size - less, None, end))
        if some:
            seen.append((dict(path_up(segment, count)), some))
    found.sort(key=tokens_of, reverse=True)
    return found


def _ends(bits: int, windowed: Mapping[int, Presence], segment: Segment, count: int) -> dict[int, int]:
    """Return by length in blocks which publishers' hits on the path to the end of a match end there."""
    ends: dict[int, int] = {}
    usual: _Path | None = None
    """Of all publishers but those that have names of their own for some blocks."""
    for bit in each(bits):
        who = windowed[bit]
        if who.own:
            path = _Path(who, segment, count)
        else:
            path = usual = usual or _Path(who, segment, count)
        length = _length(who, path, segment.tree.block_size)
        ends[length] = ends.get(length, 0) | bit
    return ends


def _length(who: Presence, path: _Path, block_size: int) -> int:
    """Return how many blocks of a path every group of a publisher allows."""
    length, before = path.length - who.drops, -1
    while length != before:
        before = length
        for window in who.windows.values():
            if window.whole and window.block_size == block_size:
                length = window.longest(path, length)
    return length


def _back(segment: Segment, count: int, blocks: int) -> tuple[Segment, int]:
    """Return the segment of the last block, so many blocks before the first ``count`` of this one end, and
    the bytes between."""
    less = 0
    for above, whole in path_up(segment, count):
        segment, count = above, whole
        if blocks < count:
            break
        less += segment.offset(count)
        blocks -= count
    return segment, less + segment.offset(count) - segment.offset(count - blocks)
