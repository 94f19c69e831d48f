"""Facts of models, looked up in the background, so that a slow hub delays no other pool.

Facts in the spec or the catalogue are available at once. The hub is asked in a thread, once for all pools of
the same model; an answer is kept for an hour, a failure for a minute at first, then longer.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvist_kube.backoff import backoff_seconds
from kvist_operator.errors import ModelNotFound, OperatorError
from kvist_operator.models.shape import Facts
from kvist_operator.models.source import draft_facts, model_facts
from kvist_operator.spec.pool import ModelRef, Pool, Speculative

VALID_SECONDS: Final = 3600.0
RETRY_SECONDS: Final = 60.0
LONGEST_RETRY_SECONDS: Final = 900.0
WAIT_SECONDS: Final = 1.0
"""Time that a reconciliation waits for an answer, which avoids a status that says 'pending'."""
PARALLEL_LOOKUPS: Final = 4
"""Threads that ask the hub at the same time."""

ModelQuery = tuple[ModelRef, Speculative | None]
ModelFacts = tuple[Facts, Facts | None]
"""Facts of the model, and of its draft model if there is one."""


@dataclass(slots=True)
class _Lookup:
    """State of one model's lookup, and its last result."""

    facts: ModelFacts | None = None
    error: OperatorError | None = None
    until: float = 0.0
    failures: int = 0
    lookup: asyncio.Task[None] | None = None


class ModelCache:
    """Looks facts up with ``look_up``; calls ``on_found`` when the first answer for a model has arrived."""

    def __init__(
        self, on_found: Callable[[], None], look_up: Callable[[ModelQuery], ModelFacts] | None = None
    ) -> None:
        self._on_found = on_found
        self._look_up = look_up or look_up_facts
        self._entries: dict[str, _Lookup] = {}
        self._semaphore = asyncio.Semaphore(PARALLEL_LOOKUPS)

    async def of(self, pool: Pool) -> ModelFacts | None:
        """Return the facts of a pool's model and draft model; None while they are being looked up.

        Raises:
            ModelError: the facts are there but cannot be used.
            ModelNotFound: no source has them.
        """
        query = (pool.model, pool.engine.speculative)
        entry = self._entries.setdefault(repr(query), _Lookup())  # a shape's config cannot be hashed
        if entry.lookup is None and time.monotonic() >= entry.until:
            entry.lookup = asyncio.create_task(self._refresh(query, entry))
        if entry.lookup is not None and entry.facts is None and entry.error is None:
            await asyncio.wait({entry.lookup}, timeout=WAIT_SECONDS)
        if entry.facts is None and entry.error is not None:
            raise entry.error
        return entry.facts

    async def close(self) -> None:
        """Stop waiting for lookups; their threads end with the process at the latest."""
        lookups = [entry.lookup for entry in self._entries.values() if entry.lookup]
        for task in lookups:
            task.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)

    async def _refresh(self, query: ModelQuery, entry: _Lookup) -> None:
        first = entry.facts is None
        try:
            async with self._semaphore:
                found = await _in_thread(lambda: self._look_up(query))
        except OperatorError as error:  # what was known before stands
            entry.error, entry.failures = error, entry.failures + 1
            pause = backoff_seconds(entry.failures, first=RETRY_SECONDS, longest=LONGEST_RETRY_SECONDS)
            entry.until = time.monotonic() + pause
        else:
            entry.facts, entry.error, entry.failures = found, None, 0
            entry.until = time.monotonic() + VALID_SECONDS
        entry.lookup = None
        if first:
            self._on_found()


def look_up_facts(query: ModelQuery) -> ModelFacts:
    """Return facts from the best source; blocks while the hub is asked. Raises ModelError, ModelNotFound."""
    model, proposer = query
    draft = draft_facts(proposer.model, proposer.shape) if proposer and proposer.model else None
    return model_facts(model), draft


async def _in_thread(look_up: Callable[[], ModelFacts]) -> ModelFacts:
    """Run a lookup in a daemon thread: the loop waits for its own threads when the process ends, and a hub
    that does not answer would delay that."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ModelFacts] = loop.create_future()

    def settle(found: ModelFacts | None, error: BaseException | None) -> None:
        if answer.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        elif found is not None:
            answer.set_result(found)

    def work() -> None:
        found, error = None, None
        try:
            found = look_up()
        except OperatorError as failure:
            error = failure
        except Exception as broken:  # noqa: BLE001 - whatever the hub's client raises, there is no answer
            error = ModelNotFound(f"spec.model.source: {type(broken).__name__}: {broken}")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, found, error)

    threading.Thread(target=work, name="model facts", daemon=True).start()
    return await answer
