"""Failures between the operator and the API server, and APIs that come and go."""

import asyncio
from pathlib import Path

import pytest
import yaml
from tests.cluster.client import CRDS, GAIE, Client, Namespace, client
from tests.cluster.collecting import collecting
from tests.cluster.control_plane import ControlPlane
from tests.cluster.keys import LEEWAY_SECONDS
from tests.cluster.operated import (
    ACCOUNT,
    HOST,
    QUICK,
    account,
    administrator,
    operating,
    pool,
    until_condition,
    with_crd,
)

from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.kinds import CHILDREN, DEPLOYMENT, ObjectKind, Target
from kvist_sim.ports import free_ports
from kvist_sim.relays import TcpRelay

pytestmark = pytest.mark.timeout(300)
ROUTES = "httproutes.gateway.networking.k8s.io"
SERVICE = ObjectKind("", "v1", "Service", "services")
GATEWAY = {"mode": "Route", "parentRefs": [{"name": "front"}]}


async def replicas(server: ApiServer, space: str, wanted: int) -> None:
    """Wait until the engines' Deployment has so many."""
    while True:
        found = await server.get(Target(DEPLOYMENT, space, "twig"))
        if found is not None and found["spec"]["replicas"] == wanted:
            return
        await asyncio.sleep(0.05)


async def there(server: ApiServer, target: Target, *, wanted: bool = True) -> None:
    """Wait until it is there, or is not."""
    while (await server.get(target) is not None) != wanted:
        await asyncio.sleep(0.05)


