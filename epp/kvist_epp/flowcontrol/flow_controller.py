"""Holds requests back while every endpoint they may go to is full, or there is none yet, and lets them go.

The shell around ``schedule.waiting``: clocks, timers and answers. Whatever may have given room wakes it (an
ended request, prefill that advanced, a scrape, another fleet); a timer does when time alone gives room or
ends somebody's patience. It works in slices, so that picking stays fast while thousands go or are refused.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Final, Protocol

from kvist_epp.errors import Cancelled, NoEndpoints, PickError, Shed, ShuttingDown
from kvist_epp.extproc.pick_request import Decision, DecisionCallback, DeferredResult
from kvist_epp.flowcontrol.capacity import Room
from kvist_epp.flowcontrol.deficit_round_robin import Spot, Subset, Ticket
from kvist_epp.flowcontrol.queue_deadlines import Pace, Patience
from kvist_epp.flowcontrol.request_queue import Waiting
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.telemetry.histogram import Histogram

SLICE_SECONDS: Final = 0.001
"""Work done at a time before others have their turn: as long as a slice of learning events."""
LONGEST_SLICE_SECONDS: Final = 0.5
"""The same under a flood: see ``slice_seconds``."""
REST: Final = 4
"""After a look at the pool nobody looks again for so many times the time it took: of a large pool no more
than a fifth of the CPU goes there, however often something changes …"""
REST_SECONDS: Final = 0.005
"""… but nobody waits longer than this for room that is there."""
RETRY_SECONDS: Final = (1, 60)
"""Bounds of ``Retry-After``."""


def slice_seconds(stopped_at: float | None, now: float) -> float:
    """How long to work: as long as the others just had, when the last slice had to stop before it was done.

    Each turn of the loop reads whatever a flood of newcomers has left in the sockets, and all of them have to
    go behind those who wait: with short slices only, the queue would fill up while endpoints have room.
    """
    others = 0.0 if stopped_at is None else now - stopped_at
    return min(max(SLICE_SECONDS, others), LONGEST_SLICE_SECONDS)


class Errand(Protocol):
    """A request that waits, as its owner sees it; one of these ends it."""

    def go(self, waited: float) -> Decision | Spot:
        """Its turn, after so many seconds: pick, or say where it has to wait on."""

    def refused(self, error: PickError, waited: float) -> None:
        """It will not be picked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """When an endpoint is full, and what may wait."""

    max_owed: float = 30.0
    """Seconds of prefill from which an endpoint is full."""
    requests: int = 10_000
    """0: nobody waits; requests are sent to full endpoints, sheddable ones are refused."""
    size: int = 512 << 20
    """Bytes held by those who wait."""
    room_seconds: float = 60.0
    """Longest wait for room."""
    empty_seconds: float = 180.0
    """Longest wait for a first endpoint; 0: nobody waits for one."""


class Held(Ticket, DeferredResult):
    """One request that waits."""

    __slots__ = ("__weakref__", "_queue", "errand", "stamp", "tell")

    def __init__(
        self, queue: "Queue", errand: Errand, place: tuple[int, str, Spot], cost: tuple[int, int]
    ) -> None:
        """``place``: priority, tenant, spot. ``cost``: tokens, bytes."""
        super().__init__(*place, *cost)
        self._queue = queue
        self.errand = errand
        self.stamp = (0.0, 0.0)
        self.tell: DecisionCallback | None = None

    def then(self, callback: DecisionCallback) -> None:
        """See ``DeferredResult``."""
        self.tell = callback

    def cancel(self) -> None:
        """See ``DeferredResult``."""
        self._queue.leave(self)


