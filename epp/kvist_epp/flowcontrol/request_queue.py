"""The queue: which request is dispatched next, and which is displaced by another one. Pure.

::

    next = of the highest priority that has one whose subset has capacity: by deficit round robin over tenants
    full = a bound on requests or bytes: a new request displaces the newest of the lowest negative priority
           below its own, as many as it needs, or is rejected itself
"""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.flowcontrol.deficit_round_robin import (
    QUANTUM,
    CanDispatch,
    DeficitRoundRobin,
    FlowKey,
    QueueItem,
)
from kvist_epp.scheduling.pick import named


class PriorityLevel:
    """Requests queued with one priority."""

    __slots__ = ("flows", "newest", "requests", "size", "tokens")

    def __init__(self, quantum: int) -> None:
        self.flows = DeficitRoundRobin(quantum)
        self.requests = 0
        self.tokens = 0
        self.size = 0
        """Bytes."""
        self.newest: dict[int, QueueItem] = {}
        """By number, oldest first; kept for negative priorities only."""


class RequestQueue:
    """All queued requests. ``offer``, ``take`` and ``remove`` take logarithmic time."""

    def __init__(self, max_requests: int, max_bytes: int, *, quantum: int = QUANTUM) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._quantum = quantum
        self.requests = 0
        self.tokens = 0
        self.size = 0
        """Bytes held by all of them."""
        self.levels: dict[int, PriorityLevel] = {}
        """Those with queued requests, by priority."""
        self._order: list[int] = []
        self._items: dict[int, QueueItem] = {}
        self._number = 0
        self._first = 1

    def __iter__(self) -> Iterator[QueueItem]:
        return iter(sorted(self._items.values(), key=attrgetter("arrival")))

    def has_unrestricted(self, priority: int) -> bool:
        """Return whether a request of at least this priority waits for any endpoint with capacity."""
        return any(None in level.flows.subsets for level in self._levels_from(priority))

    def has_restricted_to(self, endpoint: Endpoint, priority: int) -> bool:
        """Return whether a request of at least this priority waits for a subset with this endpoint."""
        return any(
            isinstance(subset, frozenset) and named(subset, endpoint)
            for level in self._levels_from(priority)
            for subset in level.flows.subsets
        )

    def _levels_from(self, priority: int) -> Iterator["PriorityLevel"]:
        return (self.levels[at] for at in reversed(self._order) if at >= priority)

    def offer(self, item: QueueItem) -> list[QueueItem] | None:
        """Add an item. Returns those displaced by it (most often none), or None if it is rejected."""
        excess = self.requests + 1 - self._max_requests, self.size + item.size - self._max_bytes
        displaced: list[QueueItem] = []
        if max(excess) > 0:
            if not self._can_displace(item.priority, *excess):
                return None
            displaced = self._displace(*excess)
        self._number += 1
        item.arrival = self._number
        self._enter(item)
        return displaced

    def take(self, can_dispatch: CanDispatch) -> QueueItem | None:
        """Take out the next item of those that can be dispatched; None when there is none."""
        for priority in reversed(self._order):
            item = self.levels[priority].flows.take(can_dispatch)
            if item is not None:
                self._left(item)
                return item
        return None

    def remove(self, item: QueueItem) -> bool:
        """Remove an item; False when it is not (or no longer) queued."""
        if not item.number:
            return False
        self.levels[item.priority].flows.remove(item)
        self._left(item)
        return True

    def requeue(self, item: QueueItem, key: FlowKey) -> None:
        """Add an item again that was taken out and has to wait for another endpoint; its arrival stays."""
        item.key = key
        self._first = min(self._first, item.arrival)
        self._enter(item)
        if item.priority < 0:
            level = self.levels[item.priority]
            level.newest = dict(sorted(level.newest.items()))

    def oldest(self) -> QueueItem | None:
        """Return the item that has waited longest, whatever its priority."""
        if not self._items:
            return None
        while self._first not in self._items:
            self._first += 1
        return self._items[self._first]

    def count_from(self, priority: int) -> int:
        """Return the number of requests of this priority and above."""
        return sum(level.requests for at, level in self.levels.items() if at >= priority)

    def _enter(self, item: QueueItem) -> None:
        item.number = item.arrival
        level = self.levels.get(item.priority)
        if level is None:
            level = self.levels[item.priority] = PriorityLevel(self._quantum)
            insort(self._order, item.priority)
        level.flows.add(item)
        if item.priority < 0:
            level.newest[item.number] = item
        self._items[item.number] = item
        if item.key.tpot is not None:
            item.key.tpot.add_queued(item, item.key.uncached, item.since)
        self._count(level, item, 1)

    def _left(self, item: QueueItem) -> None:
        level = self.levels[item.priority]
        level.newest.pop(item.number, None)
        del self._items[item.number]
        if item.key.tpot is not None:
            item.key.tpot.remove_queued(item)
        self._count(level, item, -1)
        item.number = 0
        if not level.requests:
            del self.levels[item.priority]
            self._order.remove(item.priority)

    def _count(self, level: PriorityLevel, item: QueueItem, sign: int) -> None:
        for sums in (level, self):
            sums.requests += sign
            sums.tokens += sign * item.tokens
            sums.size += sign * item.size

    def _can_displace(self, priority: int, requests: int, size: int) -> bool:
        """Whether the requests of lower negative priority are enough."""
        below = [self.levels[at] for at in self._order if at < min(priority, 0)]
        return sum(level.requests for level in below) >= requests and sum(x.size for x in below) >= size

    def _displace(self, requests: int, size: int) -> list[QueueItem]:
        displaced: list[QueueItem] = []
        while requests > 0 or size > 0:
            _, item = self.levels[self._order[0]].newest.popitem()
            self.remove(item)
            displaced.append(item)
            requests -= 1
            size -= item.size
        return displaced
