"""The picker's discovery in this process, against the real API, with a record of what it published."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.cluster.client import Namespace

from kvist_epp.endpoints.endpoint import EndpointSet
from kvist_epp.endpoints.kubernetes.pod_discovery import PodDiscovery, PoolName
from kvist_epp.endpoints.kubernetes.pools import PodSelection
from kvist_epp.names import POOL_GROUP
from kvist_kube.connection import Connection, find_cluster
from kvist_kube.informer import DEFAULT_TIMES, InformerTimes

VLLM = PodSelection("app=vllm", (8000,))
POOL = PoolName(POOL_GROUP, "pool")
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}


class Seen:
    """Record of what ``discovery`` published."""

    discovery: PodDiscovery

    def __init__(self) -> None:
        self.fleets: list[EndpointSet] = []
        self.priorities: list[Mapping[str, int]] = []

    @property
    def standing(self) -> dict[str, str]:
        """Endpoint → why it is not to be picked, by the last fleet."""
        return {e.name: e.refusal for e in self.fleets[-1]} if self.fleets else {}

    @property
    def hostports(self) -> list[str]:
        """Return the addresses of the last fleet."""
        return [e.hostport for e in self.fleets[-1]] if self.fleets else []

    async def stands(self, expected: Mapping[str, str]) -> None:
        """Wait until the last fleet stands so."""
        await self.until(lambda: bool(self.fleets) and self.standing == expected)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it; the test's time limit bounds it."""
        while not condition():
            await asyncio.sleep(0.02)

    def watch(self, resource: str = "pods") -> dict[str, Any]:
        """Return what /debug/fleet shows of one resource."""
        watches = self.discovery.describe()["watches"]
        return next(w for w in watches if w["resource"] == resource)


@asynccontextmanager
async def following(
    kubeconfig: Path,
    space: Namespace,
    wanted: PodSelection | PoolName = VLLM,
    times: InformerTimes = DEFAULT_TIMES,
) -> AsyncIterator[Seen]:
    """Run discovery in this namespace with the rights of a kubeconfig, until the context ends."""
    seen = Seen()
    seen.discovery = PodDiscovery(
        Connection(find_cluster({"KUBECONFIG": str(kubeconfig)})),
        space.name,
        wanted,
        seen.fleets.append,
        on_priorities=seen.priorities.append,
        times=times,
    )
    task = asyncio.create_task(seen.discovery.run())
    try:
        yield seen
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
