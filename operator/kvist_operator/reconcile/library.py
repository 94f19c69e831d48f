"""Facts of models, looked up beside the loop: a hub that is slow holds nobody up.

What the spec or the catalogue tells is there at once. The hub is asked in a thread, once for all pools of the
same model; an answer holds for an hour, a refusal for a minute at first, then longer.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvist_operator.errors import ModelNotFound, OperatorError
from kvist_operator.models.facts import Facts
from kvist_operator.models.source import draft_facts, facts
from kvist_operator.spec.pool import ModelRef, Pool, Speculative

HOLDS_SECONDS: Final = 3600.0
AGAIN_SECONDS: Final = 60.0
LONGEST_SECONDS: Final = 900.0
PATIENCE_SECONDS: Final = 1.0
"""A reconcile waits so long for an answer, which saves a status that says 'pending'."""
AT_ONCE: Final = 4
"""Threads that ask the hub."""

Wish = tuple[ModelRef, Speculative | None]
Known = tuple[Facts, Facts | None]
"""Of the model, and of its draft model where it has one."""


@dataclass(slots=True)
class _Entry:
    """What came of the last look."""

    known: Known | None = None
    error: OperatorError | None = None
    until: float = 0.0
    refusals: int = 0
    looking: asyncio.Task[None] | None = None


class Library:
    """``look`` is what asks; ``told`` is called when an answer has come that somebody waited for in vain."""

    def __init__(self, told: Callable[[], None], look: Callable[[Wish], Known] | None = None) -> None:
        self._told = told
        self._look = look or looked_up
        self._entries: dict[str, _Entry] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def of(self, pool: Pool) -> Known | None:
        """None while the answer is on its way.

        Raises:
            ModelError: the facts are there but cannot be used.
            ModelNotFound: no source has them.
        """
        wish = (pool.model, pool.engine.speculative)
        entry = self._entries.setdefault(repr(wish), _Entry())  # a shape's config cannot be hashed
        if entry.looking is None and time.monotonic() >= entry.until:
            entry.looking = asyncio.create_task(self._refresh(wish, entry))
        if entry.looking is not None and entry.known is None and entry.error is None:
            await asyncio.wait({entry.looking}, timeout=PATIENCE_SECONDS)
        if entry.known is None and entry.error is not None:
            raise entry.error
        return entry.known

    async def close(self) -> None:
        """Nobody waits for the threads: they end with the process at the latest."""
        looking = [entry.looking for entry in self._entries.values() if entry.looking]
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    async def _refresh(self, wish: Wish, entry: _Entry) -> None:
        first = entry.known is None
        try:
            async with self._gate:
                found = await _in_thread(lambda: self._look(wish))
        except OperatorError as error:
            self._refused(entry, error)
        else:
            entry.known, entry.error, entry.refusals = found, None, 0
            entry.until = time.monotonic() + HOLDS_SECONDS
        entry.looking = None
        if first:
            self._told()

    @staticmethod
    def _refused(entry: _Entry, error: OperatorError) -> None:
        """What was known before still stands."""
        entry.error = error
        entry.refusals += 1
        entry.until = time.monotonic() + min(LONGEST_SECONDS, AGAIN_SECONDS * 2.0 ** (entry.refusals - 1))


def looked_up(wish: Wish) -> Known:
    """From the best source there is; may take as long as the hub does. Raises ModelError, ModelNotFound."""
    model, proposer = wish
    draft = draft_facts(proposer.model, proposer.shape) if proposer and proposer.model else None
    return facts(model), draft


async def _in_thread(look: Callable[[], Known]) -> Known:
    """In a daemon thread: the loop's own threads are waited for at the end of the process, and a hub that
    does not answer would keep a pod from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Known] = loop.create_future()

    def settle(found: Known | None, error: BaseException | None) -> None:
        if answer.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        elif found is not None:
            answer.set_result(found)

    def work() -> None:
        found, error = None, None
        try:
            found = look()
        except OperatorError as refused:
            error = refused
        except Exception as broken:  # noqa: BLE001 - a client that breaks is a hub that does not answer
            error = ModelNotFound(f"spec.model.source: {type(broken).__name__}: {broken}")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, found, error)

    threading.Thread(target=work, name="model facts", daemon=True).start()
    return await answer
