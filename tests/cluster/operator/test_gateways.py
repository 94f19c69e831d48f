"""The operator and the Gateways that pools name, in a real API server; tests answer routes as GKE does."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.client import GAIE, Client, Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.foreign import crds
from tests.cluster.operated import QUICK, account, administrator, operating, pool, until_condition, with_crd

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.kinds import GCP_BACKEND_POLICY, HEALTH_CHECK_POLICY, Target, kind_named

pytestmark = pytest.mark.timeout(300)
GROUP = "gateway.networking.k8s.io"
CONTROLLER = "networking.gke.io/gateway"
REFUSAL = 'Error GWCER104: HTTPRoute "twig" is misconfigured, err: Timeouts are not supported.'


async def with_gateway(admin: Client, space: Namespace) -> None:
    """Install the CRDs and a Gateway of a class of GKE."""
    await with_crd(admin)
    await admin.install(GAIE)
    await admin.install_crds(*crds())
    name = f"gke-l7-{space.name}"
    version = {"apiVersion": f"{GROUP}/v1"}
    made = {"kind": "GatewayClass", "metadata": {"name": name}, "spec": {"controllerName": CONTROLLER}}
    await admin.ask("POST", f"/apis/{GROUP}/v1/gatewayclasses", {**version, **made})
    listener = {"name": "http", "port": 80, "protocol": "HTTP"}
    edge = {"metadata": {"name": "edge"}, "spec": {"gatewayClassName": name, "listeners": [listener]}}
    await admin.ask("POST", space.of(GROUP, "v1", "gateways"), {**version, "kind": "Gateway", **edge})


async def route_of(server: ApiServer, space: Namespace, *, timeouts: bool) -> Mapping[str, Any]:
    """Wait for a route with timeouts, or for one without."""
    target = Target(kind_named(GROUP, "HTTPRoute"), space.name, "twig")
    while True:
        found = await server.get(target)
        if found is not None and ("timeouts" in found["spec"]["rules"][0]) is timeouts:
            return found
        await asyncio.sleep(0.05)


async def answer(admin: Client, space: Namespace, status: str, reason: str, message: str) -> None:
    """Answer the route as GKE's controller."""
    condition = {
        "type": "Accepted",
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-11-27T00:00:00Z",
    }
    ref = {"group": GROUP, "kind": "Gateway", "name": "edge"}
    parent = {"controllerName": CONTROLLER, "parentRef": ref, "conditions": [condition]}
    merge = {"Content-Type": "application/merge-patch+json"}
    path = f"{space.of(GROUP, 'v1', 'httproutes')}/twig/status"
    await admin.ask("PATCH", path, {"status": {"parents": [parent]}}, headers=merge)


@pytest.mark.parametrize("everywhere", [True, False], ids=["rights everywhere", "in one namespace"])
async def test_a_route_of_gke_has_no_timeouts(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path, *, everywhere: bool
) -> None:
    """With the chart's rights the first version of the route suits GKE. An operator that may not read classes
    of gateways writes it again once GKE has refused it. Either has the policies of GKE and ends attached."""
    await with_gateway(admin, space)
    spaces = [space.name]
    kubeconfig = await account(plane, admin, space.name, [] if everywhere else spaces)
    flags = () if everywhere else (f"--namespaces={space.name}",)
    async with administrator(plane) as server, operating(tmp_path, kubeconfig, *flags, *QUICK):
        await server.apply(
            pool("twig", space.name, gateway={"mode": "Route", "parentRefs": [{"name": "edge"}]})
        )
        if not everywhere:
            await route_of(server, space, timeouts=True)
            await answer(admin, space, "False", "Invalid", REFUSAL)
        route = await route_of(server, space, timeouts=False)
        assert route["metadata"]["generation"] == (1 if everywhere else 2)
        for kind in (HEALTH_CHECK_POLICY, GCP_BACKEND_POLICY):
            while not await server.get(Target(kind, space.name, "twig")):
                await asyncio.sleep(0.05)
        await answer(admin, space, "True", "Accepted", "")
        await until_condition(server, "twig", space.name, "GatewayAttached", reason="RouteAccepted")
