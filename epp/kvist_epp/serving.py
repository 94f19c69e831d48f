"""The picker as a process: makes the parts, opens the ports, runs until a signal, drains."""

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvist_epp
from kvist_epp.admin import log, views
from kvist_epp.admin import server as admin
from kvist_epp.admin.metrics import Metrics
from kvist_epp.admin.pages import Pages
from kvist_epp.cache.health import Trust
from kvist_epp.cache.history import History
from kvist_epp.cache.index import Index
from kvist_epp.cache.learner import Learner
from kvist_epp.cache.lookup import Lookup
from kvist_epp.cache.subscriber import Subscriber
from kvist_epp.errors import SettingsError
from kvist_epp.fleet.ledger import Ledger
from kvist_epp.fleet.scrape import Scraper
from kvist_epp.fleet.watch import FileWatch
from kvist_epp.flights import Flights
from kvist_epp.membership import Membership
from kvist_epp.picker import Picker
from kvist_epp.prompt.model import Model
from kvist_epp.settings import Settings
from kvist_epp.wire.accesslog import Ended
from kvist_epp.wire.call import Method, Server
from kvist_epp.wire.health import Health
from kvist_epp.wire.limits import Limits
from kvist_epp.wire.service import health_methods, methods

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.25
"""How often requests expire, trust is weighed and counters are brought up to date."""


@dataclass(frozen=True, slots=True)
class Running:
    """A picker whose ports are open."""

    picker: Picker
    membership: Membership
    health: Health
    grpc: Server
    grpc_health: Server
    metrics_port: int

    async def drain(self, grace_seconds: float) -> None:
        """Not ready from now on; running calls get their answers."""
        self.health.set(False)
        await asyncio.gather(self.grpc.drain(grace_seconds), self.grpc_health.drain(0))


