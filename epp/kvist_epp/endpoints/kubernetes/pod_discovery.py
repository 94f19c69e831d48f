"""The fleet from Kubernetes: which pods, told by flags or by a pool, and what becomes of them.

Joins three things that are followed each on its own: the pool (if there is one) says which pods and ports
count, the pods become endpoints, the objectives become priorities."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvist_epp.endpoints.discovery import Follow, Objectives, Watched
from kvist_epp.endpoints.endpoint import Endpoint, Fleet
from kvist_epp.endpoints.kubernetes import pods
from kvist_epp.endpoints.kubernetes.api import Api
from kvist_epp.endpoints.kubernetes.objects import Objective, OwnPool, Pod, Pool
from kvist_epp.endpoints.kubernetes.pools import Selection, own_selection, priorities, selection
from kvist_epp.endpoints.kubernetes.reflector import USUAL, Pace, Reflector, Resource
from kvist_epp.names import OBJECTIVE_GROUPS, OWN_GROUP

logger = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 0.1
"""After a change was told, the next ones are gathered for so long: a rollout of a thousand pods is told ten
times a second, not a thousand times. At a thousand endpoints one that joins or leaves costs 14 ms."""


class PoolName(NamedTuple):
    """The InferencePool that tells which pods count."""

    group: str
    name: str


class _Made(NamedTuple):
    """The endpoints of one pod, kept as long as it does not change."""

    pod: Pod
    ports: tuple[int, ...]
    endpoints: tuple[Endpoint, ...]
    complaints: tuple[str, ...]


class KubeDiscovery:
    """Conforms to ``fleet.discovery.Discovery``."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        wanted: Selection | PoolName,
        follow: Follow,
        *,
        objectives: Objectives = lambda _priorities: None,
        pace: Pace = USUAL,
    ) -> None:
        """``objectives`` is told the priorities by name each time they change. Closes ``api`` when it
        ends."""
        self._api = api
        self._namespace = namespace
        self._follow = follow
        self._pace = pace
        self._tell_objectives = objectives
        self._selection = None if isinstance(wanted, PoolName) else wanted
        self._name = wanted if isinstance(wanted, PoolName) else None
        self._pool = self._pool_reflector(wanted) if isinstance(wanted, PoolName) else None
        self._pool_problem = ""
        self._pods: Reflector[Pod] | None = None
        self._objectives = [
            self._reflector(group, "v1alpha2", "inferenceobjectives", Objective, self._reprioritise)
            for group in OBJECTIVE_GROUPS
        ]
        self._made: dict[str, _Made] = {}
        self._fleet: Fleet | None = None
        self._priorities: Mapping[str, int] = {}
        self._changed = asyncio.Event()
        self._reselected = asyncio.Event()

    @property
    def problem(self) -> str:
        """Why the fleet may not be what the cluster says; empty when it is."""
        told = self._pool.problem if self._pool else ""
        return told or self._pool_problem or (self._pods.problem if self._pods else "")

    async def run(self) -> None:
        """Follow for ever."""
        watched = [r for r in (self._pool, *self._objectives) if r is not None]
        try:
            async with asyncio.TaskGroup() as group:
                for reflector in watched:
                    group.create_task(reflector.run(), name=f"watch {reflector.resource}")
                group.create_task(self._follow_pods(), name="watch pods")
                group.create_task(self._publish(), name="fleet")
        finally:
            await self._api.close()

    def watches(self) -> Sequence[Watched]:
        """For the metrics: what must be there, and what is."""
        return [r.watched() for r in self._reflectors() if r.listed or not r.optional]

    def describe(self) -> dict[str, Any]:
        """For ``/debug/fleet``."""
        found = self._selection
        return {
            "kind": "pool" if self._pool else "selector",
            "pool": f"{self._name.name}.{self._name.group}" if self._name else None,
            "namespace": self._namespace,
            "selector": found.selector if found else None,
            "ports": list(found.ports) if found else [],
            "problem": self.problem,
            "complaints": [why for made in self._made.values() for why in made.complaints],
            "objectives": dict(self._priorities),
            "credentials_renewed": self._api.renewals,
            "watches": [reflector.describe() for reflector in self._reflectors()],
        }

    def _reflectors(self) -> list[Reflector[Any]]:
        return [r for r in (self._pool, self._pods, *self._objectives) if r is not None]

    def _pool_reflector(self, wanted: PoolName) -> Reflector[Any]:
        own = wanted.group == OWN_GROUP
        return Reflector(
            self._api,
            Resource(wanted.group, "v1alpha1" if own else "v1", "inferencepools", self._namespace),
            OwnPool if own else Pool,
            self._reselect,
            selectors=(("fieldSelector", f"metadata.name={wanted.name}"),),
            pace=self._pace,
        )

    def _reflector(
        self, group: str, version: str, plural: str, kind: type[Objective], changed: Callable[[], None]
    ) -> Reflector[Objective]:
        resource = Resource(group, version, plural, self._namespace)
        return Reflector(self._api, resource, kind, changed, optional=True, pace=self._pace)

    async def _follow_pods(self) -> None:
        """The pods that are selected; begun anew when other ones are. Until those are listed the old fleet
        stays."""
        watched: list[asyncio.Task[None]] = []
        while True:
            self._reselected.clear()
            async with asyncio.TaskGroup() as group:
                if self._selection is not None:
                    self._pods = self._pods_of(self._selection.selector)
                    watched.append(group.create_task(self._pods.run(), name="watch these pods"))
                await self._reselected.wait()
                while watched:
                    watched.pop().cancel()

    def _pods_of(self, selector: str) -> Reflector[Pod]:
        return Reflector(
            self._api,
            Resource("", "v1", "pods", self._namespace),
            Pod,
            self._changed.set,
            selectors=(("labelSelector", selector),),
            pace=self._pace,
        )

    def _reselect(self) -> None:
        """The pool was listed, or has changed."""
        found = self._selected()
        if found is None or found == self._selection:
            return
        old, self._selection = self._selection, found
        logger.info("pool %s selects %s at ports %s", self._name, found.selector, found.ports)
        if old is None or old.selector != found.selector:
            self._reselected.set()
        self._changed.set()

    def _selected(self) -> Selection | None:
        """What the pool selects; None, and ``problem`` says why, when it cannot be told."""
        if self._pool is None or self._name is None:
            return None
        name = self._name.name
        pool = self._pool.objects.get(name)
        why = self._pool.store.known.unreadable.get(name, "" if pool else "does not exist")
        if pool is None or why:
            self._object(why)
            return None
        try:
            found = own_selection(pool) if isinstance(pool, OwnPool) else selection(pool)
        except ValueError as error:
            self._object(str(error))
            return None
        self._pool_problem = ""
        return found

    def _object(self, why: str) -> None:
        problem = f"InferencePool {self._namespace}/{self._name.name if self._name else ''}: {why}"
        if problem != self._pool_problem:
            logger.warning("%s; the fleet stays as it is", problem)
        self._pool_problem = problem

    async def _publish(self) -> None:
        """Tell the fleet when it has changed: at once, and then not more often than every
        ``SETTLE_SECONDS``."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._tell()
            await asyncio.sleep(SETTLE_SECONDS)

    def _tell(self) -> None:
        if self._pods is None or not self._pods.listed or self._selection is None:
            return
        fleet = self._made_of(self._pods.objects, self._selection.ports)
        if fleet == self._fleet:
            return
        if self._fleet is None or len(fleet) != len(self._fleet):
            logger.info("%d endpoints, %d of them ready", len(fleet), sum(not e.refusal for e in fleet))
        self._fleet = fleet
        self._follow(fleet)

    def _made_of(self, found: Mapping[str, Pod], ports: tuple[int, ...]) -> Fleet:
        self._made = {name: self._made_one(pod, ports) for name, pod in found.items()}
        return pods.fleet((pods.born(made.pod), made.endpoints) for made in self._made.values())

    def _made_one(self, pod: Pod, ports: tuple[int, ...]) -> _Made:
        """Endpoints that have not changed stay the same objects: comparing fleets costs nothing then."""
        old = self._made.get(pod.metadata.name)
        if old is not None and old.pod is pod and old.ports == ports:
            return old
        complaints: list[str] = []
        made = pods.endpoints(pod, ports, complaints.append)
        if old is not None and old.endpoints == made:
            made = old.endpoints
        for why in complaints:
            if old is None or why not in old.complaints:
                logger.warning("pod %s", why)
        return _Made(pod, ports, made, tuple(complaints))

    def _reprioritise(self) -> None:
        """An objective has changed."""
        pool = self._name.name if self._name else ""
        found = priorities(pool, *(reflector.objects.values() for reflector in self._objectives))
        if found != self._priorities:
            self._priorities = found
            self._tell_objectives(found)
