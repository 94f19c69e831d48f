"""State of one publisher's blocks on slower tiers, besides the index. Pure.

``WaitingBlocks`` are those whose place in the index is not known yet, ``Leases`` those that no event will
ever remove.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from kvist_epp.engines.vllm.kv_events import CPU, GPU

COUNTED: Final = frozenset({GPU, CPU})
"""Media whose engines remove a block as often as they have stored it; any other has it or has it not."""
MAX_WAITING: Final = 4096
"""Blocks of one publisher that wait: up to 2 MiB with 32 tokens each."""
WAITING_SECONDS: Final = 30.0
"""A load from a disk takes seconds, after which the GPU's event names the blocks."""
MAX_LEASED: Final = 1 << 19
"""Leased blocks of one publisher: 8 million tokens in blocks of 16, about 60 MiB. More shorten the lease."""
EXPIRED_AT_ONCE: Final = 512
"""Blocks that are removed in one step, between which a pick may run."""


def joined_media(known: Sequence[str], more: Iterable[str]) -> list[str]:
    """Return where a block is that is in ``known`` places and, by a further event, in ``more``."""
    return [*known, *(medium for medium in more if medium in COUNTED or medium not in known)]


@dataclass(slots=True, eq=False)
class WaitingBlock:
    """One block that a tier holds."""

    hash: int
    parent: int | None
    ids: Sequence[int]
    """Token ids; empty where the event names the hash only."""
    block_size: int
    lora: str | None
    since: float
    media: list[str] = field(default_factory=list)
    """Where it is; a counted medium once for each copy."""


class WaitingBlocks:
    """Blocks of one publisher by hash and by parent; the oldest makes room for a new one."""

    __slots__ = ("_blocks", "_children", "_limit")

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._blocks: OrderedDict[int, WaitingBlock] = OrderedDict()
        self._children: dict[int, list[int]] = {}
        self._limit = limit

    def __len__(self) -> int:
        """Return the number of blocks that wait."""
        return len(self._blocks)

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    def add(self, block: WaitingBlock) -> WaitingBlock | None:
        """Add a block, or what a further event says of one that waits already; return one that is dropped."""
        known = self._blocks.get(block.hash)
        if known is not None and (known.ids or not block.ids):
            known.media = joined_media(known.media, block.media)
            return None
        if known is not None:  # it had no token ids
            self._pop(block.hash)
            block.media = joined_media(known.media, block.media)
        self._blocks[block.hash] = block
        if block.parent is not None:
            self._children.setdefault(block.parent, []).append(block.hash)
        return self._pop(next(iter(self._blocks))) if len(self._blocks) > self._limit else None

    def remove(self, hashes: Iterable[int], medium: str) -> None:
        """Note that the engine removed blocks from a tier."""
        for name in hashes:
            block = self._blocks.get(name)
            if block is not None and medium in block.media:
                block.media.remove(medium)
                if not block.media:
                    self._pop(name)

    def take(self, hashes: Iterable[int]) -> list[WaitingBlock]:
        """Remove and return the blocks of these hashes, and those that follow one of them."""
        found: list[WaitingBlock] = []
        for name in hashes:
            if name in self._blocks:
                found.append(self._pop(name))
            found += [self._pop(child) for child in self._children.get(name, ())[:]]
        return found

    def old(self, before: float) -> list[WaitingBlock]:
        """Return the blocks that wait since ``before`` or longer."""
        return list(takewhile(lambda block: block.since <= before, self._blocks.values()))

    def give_up(self, block: WaitingBlock) -> bool:
        """Remove a block; return False if it waits no longer."""
        return self._blocks.get(block.hash) is block and self._pop(block.hash) is block

    def clear(self) -> None:
        """Remove all blocks."""
        self._blocks.clear()
        self._children.clear()

    def _pop(self, name: int) -> WaitingBlock:
        block = self._blocks.pop(name)
        if block.parent is not None:
            siblings = self._children[block.parent]
            siblings.remove(name)
            if not siblings:
                del self._children[block.parent]
        return block


class Leases:
    """Blocks on media of which no event tells when they are gone; each is believed for a while.

    There are two generations, of half a lease each: a block that is not renewed is believed for half a lease
    at least, and for one at most. Blocks of expired generations are taken out a few at a time.
    """

    __slots__ = ("_current", "_expired", "_previous", "_since", "limit", "seconds")

    def __init__(self, seconds: float, limit: int = MAX_LEASED) -> None:
        self.seconds = seconds
        self.limit = limit
        """Most blocks that are believed; half of them at least."""
        self._since = 0.0
        self._current: dict[str, set[int]] = {}
        """By medium."""
        self._previous: dict[str, set[int]] = {}
        self._expired: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Return the number of blocks, those included that are expired and not taken out."""
        return sum(map(len, (*self._current.values(), *self._previous.values(), *self._expired.values())))

    def __bool__(self) -> bool:
        return bool(self._current or self._previous or self._expired)

    def add(self, medium: str, names: Iterable[int]) -> None:
        """Add blocks, or renew their leases."""
        names = set(names)
        current = self._current.setdefault(medium, set())
        current |= names
        for older in (self._previous, self._expired):
            if blocks := older.get(medium):
                blocks -= names
        if 2 * len(current) > self.limit:
            self._start_generation()

    def renew(self, names: Sequence[int]) -> None:
        """Renew the leases of those of these blocks that have one."""
        for older in (self._previous, self._expired):
            for medium, blocks in older.items():
                if found := blocks.intersection(names):
                    blocks -= found
                    self._current.setdefault(medium, set()).update(found)

    def remove(self, medium: str, names: Iterable[int]) -> None:
        """End leases: the blocks are gone, or not counted."""
        for blocks in (self._current, self._previous, self._expired):
            if medium in blocks:
                blocks[medium].difference_update(names)

    def end(self, medium: str) -> None:
        """Let all leases of one medium expire now."""
        for older in (self._current, self._previous):
            self._expired.setdefault(medium, set()).update(older.pop(medium, ()))

    def age(self, now: float) -> None:
        """Start a new generation if the current one is old enough."""
        if now - self._since >= self.seconds / 2:
            self._since = now
            self._start_generation()

    def take_expired(self, limit: int = EXPIRED_AT_ONCE) -> Iterator[tuple[str, list[int]]]:
        """Take out up to ``limit`` blocks whose lease has expired; yield them by medium."""
        for medium in list(self._expired):
            blocks = self._expired[medium]
            yield medium, [blocks.pop() for _ in range(min(limit, len(blocks)))]
            if not blocks:
                del self._expired[medium]

    @property
    def expired(self) -> bool:
        """True while blocks wait to be taken out."""
        return any(self._expired.values())

    def clear(self) -> None:
        """End all leases; the blocks are gone from the index already."""
        self._current, self._previous, self._expired = {}, {}, {}

    def _start_generation(self) -> None:
        for medium, blocks in self._previous.items():
            self._expired.setdefault(medium, set()).update(blocks)
        self._previous = {medium: blocks for medium, blocks in self._current.items() if blocks}
        self._current = {}
