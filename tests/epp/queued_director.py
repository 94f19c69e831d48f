"""A director whose queue is driven by the test's loop, and the answers to queued requests."""

import asyncio
from collections.abc import Generator
from typing import Any

from tests.epp.parts import Clock, ask, chat, make

from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.errors import PickError
from kvist_epp.extproc.pick_request import Decision, PendingResult, PickRequest, PickResult
from kvist_epp.flowcontrol.driver import FlowDriver
from kvist_epp.flowcontrol.flow_controller import FlowLimits, QueuedRequest
from kvist_epp.names import PRIORITY_HEADER, SESSION_HEADER, TENANT_HEADERS


class Wait:
    """The answer to a queued request, to be awaited whenever a test likes."""

    def __init__(self, pending: PendingResult, queued: QueuedRequest) -> None:
        self.pending = pending
        self.queued = queued
        self.answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        pending.then(self._on_decision)

    def _on_decision(self, decision: Decision | Exception) -> None:
        if isinstance(decision, Exception) and not isinstance(decision, PickError):
            self.answer.set_exception(decision)
        else:
            self.answer.set_result(decision)

    def __await__(self) -> Generator[Any, None, Decision]:
        return self.answer.__await__()


class QueuedDirector:
    """A director with a queue, over endpoints with so many slots each."""

    def __init__(
        self,
        endpoints: int,
        slots: int | None,
        clock: Clock,
        *,
        decisions: DecisionLog | None = None,
        **limits: Any,
    ) -> None:
        self.driver = FlowDriver(clock)
        self.parts = make(
            endpoints,
            limits=FlowLimits(**limits),
            on_due=self.driver.wake,
            clock=clock,
            decisions=decisions,
        )
        self.director = self.parts.director
        self.clock = clock
        assert self.director.flow is not None
        self.flow = self.director.flow
        self.queue = self.flow.queue
        self.driver.start(self.flow)
        for endpoint in self.parts.endpoints:
            self.director.tracker.calibrate(endpoint.key, slots=slots)

    def decide(self, request: PickRequest) -> PickResult | PendingResult:
        """Decide as ``app`` does for the ext_proc service."""
        answer = self.parts.decide(request)
        return self.driver.pending(answer) if isinstance(answer, QueuedRequest) else answer

    def ask(
        self, name: str, *, priority: int | None = None, tenant: str = "", **more: Any
    ) -> PickResult | Wait:
        """Return the immediate answer to a request whose session has this name."""
        headers = {SESSION_HEADER: name}
        if priority is not None:
            headers[PRIORITY_HEADER] = str(priority)
        if tenant:
            headers[TENANT_HEADERS[0]] = tenant
        decision = self.parts.decide(ask(chat(more.pop("text", name)), headers=headers, **more))
        if isinstance(decision, QueuedRequest):
            return Wait(self.driver.pending(decision), decision)
        return decision

    def ends(self, *names: str) -> None:
        """End the requests of these sessions."""
        self.parts.end(*names)

    def computed(self, name: str) -> None:
        """Report that the engine has computed the prompt and decodes."""
        request = self.director.table.find(name)
        assert request is not None
        self.director.tracker.on_progress(request.attempt, 0, self.clock())

    @property
    def outcomes(self) -> dict[str, str]:
        """Outcomes by session, in the order they were known."""
        return {line.session: line.outcome for line in self.parts.log.lines}


async def refusal(decision: object) -> PickError:
    """Return the error with which a queued request was answered."""
    assert isinstance(decision, Wait)
    error = await decision
    assert isinstance(error, PickError)
    return error
