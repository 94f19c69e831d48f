"""The operator is killed before and after every write to a pool's objects; the end is the same."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tests.cluster.client import Client, Namespace, namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import administrator, children, pool, with_crd
from tests.cluster.stepping import Fuse, Killed, fresh

from kvist_operator.apply.upgrades import APPLIED
from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import POOL

pytestmark = pytest.mark.timeout(600)
VOLATILE = {
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "observedGeneration",
    "lastTransitionTime",
    "clusterIP",
    "clusterIPs",
    "kvist.dev/intent",  # has the owner's uid in it
    "kvist.dev/config",  # has the namespace in it
}
SECRETS = {"tls.crt", "tls.key", "ca.crt"}
LARGE: dict[str, Any] = {
    "gateway": {"mode": "Envoy"},
    "engine": {"maxNumSeqs": 64},
    "picker": {"replicas": 3},
}
Change = Callable[[ApiServer, str], Awaitable[None]]


@dataclass
class Life:
    """A pool, and what happens to it while the operator may be killed."""

    first: Json | None
    change: Change


async def made(server: ApiServer, space: str) -> None:
    """A pool with everything is created."""
    await server.apply(pool("twig", space, **LARGE))


async def changed(server: ApiServer, space: str) -> None:
    """Remove gateway and pickers, change arguments, and add replicas."""
    await server.apply(pool("twig", space, picker={"mode": "Off"}, engine={"maxNumSeqs": 32}, replicas=2))


async def shrunk(server: ApiServer, space: str) -> None:
    """Reduce the replicas of the pool."""
    await server.apply(pool("twig", space, replicas=1))


LIVES = {
    "create": Life(None, made),
    "update": Life(pool("twig", "", **LARGE), changed),
    "fewer replicas": Life(pool("twig", "", replicas=3), shrunk),
}


@pytest.fixture
async def ground(admin: Client) -> Client:
    """A control plane with our CRD."""
    await with_crd(admin)
    return admin


@pytest.mark.parametrize("name", LIVES)
async def test_killed_at_every_step_the_end_is_the_same(
    plane: ControlPlane, ground: Client, space: Namespace, name: str
) -> None:
    """Whatever write the operator was about to do, or had just done, when it died: a new one that knows only
    what the cluster says brings every object to where an undisturbed one would have brought it."""
    life = LIVES[name]
    undisturbed = Fuse()
    expected = await lived(plane, ground, f"{space.name}-0", life, undisturbed)
    assert len(undisturbed.moments) >= 4

    for at in range(1, len(undisturbed.moments) + 1):
        found = await lived(plane, ground, f"{space.name}-{at}", life, Fuse(at))
        assert found == expected, f"killed at {undisturbed.moments[at - 1]}"


async def lived(plane: ControlPlane, admin: Client, where: str, life: Life, fuse: Fuse) -> dict[str, str]:
    """Return the objects at the end of a life, in a namespace of its own."""
    await namespace(admin, where)
    async with administrator(plane) as server:
        if life.first:
            await server.apply({**life.first, "metadata": {"name": "twig", "namespace": where}})
            async with fresh(plane, where) as first:
                await first.settle()
        await life.change(server, where)
        died = await _ran(plane, where, fuse)
        # on a busy machine a slow lookup of the model may write a status more in one life than in another
        assert died == bool(fuse.at) or fuse.at - 2 <= len(fuse.moments)
        if died:
            assert not await _ran(plane, where, Fuse())
        return await everything(server, where)


async def _ran(plane: ControlPlane, where: str, fuse: Fuse) -> bool:
    """Whether the operator died on the way."""
    async with fresh(plane, where, fuse) as operator:
        try:
            await operator.settle()
        except Killed:
            return True
    return False


async def everything(server: ApiServer, where: str) -> dict[str, str]:
    """Every object of ours and the pool, without what differs between any two of them."""
    found = await children(server, where)
    found |= {("our", each["metadata"]["name"]): each for each in await server.find(POOL, where)}
    return {f"{kind} {name}": _told(each, where) for (kind, name), each in sorted(found.items())}


def _told(found: Json, where: str) -> str:
    text = json.dumps(_stable(found), sort_keys=True, indent=1)
    return re.sub(rf"\b{re.escape(where)}\b", "NAMESPACE", text)


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        # a deletion in the foreground is ended by the garbage collector, which is not here
        value = {k: "set" if k == "deletionTimestamp" else v for k, v in value.items()}
        if APPLIED in value:
            value[APPLIED] = json.loads(value[APPLIED])
        kept = {key: each for key, each in value.items() if key not in VOLATILE}
        return {key: "made" if key in SECRETS else _stable(each) for key, each in kept.items()}
    return [_stable(each) for each in value] if isinstance(value, list) else value


async def test_a_restart_in_the_middle_makes_no_second_certificate(
    plane: ControlPlane, ground: Client, space: Namespace
) -> None:
    """Killed between the Secret and the ConfigMap: the key that was made is kept, and the authority that is
    published is the one that signed it."""
    async with administrator(plane) as server:
        await made(server, space.name)
        fuse = Fuse()
        async with fresh(plane, space.name, fuse) as operator:
            fuse.at = 2
            with pytest.raises(Killed, match="after apply Secret"):
                await operator.settle()
        before = await children(server, space.name)
        async with fresh(plane, space.name) as operator:
            await operator.settle()
        after = await children(server, space.name)
    key = ("Secret", "twig-epp-tls")
    assert before[key] == after[key]
    assert ("ConfigMap", "twig-epp-ca") not in before
    assert ("ConfigMap", "twig-epp-ca") in after
