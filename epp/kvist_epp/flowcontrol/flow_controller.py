"""Flow control: requests wait while every endpoint they may go to is full, or the pool is empty. Sans I/O.

The owner calls ``offer`` for a request that has to wait and ``poll`` whenever an endpoint may have got
capacity or a deadline may have passed; ``poll`` answers one request per step, so that the owner may stop in
between. Every clock is a parameter. ``driver`` runs it on an event loop, ``kvist_sim.virtual`` in virtual
time.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.errors import Cancelled, NoEndpoints, PickError, Shed, ShuttingDown
from kvist_epp.extproc.pick_request import Decision, Effect
from kvist_epp.flowcontrol.capacity import Capacity
from kvist_epp.flowcontrol.deficit_round_robin import FlowKey, QueueItem, Subset
from kvist_epp.flowcontrol.queue_deadlines import DispatchRate, QueueDeadlines
from kvist_epp.flowcontrol.request_queue import RequestQueue
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.telemetry.counters import Histogram

RETRY_SECONDS: Final = (1, 60)
"""Bounds of ``Retry-After``."""
MAX_LEVELS: Final = 32
"""Priorities that are reported one by one, since clients choose them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """Limits from which an endpoint is full, and bounds of the queue."""

    max_backlog: float = 30.0
    """Seconds of prefill from which an endpoint is full."""
    requests: int = 10_000
    """Queued at most; 0: none, requests are sent to full endpoints, and those of negative priority
    rejected."""
    size: int = 512 << 20
    """Bytes held by queued requests at most."""
    capacity_seconds: float = 60.0
    """Longest wait for capacity."""
    empty_seconds: float = 180.0
    """Longest wait for a first endpoint; 0: requests for an empty pool are answered at once."""


class QueuedRequest(QueueItem):
    """One request that waits; ``context`` is its owner's."""

    __slots__ = ("__weakref__", "context", "exemplar", "on_decision", "stamp")

    def __init__(
        self,
        context: Any,
        priority: int,
        tenant: str,
        key: FlowKey,
        cost: tuple[int, int],
        exemplar: tuple[str, str] = ("", ""),
    ) -> None:
        """``cost``: tokens, bytes. ``exemplar`` of its wait: its id and that of its trace; empty: none."""
        super().__init__(priority, tenant, key, *cost)
        self.context = context
        self.exemplar = exemplar
        self.stamp = (0.0, 0.0)
        self.on_decision: Callable[[Any], None] | None = None
        """Set by a driver whose client waits for the decision; gets what ``Outcome.decision`` is, but
        None."""


class Outcome(NamedTuple):
    """A step of ``Poll``: one queued request, and what became of it."""

    request: QueuedRequest
    decision: Decision | Effect | Exception | None
    """None: it was taken out and has to wait for another endpoint."""


class Dispatcher:
    """The owner of queued requests."""

    def dispatch(self, request: QueuedRequest, now: float) -> Decision | Effect | FlowKey:
        """Choose an endpoint, or return what the request has to wait for, or what is to be carried out for
        it. Raises PickError."""
        raise NotImplementedError

    def on_poll(self, now: float) -> None:
        """The queue is about to be looked at; does nothing here."""

    def on_rejected(self, request: QueuedRequest, error: PickError, now: float) -> None:
        """The request left the queue without being dispatched."""
        raise NotImplementedError


