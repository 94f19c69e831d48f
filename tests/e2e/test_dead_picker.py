"""Answers that clients get while the picker is dead, behind Envoy Gateway."""

import json
from collections import Counter
from typing import Any, Final

import pytest
from tests.cluster.certified import PICKS
from tests.cluster.client import Client
from tests.cluster.cluster import Cluster
from tests.cluster.pooled import Served
from tests.cluster.space import Space
from tests.e2e import pools
from tests.e2e.commands import Commands
from tests.e2e.edge import attached
from tests.e2e.steps import say, step

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
Json = dict[str, Any]
PICKER: Final = "routed-epp"
OPERATOR: Final = "kvist-operator"
DEAF: Final = "deaf"
TIMES: Final = 10
NOTICED: Final = 3
"""Requests that may fail with FailClose until Envoy has put a picker aside; one, where any did."""


@pytest.mark.usefixtures("edge")
async def test_a_dead_picker_lets_everything_or_nothing_pass(
    cluster: Cluster, commands: Commands, admin: Client, system: Space
) -> None:
    """One among others that does not listen costs a few requests at most, and none with FailOpen. Where none
    listens every request passes with FailOpen and gets 503 with FailClose; where there is none at all,
    Envoy Gateway makes that 500. With pickers back, all is as before. A pool takes the other mode
    while it serves."""
    with step("helm install of kvist"):
        await pools.release(commands, system)
    try:
        async with cluster.space(admin) as room:
            with step("a pool that is attached"):
                pool = await pools.routed(commands, system, room, spec__gateway__failureMode="FailOpen")
                await room.until(lambda: pools.answers(pool), "an answer")
            await dies_and_comes_back(pool, system, "FailOpen", refused=200, none=200)
            with step("the pool takes the other mode"):
                await pool.patch(gateway={"failureMode": "FailClose"})
                await pool.until_ready()
                await room.until(lambda: closes(pool), "a policy that fails closed")
                await attached(room, pool.name)
            await dies_and_comes_back(pool, system, "FailClose", refused=503, none=500)
    finally:
        await pools.end(commands, system)


async def dies_and_comes_back(pool: Served, system: Space, mode: str, *, refused: int, none: int) -> None:
    """``refused``, ``none``: what all requests get while no picker listens, or there is none."""
    room = pool.room
    await scaled(system, OPERATOR, 0)
    with step(f"{mode}: a picker among others does not listen"):
        failed = await passed_over(pool)
    assert failed <= (0 if mode == "FailOpen" else NOTICED)
    with step(f"{mode}: no picker listens"):
        await scaled(room, PICKER, 0)
        await all_get(pool, refused)
    with step(f"{mode}: there is no picker"):
        await gone(room, DEAF)
        await all_get(pool, none)
    await scaled(system, OPERATOR, 1)
    with step(f"{mode}: pickers are back"):
        await room.rolled_out(PICKER)
        await picked(pool)
        await all_get(pool, 200)


async def closes(pool: Served) -> bool:
    """Return whether the gateway's configuration makes requests fail without a picker."""
    [asks] = (await pool.room.get("EnvoyExtensionPolicy", pool.name))["spec"]["extProc"]
    return asks["failOpen"] is False


async def passed_over(pool: Served) -> int:
    """A picker that is ready, says Kubernetes, and does not listen; how many requests notice."""
    template = (await pool.room.get("Deployment", PICKER))["spec"]["template"]
    [container] = template["spec"]["containers"]
    silent = {key: value for key, value in container.items() if not key.endswith("Probe")}
    silent |= {"command": ["sleep"], "args": ["100000"]}
    meta = {"name": DEAF, "labels": template["metadata"]["labels"]}
    spec = {**template["spec"], "containers": [silent]}
    async with pool.load() as load:
        await load.until(TIMES)
        await pool.room.apply({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        await pool.room.until(lambda: listed(pool.room), "three endpoints of the picker")
        await load.until(TIMES * TIMES)
    say("  requests that failed, of", f"{len(load.failures)}, {len(load.answers)}")
    return len(load.failures)


async def picked(pool: Served) -> None:
    """A request gets an answer, and some picker was asked."""
    seen: list[tuple[int, int]] = []

    async def picking() -> bool:
        seen.append((await pools.status(pool), await pools.counted(pool, PICKS)))
        return seen[-1][0] == 200 and seen[-1][1] > 0

    try:
        await pool.room.until(picking, "an answer by a picker")
    except AssertionError as error:
        status = (await pool.room.get("EnvoyExtensionPolicy", pool.name)).get("status")
        told = f"(status, picks) of requests: {Counter(seen)}\n{json.dumps(status)}"
        raise AssertionError(f"{told}\n{error}") from None


async def listed(room: Space) -> bool:
    """Return whether the picker's Service lists the unresponsive pod, too."""
    slices = await room.all_of("EndpointSlice", **{"kubernetes.io/service-name": PICKER})
    ends = [end for one in slices for end in one["endpoints"] or () if end["conditions"]["ready"]]
    return len(ends) == 3


async def gone(room: Space, pod: str) -> None:
    """A pod, at once."""
    await room.client.ask("DELETE", await room.path("Pod", pod), {"gracePeriodSeconds": 0})


async def scaled(space: Space, name: str, replicas: int) -> None:
    """Scale a Deployment and wait until it has exactly this number of pods, without terminating ones."""
    await space.patch("Deployment", name, {"spec": {"replicas": replicas}})
    await space.rolled_out(name)

    async def done() -> bool:
        found = [str(pod["metadata"]["name"]) for pod in await space.pods()]
        return sum(pod.startswith(f"{name}-") for pod in found) == replicas

    await space.until(done, f"{replicas} pods of {name}")


async def all_get(pool: Served, wanted: int) -> None:
    """Wait until the gateway answers with this status, then require it of every answer."""

    seen = []

    async def noticed() -> bool:
        seen.append(await pools.status(pool))
        return seen[-1] == wanted

    try:
        await pool.room.until(noticed, f"a first {wanted}", seconds=20)
    except AssertionError:
        raise AssertionError(f"no {wanted}, but {Counter(seen)}") from None
    found = [await pools.status(pool) for _ in range(TIMES)]
    assert found == [wanted] * TIMES
