"""A picker whose queue is the test's own, and the answers of requests that wait in it."""

import asyncio
from collections.abc import Generator
from typing import Any

from tests.epp.parts import Parts, ask, chat

from kvist_epp.errors import PickError
from kvist_epp.extproc.pick_request import Decision, DeferredResult, PickResult
from kvist_epp.flowcontrol.flow_controller import Bounds, Queue
from kvist_epp.names import PRIORITY_HEADER, SESSION_HEADER, TENANT_HEADERS


class Wait:
    """The answer to a request that waits: to be awaited whenever a test likes."""

    def __init__(self, pending: DeferredResult) -> None:
        self.pending = pending
        self.told: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        pending.then(self._told)

    def _told(self, decision: Decision | Exception) -> None:
        if isinstance(decision, Exception) and not isinstance(decision, PickError):
            self.told.set_exception(decision)
        else:
            self.told.set_result(decision)

    def __await__(self) -> Generator[Any, None, Decision]:
        return self.told.__await__()


class Door:
    """A picker with a queue, over endpoints of one slot each unless told otherwise."""

    def __init__(self, parts: Parts, slots: int | None, **bounds: Any) -> None:
        self.parts = parts
        self.picker = picker = parts.picker
        self.bounds = Bounds(**bounds)
        self.queue = picker.queue = Queue(
            self.bounds, lambda: picker.candidates, picker.clock, picker.metrics.queue_waits
        )
        picker.ledger.eased = self.queue.wake
        for endpoint in parts.endpoints:
            picker.ledger.calibrate(endpoint.key, slots=slots)

    def ask(
        self, name: str, *, priority: int | None = None, tenant: str = "", **more: Any
    ) -> PickResult | Wait:
        """What the picker says at once to a request whose session has this name."""
        headers = {SESSION_HEADER: name}
        if priority is not None:
            headers[PRIORITY_HEADER] = str(priority)
        if tenant:
            headers[TENANT_HEADERS[0]] = tenant
        decision = self.picker.decide(ask(chat(more.pop("text", name)), headers=headers, **more))
        if isinstance(decision, DeferredResult):
            return Wait(decision)
        assert isinstance(decision, PickResult)
        return decision

    def ends(self, *names: str) -> None:
        """The access log tells of these."""
        self.picker.settled(names, "access-log")

    @property
    def outcomes(self) -> dict[str, str]:
        """Of all requests that have one, by session, in the order it was known."""
        return {line.session: line.outcome for line in self.parts.log.lines}


async def refusal(decision: object) -> PickError:
    """What a request that waited is told, which must not be an endpoint."""
    assert isinstance(decision, Wait)
    error = await decision
    assert isinstance(error, PickError)
    return error
