"""Asks every engine for its ``/metrics`` and ``/v1/models``: who is there, what it serves, how fast it is.

Scrapes calibrate the ledger, they do not feed it: every few seconds, jittered so that a thousand engines are
not asked at once. An engine that stops answering is kept but not eligible.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import aiohttp

from kvist_epp.endpoints.batch_limit import Batch
from kvist_epp.endpoints.endpoint import Endpoint, Fleet, same
from kvist_epp.endpoints.recent_counters import Recent
from kvist_epp.engines.vllm.engine_metrics import (
    FULL_CACHE,
    EngineSample,
    Rates,
    Served,
    parse,
    parse_models,
    require_engine,
)

logger = logging.getLogger(__name__)

MAX_PAGE_BYTES: Final = 8 * 1024 * 1024


class State(Enum):
    """Whether an engine may be picked; the label of ``kvist_epp_endpoints``."""

    NEW = "new"
    """Not heard of yet."""
    READY = "ready"
    UNREACHABLE = "unreachable"


@dataclass(slots=True, eq=False)
class EngineState:
    """What is known of one engine; kept by the ``Scraper`` alone."""

    endpoint: Endpoint
    state: State = State.NEW
    problem: str = "not scraped yet"
    """Why the last scrape failed; empty when it did not."""
    failures: int = 0
    """In a row."""
    sample: EngineSample = field(default_factory=EngineSample)
    served: Served = field(default_factory=Served)
    models_problem: str = ""
    """Why ``/v1/models`` could not be read; the engine may be ready all the same (an API key guards that
    path)."""
    rates: Rates = field(default_factory=Rates)
    recent: Recent = field(default_factory=Recent)
    asked_at: float = 0.0
    """When the last answered scrape was sent (monotonic)."""
    models_at: float | None = None
    batch: Batch = field(default_factory=Batch)

    @property
    def ready(self) -> bool:
        """May be picked: it answers, and whoever discovered it does not object."""
        return self.state is State.READY and not self.endpoint.refusal

    @property
    def standing(self) -> str:
        """How it stands, in a word or two: the objection to it, else its state."""
        return self.endpoint.refusal or self.state.value

    @property
    def crowd(self) -> int | None:
        """Sequences it runs while requests wait because the KV cache is full; None: that is not so."""
        return max(1, self.sample.running) if self.sample.crowded else None

    def slots(self, guess: int | None = None) -> int | None:
        """Sequences it runs at once, all ranks together: by its label, else ``guess``, which scrapes may
        prove too low. None: unknown.

        A full KV cache makes it no smaller: a request that left its prefix for that reason would take up its
        whole prompt's blocks elsewhere, and so fill the next cache (``kvist bench route``: 21 % goodput
        against 71 % on groups of long prefixes at capacity)."""
        labelled, ranks = self.endpoint.max_num_seqs, self.endpoint.ranks
        if labelled is not None:
            return labelled * ranks
        return None if guess is None else max(guess * ranks, self.batch.limit)


Heard = Callable[[EngineState], None]


def _nobody(_state: EngineState) -> None:
    pass


class Scraper:
    """One task per engine of the fleet last given to ``follow``."""

    def __init__(
        self,
        *,
        scraped: Heard = _nobody,
        changed: Heard = _nobody,
        interval: float = 2.0,
        timeout: float = 2.0,
        models_interval: float = 60.0,
        failures: int = 3,
        concurrency: int = 32,
    ) -> None:
        """``scraped``: after each answered scrape; ``changed``: when an engine became ready or unreachable,
        or serves something else. ``interval`` seconds between scrapes of one engine, 0: none, all count as
        ready. ``failures`` in a row make an engine unreachable."""
        self.states: dict[str, EngineState] = {}
        """By endpoint key; swapped entries only, so that a copy is a consistent view."""
        self._scraped = scraped
        self._changed = changed
        self._interval = interval
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._models_interval = models_interval
        self._failures = failures
        self._gate = asyncio.Semaphore(concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Scraper":
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=4.0
        )  # vLLM closes idle connections after 5 s
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.follow(Fleet())
        if self._session:
            await self._session.close()

    def follow(self, fleet: Fleet) -> None:
        """Scrape these engines from now on; one that is the same engine keeps what is known of it."""
        for key, state in tuple(self.states.items()):
            endpoint = fleet.by_key(key)
            if endpoint is None or not same(state.endpoint, endpoint):
                del self.states[key]
                self._stop(key)
            elif endpoint is not state.endpoint:
                self._take_over(state, endpoint)
        for endpoint in fleet:
            if endpoint.key not in self.states:
                self._start(endpoint)

    def counts(self) -> Mapping[str, int]:
        """Engines by how they stand, for ``kvist_epp_endpoints``."""
        counts = {state.value: 0 for state in State}
        for engine in self.states.values():
            counts[engine.standing] = counts.get(engine.standing, 0) + 1
        return counts

    def adapters(self) -> frozenset[str]:
        """LoRA adapters that any engine serves."""
        return frozenset().union(*(engine.served.adapters for engine in self.states.values()))

    def _start(self, endpoint: Endpoint) -> None:
        state = self.states[endpoint.key] = EngineState(endpoint)
        if self._interval > 0:
            self._ask(state)
        else:
            state.state, state.problem = State.READY, ""
            self._changed(state)

    def _ask(self, state: EngineState) -> None:
        key = state.endpoint.key
        self._tasks[key] = asyncio.create_task(self._watch(state), name=f"scrape {key}")

    def _stop(self, key: str) -> None:
        if task := self._tasks.pop(key, None):
            task.cancel()

    def _take_over(self, state: EngineState, endpoint: Endpoint) -> None:
        """The same engine under other labels, or with another objection; once there is none it is asked at
        once."""
        wanted = bool(state.endpoint.refusal) and not endpoint.refusal
        state.endpoint = endpoint
        if wanted and state.state is not State.READY and self._interval > 0:
            self._stop(endpoint.key)
            self._ask(state)

    async def _watch(self, state: EngineState) -> None:
        while True:
            async with self._gate:
                await self.scrape(state)
            hasty = 0 < state.failures < self._failures or state.state is State.NEW
            pause = min(self._interval, 0.5) if hasty else self._interval
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))

    async def scrape(self, state: EngineState) -> None:
        """Ask one engine once, and for its models when that is due."""
        asked_at = time.monotonic()
        try:
            text = require_engine((await self._get(state.endpoint, "/metrics")).decode(errors="replace"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._failed(state, _why(error))
            return
        served = state.served
        if state.models_at is None or asked_at - state.models_at >= self._models_interval:
            served = await self._models(state, asked_at)
        self._answered(state, parse(text), served, asked_at)

    async def _models(self, state: EngineState, now: float) -> Served:
        try:
            served = parse_models(await self._get(state.endpoint, "/v1/models"))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            state.models_problem = _why(error)
            return state.served
        state.models_problem = ""
        state.models_at = now
        return served

    async def _get(self, endpoint: Endpoint, path: str) -> bytes:
        if self._session is None:
            raise RuntimeError("the scraper is used with `async with`")
        async with self._session.get(f"http://{endpoint.hostport}{path}", allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"{path} answered {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    raise ValueError(f"{path} is larger than {MAX_PAGE_BYTES} bytes")
            return bytes(body)

    def _answered(self, state: EngineState, sample: EngineSample, served: Served, asked_at: float) -> None:
        fresh = state.state is not State.READY
        if fresh:
            logger.info("%s at %s is ready", state.endpoint.key, state.endpoint.hostport)
        news = fresh or served != state.served
        state.state, state.problem, state.failures = State.READY, "", 0
        state.sample, state.served, state.asked_at = sample, served, asked_at
        state.rates.observe(sample, asked_at)
        state.recent.observe(sample, asked_at)
        if sample.cache_usage < FULL_CACHE:
            state.batch.observe(sample.running, sample.waiting)
        self._scraped(state)
        if news:
            self._changed(state)

    def _failed(self, state: EngineState, problem: str) -> None:
        state.failures += 1
        state.problem = problem
        if state.failures == self._failures:
            state.state = State.UNREACHABLE
            state.models_at = None
            endpoint = state.endpoint
            level = logging.INFO if endpoint.refusal else logging.WARNING  # one that starts is no trouble
            logger.log(level, "%s at %s is unreachable: %s", endpoint.key, endpoint.hostport, problem)
            self._changed(state)


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error)[:200] or type(error).__name__
