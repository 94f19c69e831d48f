"""The requests that come in one turn of the event loop are decided together.

A picker under load finds several requests in its sockets at each turn. To read them all, then to decide them
all, then to answer them all keeps the code of each step in the processor's caches (``docs/decisions/0027``).
A request that comes alone is decided in the same turn, too.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvist_epp.director.director import Director
from kvist_epp.errors import traceback_without_text
from kvist_epp.extproc.pick_request import (
    Decision,
    DecisionCallback,
    Effect,
    PendingResult,
    PickRequest,
    PickResult,
)
from kvist_epp.flowcontrol.driver import FlowDriver
from kvist_epp.flowcontrol.flow_controller import QueuedRequest

LARGEST: Final = 32
"""Requests of one batch; more wait for the next turn, in which sockets are read and timers run."""

CarryOut = Callable[[Effect], PendingResult]
"""Begins what has to be done before an answer."""

_log = logging.getLogger(__name__)


class DecisionBatch:
    """Collects requests, and has the director decide them; on the event loop's thread only."""

    def __init__(
        self,
        director: Director,
        driver: FlowDriver,
        clock: Callable[[], float],
        carry_out: CarryOut | None = None,
    ) -> None:
        """``driver`` answers the requests that have to wait. ``carry_out`` does what has to be done before an
        answer; None: the director asks for nothing."""
        self._carry_out = carry_out
        self.director = director
        self._driver = driver
        self._clock = clock
        self._collected: deque[_BatchedDecision] = deque()

    def decide(self, ask: PickRequest) -> PendingResult:
        """Decide this request in the present turn of the event loop, with the others that come in it."""
        if not self._collected:
            asyncio.get_running_loop().call_soon(self._run)
        pending = _BatchedDecision(ask, self._carry_out)
        self._collected.append(pending)
        return pending

    def _run(self) -> None:
        collected = self._collected
        batch = [collected.popleft() for _ in range(min(LARGEST, len(collected)))]
        if collected:
            asyncio.get_running_loop().call_soon(self._run)
        batch = [one for one in batch if one.callback is not None]
        answers: Sequence[PickResult | Effect | QueuedRequest | Exception]
        try:
            answers = self.director.offer_all([one.ask for one in batch], self._clock())
        except Exception as error:  # noqa: BLE001  a bug: no stream may wait for ever
            answers = [error] * len(batch)
        for one, answer in zip(batch, answers, strict=True):
            if isinstance(answer, QueuedRequest):
                one.wait(self._driver.pending(answer))
            else:
                one.answer(answer)


class _BatchedDecision(PendingResult, msgspec.Struct, eq=False):
    """The decision on one request of a batch."""

    ask: PickRequest
    _carry_out: CarryOut | None
    callback: DecisionCallback | None = None
    """None: the request was cancelled."""
    _queued: PendingResult | None = None

    def then(self, callback: DecisionCallback) -> None:
        self.callback = callback

    def cancel(self) -> None:
        self.callback = None
        if self._queued is not None:
            self._queued.cancel()

    def wait(self, queued: PendingResult) -> None:
        """Leave the answer to flow control."""
        if self.callback is None:  # cancelled while another request of the batch was answered
            queued.cancel()
        else:
            self._queued = queued
            queued.then(self.callback if self._carry_out is None else self.answer)

    def answer(self, decision: Decision | Effect | Exception) -> None:
        """Pass the answer on, or carry out what has to be done before."""
        if isinstance(decision, Effect):
            assert self._carry_out is not None, "the director was made with one"
            self.wait(self._carry_out(decision))
            return
        if self.callback is None:
            return
        try:
            self.callback(decision)
        except Exception as error:  # noqa: BLE001  a bug must not cost the rest of the batch
            _log.error("an answer could not be sent: %s", traceback_without_text(error))
