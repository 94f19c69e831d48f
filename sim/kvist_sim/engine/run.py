"""Assemble the parts of the simulated engine and run them until SIGTERM."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import zmq
from aiohttp import web

from kvist_epp.errors import SettingsError
from kvist_sim import model
from kvist_sim.engine.args import Settings
from kvist_sim.engine.blocks import BlockPool, Hasher
from kvist_sim.engine.loop import Engine, WallClock
from kvist_sim.engine.metrics import Metrics
from kvist_sim.engine.offload import OffloadTiers
from kvist_sim.engine.scheduler import Limits, Scheduler
from kvist_sim.engine.server import Server
from kvist_sim.engine.tokenizer import Prompts, Writer, local
from kvist_sim.publisher import Publisher, PublisherConfig, offset_port

log = logging.getLogger("kvist.sim.engine")


def tokenizer_of(settings: Settings) -> str:
    """Return the given folder or hub address; our own vocabulary for a mere name, so that nothing is
    downloaded."""
    if settings.tokenizer.startswith("hf://") or local(settings.tokenizer):
        return settings.tokenizer
    if settings.tokenizer != model.NAME:
        log.info("no tokenizer files at %s: using the simulator's own vocabulary", settings.tokenizer)
    return str(model.folder())


@asynccontextmanager
async def started(settings: Settings) -> AsyncIterator["Running"]:
    """Start an engine and yield it; stop everything on exit.

    Raises ModelFilesError for unusable tokenizer files, SettingsError for a port or KV endpoint that cannot
    be had.
    """
    prompts = Prompts(tokenizer_of(settings))
    longest = _longest(settings, prompts)
    metrics = Metrics(settings.served[0], longest, settings.cache_info, tiers=settings.offload is not None)
    async with contextlib.AsyncExitStack() as stack:
        publishers = _publishers(settings, stack)
        engines = {
            rank: _engine(settings, rank, longest, metrics, publishers.get(rank)) for rank in settings.ranks
        }
        server = Server(
            settings,
            engines,
            prompts,
            _writer(settings, prompts),
            metrics,
            longest=longest,
            sources={str(rank): _source(settings, publisher) for rank, publisher in publishers.items()},
            now=WallClock().now,
        )
        runner = web.AppRunner(
            server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        running = Running(engines, runner, await _listen(settings, runner))
        for engine in engines.values():
            stack.push_async_callback(_cancelled, asyncio.create_task(engine.run()))
        yield running


class Running:
    """Interfaces of a started engine."""

    def __init__(self, engines: dict[int, Engine], runner: web.AppRunner, site: web.TCPSite) -> None:
        self.engines = engines
        self._runner = runner
        self._site = site

    @property
    def port(self) -> int:
        """Port that was bound."""
        return int(self._runner.addresses[0][1])

    async def drain(self, seconds: float) -> None:
        """Stop listening, wait ``seconds`` for the requests, then end them with finish reason abort."""
        await self._site.stop()
        deadline = asyncio.get_running_loop().time() + seconds
        while any(engine.requests for engine in self.engines.values()):
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(0.01)
        for engine in self.engines.values():
            engine.abort_all()


def _publishers(settings: Settings, stack: contextlib.AsyncExitStack) -> dict[int, Publisher]:
    """One per rank, none when events are off."""
    if not settings.events.on:
        return {}
    events = settings.events
    config = PublisherConfig(
        endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
        buffer_steps=events.buffer_steps,
        hwm=events.hwm,
        topic=events.topic,
    )
    made: dict[int, Publisher] = {}
    for rank in settings.ranks:
        try:
            made[rank] = Publisher(config, rank)
        except (zmq.ZMQError, ValueError) as problem:
            raise SettingsError(f"--kv-events-config: {events.endpoint}, rank {rank}: {problem}") from problem
        stack.callback(made[rank].close)
    return made


def _source(settings: Settings, publisher: Publisher) -> dict[str, object]:
    """vLLM's ``KVEventsConfig`` with the rank's ports; only a port 0 is resolved to what was bound."""
    events = settings.events
    replay = events.replay_endpoint
    where = {
        "endpoint": _resolved(events.endpoint, publisher.endpoint, publisher.rank),
        "replay_endpoint": replay and _resolved(replay, publisher.replay_endpoint or "", publisher.rank),
    }
    return asdict(events) | {"publisher": "zmq"} | where


def _resolved(given: str, bound: str, rank: int) -> str:
    return bound if given.endswith(":0") else offset_port(given, rank)


def _longest(settings: Settings, prompts: Prompts) -> int:
    wanted = settings.max_model_len or prompts.longest or 40_960
    room = (settings.blocks - 1) * settings.block_size
    if wanted > room:
        log.warning("context length %d does not fit in %d tokens of cache: reduced", wanted, room)
    return min(wanted, room)


def _engine(
    settings: Settings, rank: int, longest: int, metrics: Metrics, publisher: Publisher | None
) -> Engine:
    pool = BlockPool(settings.blocks, settings.block_size, caching=settings.prefix_caching)
    hasher = Hasher(settings.block_size, settings.hash_algorithm, settings.hash_seed)
    limits = Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=longest,
        chunked_prefill=settings.chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        reserve_full_prompt=settings.reserve_full_prompt,
    )
    offload = settings.offload
    tiers = None if offload is None else OffloadTiers(offload, settings.block_size, seed=settings.seed)
    prompts_only = offload is None or offload.prompts_only
    return Engine(
        rank,
        Scheduler(pool, hasher, limits, tiers, prompts_only=prompts_only),
        settings.timing,
        metrics.rank(rank),
        clock=WallClock(),
        publisher=publisher,
        tiers=tiers,
    )


def _writer(settings: Settings, prompts: Prompts) -> Writer:
    corpus = (model.folder() / "corpus.txt").read_text(encoding="utf-8")
    return Writer(corpus, prompts.encode, noncanonical=settings.noncanonical)


async def _listen(settings: Settings, runner: web.AppRunner) -> web.TCPSite:
    site = web.TCPSite(runner, settings.host, settings.port, backlog=2_048)
    try:
        await site.start()
    except OSError as problem:
        where = f"{settings.host or '*'}:{settings.port}"
        raise SettingsError(f"cannot listen on {where}: {problem.strerror}") from problem
    return site


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code. Raises as ``started``."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with started(settings) as running:
        log.info("serving %s on port %d, ranks %s", settings.served[0], running.port, list(running.engines))
        await stop.wait()
        await running.drain(settings.shutdown_timeout)
    return 0
