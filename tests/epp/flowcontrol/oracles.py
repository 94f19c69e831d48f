"""A naive queue of plain lists, searched from end to end, to which the real queue must be equal."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvist_epp.flowcontrol.deficit_round_robin import EndpointFlow, Subset

QUANTUM = 8


@dataclass(eq=False)
class Want:
    """One request in the naive queue."""

    name: int
    priority: int
    tenant: str
    subset: Subset
    tokens: int
    size: int


@dataclass(eq=False)
class Turn:
    """State of a tenant for one subset: its last visit, its place since, and its unused grants."""

    since: int
    place: int
    deficit: int = 0

    def visit(self, tokens: int) -> int:
        """The round in which its grants cover this."""
        visit, granted = self.since, self.deficit
        while granted < tokens:
            visit, granted = visit + 1, granted + QUANTUM
        return visit


@dataclass
class PlainLevel:
    """Deficit round robin: every tenant is looked at for each request, round by round."""

    waiting: list[Want] = field(default_factory=list)
    turns: dict[tuple[str, Subset], Turn] = field(default_factory=dict)
    round: int = 0
    place: int = 0

    def add(self, want: Want) -> None:
        """At the end of its tenant's, where the next of those bound to an endpoint stands."""
        self.waiting.append(want)
        key = want.tenant, want.subset
        if key not in self.turns:
            self.turns[key] = Turn(self.round, self._next_place())
        elif self._first(*key) is want:
            self.turns[key].place = self._next_place()

    def remove(self, want: Want) -> None:
        """Remove a request; a tenant without any is forgotten, and one with another first request gets a new
        place."""
        key = want.tenant, want.subset
        first = self._first(*key)
        self.waiting.remove(want)
        if self._first(*key) is None:
            del self.turns[key]
        elif first is want:
            self.turns[key].place = self._next_place()

    def take(self, can_dispatch: Callable[[Subset], bool]) -> Want | None:
        """Return the oldest request of that tenant, among those that can be dispatched, whose grants cover it
        first."""
        able: list[tuple[int, int, Want, Turn]] = []
        for key, turn in self.turns.items():
            want = self._first(*key)
            if can_dispatch(key[1]) and want is not None:
                able.append((turn.visit(want.tokens), turn.place, want, turn))
        if not able:
            return None
        visit, place, want, turn = min(able, key=lambda row: row[:2])
        self.round = max(self.round, visit)
        turn.deficit += QUANTUM * (visit - turn.since) - want.tokens
        self.remove(want)
        following = self._first(want.tenant, want.subset)
        goes_on = following is not None and following.tokens <= turn.deficit
        turn.since, turn.place = (visit, place) if goes_on else (self.round, turn.place)
        return want

    def _first(self, tenant: str, subset: Subset) -> Want | None:
        waiting = reversed(self.waiting) if isinstance(subset, EndpointFlow) else self.waiting
        return next((w for w in waiting if (w.tenant, w.subset) == (tenant, subset)), None)

    def _next_place(self) -> int:
        self.place += 1
        return self.place


class Plain:
    """All levels and the bounds."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.levels: dict[int, PlainLevel] = {}

    @property
    def waiting(self) -> list[Want]:
        """All waiting requests, in the order of arrival."""
        every = [want for level in self.levels.values() for want in level.waiting]
        return sorted(every, key=lambda want: want.name)

    def offer(self, want: Want) -> list[int] | None:
        """Names of those displaced, or None when refused."""
        displaced: list[Want] = []
        while not self._fits(want, displaced):
            victim = self._victim(want, displaced)
            if victim is None:
                return None
            displaced.append(victim)
        for victim in displaced:
            self.remove(victim)
        self.levels.setdefault(want.priority, PlainLevel()).add(want)
        return [victim.name for victim in displaced]

    def take(self, can_dispatch: Callable[[Subset], bool]) -> int | None:
        """Name of the next."""
        for priority in sorted(self.levels, reverse=True):
            want = self.levels[priority].take(can_dispatch)
            if want is not None:
                self._tidy(priority)
                return want.name
        return None

    def requeue(self, want: Want) -> None:
        """Queue a request again, with another subset."""
        self.levels.setdefault(want.priority, PlainLevel()).add(want)

    def remove(self, want: Want) -> None:
        """Remove a request."""
        self.levels[want.priority].remove(want)
        self._tidy(want.priority)

    def _tidy(self, priority: int) -> None:
        if not self.levels[priority].waiting:
            del self.levels[priority]

    def _fits(self, want: Want, without: list[Want]) -> bool:
        others = [other for other in self.waiting if other not in without]
        room = len(others) < self.max_requests
        return room and sum(other.size for other in others) + want.size <= self.max_bytes

    def _victim(self, want: Want, without: list[Want]) -> Want | None:
        below = [w for w in self.waiting if w.priority < min(want.priority, 0) and w not in without]
        return max(below, key=lambda w: (-w.priority, w.name), default=None)
