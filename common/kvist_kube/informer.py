"""Lists and watches one resource, and recovers from every failure of either.

::

    list ──▶ watch from its version ──▶ ended by the server, or cut ──▶ watch from the last version …
      ▲                                                                             │
      └── 410, a refusal, an unreadable line, or a periodic list is due ◀───────────┘

Only answers of the API change the cached objects. While there is none, the last known objects stay.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kvist_kube.backoff import backoff_seconds, jittered
from kvist_kube.connection import Connection
from kvist_kube.errors import ApiError
from kvist_kube.object_cache import KubeObject, ListPage, ObjectCache, WatchStatus, decode

logger = logging.getLogger(__name__)

ObjectT = TypeVar("ObjectT", bound=KubeObject)

PAGE: Final = 250
"""Objects per page of a list: a page of pods of 10 KB takes 5 ms of the event loop."""
STEADY_SECONDS: Final = 5.0
"""A watch that was open for this long before it broke resets the count of failures."""
SHORTEST_SECONDS: Final = 0.5
"""A watch that ends sooner than this, though in order, is opened again only after a pause."""
FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 10.0
"""A change made while the API server was away is seen after at most this long."""
GONE: Final = 410
"""The version, or a list's next page, is too old (Kubernetes API concepts, "410 Gone responses")."""
BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
TOO_MANY_REQUESTS: Final = 429


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of one API version, in one namespace."""

    group: str
    """API group; empty for the core API."""
    version: str
    plural: str
    namespace: str

    @property
    def path(self) -> str:
        """Path of the collection."""
        api = f"/apis/{self.group}" if self.group else "/api"
        return f"{api}/{self.version}/namespaces/{self.namespace}/{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True, slots=True, kw_only=True)
class InformerTimes:
    """Intervals and time limits of an informer, in seconds."""

    resync: float = 600.0
    """Time between two complete lists, plus or minus a tenth: they repair whatever a watch has lost."""
    watch: float = 300.0
    """Longest life of a watch, at random down to half of it; then it is opened again."""
    silence: float = 90.0
    """API servers send a bookmark every minute: a watch that is silent for longer is half open."""


DEFAULT_TIMES: Final = InformerTimes()


class Recovery(NamedTuple):
    """Reaction to a failure."""

    pause: float
    """Seconds to wait."""
    relist: bool
    """Whether the resource version cannot be used any more, so that a list is due."""


def recovery(error: ApiError, failures: int, chance: Callable[[], float]) -> Recovery:
    """Decide how to continue after the ``failures``-th failure in a row (1 is the first).

    An answer other than 401 and 429 to a watch says that it cannot go on from its version. Where only
    watching is forbidden, for example, a list every ten seconds is what remains. Without an answer the
    version still stands. ``chance`` returns a random number from 0 to 1, which keeps a thousand pickers from
    returning to a restarted API server at the same moment.
    """
    at_once = error.status in (GONE, UNAUTHORIZED) and failures == 1
    pause = backoff_seconds(failures, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
    relist = error.status not in (0, UNAUTHORIZED, TOO_MANY_REQUESTS)
    return Recovery(max(0.0 if at_once else jittered(pause, chance()), error.retry_after), relist)


class Informer(Generic[ObjectT]):
    """Keeps an ``ObjectCache`` in step with one resource, or with the part of it that selectors leave."""

    def __init__(
        self,
        connection: Connection,
        resource: Resource,
        kind: type[ObjectT],
        on_change: Callable[[], None],
        *,
        selectors: tuple[tuple[str, str], ...] = (),
        optional: bool = False,
        times: InformerTimes = DEFAULT_TIMES,
    ) -> None:
        """``on_change`` is called after each list and each event. ``selectors``: query parameters
        ``labelSelector`` and ``fieldSelector``. ``optional``: an API that is absent or forbidden is not a
        problem; it is tried again at the next resync."""
        self.resource = resource
        self.optional = optional
        self.cache = ObjectCache(kind)
        self.listed = False
        """Whether there was a complete list."""
        self.problem = ""
        """Why the resource cannot be watched at present; empty while it is."""
        self.watching = False
        self.lists = 0
        self.errors: dict[str, int] = {}
        """Failures by HTTP status; ``connection`` where there was no answer."""
        self._last_message_at: float | None = None
        self._connection = connection
        self._on_change = on_change
        self._selectors = selectors
        self._times = times
        self._failures = 0
        self._relist_at = 0.0

    @property
    def objects(self) -> dict[str, ObjectT]:
        """Objects by name; not to be modified."""
        return self.cache.objects

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                if not self.cache.version or time.monotonic() >= self._relist_at:
                    await self._list()
                await self._watch()
            except ApiError as error:
                await asyncio.sleep(self._on_failure(error))

    def describe(self) -> dict[str, Any]:
        """Return the state that ``/debug/fleet`` shows."""
        return {
            "resource": str(self.resource),
            "namespace": self.resource.namespace,
            "selectors": dict(self._selectors),
            "problem": self.problem,
            "watching": self.watching,
            "objects": len(self.objects),
            "unreadable": dict(self.cache.unreadable),
            "resource_version": self.cache.version,
            "lists": self.lists,
            "changes": self.cache.changes,
            "bookmarks": self.cache.bookmarks,
            "errors": dict(self.errors),
            "heard_seconds_ago": self._silent_seconds(),
        }

    def status(self) -> WatchStatus:
        """Return the state that the metrics show."""
        silent = self._silent_seconds()
        return WatchStatus(str(self.resource), self.watching, silent, self.lists, dict(self.errors))

    def _silent_seconds(self) -> float | None:
        last = self._last_message_at
        return None if last is None else round(time.monotonic() - last, 1)

    async def _list(self) -> None:
        pages: list[ListPage] = []
        query = [*self._selectors, ("limit", str(PAGE))]
        try:
            while not pages or pages[-1].metadata.continue_:
                token = [("continue", pages[-1].metadata.continue_)] if pages else []
                try:
                    body = await self._connection.get(self.resource.path, [*query, *token])
                except ApiError as error:
                    if error.status != GONE or not pages:
                        raise
                    pages, query = [], list(self._selectors)  # the pages have expired: all in one
                else:
                    pages.append(decode(body, ListPage))
            self.cache.replace(pages)
        except ValueError as error:
            raise ApiError(str(error)) from error
        self.listed = True
        self.lists += 1
        self._relist_at = time.monotonic() + self._times.resync * random.uniform(0.9, 1.1)
        self._last_message_at = time.monotonic()
        self._on_change()

    async def _watch(self) -> None:
        """Watch once, until the server ends the watch."""
        left = min(self._times.watch * random.uniform(0.5, 1.0), self._relist_at - time.monotonic())
        query = [
            *self._selectors,
            *(("watch", "1"), ("allowWatchBookmarks", "true")),
            *(("resourceVersion", self.cache.version), ("timeoutSeconds", str(max(1, round(left))))),
        ]
        path, silence = self.resource.path, self._times.silence
        async with self._connection.stream_lines(path, query, silence) as lines:
            if self.problem:
                logger.info("the watch of %s is re-established", self.resource)
            self.problem, self.watching = "", True
            opened = self._last_message_at = time.monotonic()
            try:
                async for line in lines:
                    self._on_line(line)
            finally:
                self.watching = False
                open_for = time.monotonic() - opened
                self._failures = 0 if open_for >= STEADY_SECONDS else self._failures
        if open_for < SHORTEST_SECONDS:
            raise ApiError("the watch was closed right after it was opened")
        self._failures = 0

    def _on_line(self, line: bytes) -> None:
        try:
            failure = self.cache.on_line(line)
        except ValueError as error:
            self.cache.version = ""  # the lines that follow cannot be trusted either
            raise ApiError(str(error)) from error
        if failure is not None:  # mostly 410
            raise ApiError(f"{failure.code}: {failure.message or failure.reason}", failure.code or 500)
        self._failures = 0
        self._last_message_at = time.monotonic()
        self._on_change()

    def _on_failure(self, error: ApiError) -> float:
        """Return the seconds to wait."""
        self._failures += 1
        name = str(error.status) if error.status else "connection"
        self.errors[name] = self.errors.get(name, 0) + 1
        action = recovery(error, self._failures, random.random)
        if action.relist:
            self.cache.version = ""
        if error.status != GONE:
            self._report(self._explain(error))
        if self.optional and error.status in (FORBIDDEN, NOT_FOUND):
            return self._times.resync
        return action.pause

    def _explain(self, error: ApiError) -> str:
        resource = self.resource
        if error.status == FORBIDDEN:
            return (
                f"{error}; the service account needs a Role in namespace {resource.namespace} with "
                f'apiGroups: ["{resource.group}"], resources: ["{resource.plural}"], '
                'verbs: ["list", "watch"] '
                "(docs/guides/kubernetes.md)"
            )
        if error.status == BAD_REQUEST:
            return f"{error}; the query was {' '.join(f'{name} {text!r}' for name, text in self._selectors)}"
        if error.status == NOT_FOUND:
            return f"{error}; there is no {resource} {resource.version}: check that its CRD is installed"
        return str(error)

    def _report(self, problem: str) -> None:
        """Log a problem once."""
        if problem == self.problem:
            return
        self.problem = problem
        kept = f"the {len(self.objects)} known objects are kept" if self.listed else "no object is known yet"
        level = logging.INFO if self.optional else logging.WARNING
        logger.log(level, "the watch of %s is lost (%s): %s", self.resource, kept, problem)
