"""The cache of pools, children and pods, whatever the order of updates."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.memory import Memory

from kvist_operator.cluster.kinds import (
    DEPLOYMENT,
    JOB,
    NODE,
    POD,
    POOL,
    ObjectKind,
    Target,
    kind_of,
    target_of,
)
from kvist_operator.cluster.pool_cache import PoolCache, PoolInformer, PoolKey
from kvist_operator.errors import Forbidden

KEY = PoolKey("forest", "twig")


def thing(version: int, uid: str = "u", name: str = "twig", **more: Any) -> dict[str, Any]:
    """Return a Service of the pool."""
    labels = {"app.kubernetes.io/instance": "twig"}
    meta = {
        "namespace": "forest",
        "name": name,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, **more}


@given(st.permutations(range(1, 8)))
def test_the_newest_version_stands_in_any_order(versions: list[int]) -> None:
    """Lists, watches and answers to writes race; the newest version stands."""
    cache = PoolCache()
    for version in versions:
        cache.update(thing(version, spec={"n": version}))

    assert [each["spec"]["n"] for each in cache.children(KEY)] == [7]


def test_only_news_matters_to_the_pool() -> None:
    """An update with a known or older version affects no pool; a newer one does."""
    cache = PoolCache()
    assert cache.update(thing(5)) == KEY
    assert cache.update(thing(5)) is None
    assert cache.update(thing(4)) is None
    assert cache.update(thing(6)) == KEY


def test_a_deletion_is_of_the_one_that_was_meant() -> None:
    """A deletion with another uid does not remove an object of the same name."""
    cache = PoolCache()
    cache.update(thing(5, uid="new"))
    assert cache.remove(target_of(thing(0)), "old") is None
    assert len(cache.children(KEY)) == 1
    assert cache.remove(target_of(thing(0)), "new") == KEY
    assert cache.children(KEY) == []
    assert cache.remove(target_of(thing(0))) is None


def test_pools_and_pods_are_no_children() -> None:
    """Pools, pods and children are returned separately, with the fields that are read."""
    cache = PoolCache()
    meta = {"namespace": "forest", "name": "twig", "resourceVersion": "1"}
    pool = {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": {}}
    assert cache.update(pool) == KEY
    container = {"name": "engine", "image": "vllm", "args": ["serve"], "env": [{"name": "A"}]}
    pod = thing(1, spec={"containers": [container], "nodeName": "n", "volumes": [1]}, status={"phase": "x"})
    cache.update({**pod, "kind": "Pod"})
    cache.update(thing(1, status={"loadBalancer": {}}))

    assert cache.pools() == [KEY]
    [told] = cache.pods(KEY)
    assert told["spec"] == {
        "nodeName": "n",
        "containers": [{"name": "engine", "image": "vllm"}],
        "initContainers": [],
    }
    assert told["status"] == {"phase": "x"}
    assert ["status" in child for child in cache.children(KEY)] == [False]
    assert (kind_of(told), kind_of(pool)) == (POD, POOL)
    assert cache.get(Target(POOL, "forest", "twig")) == pool


class OldRights(Memory):
    """A cluster whose operator may not list one kind."""

    def __init__(self, refused: ObjectKind) -> None:
        super().__init__()
        self.refused = refused

    async def find(
        self, kind: ObjectKind, namespace: str = "", *, labels: str = "", bare: bool = False
    ) -> list[dict[str, Any]]:
        """Refuse the kind."""
        if kind == self.refused:
            raise Forbidden(f"{kind.resource} is forbidden", 403)
        return await super().find(kind, namespace, labels=labels, bare=bare)


async def test_an_operator_with_the_rights_of_an_older_chart_follows_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without the right to Jobs it manages pools, says so once, and follows Jobs as soon as it may."""
    cluster = OldRights(JOB)
    informer = PoolInformer(cluster, PoolCache(), (), lambda _key: None)
    await informer.follow(())
    await informer.follow(())
    await informer.resync()

    assert JOB not in informer.kinds
    assert {POOL, POD} <= informer.kinds
    assert caplog.text.count("Jobs are not followed: jobs.batch is forbidden") == 1
    cluster.refused = NODE
    assert await informer.follow(())
    assert JOB in informer.kinds


async def test_a_missing_right_to_other_kinds_is_an_error() -> None:
    """Deployments are in every pool, so that an operator without them cannot work."""
    informer = PoolInformer(OldRights(DEPLOYMENT), PoolCache(), (), lambda _key: None)
    with pytest.raises(Forbidden):
        await informer.follow(())
