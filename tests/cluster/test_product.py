"""kvist-epp as users run it on a cluster: a pool, pods that come and go, an API server that is away."""

import asyncio
import signal
from pathlib import Path

import pytest
from tests.cluster.client import GAIE, Client, Namespace
from tests.cluster.client import client as client_of
from tests.cluster.control_plane import ControlPlane
from tests.cluster.product import Product, product
from tests.cluster.test_rights import rules_of_the_guide

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
async def kubeconfig(plane: ControlPlane, space: Namespace, admin: Client) -> Path:
    """Return the kubeconfig of a service account with the guide's Role."""
    await admin.install(GAIE)
    await space.pool("pool", {"app": "vllm"}, 1)
    uid = await space.account("kvist-epp", rules_of_the_guide("pool"))
    return plane.kubeconfig("kvist-epp", plane.keys.token(space.name, "kvist-epp", uid, 3600))


async def spread(running: Product, count: int, tag: str) -> list[float]:
    """Return how many of ``count`` requests each engine has answered; none may fail."""
    before = await running.served()
    statuses = [await running.send(f"{tag} {number}") for number in range(count)]
    assert statuses == [200] * count
    return [after - was for after, was in zip(await running.served(), before, strict=True)]


async def until_picked(running: Product, wanted: list[bool]) -> None:
    """Wait until exactly these engines get requests."""
    for attempt in range(200):
        got = [share > 0 for share in await spread(running, 8, f"try {attempt}")]
        if got == wanted:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(await running.discovery())


async def test_requests_go_to_ready_pods_whatever_the_api_does(
    tmp_path: Path, plane: ControlPlane, space: Namespace, kubeconfig: Path
) -> None:
    """Requests go only to ready pods of the pool; while the API server is away, requests continue; changes
    made meanwhile apply when it is back."""
    async with product(tmp_path, space, kubeconfig) as running:
        first, second = running.engines
        await space.pool("pool", {"app": "vllm"}, first.port)
        await space.pod(first.name, first.address, annotations=first.annotations)
        await space.pod(second.name, second.address, ready=False, annotations=second.annotations)
        await running.ready()
        await until_picked(running, [True, False])
        assert await spread(running, 20, "one") == [20, 0]

        await space.status(second.name, ready=True)
        await until_picked(running, [True, True])

        await plane.kill_apiserver()
        while not (await running.discovery())["problem"]:
            await asyncio.sleep(0.05)
        assert sum(await spread(running, 40, "alone")) == 40
        assert (await running.page("/readyz"))[0] == 200
        assert 'kvist_epp_discovery_watching{resource="pods"} 0.0' in (await running.page("/metrics"))[1]

        await plane.start_apiserver()
        async with client_of(plane) as admin:
            await Namespace(admin, space.name).delete(first.name)
        await until_picked(running, [False, True])
        assert await spread(running, 20, "other") == [0, 20]
        while (await running.discovery())["problem"]:
            await asyncio.sleep(0.05)


async def test_a_picker_that_starts_without_the_api_waits_for_it(
    tmp_path: Path, plane: ControlPlane, space: Namespace, kubeconfig: Path
) -> None:
    """A fleet that was never listed is not an empty one: the picker is not ready and says why, until the API
    is there; SIGTERM in the meantime ends it at once."""
    async with product(tmp_path, space, kubeconfig, engines=1) as running:
        [engine] = running.engines
        await space.pool("pool", {"app": "vllm"}, engine.port)
        await space.pod(engine.name, engine.address, annotations=engine.annotations)
        await running.ready()
        await running.children.end(running.picker, signal.SIGTERM, 40)

        await plane.kill_apiserver()
        running.start_picker()
        while "ClientConnectorError" not in await readiness(running):
            await asyncio.sleep(0.1)

        await plane.start_apiserver()
        await running.ready()
        await until_picked(running, [True])


async def readiness(running: Product) -> str:
    """Return the text of a failing /readyz; empty if it passes or there is no answer."""
    try:
        status, text = await running.page("/readyz")
    except OSError:
        return ""
    return text if status == 503 else ""
