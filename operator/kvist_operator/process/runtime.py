"""Starts the parts of the operator, runs their loops, and stops them at a signal.

::

    kopf_watch ──event──▶ PoolInformer ──▶ PoolCache ──▶ WorkQueue ──▶ Reconciler ──▶ Cluster
                               ▲                             ▲
    every --resync ────────────┴── every pool ───────────────┘
"""

import asyncio
import hashlib
import logging
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import kvist_epp
from kvist_kube.backoff import backoff_seconds
from kvist_kube.connection import LoadConfiguration, find_cluster
from kvist_kube.errors import ClusterNotFound
from kvist_operator.cluster import kopf_watch
from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.capabilities import Capabilities, check
from kvist_operator.cluster.cluster_api import Cluster, Json
from kvist_operator.cluster.kinds import ObjectKind
from kvist_operator.cluster.leader_election import LeaderElection
from kvist_operator.cluster.pool_cache import PoolCache, PoolInformer, PoolKey
from kvist_operator.cluster.presets import Presets
from kvist_operator.errors import ClusterError, OperatorError, StartError
from kvist_operator.manifests import Site
from kvist_operator.reconcile.model_cache import ModelCache
from kvist_operator.reconcile.picker_client import PickerClient
from kvist_operator.reconcile.reconciler import Reconciler
from kvist_operator.reconcile.work_queue import WorkQueue

from .observability import Metrics, configure_logging, monitoring_port
from .settings import OperatorSettings

logger = logging.getLogger(__name__)

GATHER_SECONDS: Final = 0.1
"""Events of one pool that arrive within this time lead to one reconciliation."""
FIRST_PAUSE_SECONDS: Final = 0.4
LONGEST_PAUSE_SECONDS: Final = 30.0
"""Longest pause before watching is started again; a watch that lasted longer resets the count of failures."""
STUCK_SECONDS: Final = 600.0
"""A reconciliation that takes longer than this will not end by itself."""

OnEvent = Callable[[str | None, Json], None]
Follow = Callable[[Iterable[ObjectKind], OnEvent], Awaitable[None]]
"""Watches these kinds until cancelled; raises Unavailable when it ends by itself."""


