"""A pool is deleted, with the operator there, on its way, or gone: nothing of it is left."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.cluster.client import Client, Namespace, namespace
from tests.cluster.collecting import collecting
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import administrator, children, pool, with_crd
from tests.cluster.stepping import Fuse, Killed, fresh

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Moment, Write
from kvist_operator.cluster.kinds import POOL, Target

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
async def ground(plane: ControlPlane, admin: Client, tmp_path: Path) -> AsyncIterator[Client]:
    """A control plane with our CRD and a garbage collector."""
    await with_crd(admin)
    async with collecting(plane, tmp_path):
        yield admin


async def deleted(server: ApiServer, where: str) -> None:
    """Delete a pool as ``kubectl delete`` does: in the background."""
    await server.connection.request("DELETE", Target(POOL, where, "twig").path)


async def nothing_left(server: ApiServer, where: str) -> None:
    """Wait until the garbage collector is through; a test's time limit bounds it."""
    while await children(server, where, POOL):
        await asyncio.sleep(0.1)


async def test_a_pool_goes_with_all_it_owns_also_with_the_operator_down(
    plane: ControlPlane, ground: Client, space: Namespace
) -> None:
    """The garbage collector alone removes a pool: there is no finalizer, and every object names its owner,
    the Secret too."""
    async with administrator(plane) as server:
        await server.apply(pool("twig", space.name, gateway={"mode": "Envoy"}))
        async with fresh(plane, space.name) as operator:
            await operator.settle()
        assert len(await children(server, space.name)) > 20
        await deleted(server, space.name)
        await nothing_left(server, space.name)


async def test_deleted_at_any_step_of_its_making_nothing_is_left(
    plane: ControlPlane, ground: Client, space: Namespace
) -> None:
    """The pool goes before each write of the operator, which goes on, or dies there: what it still made for a
    pool that is gone goes, too."""
    whole = Fuse()
    async with administrator(plane) as server:
        await server.apply(pool("twig", space.name))
        async with fresh(plane, space.name, whole) as operator:
            await operator.settle()
        spaces = []
        for at in range(1, len(whole.moments) + 1, 3):
            where = f"{space.name}-{at}"
            await namespace(ground, where)
            await server.apply(pool("twig", where))
            await _made_while_it_goes(plane, server, where, at)
            spaces.append(where)
        for where in spaces:
            await nothing_left(server, where)


async def _made_while_it_goes(plane: ControlPlane, server: ApiServer, where: str, at: int) -> None:
    """Every second operator dies a moment after the deletion."""
    seen = 0

    async def hook(_moment: Moment, _write: Write) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            await deleted(server, where)
        if seen == at + 1 and at % 2:
            raise Killed

    async with fresh(plane, where, hook) as operator:
        try:
            await operator.settle()
        except Killed:
            return


async def test_what_a_pool_no_longer_wants_ends_its_deletion(
    plane: ControlPlane, ground: Client, space: Namespace
) -> None:
    """Deleted in the foreground, ended by the garbage collector; a pool that wants its pickers
    back while they go gets them when they have gone."""
    async with administrator(plane) as server:
        await server.apply(pool("twig", space.name))
        async with fresh(plane, space.name) as operator:
            await operator.settle()
            await server.apply(pool("twig", space.name, picker={"mode": "Off"}))
            await operator.operator.informer.resync()
            await operator.settle()
            await server.apply(pool("twig", space.name))
            while True:
                await operator.operator.informer.resync()
                await operator.settle()
                found = await children(server, space.name)
                if all("deletionTimestamp" not in each["metadata"] for each in found.values()):
                    break
                await asyncio.sleep(0.1)
        assert ("Deployment", "twig-epp") in found
        assert ("Secret", "twig-epp-tls") in found