def main(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises ``KvistError`` or ``OSError`` when it cannot start."""
    import uvloop

    uvloop.run(_until_told(settings))


async def _until_told(settings: Settings) -> None:
    stop = asyncio.Event()
    async with running(settings) as picker:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        logger.info(
            "listening: ext_proc %d, health %d, metrics %d, transport %s",
            picker.grpc.port,
            picker.grpc_health.port,
            picker.metrics_port,
            settings.transport,
        )
        await stop.wait()
        logger.info("draining, at most %g s", settings.drain_seconds)
        await picker.drain(settings.drain_seconds)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Running]:
    """A picker with open ports; everything is closed on the way out."""
    async with AsyncExitStack() as stack:
        logs = log.configure(
            level=settings.log_level,
            form=settings.log_format,
            requests=settings.log_requests,
            debug_text=settings.debug_text,
        )
        stack.callback(logs.close)
        model = _model(settings)
        picker = _picker(settings, model, logs)
        membership = await _membership(settings, picker, model, stack)
        _gauges(picker, membership, logs)
        watch = FileWatch(Path(settings.endpoints_file), membership.follow, lambda _: _refused(picker))
        health = Health()
        grpc, grpc_health = await _servers(settings, picker, health, stack)
        pages = await _pages(settings, picker, membership, watch, health)
        stack.push_async_callback(pages.close)
        _run(stack, watch.run(), "endpoints file")
        _run(stack, _tick(membership, _Gate(membership, health, settings.warm_seconds)), "tick")
        _settle_memory()
        yield Running(picker, membership, health, grpc, grpc_health, pages.port)


def _model(settings: Settings) -> Model | None:
    """Blocks: nothing else runs yet, and a signal still ends the process at once."""
    if not settings.model:
        logger.warning("no --model: approximate mode, from the routing history alone")
        return None
    model = Model.load(settings.model)
    if not model.faithful:
        logger.warning("%s: approximate mode, its bytes are not faithful: %s", settings.model, model.why_not)
    return model


def _picker(settings: Settings, model: Model | None, logs: log.Logs) -> Picker:
    index, history = Index(), History()
    return Picker(
        model=model,
        index=index,
        history=history,
        lookup=Lookup(index, history),
        ledger=Ledger(
            default_rate=settings.prefill_tokens_per_second, expire_seconds=settings.request_seconds
        ),
        flights=Flights(),
        metrics=Metrics(version=kvist_epp.__version__),
        log=logs.requests,
        max_endpoints=settings.max_endpoints,
    )


async def _membership(
    settings: Settings, picker: Picker, model: Model | None, stack: AsyncExitStack
) -> Membership:
    learner = subscriber = None
    if settings.kv_events and model is not None and model.faithful:
        learner = Learner(picker.index, model)
        subscriber = _subscriber(settings, learner, picker)
        stack.push_async_callback(subscriber.close)
        picker.expect = learner.expect
        learner.begins = picker.begins
    membership = Membership(settings, picker, learner, subscriber, Trust())
    membership.scraper = Scraper(
        scraped=membership.scraped,
        changed=membership.changed,
        interval=settings.scrape_interval,
        timeout=settings.scrape_timeout,
    )
    await stack.enter_async_context(membership.scraper)
    picker.truth = membership.truth
    picker.departed = membership.departed
    return membership


def _subscriber(settings: Settings, learner: Learner, picker: Picker) -> Subscriber:
    try:
        return Subscriber(learner, observe=picker.observed, bind=settings.kv_events_bind or None)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--kv-events-bind: cannot bind {settings.kv_events_bind}: {error}") from error


def _gauges(picker: Picker, membership: Membership, logs: log.Logs) -> None:
    gauges = picker.metrics.gauges
    gauges.index_blocks = membership.blocks
    gauges.trust = membership.trusted
    gauges.owed = membership.owed
    gauges.endpoints = membership.scraper.counts
    gauges.model_faithful = lambda: picker.model is not None and picker.model.faithful
    gauges.log_dropped = lambda: logs.writer.dropped


def _refused(picker: Picker) -> None:
    picker.metrics.bad_endpoints_files += 1


async def _servers(
    settings: Settings, picker: Picker, health: Health, stack: AsyncExitStack
) -> tuple[Server, Server]:
    def ended(entries: list[Ended]) -> None:
        for entry in entries:
            if entry.session:
                refused = not 200 <= entry.status < 400
                picker.settled([entry.session], "access-log", refused=refused)

    def trouble(kind: str, count: int) -> None:
        picker.metrics.troubles[kind] += count

    observe = settings.observe_responses
    served = methods(picker.decide, ended, health, observe_responses=observe, trouble=trouble)
    grpc = await _listen(settings, served, settings.grpc_port, "--grpc-port")
    stack.push_async_callback(grpc.close)
    port = settings.grpc_health_port
    grpc_health = await _listen(settings, health_methods(health), port, "--grpc-health-port")
    stack.push_async_callback(grpc_health.close)
    return grpc, grpc_health


async def _listen(settings: Settings, served: dict[str, Method], port: int, flag: str) -> Server:
    try:
        if settings.transport == "grpc":
            from kvist_epp.wire.grpc_server import serve_grpc

            return await serve_grpc(served, settings.host or "[::]", port, settings.max_message_bytes)
        from kvist_epp.wire.server import serve_fast

        limits = Limits(message_bytes=settings.max_message_bytes)
        return await serve_fast(served, settings.host, port, limits)
    except OSError as error:
        raise SettingsError(f"{flag}: cannot listen on port {port}: {error}") from error


async def _pages(
    settings: Settings, picker: Picker, membership: Membership, watch: FileWatch, health: Health
) -> admin.AdminServer:
    pages = Pages(
        metrics=picker.metrics,
        explain=picker.explain,
        fleet=lambda: views.fleet(membership, watch),
        index=lambda: views.index(membership),
        not_ready=lambda: "" if health.ready else watch.problem or "warming up",
    )
    return await admin.serve(
        pages, settings.host, settings.metrics_port, body_limit=settings.max_message_bytes
    )


class _Gate:
    """Ready, once: when the fleet was listed and the index has caught up, or the wait for it is over."""

    def __init__(self, membership: Membership, health: Health, patience: float) -> None:
        self._membership = membership
        self._health = health
        self._patience = patience
        self._listed_at: float | None = None
        self._open = False

    def look(self) -> None:
        """Open it if it is time."""
        membership = self._membership
        if self._open or membership.fleet is None:
            return
        now = membership.picker.clock()
        self._listed_at = now if self._listed_at is None else self._listed_at
        cold = membership.cold()
        if not cold or now - self._listed_at >= self._patience:
            self._open = True
            self._health.set(True)
            logger.info("ready: %r%s", membership.picker.index, f", cold: {cold}" if cold else "")


async def _tick(membership: Membership, gate: _Gate) -> None:
    while True:
        membership.tick()
        gate.look()
        await asyncio.sleep(TICK_SECONDS)


def _run(stack: AsyncExitStack, coroutine: Coroutine[None, None, None], name: str) -> None:
    """A task for the life of the picker; if it dies, the picker says so and ends."""
    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(_died)

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(stop)


def _died(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s ended", task.get_name(), exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)


def _settle_memory() -> None:
    """What was loaded lives as long as the process: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
