"""Warm hand-over while the picker runs: looks, asks engines, lets go of what is not wanted any more."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.prewarm.plan import HandOver, Step
from kvist_epp.prewarm.sender import Answer

logger = logging.getLogger(__name__)


class Asks(Protocol):
    """How engines are asked; ``Sender``, or a test's."""

    async def ask(self, endpoint: Endpoint, session: str, text: bytes, model: str | None) -> Answer:
        """One step to its end."""


class Keeper:
    """One for the process."""

    def __init__(
        self,
        plan: HandOver,
        asks: Asks,
        *,
        clock: Callable[[], float],
        model: Callable[[str], str | None] = lambda _key: None,
        begun: Callable[[Step], None] = lambda _step: None,
        ended: Callable[[Step], None] = lambda _step: None,
    ) -> None:
        """``model``: the name that an endpoint serves its model by, if known. ``begun`` and ``ended``: told
        of each step."""
        self.denied = False
        """An engine wanted a key: nothing more is asked."""
        self._plan, self._asks, self._clock = plan, asks, clock
        self._model, self._begun, self._ended = model, begun, ended
        self._tasks: dict[Step, asyncio.Task[None]] = {}
        self._answered = asyncio.Event()
        self._since: float | None = None
        """When something was first to be given; None: nothing is."""
        self._before = (0, 0)
        plan.opened = self._opened

    async def run(self) -> None:
        """For ever; cancelled, no step is left behind."""
        try:
            while not self.denied:
                self.look()
                await self._pause()
        finally:
            await self._stop(list(self._tasks.values()))
        await asyncio.Event().wait()

    def look(self) -> None:
        """Ask for what is due, and stop asking for what is not wanted any more."""
        for step in self._plan.due(self._clock()):
            self._begun(step)
            name = f"hand-over to {step.endpoint.key}"
            self._tasks[step] = asyncio.create_task(self._ask(step), name=name)
        for step, task in list(self._tasks.items()):
            if not self._plan.wants(step):
                task.cancel()
        if self._since is not None and self._plan.idle and not self._tasks:
            self._closed()

    async def _pause(self) -> None:
        self._answered.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._plan.pause):
                await self._answered.wait()

    async def _ask(self, step: Step) -> None:
        answer, began = Answer.FAILED, self._clock()
        try:
            key = step.endpoint.key
            answer = await self._asks.ask(step.endpoint, step.session, step.text, self._model(key))
        finally:
            now = self._clock()
            del self._tasks[step]
            if answer is Answer.UNFIT:
                self._plan.drop(step)
            self._plan.ended(step, now, good=answer is Answer.DONE, seconds=now - began)
            self._ended(step)
            if answer is Answer.DENIED:
                self._deny(step)
            self._answered.set()

    def _deny(self, step: Step) -> None:
        if not self.denied:
            self.denied = True
            logger.warning(
                "hand-over: %s wants an API key (or another one); nothing more is handed over. Give it with "
                "--engine-key-file, or set --hand-over-tokens=0",
                step.endpoint.key,
            )

    def _opened(self, who: str, tokens: int) -> None:
        logger.info("hand-over %s begins: %d tokens", who, tokens)
        if self._since is None:
            given = self._plan.given
            self._since, self._before = self._clock(), (given.tokens, given.failed)

    def _closed(self) -> None:
        since, given, (tokens, failed) = self._since or 0.0, self._plan.given, self._before
        self._since = None
        logger.info(
            "hand-over ends: %d tokens computed in %.1f s, %d steps failed",
            given.tokens - tokens,
            self._clock() - since,
            given.failed - failed,
        )

    async def _stop(self, tasks: "list[asyncio.Task[None]]") -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
