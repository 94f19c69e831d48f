"""Who waits for room in the pool, who goes next, and who has to give way. Pure.

::

    next    = of the highest level that has one whose subset has room: in turn between tenants (``rounds``)
    full    = a bound on requests or bytes: a newcomer displaces the newest of the lowest negative level below
              its own, as many as it needs, or is refused itself
"""

from bisect import insort
from collections.abc import Iterator

from kvist_epp.flowcontrol.deficit_round_robin import QUANTUM, Bound, MayGo, Rounds, Spot, Ticket


class Level:
    """What waits with one priority."""

    __slots__ = ("bound", "newest", "requests", "rounds", "size", "tokens")

    def __init__(self, quantum: int) -> None:
        self.rounds = Rounds(quantum)
        self.requests = 0
        self.bound = 0
        """Those of them that wait for one endpoint."""
        self.tokens = 0
        self.size = 0
        """Bytes."""
        self.newest: dict[int, Ticket] = {}
        """By number, oldest first; of sheddable levels only."""


class Waiting:
    """The queue. ``offer``, ``take`` and ``leave`` take logarithmic time; nothing is kept of who has left."""

    def __init__(self, max_requests: int, max_bytes: int, *, quantum: int = QUANTUM) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._quantum = quantum
        self.requests = 0
        self.tokens = 0
        self.size = 0
        """Bytes held by all of them."""
        self.levels: dict[int, Level] = {}
        """Those where something waits, by priority."""
        self._order: list[int] = []
        self._tickets: dict[int, Ticket] = {}
        self._number = 0
        self._first = 1

    def __iter__(self) -> Iterator[Ticket]:
        """All, oldest first."""
        return iter(sorted(self._tickets.values(), key=_came))

    @property
    def top(self) -> int | None:
        """The highest level where somebody waits for whatever endpoint has room."""
        levels = self.levels
        return next((at for at in reversed(self._order) if levels[at].requests > levels[at].bound), None)

    def offer(self, ticket: Ticket) -> list[Ticket] | None:
        """It wants to wait: those that have to leave for it (most often none), or None if it is refused."""
        wanted = self.requests + 1 - self._max_requests, self.size + ticket.size - self._max_bytes
        displaced: list[Ticket] = []
        if max(wanted) > 0:
            if not self._can_make_room(ticket.priority, *wanted):
                return None
            displaced = self._make_room(*wanted)
        self._number += 1
        ticket.came = self._number
        self._enter(ticket)
        return displaced

    def take(self, may_go: MayGo) -> Ticket | None:
        """The next one of those who may go, taken out; None when there is none."""
        for priority in reversed(self._order):
            ticket = self.levels[priority].rounds.take(may_go)
            if ticket is not None:
                self._gone(ticket)
                return ticket
        return None

    def leave(self, ticket: Ticket) -> bool:
        """It gives up; False when it does not wait (any more)."""
        if not ticket.number:
            return False
        self.levels[ticket.priority].rounds.remove(ticket)
        self._gone(ticket)
        return True

    def again(self, ticket: Ticket, spot: Spot) -> None:
        """It was taken out, and has to wait on for somebody else; what it has waited counts."""
        ticket.spot = spot
        self._first = min(self._first, ticket.came)
        self._enter(ticket)
        if ticket.priority < 0:
            level = self.levels[ticket.priority]
            level.newest = dict(sorted(level.newest.items()))

    def oldest(self) -> Ticket | None:
        """Who has waited longest, whatever its priority."""
        if not self._tickets:
            return None
        while self._first not in self._tickets:
            self._first += 1
        return self._tickets[self._first]

    def ahead(self, priority: int) -> int:
        """Requests of this level and those above."""
        return sum(level.requests for at, level in self.levels.items() if at >= priority)

    def _enter(self, ticket: Ticket) -> None:
        ticket.number = ticket.came
        level = self.levels.get(ticket.priority)
        if level is None:
            level = self.levels[ticket.priority] = Level(self._quantum)
            insort(self._order, ticket.priority)
        level.rounds.add(ticket)
        if ticket.priority < 0:
            level.newest[ticket.number] = ticket
        self._tickets[ticket.number] = ticket
        if ticket.spot.pacing is not None:
            ticket.spot.pacing.hold(ticket, ticket.spot.need, ticket.since)
        self._count(level, ticket, 1)

    def _gone(self, ticket: Ticket) -> None:
        level = self.levels[ticket.priority]
        level.newest.pop(ticket.number, None)
        del self._tickets[ticket.number]
        if ticket.spot.pacing is not None:
            ticket.spot.pacing.release(ticket)
        self._count(level, ticket, -1)
        ticket.number = 0
        if not level.requests:
            del self.levels[ticket.priority]
            self._order.remove(ticket.priority)

    def _count(self, level: Level, ticket: Ticket, sign: int) -> None:
        for account in (level, self):
            account.requests += sign
            account.tokens += sign * ticket.tokens
            account.size += sign * ticket.size
        level.bound += sign * isinstance(ticket.spot.subset, Bound)

    def _can_make_room(self, priority: int, requests: int, size: int) -> bool:
        """Whether the sheddable below this level are enough."""
        below = [self.levels[at] for at in self._order if at < min(priority, 0)]
        return sum(level.requests for level in below) >= requests and sum(x.size for x in below) >= size

    def _make_room(self, requests: int, size: int) -> list[Ticket]:
        displaced: list[Ticket] = []
        while requests > 0 or size > 0:
            _, ticket = self.levels[self._order[0]].newest.popitem()
            self.leave(ticket)
            displaced.append(ticket)
            requests -= 1
            size -= ticket.size
        return displaced


def _came(ticket: Ticket) -> int:
    return ticket.came
