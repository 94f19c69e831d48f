"""Runs flow control on an event loop: clocks, timers, and answers to clients that wait.

Whatever may have given an endpoint capacity wakes it; a timer does when time alone gives capacity or ends a
deadline. It works in slices, so that picking stays fast while thousands of requests are dispatched or
rejected.
"""

import asyncio
from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Final

from kvist_epp.extproc.pick_request import DecisionCallback, PendingResult
from kvist_epp.flowcontrol.flow_controller import FlowController, Poll, QueuedRequest

SLICE_SECONDS: Final = 0.001
"""Work done at a time before other work has its turn: as long as a slice of ingesting events."""
LONGEST_SLICE_SECONDS: Final = 0.5
"""The same under a flood: see ``slice_seconds``."""
REST: Final = 4
"""Pause after a poll of the pool, as a multiple of its duration: polls take at most a fifth of the CPU,
however large the pool is and however often it changes …"""
REST_SECONDS: Final = 0.005
"""… but the pause is never longer than this, in seconds."""


def slice_seconds(stopped_at: float | None, now: float) -> float:
    """Return how long to work: as long as other work just took, if the last slice had to stop early.

    Each turn of the loop reads whatever a flood of new requests has left in the sockets, and all of them have
    to queue behind those that wait: with short slices only, the queue would fill up while endpoints have
    capacity.
    """
    others = 0.0 if stopped_at is None else now - stopped_at
    return min(max(SLICE_SECONDS, others), LONGEST_SLICE_SECONDS)


class FlowDriver:
    """Polls one ``FlowController`` when it is due; on the event loop's thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._controller: FlowController | None = None
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._due = inf
        self._calls: set[asyncio.Handle] = set()
        self._rest_until = 0.0
        self._stopped_at: float | None = None
        """When the last slice of work had to stop before it was done."""

    def start(self, controller: FlowController) -> None:
        """Poll this controller from now on."""
        self._controller = controller

    @property
    def busy(self) -> bool:
        """True if a poll is due within a rest."""
        return self._soon is not None

    def wake(self) -> None:
        """Poll soon, if a request waits: something may have changed. Harmless before ``start``."""
        if self._controller is not None and not self._controller.idle:
            self._poll_in(self._rest_until - perf_counter())

    def shut_in(self, seconds: float) -> None:
        """Let no request wait any longer, later; see ``FlowController.shut``."""
        if self._controller is not None:
            self._calls.add(asyncio.get_running_loop().call_later(seconds, self._controller.shut))

    def close(self) -> None:
        """Cancel the timers; queued requests are not answered after this."""
        for handle in (self._soon, self._later, *self._calls):
            if handle is not None:
                handle.cancel()

    def pending(self, request: QueuedRequest) -> PendingResult:
        """Return the answer to come of a request that waits."""
        return _PendingDecision(self, request)

    def cancel(self, request: QueuedRequest) -> None:
        """Remove a request that its client has cancelled."""
        if self._controller is not None:
            self._controller.cancel(request, self._clock())

    def _poll_in(self, seconds: float) -> None:
        if self._soon is None:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_later(seconds, self._poll) if seconds > 0 else loop.call_soon(self._poll)

    def _poll_by(self, seconds: float) -> None:
        """Poll then at the latest; an earlier time that was set stays."""
        if seconds == inf:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(seconds, SLICE_SECONDS)
        if due >= self._due:
            return
        if self._later is not None:
            self._later.cancel()
        self._later, self._due = loop.call_at(due, self._on_timer), due

    def _on_timer(self) -> None:
        self._later, self._due = None, inf
        self._poll_in(0.0)

    def _poll(self) -> None:
        self._soon = None
        if self._controller is None:
            return
        begun = perf_counter()
        poll = self._controller.poll(self._clock())
        looked = perf_counter()
        self._rest_until = looked + min(REST * (looked - begun), REST_SECONDS)
        done = False
        try:
            done = self._steps(poll, looked + slice_seconds(self._stopped_at, begun))
        finally:
            self._stopped_at = None if done else perf_counter()
            if not done:  # nor may a bug in answering one of them leave the others waiting
                self._poll_in(0.0)
        if done:
            self._poll_by(poll.seconds_until_due())

    def _steps(self, poll: Poll, until: float) -> bool:
        """Answer queued requests; return False if ``until`` came before all that can be answered were."""
        while (outcome := poll.step(self._clock())) is not None:
            request, decision = outcome
            answer = request.on_decision
            if decision is not None and answer is not None:
                request.on_decision = None
                answer(decision)
            if perf_counter() > until:
                return False
        return True


class _PendingDecision(PendingResult):
    """The answer of a queued request."""

    __slots__ = ("_driver", "_request")

    def __init__(self, driver: FlowDriver, request: QueuedRequest) -> None:
        self._driver = driver
        self._request = request

    def then(self, tell: DecisionCallback) -> None:
        self._request.on_decision = tell

    def cancel(self) -> None:
        self._driver.cancel(self._request)
