"""Stored events whose parent is unknown: they wait here for a replay or a later event to explain them.

Never stored as a root (their text would be matched at the wrong place) and never dropped at once (the parent
may be on its way). Bounded by number and age, one instance per publisher.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

import msgspec

from kvist_epp.engines.vllm.kv_events import Stored


@dataclass(slots=True)
class _Orphan:
    event: Stored
    since: float
    gone: int | None = None
    """Position of the first block removed while it waited: the chain is cut there."""


class Quarantine:
    """Orphans of one publisher; ``limit`` events, ``age`` seconds."""

    def __init__(self, limit: int = 4096, age: float = 30.0) -> None:
        self._limit = limit
        self._age = age
        self._numbers = count()
        self._orphans: OrderedDict[int, _Orphan] = OrderedDict()
        self._by_parent: dict[int, list[int]] = {}
        self._by_hash: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Events that wait."""
        return len(self._orphans)

    def add(self, event: Stored, now: float) -> int:
        """Takes an event in; returns how many (older ones) were dropped to make room."""
        number = next(self._numbers)
        self._orphans[number] = _Orphan(event, now)
        self._by_parent.setdefault(event.parent or 0, []).append(number)
        for position, known in enumerate(event.hashes):
            self._by_hash[known] = (number, position)
        dropped = 0
        while len(self._orphans) > self._limit:
            self._drop(next(iter(self._orphans)))
            dropped += 1
        return dropped

    def knows(self, known: int) -> bool:
        """Whether an event that waits would store this hash."""
        return known in self._by_hash

    def children(self, hashes: list[int]) -> list[Stored]:
        """Takes out the events whose parent is one of ``hashes``, oldest first."""
        numbers = [number for known in hashes for number in self._by_parent.get(known, ())]
        return [event for number in numbers if (event := self._drop(number)) is not None]

    def parents(self) -> list[int]:
        """The hashes that are waited for."""
        return list(self._by_parent)

    def removed(self, known: int) -> None:
        """The engine dropped a block that waits here: neither it nor what follows it may be stored later."""
        place = self._by_hash.pop(known, None)
        if place is None:
            return
        orphan = self._orphans[place[0]]
        orphan.gone = place[1] if orphan.gone is None else min(orphan.gone, place[1])

    def expire(self, now: float) -> int:
        """Drops what waited too long; returns how many events."""
        dropped = 0
        while self._orphans:
            number, orphan = next(iter(self._orphans.items()))
            if now - orphan.since < self._age:
                break
            self._drop(number)
            dropped += 1
        return dropped

    def clear(self) -> None:
        """Remove everything from quarantine."""
        self._orphans.clear()
        self._by_parent.clear()
        self._by_hash.clear()

    def _drop(self, number: int) -> Stored | None:
        orphan = self._orphans.pop(number)
        event = orphan.event
        for known in event.hashes:
            if self._by_hash.get(known, (None,))[0] == number:
                del self._by_hash[known]
        siblings = self._by_parent[event.parent or 0]
        siblings.remove(number)
        if not siblings:
            del self._by_parent[event.parent or 0]
        return event if orphan.gone is None else _cut(event, orphan.gone)


def _cut(event: Stored, blocks: int) -> Stored | None:
    """The first ``blocks`` blocks of the event."""
    if blocks == 0:
        return None
    ids = event.token_ids[: blocks * event.block_size]
    return msgspec.structs.replace(event, hashes=event.hashes[:blocks], token_ids=ids)
