"""The operator and the Gateways that pools name, in a real API server; tests answer routes as GKE does."""

import asyncio
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.client import GAIE, Client, Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.foreign import crds
from tests.cluster.operated import QUICK, account, administrator, operating, pool, until_condition, with_crd

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.kinds import POOL, Target, kind_named
from kvist_operator.manifests.object_names import ENVOY_GATEWAY, GKE, NGINX

pytestmark = pytest.mark.timeout(300)
GROUP = "gateway.networking.k8s.io"
REFUSAL = 'Error GWCER104: HTTPRoute "twig" is misconfigured, err: Timeouts are not supported.'


async def with_gateway(admin: Client, space: Namespace, controller: str = GKE) -> None:
    """Install the CRDs and a Gateway whose class has this controller."""
    await with_crd(admin)
    await admin.install(GAIE)
    await admin.install_crds(*crds())
    name = f"class-of-{space.name}"
    version = {"apiVersion": f"{GROUP}/v1"}
    made = {"kind": "GatewayClass", "metadata": {"name": name}, "spec": {"controllerName": controller}}
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
    parent = {"controllerName": GKE, "parentRef": ref, "conditions": [condition]}
    merge = {"Content-Type": "application/merge-patch+json"}
    path = f"{space.of(GROUP, 'v1', 'httproutes')}/twig/status"
    await admin.ask("PATCH", path, {"status": {"parents": [parent]}}, headers=merge)


def without(kind: str, field: str) -> dict[str, Any]:
    """Return the CRD of a kind of an older version, whose ``spec`` lacks a field."""
    [found] = [crd for crd in crds() if crd["spec"]["names"]["kind"] == kind]
    made: dict[str, Any] = copy.deepcopy(found)
    for version in made["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        del spec["properties"][field]
        spec.pop("x-kubernetes-validations", None)  # they may name the field
    return made


def folder(parent: Path, name: str) -> Path:
    """Make a folder for the logs of one operator."""
    made = parent / name
    made.mkdir()
    return made


async def exchange(admin: Client, *made: dict[str, Any]) -> None:
    """Install CRDs in place of those of the same names."""
    for crd in made:
        await admin.uninstall(crd["metadata"]["name"])
    await admin.install_crds(*made)


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
        for kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
            while not await server.get(Target(kind_named("networking.gke.io", kind), space.name, "twig")):
                await asyncio.sleep(0.05)
        await answer(admin, space, "True", "Accepted", "")
        await until_condition(server, "twig", space.name, "GatewayAttached", reason="RouteAccepted")


async def test_a_policy_that_an_older_gateway_does_not_know_is_advice(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """The API server answers 500 to a field that a CRD lacks. Where that only raises a limit of a gateway,
    the pool is attached all the same; once the CRD is newer, the policy is created and the advice gone."""
    await with_gateway(admin, space, NGINX)
    older = without("ProxySettingsPolicy", "timeout")
    await exchange(admin, older)
    kubeconfig = await account(plane, admin, space.name)
    async with administrator(plane) as server:
        gateway = {"mode": "Route", "parentRefs": [{"name": "edge"}]}
        async with operating(folder(tmp_path, "older"), kubeconfig, *QUICK):
            await server.apply(pool("twig", space.name, gateway=gateway))
            said = await advice(server, space, "field not declared in schema", wanted=True)
            assert "upgrade it" in said
            await until_condition(server, "twig", space.name, "GatewayAttached", reason="NoAnswer")
        await exchange(admin, *crds())
        async with operating(folder(tmp_path, "newer"), kubeconfig, *QUICK):
            await advice(server, space, "field not declared in schema", wanted=False)


async def test_an_object_that_an_older_api_does_not_know_is_a_condition(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """The flavor EnvoyGateway needs its policies: with CRDs of an older Envoy Gateway a condition names the
    field and the remedy, and the other objects are there."""
    await with_gateway(admin, space, ENVOY_GATEWAY)
    await exchange(admin, without("BackendTrafficPolicy", "requestBuffer"))
    kubeconfig = await account(plane, admin, space.name)
    gateway = {"mode": "Route", "flavor": "EnvoyGateway", "parentRefs": [{"name": "edge"}]}
    async with administrator(plane) as server:
        async with operating(tmp_path, kubeconfig, *QUICK):
            await server.apply(pool("twig", space.name, gateway=gateway))
            said = await until_condition(server, "twig", space.name, "Progressing", reason="ObjectRefused")
        assert "requestBuffer: field not declared in schema" in said["message"]
        assert "upgrade it" in said["message"]
        await route_of(server, space, timeouts=True)
    await exchange(admin, *crds())


async def advice(server: ApiServer, space: Namespace, words: str, *, wanted: bool) -> str:
    """Wait until the pool's advice has these words, or has them no more."""
    while True:
        found = await server.get(Target(POOL, space.name, "twig")) or {}
        said = " ".join((found.get("status") or {}).get("advice", []))
        if (words in said) is wanted:
            return said
        await asyncio.sleep(0.05)