async def test_the_api_server_dies_and_comes_back(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """The operator waits, and goes on: with what changed meanwhile, and with what changes after."""
    await with_crd(admin)
    kubeconfig = await account(plane, admin, space.name, [space.name])
    async with administrator(plane) as server:
        await server.apply(pool("twig", space.name))
        async with operating(tmp_path, kubeconfig, f"--namespaces={space.name}", *QUICK) as operator:
            await replicas(server, space.name, 0)
            await plane.kill_apiserver()
            await plane.start_apiserver()
            await server.apply(pool("twig", space.name, replicas=2))
            await replicas(server, space.name, 2)
            await server.apply(pool("twig", space.name, replicas=1))
            await replicas(server, space.name, 1)
            assert operator.child.running()
            assert "ok" in await operator.page("/healthz")


async def test_what_was_deleted_while_it_was_deaf_is_made_again(
    plane: ControlPlane, admin: Client, space: Namespace, relay: TcpRelay, tmp_path: Path
) -> None:
    """After an interruption longer than the API server's memory, no watch reports a deletion; the periodic
    resync finds it."""
    await with_crd(admin)
    await account(plane, admin, space.name, [space.name])
    uid = (await admin.ask("GET", f"{space.path}/serviceaccounts/{ACCOUNT}"))["metadata"]["uid"]
    token = plane.keys.token(space.name, ACCOUNT, uid, 3500)
    way = plane.kubeconfig(f"relayed-{space.name}", token, server=f"https://{relay.address}")
    flags = (f"--namespaces={space.name}", *QUICK)
    async with administrator(plane) as server:
        await server.apply(pool("twig", space.name))
        async with operating(tmp_path, way, *flags):
            await there(server, Target(SERVICE, space.name, "twig"))
            await until_condition(server, "twig", space.name, "Progressing", reason="Settled")
            relay.part()
            await admin.ask("DELETE", f"{space.path}/services/twig")
            await plane.compact()
            await plane.kill_apiserver()
            await plane.start_apiserver()
            relay.cut()
            relay.heal()
            async with client(plane):
                await there(server, Target(SERVICE, space.name, "twig"))


async def test_a_token_that_ends_is_read_again(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """Pods' tokens are replaced in their file; the old one ends, and neither reads nor watches stop."""
    await with_crd(admin)
    await account(plane, admin, space.name, [space.name])
    uid = (await admin.ask("GET", f"{space.path}/serviceaccounts/{ACCOUNT}"))["metadata"]["uid"]
    file = tmp_path / "token"
    file.write_text(plane.keys.token(space.name, ACCOUNT, uid, 20 - LEEWAY_SECONDS))
    way = plane.kubeconfig(f"rotating-{space.name}", file)
    async with administrator(plane) as server:
        await server.apply(pool("twig", space.name))
        async with operating(tmp_path, way, f"--namespaces={space.name}", *QUICK) as operator:
            await replicas(server, space.name, 0)
            file.write_text(plane.keys.token(space.name, ACCOUNT, uid, 3500))
            while not await operator.count('kvist_operator_api_requests_total{method="GET",status="401"'):
                await asyncio.sleep(0.2)
            await server.apply(pool("twig", space.name, replicas=2))
            await replicas(server, space.name, 2)


async def test_apis_come_and_go(plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path) -> None:
    """A pool that needs routes has a condition while their APIs are missing; once installed, the objects are
    created and followed. If an API is removed, that is a condition, and the operator continues."""
    await with_crd(admin)
    for name in (GAIE, ROUTES):
        await admin.uninstall(name)
    kubeconfig = await account(plane, admin, space.name, [space.name])
    route = Target(next(kind for kind in CHILDREN if kind.kind == "HTTPRoute"), space.name, "twig")
    async with administrator(plane) as server, collecting(plane, tmp_path):
        await server.apply(pool("twig", space.name, gateway=GATEWAY))
        async with operating(tmp_path, kubeconfig, f"--namespaces={space.name}", *QUICK) as operator:
            wait = until_condition
            said = await wait(server, "twig", space.name, "GatewayAttached", reason="ApiMissing")
            assert GAIE in said["message"]
            await admin.install(GAIE)
            await admin.install_crds(_routes())
            await there(server, route)
            await wait(server, "twig", space.name, "GatewayAttached", status="Unknown", reason="NoAnswer")

            await admin.ask("DELETE", route.path)
            await there(server, route)  # it is followed, too
            await admin.uninstall(ROUTES)
            await wait(server, "twig", space.name, "GatewayAttached", reason="ApiMissing")
            assert operator.child.running()
            await admin.install_crds(_routes())
            await there(server, route)
        await admin.uninstall(ROUTES)
        await admin.uninstall(GAIE)


async def test_a_webhook_that_does_not_answer_is_a_condition(
    plane: ControlPlane, admin: Client, space: Namespace, tmp_path: Path
) -> None:
    """While an admission webhook for Deployments is down, a condition quotes the API server, and objects of
    other kinds are there; the pool goes on by itself once the webhook is gone."""
    await with_crd(admin)
    [port] = free_ports(1)
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    hook = {
        "name": "policy.example.com",
        "clientConfig": {"url": f"https://{HOST}:{port}/"},
        "rules": [
            {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments"]}
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
    }
    await admin.ask("POST", hooks, {"metadata": {"name": space.name}, "webhooks": [hook]})
    kubeconfig = await account(plane, admin, space.name, [space.name])
    async with administrator(plane) as server:
        try:
            async with operating(tmp_path, kubeconfig, f"--namespaces={space.name}", *QUICK):
                await server.apply(pool("twig", space.name))
                said = await until_condition(
                    server, "twig", space.name, "Progressing", reason="ApiUnavailable"
                )
                assert 'failed calling webhook "policy.example.com"' in said["message"]
                assert await server.get(Target(SERVICE, space.name, "twig"))
                await admin.ask("DELETE", f"{hooks}/{space.name}")
                await replicas(server, space.name, 0)
                await until_condition(server, "twig", space.name, "Accepted", status="True")
        finally:
            await admin.ask("DELETE", f"{hooks}/{space.name}", expect=(200, 404))


def _routes() -> dict[str, object]:
    """HTTPRoutes with as much of a schema as is needed here: that of the Inference Extension's pool takes any
    spec, in the tests."""
    [found] = [crd for crd in yaml.safe_load_all(CRDS.read_text()) if crd["metadata"]["name"] == GAIE]
    names = {"kind": "HTTPRoute", "plural": "httproutes", "singular": "httproute"}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": anything},
        "subresources": {"status": {}},
    }
    group, note = "gateway.networking.k8s.io", {"api-approved.kubernetes.io": "unapproved, a test's own"}
    return {
        **found,
        "metadata": {"name": ROUTES, "annotations": note},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }
