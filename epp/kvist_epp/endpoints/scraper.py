"""Asks each engine for ``/metrics`` and ``/v1/models``: whether it answers, what it serves, how fast it is.

Scrapes calibrate the load tracker; they are not its source. They are sent every few seconds, with jitter, so
that a thousand engines are not asked at once. An engine that stops answering is kept but receives no
requests. One that answers, but has no metrics of vLLM (statistics are off, a proxy is in front, it is another
server), is picked by what the picker itself knows, as long as ``/health`` answers without a server error.
"""

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import ceil, inf
from typing import Final

import aiohttp

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet, same_engine
from kvist_epp.endpoints.engine_key import EngineKey
from kvist_epp.endpoints.engine_session import cause, check_status, engine_session, get_page
from kvist_epp.endpoints.engine_state import EngineState, ScrapeState
from kvist_epp.endpoints.page_connection import HTTP_OK, NO_HEADERS, Page, PageConnection
from kvist_epp.engines.vllm.engine_metrics import (
    FULL_CACHE,
    EngineSample,
    ServedModels,
    needed_lines,
    page_digest,
    parse_metrics,
    parse_models,
)
from kvist_kube.backoff import backoff_seconds

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
LEAST_INTERVAL: Final = 0.1
"""Seconds from the end of one scrape to the next that ``hurry`` starts, at least."""
AT_ONCE: Final = 32
"""Engines asked at once, of each group (``_group``): those that hang hold their slots until the time limit,
and must not delay the rest."""
_ANSWERING: Final = "answering"
GRID_SECONDS: Final = 0.01
"""Scrapes begin at multiples of it, those of several engines at once: the process wakes up less often."""
MAX_WARNINGS: Final = 16
"""Different reasons for missing metrics that are logged."""
SERVER_ERROR: Final = 500
"""HTTP status of ``/health`` from which an engine is not healthy; vLLM answers 503 once its core has died.
Other servers may have no such page."""

OnState = Callable[[EngineState], None]


def _ignore(_state: EngineState) -> None:
    pass