class FlowController:
    """All requests that wait in this picker."""

    def __init__(
        self,
        limits: FlowLimits,
        pool: Callable[[], Sequence[Candidate]],
        dispatcher: Dispatcher,
        *,
        now: float,
        waits: defaultdict[str, Histogram],
        on_due: Callable[[], None] = lambda: None,
    ) -> None:
        """``pool`` returns the endpoints as they are. ``waits`` gets the seconds waited, by outcome.
        ``on_due`` is called when ``poll`` should be, at once."""
        self.limits = limits
        self.pool = pool
        self.queue = RequestQueue(limits.requests, limits.size)
        self.deadlines = QueueDeadlines(limits.capacity_seconds, limits.empty_seconds, now)
        self.dispatch_rate = DispatchRate()
        self.last_queued: dict[int, float] = {}
        """When a request of each priority was last queued; of ``MAX_LEVELS`` priorities at most."""
        self._dispatcher = dispatcher
        self._waits = waits
        self._on_due = on_due
        self._displaced: deque[tuple[QueuedRequest, PickError]] = deque()
        self._shut = False
        self.on_pool_changed(now)

    @property
    def idle(self) -> bool:
        """True if no request waits."""
        return not self.queue.requests and not self._displaced

    @property
    def can_wait_for_endpoints(self) -> bool:
        """True if a request for an empty pool may wait."""
        return self.limits.requests > 0 and self.limits.empty_seconds > 0

    @property
    def can_wait(self) -> bool:
        """True if requests may wait for an endpoint."""
        return self.limits.requests > 0 and not self._shut

    def must_wait(self, priority: int) -> bool:
        """Return whether a request of this priority must not be sent to a full endpoint."""
        return priority < 0 or self.can_wait

    def has_queued(self, priority: int) -> bool:
        """Return whether a request of at least this priority waits for any endpoint with capacity."""
        return self.queue.requests > 0 and not self._shut and self.queue.has_unrestricted(priority)

    def has_queued_for(self, endpoint: Endpoint, priority: int) -> bool:
        """Return whether a request of at least this priority waits for a subset with this endpoint."""
        return self.queue.requests > 0 and not self._shut and self.queue.has_restricted_to(endpoint, priority)

    def offer(self, request: QueuedRequest, now: float) -> None:
        """Queue a request. Raises Shed (the queue is full) or ShuttingDown."""
        if self._shut:
            raise _shutting_down()
        request.since, request.stamp = now, self.deadlines.stamp(now)
        displaced = self.queue.offer(request)
        if displaced is None:
            text = f"the queue is full: {self.queue.requests} requests wait for capacity"
            raise Shed(text, retry_after=self._retry_after(request.priority))
        for other in displaced:
            assert isinstance(other, QueuedRequest), "nothing else is offered"
            text = "a request of higher priority took this one's place in the full queue"
            retry = self._retry_after(other.priority)
            self._displaced.append((other, Shed(text, reason="evicted-priority", retry_after=retry)))
        if request.priority in self.last_queued or len(self.last_queued) < MAX_LEVELS:
            self.last_queued[request.priority] = now
        self._on_due()

    def cancel(self, request: QueuedRequest, now: float) -> None:
        """Remove a request that its client has cancelled; no effect once it has a decision."""
        request.on_decision = None
        if self.queue.remove(request):
            self._reject(request, Cancelled("the client cancelled the request"), now)

    def wake(self) -> None:
        """Have ``poll`` called: an endpoint may have got capacity."""
        if not self.idle:
            self._on_due()

    def on_pool_changed(self, now: float) -> None:
        """Handle a change of the endpoints or of their state."""
        self.deadlines.observe(now, pool_empty=all(candidate.refusal for candidate in self.pool()))
        self.wake()

    def on_tick(self, picked: int, now: float) -> None:
        """Observe the total number of picked requests; called periodically."""
        self.dispatch_rate.observe(picked, now)
        self.wake()

    def shut(self) -> None:
        """Let no request wait any longer: all go to the best endpoint, full or not; engines can queue, too.

        Requests of negative priority, and those for an empty pool, are rejected: the picker shuts down.
        """
        self._shut = True
        self.wake()

    def poll(self, now: float) -> "Poll":
        """Begin a pass over the queue, with one reading of every endpoint's load."""
        self._dispatcher.on_poll(now)
        return Poll(self, Capacity(self.pool(), now, self.limits.max_backlog), now)

    def step(self, capacity: Capacity, now: float) -> Outcome | None:
        """Decide on one request; None when no request can be dispatched or rejected now."""
        if self._displaced:
            request, error = self._displaced.popleft()
            return self._reject(request, error, now)
        oldest = self.queue.oldest()
        if isinstance(oldest, QueuedRequest) and (overdue := self._overdue(oldest, now)) is not None:
            self.queue.remove(oldest)
            return self._reject(oldest, overdue, now)
        item = self.queue.take(_always if self._shut else capacity.can_dispatch)
        return self._dispatch(item, now) if isinstance(item, QueuedRequest) else None

    def _dispatch(self, request: QueuedRequest, now: float) -> Outcome:
        try:
            decision: Decision | Effect | FlowKey | Exception = self._dispatcher.dispatch(request, now)
        except Exception as error:  # noqa: BLE001  a bug in the policy must cost one request, not the queue
            decision = error
        if isinstance(decision, FlowKey):
            self.queue.requeue(request, decision)
            return Outcome(request, None)
        outcome = decision.reason if isinstance(decision, PickError) else "picked"
        self._waits[outcome].observe(now - request.since, *request.exemplar)
        return Outcome(request, decision)

    def _reject(self, request: QueuedRequest, error: PickError, now: float) -> Outcome:
        self._waits[error.reason].observe(now - request.since, *request.exemplar)
        self._dispatcher.on_rejected(request, error, now)
        return Outcome(request, error)

    def _overdue(self, request: QueuedRequest, now: float) -> PickError | None:
        """Why it may not wait any longer; None when it may."""
        if self._shut:
            return _shutting_down() if request.priority < 0 or self.deadlines.pool_empty else None
        if self.deadlines.seconds_left(request.stamp, now) > 0:
            return None
        if self.deadlines.pool_empty:
            return NoEndpoints(f"the pool had no endpoint for {self.limits.empty_seconds:g} s")
        text = f"the request was queued for {self.limits.capacity_seconds:g} s without being dispatched"
        retry = self._retry_after(request.priority)
        return Shed(text, reason="rejected-ttl-expired", retry_after=retry)

    def _retry_after(self, priority: int) -> int:
        """Whole seconds in which the requests before one of this priority are picked."""
        return self.dispatch_rate.seconds(self.queue.count_from(priority) + 1, *RETRY_SECONDS)


class Poll:
    """One pass over the queue: call ``step`` until it returns None or there is no more time."""

    __slots__ = ("_capacity", "_controller", "_now")

    def __init__(self, controller: FlowController, capacity: Capacity, now: float) -> None:
        self._controller = controller
        self._capacity = capacity
        self._now = now
        controller.deadlines.observe(now, pool_empty=capacity.pool_empty)

    def step(self, now: float) -> Outcome | None:
        """Decide on one request; None when no request can be dispatched or rejected now."""
        return self._controller.step(self._capacity, now)

    def seconds_until_due(self) -> float:
        """Return the seconds until time alone changes something; infinite if no request waits."""
        oldest = self._controller.queue.oldest()
        if not isinstance(oldest, QueuedRequest):
            return inf
        left = self._controller.deadlines.seconds_left(oldest.stamp, self._now)
        return min(left, self._capacity.seconds_until_capacity())


def _always(_subset: Subset, _uncached: int) -> bool:
    return True


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("this picker is shutting down: try again")
