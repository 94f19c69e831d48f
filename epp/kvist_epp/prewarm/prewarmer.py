"""Prewarming in a running picker: polls the planner, requests its steps, and cancels those no longer
wanted."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.disaggregation.legs import OFF
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.prewarm.prewarm_client import PrewarmClient, PrewarmOutcome
from kvist_epp.prewarm.prewarm_planner import PrewarmLimits, PrewarmPlanner
from kvist_epp.prewarm.prewarm_step import PrewarmStep
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.counters import PrewarmStats

logger = logging.getLogger(__name__)


class PrewarmLog:
    """Logs when prewarming starts and ends."""

    def __init__(self, stats: PrewarmStats, clock: Callable[[], float]) -> None:
        self._stats, self._clock = stats, clock
        self._started_at: float | None = None
        """Time of the first selection; None while no prefix is pending."""
        self._before = (0, 0)

    def on_selected(self, reason: str, tokens: int) -> None:
        """Log a selection of prefixes."""
        logger.info("prewarming %s starts: %d tokens", reason, tokens)
        if self._started_at is None:
            self._started_at, self._before = self._clock(), (self._stats.tokens, self._stats.failed)

    def on_idle(self) -> None:
        """Log the end, if prewarming had started."""
        if self._started_at is None:
            return
        (tokens, failed), seconds = self._before, self._clock() - self._started_at
        self._started_at = None
        logger.info(
            "prewarming ends: %d tokens computed in %.1f s, %d requests failed",
            self._stats.tokens - tokens,
            seconds,
            self._stats.failed - failed,
        )


class Prewarmer:
    """Requests the steps of a planner from engines."""

    def __init__(
        self,
        planner: PrewarmPlanner,
        send: Callable[[Endpoint, str, bytes, str | None], Awaitable[PrewarmOutcome]],
        log: PrewarmLog,
        *,
        clock: Callable[[], float],
        model: Callable[[str], str | None] = lambda _key: None,
        keyed: bool = False,
    ) -> None:
        """``send`` requests (endpoint, session, prompt, model) from an engine. ``model`` returns the name by
        which an endpoint serves its model, if known. ``keyed``: requests have an API key, which may change,
        so that an engine that rejects it is asked again later."""
        self.denied = False
        """Whether an engine rejected the API key, or asked for one. Without a key nothing more is
        requested."""
        self._keyed = keyed
        self._planner, self._send, self._log, self._clock = planner, send, log, clock
        self._model = model
        self._tasks: dict[PrewarmStep, asyncio.Task[None]] = {}
        self._answered = asyncio.Event()

    async def run(self) -> None:
        """Prewarm until cancelled; then cancel all steps and wait for their end."""
        try:
            while self._keyed or not self.denied:
                self.poll()
                self._answered.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._planner.pause):
                        await self._answered.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.Event().wait()

    def poll(self) -> None:
        """Request the steps that are due, and cancel those whose endpoint cannot be picked any longer."""
        for step in self._planner.poll(self._clock()):
            name = f"prewarming of {step.endpoint.key}"
            self._tasks[step] = asyncio.create_task(self._request(step), name=name)
        for step, task in list(self._tasks.items()):
            if not self._planner.is_wanted(step):
                task.cancel()
        if self._planner.idle and not self._tasks:
            self._log.on_idle()

    async def _request(self, step: PrewarmStep) -> None:
        outcome, started = PrewarmOutcome.FAILED, self._clock()
        try:
            key = step.endpoint.key
            outcome = await self._send(step.endpoint, step.session, step.text, self._model(key))
        finally:
            now = self._clock()
            del self._tasks[step]
            if outcome is PrewarmOutcome.UNFIT:
                self._planner.drop(step)
            good = outcome is PrewarmOutcome.DONE
            self._planner.on_ended(step, now, good=good, seconds=now - started)
            if outcome is PrewarmOutcome.DENIED and not self.denied:
                self._on_denied(step.endpoint.key)
            self.denied = self.denied and not good
            self._answered.set()

    def _on_denied(self, key: str) -> None:
        """Write one line to the log, again after an engine has accepted the key."""
        self.denied = True
        if self._keyed:
            logger.warning(
                "%s rejects the API key in --engine-key-file, so it is not prewarmed for now: if it was "
                "started with another key, it has to be restarted to read a new one",
                key,
            )
            return
        logger.warning(
            "prewarming stops, because %s requires an API key. Provide it with --engine-key-file, or set "
            "--prewarm-tokens=0",
            key,
        )


@asynccontextmanager
async def open_prewarmer(settings: Settings, registry: EndpointRegistry) -> AsyncIterator[Prewarmer]:
    """Connect a prewarmer with a director that notes hot prefixes; the caller runs it."""
    director, clock, stats = registry.director, registry.clock, PrewarmStats()
    assert director.hot is not None, "prewarming is on"
    log = PrewarmLog(stats, clock)
    planner = PrewarmPlanner(
        director,
        director.hot,
        PrewarmLimits(tokens=settings.prewarm_tokens, step_tokens=settings.prewarm_step_tokens),
        stats=stats,
        name=f"{director.replica}.prewarm",
        start=random.random() if settings.replicas else 0.0,
        splits=settings.disaggregation != OFF,
        cache_tokens=lambda key: cache_tokens_of(registry, key),
        on_selected=log.on_selected,
    )
    director.metrics.gauges.prewarm = lambda: stats
    registry.add_leaving_listener(lambda keys: planner.on_leaving(keys, clock()))
    lowest_priority = settings.scheduling_policy == "priority"
    async with PrewarmClient(key_file=settings.engine_key_file, lowest_priority=lowest_priority) as client:
        yield Prewarmer(
            planner,
            client.send,
            log,
            clock=clock,
            model=lambda key: model_of(registry, key),
            keyed=client.key.given,
        )


def model_of(registry: EndpointRegistry, key: str) -> str | None:
    """Return a name of the base model that an endpoint serves; None if it is not known."""
    state = registry.states.get(key)
    return min(state.scrape.served.models, default=None) if state is not None else None


def cache_tokens_of(registry: EndpointRegistry, key: str) -> int | None:
    """Return how many tokens an endpoint's cache holds; None if it is not known."""
    state = registry.states.get(key)
    return state.scrape.sample.cache_tokens if state is not None else None
