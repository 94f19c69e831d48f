"""How a running picker comes to its end: a signal asks for it, or a part of the picker fails."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from kvist_epp.errors import UncleanEnd

logger = logging.getLogger(__name__)


class Ending:
    """Whether the end has begun, how much of a hurry it is, and whether it is a clean one."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._cut = asyncio.Event()
        self._why = ""
        self.watched = False
        """A person at a terminal waits for it (SIGINT)."""

    def heed_signals(self) -> None:
        """The first SIGTERM or SIGINT begins the end, the next one cuts it short."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked, number)

    async def begun(self) -> None:
        """Wait until there is a reason to end."""
        await self._begun.wait()

    async def unless_cut(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run it to its end, or until a second signal."""
        work = asyncio.ensure_future(coroutine)
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((work, cut), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            await _stop(work)
            await _stop(cut)

    def check(self) -> None:
        """Raises UncleanEnd unless it was asked for and had its time."""
        if self._why:
            raise UncleanEnd(self._why)

    def keep(self, stack: AsyncExitStack, part: Coroutine[None, None, None], name: str) -> None:
        """A task for the life of the picker; if it fails, the picker says so and ends."""
        task = asyncio.create_task(part, name=name)
        task.add_done_callback(self._ended)
        stack.push_async_callback(_stop, task)

    def _asked(self, number: signal.Signals) -> None:
        if self._begun.is_set():
            self._why = self._why or f"a second signal cut the drain short ({number.name})"
            self._cut.set()
        self.watched = number == signal.SIGINT
        self._begun.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        logger.critical("%s ended", task.get_name(), exc_info=task.exception())
        self._why = f"a part of the picker ended: {task.get_name()}"
        self._begun.set()


async def _stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