async def serve(settings: OperatorSettings, environment: Mapping[str, str]) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises StartError, or ClusterError when the cluster does not answer.
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        load = find_cluster(environment, otherwise="set KUBECONFIG, or run in a pod")
    except ClusterNotFound as error:
        raise StartError(str(error)) from error
    server = ApiServer(load)
    stop = asyncio.Event()

    def handle_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)

    handle_signals()
    try:
        work = asyncio.ensure_future(_run(settings, server, load, handle_signals))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        logger.info("the operator is shutting down")
        stopped.cancel()
        work.cancel()
        for outcome in await asyncio.gather(work, stopped, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    finally:
        await server.close()


async def _run(
    settings: OperatorSettings, server: ApiServer, load: LoadConfiguration, handle_signals: Callable[[], None]
) -> None:
    async def follow(kinds: Iterable[ObjectKind], on_event: OnEvent) -> None:
        await kopf_watch.follow(load, kinds, settings.watched, on_event, handle_signals)

    operator = Operator(settings, server, follow)
    operator.metrics.count_requests(lambda: server.connection.requests)
    host, port = settings.metrics_host, settings.metrics_port
    async with monitoring_port(host, port, operator.metrics_page, operator.alive, operator.ready) as bound:
        logger.info("kvist-operator %s is starting; its metrics port is %d", kvist_epp.__version__, bound)
        await check(server, server.may, settings.watched)
        if settings.lease:
            namespace, _, name = settings.lease.partition("/")
            identity = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
            await operator.run_as_leader(LeaderElection(server, namespace, name, identity))
        else:
            await operator.run()


def build_identity() -> str:
    """Return the version and a hash of the operator's files, so that each build has another one."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".yaml", ".json"):
            digest.update(file.read_bytes())
    return f"{kvist_epp.__version__}-{digest.hexdigest()[:12]}"


class Operator:
    """All parts and their loops; ``follow`` watches the cluster."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster, follow: Follow) -> None:
        self.settings = settings
        self.cache = PoolCache()
        self.queue: WorkQueue[PoolKey] = WorkQueue()
        self.metrics = Metrics()
        self.capabilities = Capabilities(cluster, nodes_allowed=not settings.watched)
        self.informer = PoolInformer(cluster, self.cache, settings.watched, self.on_change)
        self.presets = Presets(cluster, settings.watched, settings.lease.partition("/")[0])
        self.models = ModelCache(self._on_model_found)
        self.pickers = PickerClient(cluster.annotate, self.cache, self.on_change)
        self.reconciler = Reconciler(
            cluster=cluster,
            cache=self.cache,
            capabilities=self.capabilities,
            models=self.models,
            pickers=self.pickers,
            presets=self.presets,
            images=Site(picker_image=settings.picker_image, envoy_image=settings.envoy_image),
            engine_image=settings.engine_image,
            identity=build_identity(),
            release=settings.lease,
            prices=settings.price_list,
            observer=self.metrics.by_pool,
        )
        self._follow = follow
        self._wake = asyncio.Event()
        self._restart_watch = asyncio.Event()
        self._started_at: dict[PoolKey, float] = {}
        self._loaded = False
        self._standby = False
        self._watch_problem = ""
        """Why no events arrive at present; empty while they do."""

    async def run_as_leader(self, election: LeaderElection) -> None:
        """Wait until this replica is the leader, then run until cancelled. Raises LeadershipLost, and what
        ``run`` raises."""
        self._standby = True
        await election.acquire()
        self._standby = False
        tasks = {asyncio.ensure_future(election.hold()), asyncio.ensure_future(self.run())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.metrics.leader.set(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await election.release()

    async def run(self) -> None:
        """Run until cancelled. Raises ClusterError when the first discovery fails."""
        self.metrics.leader.set(1)
        await self.discover()
        self._loaded = True
        logger.info(
            "the cluster has %d InferencePools; the operator watches %d objects",
            len(self.cache.pools()),
            len(self.cache),
        )
        try:
            async with self.pickers, asyncio.TaskGroup() as group:
                group.create_task(self.pickers.run(self.settings.fleet_interval), name="poll pickers")
                group.create_task(self._watch_forever(), name="watch")
                group.create_task(self._discover_forever(), name="discover")
                group.create_task(self._resync_forever(), name="resync")
                for number in range(self.settings.workers):
                    group.create_task(self._work(), name=f"worker {number}")
        finally:
            await self.models.close()

    def on_change(self, key: PoolKey) -> None:
        """Queue a pool of which something has changed."""
        self._enqueue(key, GATHER_SECONDS)

    def alive(self) -> str:
        """Return why the process should be restarted; empty when it should not."""
        now = time.monotonic()
        stuck = [str(key) for key, at in self._started_at.items() if now - at > STUCK_SECONDS]
        return f"reconciling {', '.join(stuck)} takes too long" if stuck else ""

    def ready(self) -> str:
        """Return why pools are not reconciled at present; empty when they are, or when another replica
        reconciles them."""
        if self._standby:
            return ""
        return self._watch_problem if self._loaded else "the cluster has not been read yet"

    def metrics_page(self) -> bytes:
        """Return the metrics, with current gauges."""
        self.metrics.queue.set(len(self.queue))
        self.metrics.pools.set(len(self.cache.pools()))
        self.metrics.objects.set(len(self.cache))
        return self.metrics.text()

    async def discover(self) -> None:
        """Discover the cluster's capabilities and presets; queue all pools when they have changed. Raises
        ClusterError."""
        before = self.capabilities.latest
        latest = await self.capabilities.discover()
        if await self.informer.follow(latest.kinds):
            self._restart_watch.set()
        if await self.presets.refresh() or latest != before:
            self._enqueue_all()

    def _on_model_found(self) -> None:
        for key in sorted(self.reconciler.pending):
            self._enqueue(key, 0.0)

    def _enqueue(self, key: PoolKey, seconds: float) -> None:
        self.queue.add(key, time.monotonic() + seconds)
        self._wake.set()

    def _enqueue_all(self) -> None:
        for key in self.cache.pools():
            self._enqueue(key, 0.0)

    async def _discover_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.discovery_interval)
            try:
                await self.discover()
            except ClusterError as error:
                logger.warning("discovery of the cluster's capabilities failed, will retry: %s", error)

    async def _resync_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.resync)
            try:
                await self.informer.resync()
            except ClusterError as error:
                logger.warning("periodic resync failed, will retry: %s", error)
            self._enqueue_all()

    async def _watch_forever(self) -> None:
        """Watch the informer's kinds; start again when these change, or when watching has failed."""
        failures = 0
        while True:
            self._restart_watch.clear()
            started = time.monotonic()
            problem = await self._watch()
            if not problem:
                failures = 0
                continue
            failures = 1 if time.monotonic() - started > LONGEST_PAUSE_SECONDS else failures + 1
            self.metrics.restarts.inc()
            self._watch_problem = problem
            pause = backoff_seconds(failures, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
            logger.warning("%s; watching again in %g s", problem, pause)
            await asyncio.sleep(pause)

    async def _watch(self) -> str:
        """Return why the watch ended; empty if it has to restart with other kinds."""
        watch = asyncio.ensure_future(self._follow(self.informer.kinds, self._on_event))
        restart = asyncio.ensure_future(self._restart_watch.wait())
        try:
            await asyncio.wait({watch, restart}, return_when=asyncio.FIRST_COMPLETED)
            return str(watch.exception() or "the watch ended") if watch.done() else ""
        finally:
            for task in (watch, restart):
                task.cancel()
                with suppress(asyncio.CancelledError, OperatorError):
                    await task

    def _on_event(self, verb: str | None, found: Json) -> None:
        self._watch_problem = ""
        self.informer.on_event(verb, found)

    async def _work(self) -> None:
        while True:
            key = self.queue.pop(time.monotonic())
            if key is None:
                self._wake.clear()
                at = self.queue.next_at()
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if at is None else max(0.0, at - time.monotonic())):
                        await self._wake.wait()
                continue
            self._started_at[key] = time.monotonic()
            try:
                await self._reconcile(key)
            finally:
                self.metrics.seconds.observe(time.monotonic() - self._started_at.pop(key))

    async def _reconcile(self, key: PoolKey) -> None:
        again: float | None
        try:
            again, result = await self.reconciler.reconcile(key), "ok"
            self.queue.done(key)
        except Exception as error:
            result = error.reason if isinstance(error, OperatorError) else "InternalError"
            if not isinstance(error, OperatorError):
                logger.exception("%s: reconciling failed with an internal error", key)
            again = self.queue.failed(key)
            logger.info("%s: reconciling failed (%s), will retry in %g s", key, result, again)
        self.metrics.reconciles.labels(result).inc()
        self.metrics.by_pool.on_reconciled(key, ok=result == "ok")
        if again is not None:
            self._enqueue(key, again)
