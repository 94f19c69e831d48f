"""A pool of the Gateway API Inference Extension behind a real Istio."""

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio
from tests.cluster.certified import PICKS
from tests.cluster.client import Client
from tests.cluster.cluster import RESTRICTED, Cluster
from tests.cluster.pooled import Served, condition
from tests.cluster.space import Space
from tests.e2e import pools
from tests.e2e.commands import Commands, patch
from tests.e2e.edge import accepted, gateway_address
from tests.e2e.istio import install as istio
from tests.e2e.steps import say, step
from tests.e2e.test_journey import LARGE_BYTES, MORE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
EXAMPLE: Final = "04-httproute"
IN_CLUSTER: Final = {"networking.istio.io/service-type": "ClusterIP"}
"""For a Gateway: nothing here gives addresses to a Service of type LoadBalancer."""
OUT_OF_MESH: Final = {"sidecar.istio.io/inject": "false"}
BY_LABEL: Final = 'with the label `sidecar.istio.io/inject: "false"` in spec.picker.podTemplate'
OWN_ROUTE: Final[dict[str, Any]] = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "HTTPRoute",
    "metadata": {"name": "models"},
    "spec": {
        "parentRefs": [{"name": "edge"}],
        "hostnames": [pools.HOST],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                "backendRefs": [
                    {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "routed"}
                ],
                "timeouts": {"request": "0s"},
            }
        ],
    },
}
"""A route that a user writes."""
[SECURITY] = RESTRICTED
"""Label of the namespaces that tests have."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(cluster: Cluster, admin: Client, commands: Commands, system: Space) -> AsyncIterator[Served]:
    """The pool of 04-httproute at a Gateway of Istio."""
    async with cluster.space(admin, istio.NAMESPACE) as home, cluster.space(admin) as room:
        with step("helm install of Istio"):
            await istio.install(commands, admin, home, room.name)
        try:
            await pools.release(commands, system)
            with step(f"kubectl apply of {EXAMPLE}, until Istio answers"):
                made = await attached(commands, system, room)
            yield made
        finally:
            await pools.end(commands, system)
            await istio.uninstall(commands, home)


async def attached(commands: Commands, system: Space, room: Space) -> Served:
    """The example's pool, which answers by the example's Gateway."""
    patches = (
        patch("InferencePool", **pools.OURS),
        patch("Gateway", metadata__annotations=IN_CLUSTER),
    )
    await commands.apply(EXAMPLE, room.name, *patches)
    made = Served(commands.cluster, room, system, "routed", host=pools.HOST)
    await made.until_ready()
    made.gateway = await gateway_address(room)
    await room.until(lambda: pools.answers(made), "an answer by Istio")
    return made


async def test_prefixes_are_cached_where_istio_sends_them(pool: Served) -> None:
    """The pickers are asked over TLS without a DestinationRule; prompts with the same beginning find it in
    the cache, and a large body passes."""
    assert condition(await pool.get(), "GatewayAttached")["reason"] == "RouteAccepted"
    assert accepted(await pool.room.get("BackendTLSPolicy", "routed-epp"), "ancestors")
    found = await pools.cached(pool)
    say("  of their tokens were in the cache of the pod that was picked", f"{found:.0%}")
    assert found > 0.85
    assert await pools.counted(pool, PICKS) >= pools.PREFIXES * (1 + pools.EACH)
    assert await pools.status(pool, LARGE_BYTES) == 200


async def test_no_request_fails_while_pods_are_replaced(commands: Commands, pool: Served) -> None:
    """No request fails while the engines roll over to other arguments, and then the pickers."""
    async with pool.load() as load:
        await load.until(MORE)
        with step("the engines roll over"):
            await pools.rolled(pool)
        await load.until(MORE)
        with step("the pickers roll over"):
            where = ("rollout", "--namespace", pool.room.name)
            await commands.kubectl(*where, "restart", "deployment/routed-epp")
            await commands.kubectl(*where, "status", "deployment/routed-epp", "--timeout=90s")
        await load.until(MORE)
    say("  answers meanwhile", str(len(load.answers)))
    assert load.failures == []


async def test_a_telemetry_resource_reports_the_ends(commands: Commands, pool: Served) -> None:
    """With the example's provider and Telemetry, the pickers learn from Istio's access log when requests
    end."""
    assert await pools.counted(pool, pools.ENDS) == 0
    await commands.apply(f"{EXAMPLE}/istio", pool.room.name)
    async with pool.load() as load:
        while await pools.counted(pool, pools.ENDS) < MORE:
            await load.until(MORE)
    assert load.failures == []


async def test_a_route_of_the_user_s_replaces_the_pool_s(pool: Served) -> None:
    """No request fails while a pool's own route gives way to one of the user's, and back: the pickers are
    asked, the status follows the Gateway that names the pool, and only its pods may connect to the
    engines."""
    room, gateway = pool.room, (await pool.get())["spec"]["gateway"]

    async def attached_by(reason: str) -> bool:
        return bool(condition(await pool.get(), "GatewayAttached")["reason"] == reason)

    async def peers() -> str:
        return str((await room.get("NetworkPolicy", pool.name))["spec"]["ingress"])

    before = await peers()
    assert "gateway-name" in before
    async with pool.load() as load:
        await load.until(MORE)
        await room.apply(OWN_ROUTE)
        await room.until(
            lambda: taken(room, OWN_ROUTE["metadata"]["name"]), "Istio reports the route of the user's"
        )
        await pool.patch(gateway={"parentRefs": None, "hostnames": None})
        await room.until(lambda: gone(room, pool.name), "no route of the pool's")
        await room.until(lambda: attached_by("RouteAccepted"), "attached")
        picks = await pools.counted(pool, PICKS)
        await load.until(MORE)
        assert await pools.counted(pool, PICKS) > picks
        assert await peers() == before
        await pool.patch(gateway=gateway)
        await room.until(lambda: taken(room, pool.name), "a route of the pool's")
        await room.remove("HTTPRoute", OWN_ROUTE["metadata"]["name"])
        await load.until(MORE)
    assert load.failures == []


async def taken(room: Space, route: str) -> bool:
    """Return whether Istio has taken a route."""
    found = await room.found("HTTPRoute", route)
    return found is not None and accepted(found, "parents")


async def gone(room: Space, route: str) -> bool:
    """Return whether a route is no longer there."""
    return await room.found("HTTPRoute", route) is None


async def test_a_label_leaves_pods_out_of_the_mesh(commands: Commands, pool: Served, restored: None) -> None:
    """In a namespace whose pods get Istio's proxy, the status says by which label they get none, whether the
    pods are refused or created; no request fails meanwhile."""
    room = pool.room.name

    async def says(text: str, *, there: bool = True) -> bool:
        found = (await pool.get())["status"]
        lines = [*found["advice"], *(each["message"] for each in found["conditions"])]
        return any(text in line for line in lines) is there

    async with pool.load() as load:
        await commands.kubectl("label", "namespace", room, "istio-injection=enabled")
        with step("new pods are refused"):
            await commands.kubectl("rollout", "--namespace", room, "restart", "deployment/routed-epp")
            await pool.room.until(lambda: says("adds this container"), "the remedy")
            assert await says(BY_LABEL)
        with step("new pods get a proxy"):
            await commands.kubectl("label", "--overwrite", "namespace", room, f"{SECURITY}=privileged")
            await pool.room.until(lambda: says("are in a service mesh"), "the advice")
            assert await says(BY_LABEL)
        with step("new pods get none"):
            await pool.patch(picker={"podTemplate": {"metadata": {"labels": OUT_OF_MESH}}})
            await pool.room.rolled_out("routed-epp")
            await pool.room.until(lambda: says(BY_LABEL, there=False), "no advice")
        await load.until(MORE)
    assert load.failures == []
    pods = await pool.room.pods(**{"app.kubernetes.io/component": "picker"})
    assert {each["name"] for pod in pods for each in pod["spec"]["containers"]} == {"picker"}


@pytest_asyncio.fixture(loop_scope="session")
async def restored(commands: Commands, pool: Served) -> AsyncIterator[None]:
    """The labels of the namespace as they were."""
    yield
    back = ("istio-injection-", f"{SECURITY}={RESTRICTED[SECURITY]}")
    await commands.kubectl("label", "--overwrite", "namespace", pool.room.name, *back)
