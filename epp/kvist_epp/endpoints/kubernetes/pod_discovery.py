"""Discovers endpoints in Kubernetes.

Three resources are followed independently: the pool, if there is one, says which pods and ports count; the
pods become endpoints; the objectives become priorities.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvist_epp.endpoints.discovery import OnEndpoints, OnPriorities
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.kubernetes.pod_endpoints import Pod, endpoint_set, endpoints_of, pod_age
from kvist_epp.endpoints.kubernetes.pools import (
    GatewayPool,
    Objective,
    OwnPool,
    PodSelection,
    priorities,
    selection_of,
)
from kvist_epp.names import OBJECTIVE_GROUPS, OWN_GROUP
from kvist_kube.connection import Connection
from kvist_kube.informer import DEFAULT_TIMES, Informer, InformerTimes, Resource
from kvist_kube.object_cache import WatchStatus

logger = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 0.1
"""After endpoints were published, further changes are gathered for this long: a rollout of a thousand pods is
published ten times a second, not a thousand times. At a thousand endpoints one that joins or leaves costs 14
ms."""


class PoolName(NamedTuple):
    """The InferencePool that selects the pods."""

    group: str
    name: str


class _PodEndpoints(NamedTuple):
    """The endpoints of one pod, kept as long as the pod does not change."""

    pod: Pod
    ports: tuple[int, ...]
    endpoints: tuple[Endpoint, ...]
    complaints: tuple[str, ...]


class PodDiscovery:
    """A ``Discovery`` that follows pods, selected by flags or by a pool."""

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        wanted: PodSelection | PoolName,
        on_endpoints: OnEndpoints,
        *,
        on_priorities: OnPriorities = lambda _priorities: None,
        times: InformerTimes = DEFAULT_TIMES,
    ) -> None:
        """``on_priorities`` is called with the priorities by name each time they change. ``run`` closes
        ``connection`` when it ends."""
        self._connection = connection
        self._namespace = namespace
        self._times = times
        self._on_endpoints = on_endpoints
        self._on_priorities = on_priorities
        self._selection = None if isinstance(wanted, PoolName) else wanted
        self._name = wanted if isinstance(wanted, PoolName) else None
        self._pool = self._pool_informer(wanted) if isinstance(wanted, PoolName) else None
        self._pool_problem = ""
        self._pods: Informer[Pod] | None = None
        self._objectives = [
            Informer(
                connection,
                Resource(group, "v1alpha2", "inferenceobjectives", namespace),
                Objective,
                self._on_objectives_changed,
                optional=True,
                times=times,
            )
            for group in OBJECTIVE_GROUPS
        ]
        self._by_pod: dict[str, _PodEndpoints] = {}
        self._published: EndpointSet | None = None
        self._priorities: Mapping[str, int] = {}
        self._changed = asyncio.Event()
        self._reselected = asyncio.Event()

    @property
    def problem(self) -> str:
        """Why the endpoints may differ from what the cluster says; empty when they do not."""
        watching = self._pool.problem if self._pool else ""
        return watching or self._pool_problem or (self._pods.problem if self._pods else "")

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        informers = [each for each in (self._pool, *self._objectives) if each is not None]
        try:
            async with asyncio.TaskGroup() as group:
                for informer in informers:
                    group.create_task(informer.run(), name=f"watch {informer.resource}")
                group.create_task(self._follow_pods(), name="watch pods")
                group.create_task(self._publish(), name="endpoints")
        finally:
            await self._connection.close()

    def watches(self) -> Sequence[WatchStatus]:
        """Return the state of each watch; optional resources only where they exist."""
        return [each.status() for each in self._informers() if each.listed or not each.optional]

    def describe(self) -> dict[str, Any]:
        """Return the state that ``/debug/fleet`` shows."""
        selection = self._selection
        return {
            "kind": "pool" if self._pool else "selector",
            "pool": f"{self._name.name}.{self._name.group}" if self._name else None,
            "namespace": self._namespace,
            "selector": selection.selector if selection else None,
            "ports": list(selection.ports) if selection else [],
            "problem": self.problem,
            "complaints": [why for each in self._by_pod.values() for why in each.complaints],
            "objectives": dict(self._priorities),
            "credentials_renewed": self._connection.renewals,
            "watches": [each.describe() for each in self._informers()],
        }

    def _informers(self) -> list[Informer[Any]]:
        return [each for each in (self._pool, self._pods, *self._objectives) if each is not None]

    def _pool_informer(self, wanted: PoolName) -> Informer[Any]:
        own = wanted.group == OWN_GROUP
        return Informer(
            self._connection,
            Resource(wanted.group, "v1alpha1" if own else "v1", "inferencepools", self._namespace),
            OwnPool if own else GatewayPool,
            self._on_pool_changed,
            selectors=(("fieldSelector", f"metadata.name={wanted.name}"),),
            times=self._times,
        )

    async def _follow_pods(self) -> None:
        """Follow the selected pods; start again when the selector changes. The old endpoints stay until the
        new pods are listed."""
        running: list[asyncio.Task[None]] = []
        while True:
            self._reselected.clear()
            async with asyncio.TaskGroup() as group:
                if self._selection is not None:
                    self._pods = Informer(
                        self._connection,
                        Resource("", "v1", "pods", self._namespace),
                        Pod,
                        self._changed.set,
                        selectors=(("labelSelector", self._selection.selector),),
                        times=self._times,
                    )
                    running.append(group.create_task(self._pods.run(), name="watch these pods"))
                await self._reselected.wait()
                while running:
                    running.pop().cancel()

    def _on_pool_changed(self) -> None:
        selection = self._select()
        if selection is None or selection == self._selection:
            return
        old, self._selection = self._selection, selection
        logger.info(
            "InferencePool %s selects the pods %s at ports %s",
            self._name,
            selection.selector,
            selection.ports,
        )
        if old is None or old.selector != selection.selector:
            self._reselected.set()
        self._changed.set()

    def _select(self) -> PodSelection | None:
        """Return what the pool selects; None, with the reason in ``problem``, when that cannot be
        determined."""
        if self._pool is None or self._name is None:
            return None
        name = self._name.name
        pool = self._pool.objects.get(name)
        problem = self._pool.cache.unreadable.get(name, "" if pool else "does not exist")
        found = None
        if pool is not None and not problem:
            try:
                found = selection_of(pool)
            except ValueError as error:
                problem = str(error)
        if problem:
            problem = f"InferencePool {self._namespace}/{name}: {problem}"
            if problem != self._pool_problem:
                logger.warning("%s; the known endpoints are kept", problem)
        self._pool_problem = problem
        return found

    async def _publish(self) -> None:
        """Publish the endpoints when they have changed, at most every ``SETTLE_SECONDS``."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._publish_once()
            await asyncio.sleep(SETTLE_SECONDS)

    def _publish_once(self) -> None:
        if self._pods is None or not self._pods.listed or self._selection is None:
            return
        ports = self._selection.ports
        self._by_pod = {name: self._endpoints_of(pod, ports) for name, pod in self._pods.objects.items()}
        found = endpoint_set((pod_age(each.pod), each.endpoints) for each in self._by_pod.values())
        if found == self._published:
            return
        if self._published is None or len(found) != len(self._published):
            logger.info(
                "the endpoints of the pool have changed (endpoints: %d, in ready pods: %d)",
                len(found),
                sum(not e.refusal for e in found),
            )
        self._published = found
        self._on_endpoints(found)

    def _endpoints_of(self, pod: Pod, ports: tuple[int, ...]) -> _PodEndpoints:
        """Return the pod's endpoints; unchanged ones stay the same objects, which makes comparing sets
        cheap."""
        old = self._by_pod.get(pod.metadata.name)
        if old is not None and old.pod is pod and old.ports == ports:
            return old
        complaints: list[str] = []
        found = endpoints_of(pod, ports, complaints.append)
        if old is not None and old.endpoints == found:
            found = old.endpoints
        for complaint in complaints:
            if old is None or complaint not in old.complaints:
                logger.warning("pod %s", complaint)
        return _PodEndpoints(pod, ports, found, tuple(complaints))

    def _on_objectives_changed(self) -> None:
        pool = self._name.name if self._name else ""
        found = priorities(pool, *(each.objects.values() for each in self._objectives))
        if found != self._priorities:
            self._priorities = found
            self._on_priorities(found)
