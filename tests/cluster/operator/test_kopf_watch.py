"""kopf on the event loop of this process, against a real API server."""

import asyncio
import logging

import pytest
from tests.cluster.client import Client, Namespace
from tests.cluster.control_plane import ADMIN, ControlPlane
from tests.cluster.operated import administrator, pool, with_crd

from kvist_kube.connection import find_cluster
from kvist_operator.cluster import kopf_watch
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import CHILDREN, POOL
from kvist_operator.errors import Unavailable


async def test_a_watch_reports_objects_and_leaves_no_task_behind(
    plane: ControlPlane, admin: Client, space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Objects that exist and objects that are created are reported in order; cancelled, kopf's tasks are all
    gone, and tasks of others go on."""
    caplog.set_level(logging.CRITICAL, "kopf")
    await with_crd(admin)
    load = find_cluster({"KUBECONFIG": str(plane.kubeconfig("admin", ADMIN))})
    events: list[tuple[str | None, str]] = []
    spawned = asyncio.Event()

    def on_event(verb: str | None, found: Json) -> None:
        if found["kind"] == POOL.kind:
            events.append((verb, found["metadata"]["name"]))

    kinds = [POOL, *(kind for kind in CHILDREN if kind.optional is None)]
    async with administrator(plane) as server:
        await server.apply(pool("first", space.name))
        bystander = asyncio.create_task(asyncio.sleep(3600))
        before = asyncio.all_tasks()
        watch = asyncio.create_task(
            kopf_watch.follow(load, kinds, [space.name], on_event, spawned.set), name="watch"
        )
        while events != [(None, "first")]:
            await asyncio.sleep(0.05)
        assert spawned.is_set()
        await server.apply(pool("second", space.name))
        while len(events) < 2:
            await asyncio.sleep(0.05)
        later = asyncio.create_task(asyncio.sleep(3600))
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
        left = asyncio.all_tasks() - before - {later}

        assert events[1] == ("ADDED", "second")
        assert {task.get_name() for task in left} == set()
        assert not bystander.done()
        assert not later.done()
        for task in (bystander, later):
            task.cancel()
        await asyncio.gather(bystander, later, return_exceptions=True)


async def test_a_missing_right_ends_the_watch_and_is_named(
    plane: ControlPlane, admin: Client, space: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A watch without the right to it ends within kopf's two short retries, and says which right is
    missing."""
    caplog.set_level(logging.CRITICAL, "kopf")
    await with_crd(admin)
    path = f"/api/v1/namespaces/{space.name}/serviceaccounts"
    account = await admin.ask("POST", path, {"metadata": {"name": "nobody"}})
    token = plane.keys.token(space.name, "nobody", str(account["metadata"]["uid"]), 3500)
    load = find_cluster({"KUBECONFIG": str(plane.kubeconfig("nobody", token))})
    assert sum(kopf_watch.ERROR_BACKOFFS) < 10

    with pytest.raises(Unavailable, match=r'cannot list resource "inferencepools"') as raised:
        await kopf_watch.follow(load, [POOL], [space.name], lambda _verb, _found: None)
    assert "apiVersion" not in str(raised.value)
