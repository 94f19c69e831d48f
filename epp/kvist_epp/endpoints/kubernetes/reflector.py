"""Keeps a ``Store`` in step with the API: list, watch, and whatever goes wrong with either.

::

    list ──▶ watch from its version ──▶ ended by the server, or cut ──▶ watch from the last version …
      ▲                                                                             │
      └── 410, a refusal, something unreadable, or the time for a list anyway ◀─────┘

Nothing but an answer of the API changes the store; while there is none, what was known last stands.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from kvist_epp.endpoints.discovery import Watched
from kvist_epp.endpoints.kubernetes.api import Api
from kvist_epp.endpoints.kubernetes.objects import Failure, Object, Page, decoded
from kvist_epp.endpoints.kubernetes.recovery import BAD_REQUEST, FORBIDDEN, GONE, NOT_FOUND, recovery
from kvist_epp.endpoints.kubernetes.store import Store
from kvist_epp.errors import ApiError

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)

PAGE: Final = 250
"""Objects asked for at once: a page of pods of 10 KB takes 5 ms of the event loop."""
STEADY_SECONDS: Final = 5.0
"""A watch that was open for so long before it broke was in order until then."""
SHORTEST_SECONDS: Final = 0.5
"""One that ends sooner, though in order, is opened again after a pause."""


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object of one API, in one namespace."""

    group: str
    """Empty: the core API."""
    version: str
    plural: str
    namespace: str

    @property
    def path(self) -> str:
        """Of its collection."""
        api = f"/apis/{self.group}" if self.group else "/api"
        return f"{api}/{self.version}/namespaces/{self.namespace}/{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often and how long, in seconds."""

    resync: float = 600.0
    """Between two complete lists, give or take a tenth: what a watch may have lost is found by then."""
    watch: float = 300.0
    """The longest life of a watch, at random down to half of it; then it is opened again."""
    silence: float = 90.0
    """API servers send a bookmark every minute: a watch that is silent for longer is half open."""


USUAL: Final = Pace()


