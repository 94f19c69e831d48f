"""The operator's loops on a cluster in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.operator.memory import Memory

from kvist_operator.cluster.capabilities import check
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import (
    CHILDREN,
    DEPLOYMENT,
    POD,
    POOL,
    SECRET,
    ObjectKind,
    Right,
    Target,
    kind_of,
)
from kvist_operator.cluster.pool_cache import PoolCache, PoolInformer, PoolKey
from kvist_operator.errors import StartError, Unavailable
from kvist_operator.process.runtime import Operator
from kvist_operator.process.settings import OperatorSettings

OPTIONAL = {kind for kind in CHILDREN if kind.optional}
SETTINGS = OperatorSettings(fleet_interval=0.0, resync=3600.0, discovery_interval=3600.0)


class Ears:
    """A watch that the test feeds and ends."""

    def __init__(self) -> None:
        self.kinds: list[frozenset[ObjectKind]] = []
        self.heard: Callable[[str | None, Json], None] | None = None
        self.end = asyncio.Event()

    async def __call__(self, kinds: Iterable[ObjectKind], heard: Callable[[str | None, Json], None]) -> None:
        """Follow until the test ends it."""
        self.kinds.append(frozenset(kinds))
        self.heard = heard
        await self.end.wait()
        self.end.clear()
        raise Unavailable("watching ended: 403")

    async def tell(self, verb: str | None, found: Json) -> None:
        """Send an event."""
        while self.heard is None:
            await asyncio.sleep(0)
        self.heard(verb, found)


@pytest.fixture
def cluster() -> Memory:
    """Return a cluster without optional APIs."""
    made = Memory()
    made.absent = set(OPTIONAL)
    return made


@asynccontextmanager
async def running(
    cluster: Memory, settings: OperatorSettings = SETTINGS
) -> AsyncIterator[tuple[Operator, Ears]]:
    """Run all loops."""
    ears = Ears()
    operator = Operator(settings, cluster, ears)
    task = asyncio.create_task(operator.run())
    try:
        yield operator, ears
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def pool(name: str = "twig", **spec: Any) -> Json:
    """Return a pool of the catalogue."""
    base = {"model": {"source": "hf://Qwen/Qwen3-8B"}, "accelerator": {"product": "L4"}, "replicas": 0}
    meta = {"name": name, "namespace": "forest"}
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": meta,
        "spec": {**base, **spec},
    }


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until the condition holds; the test's time limit bounds it."""
    while True:
        found = condition()
        if (await found) if isinstance(found, Awaitable) else found:
            return
        await asyncio.sleep(0.005)


def engines(cluster: Memory) -> Json | None:
    """Return the Deployment of the engines."""
    return cluster.objects.get(Target(DEPLOYMENT, "forest", "twig"))


async def test_listed_and_created_pools_are_reconciled(cluster: Memory) -> None:
    """Listed and created pools are reconciled; echoes of the operator's own writes are not events."""
    cluster.put(pool("first"))
    async with running(cluster) as (operator, ears):
        await until(lambda: Target(DEPLOYMENT, "forest", "first") in cluster.objects)
        await ears.tell("ADDED", cluster.put(pool("twig")))
        await until(lambda: engines(cluster) is not None)
        await until(lambda: operator.queue.busy == 0 and not len(operator.queue))
        for target in list(cluster.objects):
            if kind_of(cluster.objects[target]) not in (SECRET, POD):
                await ears.tell("MODIFIED", cluster.objects[target])
        assert len(operator.queue) == 0
        assert operator.ready() == operator.alive() == ""


async def test_reported_drift_is_undone(cluster: Memory) -> None:
    """A deleted Deployment of engines is created again."""
    cluster.put(pool())
    async with running(cluster) as (_, ears):
        await until(lambda: engines(cluster) is not None)
        gone = cluster.objects.pop(Target(DEPLOYMENT, "forest", "twig"))
        await ears.tell("DELETED", gone)
        await until(lambda: engines(cluster) is not None)


async def test_a_failed_watch_is_started_again_and_reported(cluster: Memory) -> None:
    """While watching has failed the operator is not ready; watching starts again, and pools are
    reconciled."""
    cluster.put(pool())
    async with running(cluster) as (operator, ears):
        await until(lambda: len(ears.kinds) == 1)
        ears.end.set()
        await until(lambda: "403" in operator.ready())
        await until(lambda: len(ears.kinds) == 2)
        await ears.tell("MODIFIED", cluster.put(pool(replicas=1)))
        await until(lambda: bool(engines(cluster)) and engines(cluster)["spec"]["replicas"] == 1)  # type: ignore[index]
        assert operator.ready() == ""


