"""Facts of models, looked up in the background, so that a slow hub delays no other pool.

Facts in the spec or the catalogue are available at once. The hub is asked in a thread, once for all pools of
the same model; an answer is kept for an hour, a failure for a minute at first, then longer.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvist_kube.backoff import backoff_seconds
from kvist_operator.errors import ModelNotFound, OperatorError
from kvist_operator.models.catalogue import from_catalogue
from kvist_operator.models.shape import Facts
from kvist_operator.models.source import ModelHub, draft_facts, from_model_files, model_facts
from kvist_operator.spec.pool import ModelRef, Pool, Source, Speculative
from kvist_operator.status.known_model import KnownModel

VALID_SECONDS: Final = 3600.0
RETRY_SECONDS: Final = 60.0
LONGEST_RETRY_SECONDS: Final = 900.0
WAIT_SECONDS: Final = 1.0
"""Time that a reconciliation waits for an answer, which avoids a status that says 'pending'."""
PARALLEL_LOOKUPS: Final = 4
"""Threads that ask the hub at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuery:
    """Question for the facts of a pool's model and draft model."""

    model: ModelRef
    speculative: Speculative | None = None
    known: KnownModel | None = None
    """What the pool's status says of this model, from an earlier lookup."""


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

    async def of(self, pool: Pool, known: KnownModel | None = None) -> ModelFacts | None:
        """Return the facts of a pool's model and draft model; None while they are being looked up.

        ``known`` is what the pool's status says of the model: the hub is not asked again.

        Raises:
            ModelError: the facts are there but cannot be used.
            ModelNotFound: no source has them.
        """
        query = ModelQuery(model=pool.model, speculative=pool.engine.speculative, known=known)
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


def pinned(pool: Pool, facts: Facts) -> Pool:
    """Return the pool with the commit that the facts are of, which engines and pickers load."""
    return replace(pool, model=replace(pool.model, revision=pool.model.revision or facts.revision))


def look_up_facts(query: ModelQuery) -> ModelFacts:
    """Return facts from the best source; blocks while the hub is asked. Raises ModelError, ModelNotFound."""
    model, proposer, known = query.model, query.speculative, query.known
    draft = None
    if proposer and proposer.model:
        if known and known.draft:
            draft = from_model_files(known.draft)
        else:
            draft = draft_facts(proposer.model, proposer.shape)
    if known and known.files:
        return from_model_files(known.files), draft
    unpinned = model.kind is Source.HUB and not model.revision and not model.shape
    listed = from_catalogue(model.location) if unpinned else None
    if listed is None:
        return model_facts(replace(model, revision=known.revision) if known and unpinned else model), draft
    if known:
        return replace(listed, revision=known.revision), draft
    # the catalogue needs no hub, but engines are to load one commit, whatever is pushed later
    with contextlib.suppress(ModelNotFound):
        listed = replace(listed, revision=ModelHub().commit(model.location, ""))
    return listed, draft


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