class Reflector(Generic[T]):
    """One resource, or what ``selectors`` leave of it."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        kind: type[T],
        changed: Callable[[], None],
        *,
        selectors: tuple[tuple[str, str], ...] = (),
        optional: bool = False,
        pace: Pace = USUAL,
    ) -> None:
        """``changed`` is called after each list and each event. ``selectors``: ``labelSelector``,
        ``fieldSelector``. ``optional``: an API that is not there, or not for us, is no trouble; it is
        looked for again at the next resync."""
        self.resource = resource
        self.optional = optional
        self.store = Store(kind)
        self.listed = False
        """Whether there was a complete list."""
        self.problem = ""
        """Why the API is not followed just now; empty while it is."""
        self.watching = False
        self.lists = 0
        self.errors: dict[str, int] = {}
        """By HTTP status, ``connection`` where there was none."""
        self._heard_at: float | None = None
        self._api = api
        self._changed = changed
        self._selectors = selectors
        self._pace = pace
        self._failures = 0
        self._relist_at = 0.0

    @property
    def objects(self) -> dict[str, T]:
        """By name; not to be changed."""
        return self.store.known.objects

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                if not self.store.version or time.monotonic() >= self._relist_at:
                    await self._list()
                await self._watch()
            except ApiError as error:
                await asyncio.sleep(self._failed(error))

    def describe(self) -> dict[str, Any]:
        """For ``/debug/fleet``."""
        store = self.store
        return {
            "resource": str(self.resource),
            "namespace": self.resource.namespace,
            "selectors": dict(self._selectors),
            "problem": self.problem,
            "watching": self.watching,
            "objects": len(self.objects),
            "unreadable": dict(store.known.unreadable),
            "resource_version": store.version,
            "lists": self.lists,
            "changes": store.changes,
            "bookmarks": store.bookmarks,
            "errors": dict(self.errors),
            "heard_seconds_ago": self._silent_for(),
        }

    def watched(self) -> Watched:
        """For the metrics."""
        return Watched(str(self.resource), self.watching, self._silent_for(), self.lists, dict(self.errors))

    def _silent_for(self) -> float | None:
        return None if self._heard_at is None else round(time.monotonic() - self._heard_at, 1)

    async def _list(self) -> None:
        pages: list[Page] = []
        query = [*self._selectors, ("limit", str(PAGE))]
        while not pages or pages[-1].metadata.continue_:
            token = [("continue", pages[-1].metadata.continue_)] if pages else []
            try:
                pages.append(self._page(await self._api.get(self.resource.path, [*query, *token])))
            except ApiError as error:
                if error.status != GONE or not pages:
                    raise
                pages, query = [], list(self._selectors)  # too slow for its pages: all at once
        self._replace(pages)

    def _page(self, body: bytes) -> Page:
        try:
            return decoded(body, Page)
        except ValueError as error:
            raise ApiError(str(error)) from error

    def _replace(self, pages: list[Page]) -> None:
        try:
            self.store.replace(pages)
        except ValueError as error:
            raise ApiError(str(error)) from error
        self.listed = True
        self.lists += 1
        self._relist_at = time.monotonic() + self._pace.resync * random.uniform(0.9, 1.1)
        self._heard()
        self._changed()

    async def _watch(self) -> None:
        """One watch, to its end."""
        left = min(self._pace.watch * random.uniform(0.5, 1.0), self._relist_at - time.monotonic())
        query = [
            *self._selectors,
            *(("watch", "1"), ("allowWatchBookmarks", "true")),
            *(("resourceVersion", self.store.version), ("timeoutSeconds", str(max(1, round(left))))),
        ]
        async with self._api.lines(self.resource.path, query, self._pace.silence) as lines:
            opened = self._well()
            try:
                async for line in lines:
                    self._told(line)
            finally:
                self.watching = False
                open_for = time.monotonic() - opened
                self._failures = 0 if open_for >= STEADY_SECONDS else self._failures
        if open_for < SHORTEST_SECONDS:
            raise ApiError("the watch was cut off as soon as it was open")
        self._failures = 0

    def _told(self, line: bytes) -> None:
        try:
            failure = self.store.tell(line)
        except ValueError as error:
            self.store.version = ""  # what follows is not to be trusted either
            raise ApiError(str(error)) from error
        if failure is not None:
            raise _refused(failure)
        self._failures = 0
        self._heard()
        self._changed()

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def _well(self) -> float:
        """A watch is open, from now on."""
        if self.problem:
            logger.info("%s: followed again", self.resource)
        self.problem, self.watching = "", True
        self._heard_at = time.monotonic()
        return self._heard_at

    def _failed(self, error: ApiError) -> float:
        """Seconds to wait."""
        self._failures += 1
        name = str(error.status) if error.status else "connection"
        self.errors[name] = self.errors.get(name, 0) + 1
        todo = recovery(error, self._failures, random.random)
        if todo.relist:
            self.store.version = ""
        if error.status != GONE:
            self._complain(self._explained(error))
        if self.optional and error.status in (FORBIDDEN, NOT_FOUND):
            return self._pace.resync
        return todo.pause

    def _explained(self, error: ApiError) -> str:
        if error.status == FORBIDDEN:
            of = self.resource
            return (
                f"{error}; the picker's service account needs a Role in namespace {of.namespace} with "
                f'apiGroups: ["{of.group}"], resources: ["{of.plural}"], verbs: ["list", "watch"] '
                "(docs/guides/kubernetes.md)"
            )
        if error.status == BAD_REQUEST:
            return f"{error}; asked for {' '.join(f'{name} {text!r}' for name, text in self._selectors)}"
        if error.status == NOT_FOUND:
            return f"{error}; there is no {self.resource} {self.resource.version}: is its CRD installed?"
        return str(error)

    def _complain(self, problem: str) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        kept = f"keeping the {len(self.objects)} known" if self.listed else "none is known yet"
        level = logging.INFO if self.optional else logging.WARNING
        logger.log(level, "%s: not followed, %s: %s", self.resource, kept, problem)


def _refused(failure: Failure) -> ApiError:
    """A watch that ends with a ``Status`` says why: 410 mostly."""
    return ApiError(f"{failure.code}: {failure.message or failure.reason}", failure.code or 500)
