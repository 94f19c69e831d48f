"""Puts the parts together: loops that look, hear and work, until they are told to stop.

::

    handlers ──heard──▶ watching ──▶ store ──▶ schedule ──▶ reconcile ──▶ cluster
                           ▲                      ▲
    every --resync ────────┴── every pool ────────┘
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final

from kvist_operator.cluster.failures import FIRST_SECONDS
from kvist_operator.cluster.kinds import Kind
from kvist_operator.cluster.port import Cluster, Json
from kvist_operator.cluster.store import PoolKey, Store
from kvist_operator.cluster.surroundings import Surroundings
from kvist_operator.cluster.watching import Watching
from kvist_operator.errors import ClusterError, OperatorError
from kvist_operator.manifests import Site
from kvist_operator.reconcile.fleet import Pickers
from kvist_operator.reconcile.library import Library
from kvist_operator.reconcile.reconciler import Reconciler
from kvist_operator.reconcile.schedule import Schedule

from .metrics import Metrics
from .settings import Settings

logger = logging.getLogger(__name__)

GATHER_SECONDS: Final = 0.1
"""Events of one pool that come together are one look at it."""
LONGEST_SECONDS: Final = 30.0
STUCK_SECONDS: Final = 600.0
"""A worker that has been at it for so long will not end by itself."""

Heard = Callable[[str | None, Json], None]
Follow = Callable[[Iterable[Kind], Heard], Awaitable[None]]
"""Follows these kinds until it is cancelled; raises Unavailable when it ends by itself."""


class Operator:
    """``run`` is all of it; ``follow`` is what hears."""

    def __init__(self, settings: Settings, cluster: Cluster, follow: Follow) -> None:
        self.settings = settings
        self.store = Store()
        self.schedule: Schedule[PoolKey] = Schedule()
        self.metrics = Metrics()
        self.surroundings = Surroundings(cluster, nodes_allowed=not settings.watched)
        self.watching = Watching(cluster, self.store, settings.watched, self.changed)
        self.library = Library(self._answered)
        self.fleet = Pickers(cluster, self.store, self.changed)
        self.reconciler = Reconciler(
            cluster=cluster,
            store=self.store,
            surroundings=self.surroundings,
            library=self.library,
            fleet=self.fleet,
            images=Site(picker_image=settings.picker_image, envoy_image=settings.envoy_image),
        )
        self._follow = follow
        self._wake = asyncio.Event()
        self._restart = asyncio.Event()
        self._began: dict[PoolKey, float] = {}
        self._loaded = False
        self._deaf = ""
        """Why nothing is heard at present."""

    async def run(self) -> None:
        """Until it is cancelled. Raises ClusterError where the first look at the cluster fails."""
        await self.discover()
        self._loaded = True
        logger.info("%d pools, %d objects", len(self.store.pools()), len(self.store))
        try:
            async with self.fleet, asyncio.TaskGroup() as group:
                group.create_task(self.fleet.run(self.settings.fleet_interval), name="fleet")
                group.create_task(self._hear(), name="hear")
                group.create_task(self._look_around(), name="look around")
                group.create_task(self._resync(), name="resync")
                for number in range(self.settings.workers):
                    group.create_task(self._work(), name=f"worker {number}")
        finally:
            await self.library.close()

    def changed(self, key: PoolKey) -> None:
        """Something of this pool is not as it was."""
        self._add(key, GATHER_SECONDS)

    def alive(self) -> str:
        """What is wrong with the process; empty = nothing."""
        now = time.monotonic()
        stuck = [str(key) for key, at in self._began.items() if now - at > STUCK_SECONDS]
        return f"no end to {', '.join(stuck)}" if stuck else ""

    def ready(self) -> str:
        """Why pools are not seen to at present; empty = they are."""
        return self._deaf if self._loaded else "the cluster has not been read yet"

    def told(self) -> bytes:
        """The metrics, the gauges brought up to date."""
        self.metrics.queue.set(len(self.schedule))
        self.metrics.pools.set(len(self.store.pools()))
        self.metrics.objects.set(len(self.store))
        return self.metrics.text()

    def _answered(self) -> None:
        for key in sorted(self.reconciler.pending):
            self._add(key, 0.0)

    def _add(self, key: PoolKey, seconds: float) -> None:
        self.schedule.add(key, time.monotonic() + seconds)
        self._wake.set()

    def _all(self) -> None:
        for key in self.store.pools():
            self._add(key, 0.0)

    async def discover(self) -> None:
        """What there is; where that has changed, all pools are looked at again."""
        before = self.surroundings.seen
        seen = await self.surroundings.look()
        if await self.watching.follow(seen.kinds):
            self._restart.set()
        if seen != before:
            self._all()

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(self.settings.discovery_interval)
            try:
                await self.discover()
            except ClusterError as error:
                logger.warning("what there is in the cluster is not known: %s", error)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self.settings.resync)
            try:
                await self.watching.look()
            except ClusterError as error:
                logger.warning("no look at everything: %s", error)
            self._all()

    async def _hear(self) -> None:
        """Follow what is to be followed; anew when that changes, or when it has ended."""
        failures = 0
        while True:
            self._restart.clear()
            started = time.monotonic()
            why = await self._heard_until()
            if not why:
                failures = 0
                continue
            failures = 1 if time.monotonic() - started > LONGEST_SECONDS else failures + 1
            self.metrics.restarts.inc()
            self._deaf = why
            logger.warning("%s", why)
            await asyncio.sleep(min(LONGEST_SECONDS, FIRST_SECONDS * 2.0**failures))

    async def _heard_until(self) -> str:
        """Why it ended; empty = there is something else to follow."""
        hearing = asyncio.ensure_future(self._follow(self.watching.kinds, self._told))
        restart = asyncio.ensure_future(self._restart.wait())
        try:
            await asyncio.wait({hearing, restart}, return_when=asyncio.FIRST_COMPLETED)
            return str(hearing.exception() or "watching ended") if hearing.done() else ""
        finally:
            for task in (hearing, restart):
                task.cancel()
                with suppress(asyncio.CancelledError, OperatorError):
                    await task

    def _told(self, verb: str | None, found: Json) -> None:
        self._deaf = ""
        self.watching.heard(verb, found)

    async def _work(self) -> None:
        while True:
            key = self.schedule.pop(time.monotonic())
            if key is None:
                await self._nothing_due()
                continue
            self._began[key] = time.monotonic()
            try:
                await self._see_to(key)
            finally:
                self.metrics.seconds.observe(time.monotonic() - self._began.pop(key))

    async def _nothing_due(self) -> None:
        """Sleep until something is."""
        self._wake.clear()
        at = self.schedule.next_at()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if at is None else max(0.0, at - time.monotonic())):
                await self._wake.wait()

    async def _see_to(self, key: PoolKey) -> None:
        try:
            again = await self.reconciler.reconcile(key)
        except OperatorError as error:
            self._failed(key, error.reason)
        except Exception:
            logger.exception("%s: a fault of the operator's own", key)
            self._failed(key, "InternalError")
        else:
            self.metrics.reconciles.labels("ok").inc()
            self.schedule.done(key)
            if again is not None:
                self._add(key, again)

    def _failed(self, key: PoolKey, reason: str) -> None:
        wait = self.schedule.failed(key)
        self.metrics.reconciles.labels(reason).inc()
        logger.info("%s: %s, again in %g s", key, reason, wait)
        self._add(key, wait)