class Scraper:
    """Scrapes the endpoints last given to ``follow``, in one task for each."""

    def __init__(
        self,
        *,
        on_scrape: OnState = _ignore,
        on_change: OnState = _ignore,
        on_unmeasured: OnState = _ignore,
        interval: float = 2.0,
        timeout: float = 2.0,
        models_interval: float = 60.0,
        failures: int = 3,
        key: EngineKey | None = None,
    ) -> None:
        """``on_scrape`` is called after each answered scrape, ``on_change`` when an engine became ready or
        unreachable, or serves other models, ``on_unmeasured`` when an engine has no metrics (any more).
        ``interval``: seconds between scrapes of one engine; with 0 there
        are none and all engines count as ready; when infinite there are none and the owner calls
        ``on_answer``. ``failures`` in a row make an engine unreachable. ``models_interval``: seconds between
        requests for ``/v1/models``, which ``key`` guards. Where it cannot be read, the pause begins at
        ``interval`` and doubles each time."""
        self.states: dict[str, EngineState] = {}
        """States by endpoint key. Entries are only replaced, so that a copy is a consistent view."""
        self._on_scrape = on_scrape
        self._on_change = on_change
        self._on_unmeasured = on_unmeasured
        self._warned: set[str] = set()
        """Reasons for missing metrics that the log has."""
        self._interval = interval
        self._timeout = timeout
        self._models_interval = models_interval
        self._failures = failures
        self._key = key or EngineKey()
        self._slots = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(AT_ONCE))
        """By group of engines."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._connections: dict[str, PageConnection] = {}
        """Open connections by endpoint key; all pages are requested on them."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Scraper":
        self._session = engine_session(self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.follow(EndpointSet())
        if self._session:
            await self._session.close()

    def follow(self, endpoints: EndpointSet) -> None:
        """Scrape these endpoints and no others. What is known of an engine stays while it is the same one."""
        for key, state in tuple(self.states.items()):
            endpoint = endpoints.by_key(key)
            if endpoint is None or not same_engine(state.endpoint, endpoint):
                del self.states[key]
                self._stop(key)
                self._disconnect(key)
            elif endpoint is not state.endpoint:
                self._update(state, endpoint)
        for endpoint in endpoints:
            if endpoint.key not in self.states:
                self._start(endpoint)

    def counts(self) -> Mapping[str, int]:
        """Return the number of engines by status, for ``kvist_epp_endpoints``."""
        counts = {state.value: 0 for state in ScrapeState}
        for engine in self.states.values():
            counts[engine.status] = counts.get(engine.status, 0) + 1
        return counts

    def adapters(self) -> frozenset[str]:
        """Return the LoRA adapters that any engine serves."""
        return frozenset().union(*(engine.served.adapters for engine in self.states.values()))

    def _start(self, endpoint: Endpoint) -> None:
        state = self.states[endpoint.key] = EngineState(endpoint)
        if self._interval > 0:
            self._start_task(state)
        else:
            state.state, state.problem = ScrapeState.READY, ""
            self._on_change(state)

    def _start_task(self, state: EngineState) -> None:
        if self._interval == inf:
            return
        key = state.endpoint.key
        self._tasks[key] = asyncio.create_task(self._scrape_forever(state), name=f"scrape {key}")

    def _stop(self, key: str) -> None:
        if task := self._tasks.pop(key, None):
            task.cancel()

    def _disconnect(self, key: str) -> None:
        if connection := self._connections.pop(key, None):
            connection.close()

    def _update(self, state: EngineState, endpoint: Endpoint) -> None:
        """Replace labels and refusal of the same engine; scrape it at once when the refusal has gone."""
        accepted = bool(state.endpoint.refusal) and not endpoint.refusal
        state.endpoint = endpoint
        if accepted and state.state is not ScrapeState.READY and self._interval > 0:
            self._stop(endpoint.key)
            self._start_task(state)

    def hurry(self, key: str) -> None:
        """Scrape an engine now, unless it was asked a moment ago, or is being asked."""
        state = self.states.get(key)
        if state is None or key not in self._tasks or state.asking:
            return
        if time.monotonic() - state.tried_at >= LEAST_INTERVAL:
            self._stop(key)
            self._start_task(state)

    async def _scrape_forever(self, state: EngineState) -> None:
        while True:
            state.asking = True
            try:
                async with self._slots[_group(state)]:
                    await self.scrape(state)
            finally:
                state.asking, state.tried_at = False, time.monotonic()
            hasty = 0 < state.failures < self._failures or state.state is ScrapeState.NEW
            pause = min(self._interval, 0.5) if hasty else self._interval
            await asyncio.sleep(_on_grid(asyncio.get_running_loop().time(), pause * random.uniform(0.9, 1.1)))

    async def scrape(self, state: EngineState) -> None:
        """Scrape one engine once; ask for its models too when that is due."""
        asked_at = time.monotonic()
        try:
            sample = await self._sample(state)
            if sample is None:
                return
            served = await self._models(state, asked_at)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._on_failure(state, cause(error))
            return
        self.on_answer(state, sample, served, asked_at)

    async def _sample(self, state: EngineState) -> EngineSample | None:
        """Return what ``/metrics`` says; the empty sample of an engine that answers, but not with metrics of
        vLLM; None while it is not certain that these are missing for good.

        Raises aiohttp.ClientError, TimeoutError, OSError or ValueError: the engine cannot be used.
        """
        try:
            page = await self._get(state, "/metrics")
            digest = page_digest(page)
            lines = state.lines if digest == state.page_digest else needed_lines(page)
        except (PermissionError, ValueError) as error:
            problem, silence = cause(error), None
        except (aiohttp.ClientConnectorError, ConnectionRefusedError):
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem, silence = f"GET /metrics: {cause(error)}", error
        else:
            missed, state.metrics_problem, state.pages_missed = bool(state.metrics_problem), "", 0
            state.page_digest = digest
            if lines != state.lines or missed:
                state.lines, state.sample = lines, parse_metrics(lines.decode(errors="replace"))
            return state.sample
        await self._check_health(state, silence)
        state.pages_missed += 1
        if not state.metrics_problem and state.pages_missed < self._failures:
            state.failures = 0
            return None
        state.metrics_problem = problem
        return EngineSample()

    async def _check_health(self, state: EngineState, silence: Exception | None) -> None:
        """Raise if an engine cannot be used: ``/health`` is a server error, or no page is answered.
        ``silence``: why ``/metrics`` was not; None: it was, though not with metrics."""
        try:
            status = (await self._ask(state, "/health")).status
        except (aiohttp.ClientError, TimeoutError, OSError):
            if silence is None:
                return  # it has answered another page a moment ago
            raise silence from None
        if status >= SERVER_ERROR:
            raise ValueError(f"GET /health returned HTTP status {status}")

    async def _ask(self, state: EngineState, path: str, headers: Mapping[str, str] = NO_HEADERS) -> Page:
        """Return a page, on the connection of the last scrape where that is possible. A status other than 200
        is believed only after a full client has received the same one.

        Raises aiohttp.ClientError, TimeoutError, OSError or ValueError.
        """
        connection, page = await self._connected(state), None
        if connection is not None:
            try:
                page = await connection.get(path, self._timeout, headers)
            except TimeoutError:
                connection.odd = True
                raise
            if page is not None and (page.status == HTTP_OK or connection.refusals.get(path) == page.status):
                return page
        try:
            found = await self._ask_in_full(state.endpoint, path, headers)
        except aiohttp.ClientConnectorError:
            state.refused = True
            raise
        if connection is not None and page is not None:
            if page.status == found.status:
                connection.refusals[path] = page.status
            else:
                connection.odd = True
        return found

    async def _connected(self, state: EngineState) -> PageConnection | None:
        """Return the connection of an engine, opened if need be; None where a full client has to ask, who
        finds the reason of an answer that is not as usual, or of none. An engine that has refused the last
        connection needs none to find that it still does.

        Raises OSError if nothing accepts connections, or TimeoutError.
        """
        endpoint = state.endpoint
        connection = self._connections.get(endpoint.key)
        if connection is not None and connection.odd:
            return None
        if connection is None or not connection.usable:
            if _group(state) != _ANSWERING and not state.refused:
                return None
            place = endpoint.address, endpoint.port, endpoint.hostport
            refusals = {} if connection is None else connection.refusals
            state.refused = True
            async with asyncio.timeout(self._timeout):
                connection = await PageConnection.open(*place, MAX_PAGE_BYTES)
            state.refused = False
            connection.refusals = refusals
            self._connections[endpoint.key] = connection
        return connection

    async def _ask_in_full(self, endpoint: Endpoint, path: str, headers: Mapping[str, str]) -> Page:
        """Return a page by a full client. Raises as ``_ask``."""
        if self._session is None:
            raise RuntimeError("the scraper must be used with `async with`")
        return await get_page(self._session, endpoint.hostport, path, headers, MAX_PAGE_BYTES)

    async def _models(self, state: EngineState, now: float) -> ServedModels:
        """Return what ``/v1/models`` says if it is due, else what is known."""
        if now < state.models_due:
            return state.served
        try:
            served = parse_models(await self._get_guarded(state, "/v1/models"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            state.models_problem = cause(error)
            state.models_failures += 1
            longest = self._models_interval
            state.models_due = now + backoff_seconds(
                state.models_failures, first=self._interval, longest=longest
            )
            return state.served
        state.models_problem, state.models_failures = "", 0
        state.models_due = now + self._models_interval
        return served

    async def _get_guarded(self, state: EngineState, path: str) -> bytes:
        """Return a page that an API key may guard, with the first key that the engine accepts."""
        *others, last = self._key.headers()
        for authorization in others:
            try:
                return await self._get(state, path, authorization)
            except PermissionError:
                continue
        return await self._get(state, path, last)

    async def _get(self, state: EngineState, path: str, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
        """Return the content of a page.

        Raises PermissionError, ValueError, aiohttp.ClientError, TimeoutError or OSError.
        """
        page = await self._ask(state, path, headers)
        check_status(path, page.status)
        return page.body

    def on_answer(
        self, state: EngineState, sample: EngineSample, served: ServedModels, asked_at: float
    ) -> None:
        fresh = state.state is not ScrapeState.READY
        if fresh:
            logger.info("endpoint %s (%s) is ready", state.endpoint.key, state.endpoint.hostport)
        news = fresh or served != state.served
        state.state, state.problem, state.failures = ScrapeState.READY, "", 0
        state.sample, state.served, state.asked_at = sample, served, asked_at
        if state.metrics_problem:
            self._warn_of_missing_metrics(state)
            self._on_unmeasured(state)
            if news:
                self._on_change(state)
            return
        state.rates.observe(sample, asked_at)
        state.recent.observe(sample, asked_at)
        state.tier_speed.observe(sample.tiers, asked_at)
        state.transfer_rate.observe(sample.transfers)
        if sample.cache_usage < FULL_CACHE:
            state.batch.observe(sample.running, sample.waiting)
        self._on_scrape(state)
        if news:
            self._on_change(state)

    def _warn_of_missing_metrics(self, state: EngineState) -> None:
        """Say it once for each reason: a whole pool may lack its metrics."""
        if state.metrics_problem in self._warned or len(self._warned) >= MAX_WARNINGS:
            return
        self._warned.add(state.metrics_problem)
        logger.warning(
            "endpoint %s (%s) has no metrics of vLLM: %s. It gets requests by the picker's own account; "
            "requests of others, a full KV cache, its prefill rate and the size of its cache are not seen. "
            "Other endpoints without metrics for this reason are on /debug/fleet only",
            state.endpoint.key,
            state.endpoint.hostport,
            state.metrics_problem,
        )

    def _on_failure(self, state: EngineState, problem: str) -> None:
        state.failures += 1
        state.problem, state.pages_missed = problem, 0
        self._disconnect(state.endpoint.key)
        if state.failures == self._failures:
            state.state = ScrapeState.UNREACHABLE
            state.models_due, state.models_failures = -inf, 0
            endpoint = state.endpoint
            # An engine that is starting is expected not to answer.
            level = logging.INFO if endpoint.refusal else logging.WARNING
            text = "endpoint %s (%s) gets no requests, because it cannot be scraped: %s"
            logger.log(level, text, endpoint.key, endpoint.hostport, problem)
            self._on_change(state)


def _group(state: EngineState) -> str:
    """Return the group of engines that share slots: ``_ANSWERING`` for one that answered last time."""
    if state.state is ScrapeState.UNREACHABLE:
        return "unreachable"
    return _ANSWERING if state.state is ScrapeState.READY and not state.failures else "uncertain"


def _on_grid(now: float, seconds: float) -> float:
    """Return the seconds to the first moment of the grid that is at least ``seconds`` from ``now``."""
    return ceil((now + seconds) / GRID_SECONDS) * GRID_SECONDS - now