class Queue:
    """All that wait in this picker. Lives on its event loop's thread."""

    def __init__(
        self,
        bounds: Bounds,
        pool: Callable[[], Sequence[Candidate]],
        clock: Callable[[], float],
        waits: defaultdict[str, Histogram],
    ) -> None:
        """``pool``: the fleet as it stands. ``waits`` gets how long who waited, by what became of them."""
        self.bounds = bounds
        self.pool = pool
        self.clock = clock
        self.waiting = Waiting(bounds.requests, bounds.size)
        self.patience = Patience(bounds.room_seconds, bounds.empty_seconds, clock())
        self.pace = Pace()
        self.held: Callable[[int, float], None] = lambda _priority, _now: None
        """Told of each that begins to wait."""
        self._waits = waits
        self._timers = Timers(self._work)
        self._rest_until = 0.0
        self._stopped_at: float | None = None
        """When the last slice of work had to stop before it was done."""
        self._shut = False
        self.fleet_changed()

    @property
    def busy(self) -> bool:
        """Some work is due at once."""
        return self._timers.soon

    @property
    def expects_endpoints(self) -> bool:
        """A request for an empty pool may wait."""
        return self.bounds.requests > 0 and self.bounds.empty_seconds > 0

    def holds(self, priority: int) -> bool:
        """A request that finds only full endpoints may not go there."""
        return priority < 0 or (self.bounds.requests > 0 and not self._shut)

    @property
    def paces(self) -> bool:
        """Requests may wait for an endpoint that has room, but not for more prefill."""
        return self.bounds.requests > 0 and not self._shut

    def behind(self, priority: int) -> bool:
        """Who comes now has to go behind somebody."""
        top = self.waiting.top
        return top is not None and top >= priority and not self._shut

    def hold(self, errand: Errand, place: tuple[int, str, Spot], cost: tuple[int, int]) -> Held:
        """Let it wait: ``place`` is priority, tenant, spot; ``cost`` tokens and bytes.

        Raises ``Shed`` or ``ShuttingDown`` instead.
        """
        now = self.clock()
        if self._shut:
            raise _shutting_down()
        held = Held(self, errand, place, cost)
        held.since, held.stamp = now, self.patience.stamp(now)
        displaced = self.waiting.offer(held)
        if displaced is None:
            raise self._no_room(held.priority)
        for ticket in displaced:
            self._timers.call_soon(self._refuse, ticket, self._displaced(ticket.priority))
        self.held(held.priority, now)
        self.wake()
        return held

    def leave(self, held: Held) -> None:
        """Its client has given up."""
        if self.waiting.leave(held):
            held.tell = None
            self._refuse(held, Cancelled("the client has given up"))

    def wake(self) -> None:
        """There may be room now."""
        if self.waiting.requests:
            self._timers.work_in(self._rest_until - perf_counter())

    def fleet_changed(self) -> None:
        """The pool is another one."""
        empty = all(candidate.refusal for candidate in self.pool())
        self.patience.regard(self.clock(), empty=empty)
        self.wake()

    def tick(self, picked: int) -> None:
        """Now and then, with the number of requests ever picked."""
        self.pace.observe(picked, self.clock())
        self.wake()

    def shut(self) -> None:
        """From now on nobody may wait: all go to the best endpoint, full or not; engines can queue, too.

        Sheddable requests, and those for an empty pool, are told that this picker shuts down.
        """
        self._shut = True
        self.wake()

    def shut_in(self, seconds: float) -> None:
        """The same, later."""
        self._timers.call_later(seconds, self.shut)

    def close(self) -> None:
        """Forget the timers; nobody is told anything any more."""
        self._timers.close()

    # -- work

    def _work(self) -> None:
        begun, now = perf_counter(), self.clock()
        room = Room(self.pool(), now, self.bounds.max_owed)
        self.patience.regard(now, empty=room.empty)
        looked = perf_counter()
        self._rest_until = looked + min(REST * (looked - begun), REST_SECONDS)
        done = False
        try:
            done = self._steps(room, now, looked + slice_seconds(self._stopped_at, begun))
        finally:
            self._stopped_at = None if done else perf_counter()
            if not done:  # nor may a bug in answering one of them leave the others waiting
                self._timers.work_in(0.0)
        if done:
            self._set_timer(room, now)

    def _steps(self, room: Room, now: float, until: float) -> bool:
        """Let one after the other go; False when the time is over before that is done."""
        while self._step(room, now):
            if perf_counter() > until:
                return False
        return True

    def _step(self, room: Room, now: float) -> bool:
        """One of them goes, one way or the other; False when none can."""
        oldest = self.waiting.oldest()
        if isinstance(oldest, Held) and (error := self._over(oldest, now)) is not None:
            self.waiting.leave(oldest)
            self._refuse(oldest, error)
            return True
        held = self.waiting.take(_anywhere if self._shut else room.may_go)
        if isinstance(held, Held):
            self._go(held)
        return held is not None

    def _go(self, held: Held) -> None:
        waited = self.clock() - held.since
        try:
            decision: Decision | Spot | Exception = held.errand.go(waited)
        except Exception as error:  # noqa: BLE001  a bug in the picker must cost one request, not the queue
            decision = error
        if isinstance(decision, Spot):
            self.waiting.again(held, decision)
            return
        self._waits[decision.reason if isinstance(decision, PickError) else "picked"].observe(waited)
        _tell(held, decision)

    def _refuse(self, ticket: Ticket, error: PickError) -> None:
        assert isinstance(ticket, Held), "nothing else is offered"
        waited = self.clock() - ticket.since
        self._waits[error.reason].observe(waited)
        ticket.errand.refused(error, waited)
        _tell(ticket, error)

    def _set_timer(self, room: Room, now: float) -> None:
        """For the next moment at which time alone changes something."""
        oldest = self.waiting.oldest()
        if isinstance(oldest, Held):
            self._timers.work_by(min(self.patience.left(oldest.stamp, now), room.relieved_in()))

    # -- refusals

    def _over(self, held: Held, now: float) -> PickError | None:
        """Why it cannot wait any longer; None when it can."""
        if self._shut:
            return _shutting_down() if held.priority < 0 or self.patience.empty else None
        if self.patience.left(held.stamp, now) > 0:
            return None
        if self.patience.empty:
            return NoEndpoints(f"no endpoint came within {self.bounds.empty_seconds:g} s")
        text = f"no endpoint had room within {self.bounds.room_seconds:g} s"
        return Shed(text, reason="rejected-ttl-expired", retry_after=self._retry_after(held.priority))

    def _no_room(self, priority: int) -> Shed:
        text = f"every endpoint is full, and {self.waiting.requests} requests wait"
        return Shed(text, retry_after=self._retry_after(priority))

    def _displaced(self, priority: int) -> Shed:
        text = "every endpoint is full, and a request of higher priority took this one's place in the queue"
        return Shed(text, reason="evicted-priority", retry_after=self._retry_after(priority))

    def _retry_after(self, priority: int) -> int:
        """Whole seconds in which those are picked who are before a request of this priority."""
        return self.pace.seconds(self.waiting.ahead(priority) + 1, *RETRY_SECONDS)