async def test_a_new_api_is_watched_within_the_interval(cluster: Memory) -> None:
    """A new optional API is watched and used within the discovery interval."""
    cluster.put(pool(monitoring={"podMonitor": "Auto"}))
    monitors = next(kind for kind in OPTIONAL if kind.kind == "PodMonitor")
    settings = OperatorSettings(fleet_interval=0.0, resync=3600.0, discovery_interval=1.0)
    async with running(cluster, settings) as (_, ears):
        await until(lambda: engines(cluster) is not None)
        cluster.absent.discard(monitors)
        await until(lambda: any(target.kind == monitors for target in cluster.objects))
        await until(lambda: monitors in ears.kinds[-1])
        assert monitors not in ears.kinds[0]


async def test_a_pool_that_fails_waits_and_others_go_on(cluster: Memory) -> None:
    """A pool whose objects are refused is retried later; other pools continue."""
    cluster.refuse = lambda _verb, target: (
        Unavailable("busy", 503) if target.name.startswith("twig") else None
    )
    cluster.put(pool("twig"))
    cluster.put(pool("other"))
    async with running(cluster) as (operator, _):
        await until(lambda: Target(DEPLOYMENT, "forest", "other") in cluster.objects)
        await until(lambda: b'result="ApiUnavailable"' in operator.metrics_page())
        assert engines(cluster) is None
        cluster.refuse = lambda _verb, _target: None
        await until(lambda: engines(cluster) is not None)


async def test_an_internal_error_ends_no_worker(cluster: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error is counted and logged, and the pool is retried."""
    cluster.put(pool())
    monkeypatch.setattr("kvist_operator.reconcile.reconciler.children_of", lambda *_: 1 / 0)
    async with running(cluster) as (operator, _):
        await until(lambda: b'result="InternalError"' in operator.metrics_page())
        monkeypatch.undo()
        await until(lambda: engines(cluster) is not None)


async def test_a_resync_finds_what_was_not_reported(cluster: Memory) -> None:
    """A resync finds deleted, new and changed objects by metadata; kinds no longer served are dropped."""
    changed: list[PoolKey] = []
    cache = PoolCache()
    informer = PoolInformer(cluster, cache, (), changed.append)
    cluster.put(pool())
    for name in ("a", "b"):
        cluster.put(service(name))
    await informer.follow([])
    changed.clear()
    cluster.objects.pop(Target(kind_of(service("a")), "forest", "a"))
    cluster.put(service("b", spec={"x": 1}))
    cluster.put(service("c"))
    await informer.resync()
    assert {child["metadata"]["name"] for child in cache.children(PoolKey("forest", "twig"))} == {"b", "c"}
    assert set(changed) == {PoolKey("forest", "twig")}
    changed.clear()
    await informer.resync()
    assert changed == []


def service(name: str, **more: Any) -> Json:
    """Return a child of the pool."""
    labels = {"app.kubernetes.io/managed-by": "kvist-operator", "app.kubernetes.io/instance": "twig"}
    meta = {"name": name, "namespace": "forest", "labels": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, **more}


class Rights:
    """Grants all but some rights."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing
        self.asked: list[tuple[str, str]] = []

    async def may(self, right: Right, namespace: str) -> bool:
        """Grant the right unless it is missing."""
        self.asked.append((str(right), namespace))
        return str(right) not in self.missing


async def test_it_starts_only_with_its_crd_and_its_rights(cluster: Memory) -> None:
    """Each missing right is named with its namespace; without the CRD nothing else is checked."""
    await check(cluster, Rights().may, ())
    lacking = Rights("patch deployments.apps", "get secrets")
    with pytest.raises(StartError, match=r"may not get secrets in a, patch deployments\.apps in a, get sec"):
        await check(cluster, lacking.may, ("a", "b"))
    assert {namespace for _, namespace in lacking.asked} == {"a", "b"}
    with pytest.raises(StartError, match=r"in all namespaces.*or set --namespaces"):
        await check(cluster, lacking.may, ())
    cluster.absent.add(POOL)
    with pytest.raises(StartError, match="kubectl apply --server-side -f crds"):
        await check(cluster, lacking.may, ())
