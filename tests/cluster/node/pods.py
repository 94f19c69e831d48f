"""The life of one pod: network, volumes, init containers, containers, the end."""

import asyncio
import shutil
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from tests.cluster.client import Client

from . import eviction
from .containers import Container
from .errors import WaitingError
from .facts import Facts
from .follow import Json, Store, now
from .images import Images
from .network import Addresses, PodNetwork, hosts, resolver
from .status import PodCondition
from .volumes import Volumes

STRATEGIC: Final = {"Content-Type": "application/strategic-merge-patch+json"}
USUAL_GRACE: Final = 30
RETRY_SECONDS: Final = 1.0
SIDECAR_SECONDS: Final = 0.1
"""Between two looks at whether a sidecar has started."""
REFRESH_SECONDS: Final = 60.0
"""Data are looked at when they change; this is for what was missed."""


@dataclass(frozen=True)
class Surroundings:
    """Parts that all pods of a node share."""

    client: Client
    store: Store
    images: Images
    addresses: Addresses
    folder: Path
    """Of the whole cluster."""
    node: str
    node_address: str


def _is_sidecar(container: Container) -> bool:
    return bool(container.spec.get("restartPolicy") == "Always")


class Pod:
    """One pod of this node; a ``containers.Host``."""

    def __init__(self, found: Json, around: Surroundings) -> None:
        meta = found["metadata"]
        self.uid = str(meta["uid"])
        self.facts = Facts(found, around.node, around.node_address, around.store)
        self.images = around.images
        self.network = PodNetwork(around.addresses.take())
        self.folder = around.folder / "pods" / self.uid
        self.logs = around.folder / "logs" / f"{meta['namespace']}_{meta['name']}_{self.uid[:8]}"
        claims = around.folder / "claims"
        self.volumes = Volumes(self.folder / "volumes", claims, self.facts, around.client, around.images)
        self.ending = False
        self.forced = False
        spec = found["spec"]
        self._policy = spec.get("restartPolicy", "Always")
        again = "OnFailure" if self._policy == "Always" else self._policy
        self.init = [
            Container(self, c, policy=c.get("restartPolicy", again)) for c in spec.get("initContainers", [])
        ]
        self._sidecars: list[asyncio.Task[bool]] = []
        self.containers = [Container(self, c, policy=self._policy) for c in spec["containers"]]
        self._condition = PodCondition(
            around.node_address,
            init=[c.condition for c in self.init],
            containers=[c.condition for c in self.containers],
        )
        self._around = around
        self._deadline = float("inf")
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._told: Json = {}
        self._mount_problem = ""
        self._events: set[asyncio.Task[None]] = set()

    @property
    def path(self) -> str:
        """At the API server."""
        return f"/api/v1/namespaces/{self.facts.namespace}/pods/{self.facts.name}"

    def update(self, found: Json) -> None:
        """Take in the pod as the API server has it now."""
        self.facts.pod = found
        if found["metadata"].get("deletionTimestamp"):
            self.end(found["metadata"].get("deletionGracePeriodSeconds", USUAL_GRACE))
        self.wake()

    def end(self, seconds: float, *, forced: bool = False) -> None:
        """End the pod within so many seconds; a later call may shorten the time."""
        now = asyncio.get_running_loop().time()
        self._deadline = min(self._deadline, now + seconds)
        self.ending = True
        self.forced |= forced
        self.wake()

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        self._wake.set()
        self._wake.clear()

    async def pause(self, seconds: float) -> None:
        """Wait for so many seconds, or until a change."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def extend(self, seconds: float) -> None:
        """At least so much is left of the time to end."""
        if not self.forced:
            self._deadline = max(self._deadline, asyncio.get_running_loop().time() + seconds)

    async def within_grace(self, work: Coroutine[Any, Any, object]) -> None:
        """Until it is done, or the time to end is up, which may become shorter meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and (left := self._deadline - asyncio.get_running_loop().time()) > 0:
                woken = asyncio.ensure_future(self.pause(left))
                await asyncio.wait({task, woken}, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def run(self) -> None:
        """From its first moment to the last."""
        telling = asyncio.create_task(self._tells())
        living = asyncio.create_task(self._lives())
        measuring = asyncio.create_task(self._measures())
        self._around.store.listeners.add(self.wake)
        try:
            while not self.ending:
                await self._refreshed()
                await self.pause(REFRESH_SECONDS)
            first = [c for c in self.init if not _is_sidecar(c)]
            await asyncio.gather(*(c.stop() for c in (*first, *self.containers)))
            for sidecar in reversed([c for c in self.init if _is_sidecar(c)]):
                await sidecar.stop()
            await asyncio.wait({living, *self._sidecars})
        finally:
            self._around.store.listeners.discard(self.wake)
            tasks = {telling, living, measuring, *self._sidecars}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._goes()

    async def _measures(self) -> None:
        """Evict the pod as soon as it uses more of the disk than it may."""
        spec = self.facts.pod["spec"]
        while eviction.has_limits(spec):
            await asyncio.sleep(eviction.LOOK_SECONDS)
            use = await asyncio.to_thread(eviction.disk_use, spec, self.volumes.sources, self.logs)
            message = eviction.eviction_message(spec, use)
            if message:
                self._condition.failure = (eviction.REASON, message)
                self.event(eviction.REASON, message, warning=True)
                self.end(0, forced=True)
                return

    async def _lives(self) -> None:
        """All there is to start; whatever runs when the pod is to end is stopped by others."""
        try:
            if await self._set_up() and await self._initialized():
                await asyncio.gather(*(c.live() for c in self.containers))
        except OSError as error:
            sys.stderr.write(f"{self.path}: {error}\n")

    async def _initialized(self) -> bool:
        """Init containers, one after the other; False when one failed for good, or the pod ends first.

        Sidecars (``restartPolicy: Always``) only have to have started; they run beside the containers.
        """
        for container in self.init:
            if _is_sidecar(container):
                self._sidecars.append(asyncio.create_task(container.live()))
                while not (container.condition.started or self.ending):
                    await self.pause(SIDECAR_SECONDS)
            elif not await container.live():
                return False
        self._condition.initialized = True
        self.tell()
        return not self.ending

    async def _set_up(self) -> bool:
        """Network and volumes; False when the pod ends first."""
        context = self.facts.pod["spec"].get("securityContext", {})
        await self.network.up(context.get("sysctls", ()))
        self.facts.address = self._condition.address = self.network.address
        etc = self.folder / "etc"
        etc.mkdir(parents=True)
        (etc / "resolv.conf").write_text(resolver(self.facts.namespace))
        (etc / "hosts").write_text(hosts(self.facts.name, self.network.address))
        while not self.ending:
            try:
                await self.volumes.prepare()
            except WaitingError as error:
                self._mounting(error)
                await self.pause(RETRY_SECONDS)
            else:
                self.tell()
                return True
        return False

    def _mounting(self, error: WaitingError) -> None:
        reason = (error.reason, error.message if error.reason != "ContainerCreating" else "")
        if error.message != self._mount_problem:
            self._mount_problem = error.message
            self.event("FailedMount", error.message, warning=True)
        for container in self.containers:
            container.condition.waiting = reason
        self.tell()

    async def _refreshed(self) -> None:
        """Data that are gone are left as they were, as a kubelet leaves them."""
        with suppress(WaitingError):
            await self.volumes.refresh()

    def tell(self) -> None:
        """The status has changed."""
        self._changed.set()

    async def _tells(self) -> None:
        """Whenever something has changed, and only then."""
        self.tell()
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write_status()
            except (aiohttp.ClientError, TimeoutError) as error:
                sys.stderr.write(f"{self.path}: {error!r}\n")
                await asyncio.sleep(RETRY_SECONDS)
                self._changed.set()

    async def _write_status(self) -> None:
        status = self._condition.json("Never" if self.ending else self._policy)
        if status == self._told:
            return
        body = {"metadata": {"uid": self.uid}, "status": status}
        expect = (200, 404, 409, 422)
        await self._around.client.ask("PATCH", f"{self.path}/status", body, headers=STRATEGIC, expect=expect)
        self._told = status

    async def _goes(self) -> None:
        """The last word, then everything of it goes."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        with suppress(OSError):  # it never was up
            await self.network.down()
        with suppress(aiohttp.ClientError, TimeoutError):
            await self._write_status()
            if not self._condition.failure[0]:  # a failed pod stays, for people to see why
                await self._around.client.ask("DELETE", self.path, body, expect=(200, 202, 404, 409))
        self._around.addresses.give_back(self.network.address)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Send an event without waiting; a lost event does no harm."""
        task = asyncio.create_task(self._event(reason, message, "Warning" if warning else "Normal"))
        self._events.add(task)
        task.add_done_callback(self._events.discard)

    async def _event(self, reason: str, message: str, kind: str) -> None:
        meta, time = self.facts.pod["metadata"], now()
        about = {"apiVersion": "v1", "kind": "Pod", "uid": self.uid}
        body = {
            "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": about | {"name": meta["name"], "namespace": meta["namespace"]},
            "reason": reason,
            "message": message[:1000],
            "type": kind,
            "count": 1,
            "firstTimestamp": time,
            "lastTimestamp": time,
            "source": {"component": "kubelet", "host": self._around.node},
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/events"
        with suppress(aiohttp.ClientError, TimeoutError):
            await self._around.client.ask("POST", path, body, expect=(201, 403, 404, 409))
