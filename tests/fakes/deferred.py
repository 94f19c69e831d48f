"""Decisions that a test makes later, by a future or a coroutine."""

import asyncio
from collections.abc import Awaitable

from kvist_epp.extproc.pick_request import Decision, DecisionCallback, PendingResult


class AwaitedResult(PendingResult):
    """A deferred decision that is the result of an awaitable."""

    def __init__(self, awaitable: Awaitable[Decision]) -> None:
        self._awaitable = awaitable
        self._task: asyncio.Task[None] | None = None

    def then(self, callback: DecisionCallback) -> None:
        """Start to wait."""
        self._task = asyncio.ensure_future(self._wait(callback))

    def cancel(self) -> None:
        """Cancel the awaitable."""
        assert self._task is not None
        self._task.cancel()

    async def _wait(self, callback: DecisionCallback) -> None:
        try:
            decision: Decision | Exception = await self._awaitable
        except Exception as error:  # noqa: BLE001  passed on, as the queue does
            decision = error
        callback(decision)


def deferred(decision: Decision | Awaitable[Decision] | PendingResult) -> Decision | PendingResult:
    """Return the decision, wrapped if it is an awaitable."""
    return AwaitedResult(decision) if isinstance(decision, Awaitable) else decision