class Timers:
    """When the queue works next: at most one call is due at a time, and one later."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._due = inf
        self._calls: set[asyncio.Handle] = set()

    @property
    def soon(self) -> bool:
        """The next work is due within a rest."""
        return self._soon is not None

    def work_in(self, seconds: float) -> None:
        """Unless it is about to."""
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_later(seconds, self._begin) if seconds > 0 else loop.call_soon(self._begin)

    def work_by(self, seconds: float) -> None:
        """Then at the latest; an earlier time that was set stays."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(seconds, SLICE_SECONDS)
        if due >= self._due:
            return
        if self._later is not None:
            self._later.cancel()
        self._later, self._due = loop.call_at(due, self._ring), due

    def call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        """Not from within this call."""
        asyncio.get_running_loop().call_soon(call, *arguments)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Unless closed before."""
        self._calls.add(asyncio.get_running_loop().call_later(seconds, call))

    def close(self) -> None:
        """Nothing is due any more."""
        for handle in (self._soon, self._later, *self._calls):
            if handle is not None:
                handle.cancel()

    def _begin(self) -> None:
        self._soon = None
        self._work()

    def _ring(self) -> None:
        self._later, self._due = None, inf
        self.work_in(0.0)


def _tell(held: Held, decision: Decision | Exception) -> None:
    tell, held.tell = held.tell, None
    if tell is not None:
        tell(decision)


def _anywhere(_subset: Subset, _need: int) -> bool:
    return True


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("this picker is shutting down: try again")
