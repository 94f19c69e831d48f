"""The operator on a cluster of the tests: a process of its own, under exactly the rights it ships."""

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.client import Client
from tests.cluster.control_plane import ADMIN, ControlPlane
from tests.crd.cases import CRD

from kvist_kube.connection import find_cluster
from kvist_operator.cluster.apiserver import ApiServer
from kvist_operator.cluster.cluster_api import Hook, Json
from kvist_operator.cluster.kinds import CHILDREN, POOL, ObjectKind, Target, election, everywhere, namespaced
from kvist_operator.manifests.object_names import OURS
from kvist_sim.http1 import answers, get
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children

HOST = "127.0.0.1"
START_SECONDS = 60.0
ACCOUNT = "kvist-operator"
RBAC = "rbac.authorization.k8s.io"
TOKEN_SECONDS = 3500
QUICK = ("--discovery-interval=1", "--resync=5")
"""What takes a minute on a cluster does not in a test."""


@dataclass
class Operator:
    """A running operator."""

    child: Child
    port: int

    async def page(self, path: str) -> str:
        """Return a page of the operator's metrics port."""
        _, body = await get(HOST, self.port, path)
        return body.decode()

    async def count(self, series: str) -> float:
        """The sum of what begins like this on its metrics page."""
        lines = (await self.page("/metrics")).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))


@asynccontextmanager
async def operating(
    folder: Path, kubeconfig: Path, *flags: str, ready: bool = True
) -> AsyncIterator[Operator]:
    """An operator, ready, and ended on the way out."""
    async with Children(folder) as children:
        yield await started(children, kubeconfig, *flags, ready=ready)


async def started(children: Children, kubeconfig: Path, *flags: str, ready: bool = True) -> Operator:
    """An operator that the caller ends."""
    [port] = free_ports(1)
    argv = [
        *(sys.executable, "-m", "kvist_operator", f"--metrics-host={HOST}", f"--metrics-port={port}"),
        *flags,
    ]
    child = children.start("operator", argv, environment={"KUBECONFIG": str(kubeconfig)})
    if ready:
        probe = functools.partial(answers, HOST, port, "/readyz")
        await children.ready(child, probe, START_SECONDS)
    return Operator(child, port)


async def account(plane: ControlPlane, admin: Client, home: str, namespaces: Sequence[str] = ()) -> Path:
    """A kubeconfig of a service account in ``home`` that has exactly the rights that are shipped: in all
    namespaces, or in these."""
    made = await admin.ask(
        "POST", f"/api/v1/namespaces/{home}/serviceaccounts", {"metadata": {"name": ACCOUNT}}
    )
    if namespaces:
        for space in namespaces:
            path = f"/apis/{RBAC}/v1/namespaces/{space}"
            await _bound(admin, home, f"{path}/roles", f"{path}/rolebindings", "Role", namespaced(), ACCOUNT)
    else:
        name, path = f"{ACCOUNT}-{home}", f"/apis/{RBAC}/v1"
        await _bound(
            admin,
            home,
            f"{path}/clusterroles",
            f"{path}/clusterrolebindings",
            "ClusterRole",
            everywhere(),
            name,
        )
    path, name = f"/apis/{RBAC}/v1/namespaces/{home}", f"{ACCOUNT}-lease"
    await _bound(admin, home, f"{path}/roles", f"{path}/rolebindings", "Role", election(), name)
    token = plane.keys.token(home, ACCOUNT, str(made["metadata"]["uid"]), TOKEN_SECONDS)
    return plane.kubeconfig(f"operator-{home}", token)


async def _bound(
    admin: Client, home: str, roles: str, bindings: str, kind: str, rules: Sequence[Json], name: str
) -> None:
    await admin.ask("POST", roles, {"metadata": {"name": name}, "rules": list(rules)})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": home}],
    }
    await admin.ask("POST", bindings, binding)


@asynccontextmanager
async def administrator(plane: ControlPlane, hook: Hook | None = None) -> AsyncIterator[ApiServer]:
    """The operator's own port, as the administrator."""
    load = find_cluster({"KUBECONFIG": str(plane.kubeconfig("admin", ADMIN))})
    server = ApiServer(load, hook=hook) if hook else ApiServer(load)
    try:
        yield server
    finally:
        await server.close()


async def with_crd(admin: Client) -> None:
    """Our CRD, served."""
    await admin.install_crds(yaml.safe_load(CRD.read_text()))


def pool(name: str, space: str, **spec: Any) -> Json:
    """A pool that is planned without a hub; ``spec`` replaces whole sections."""
    made = {
        "model": {"source": "hf://Qwen/Qwen3-8B"},
        "accelerator": {"product": "H100-80GB"},
        "replicas": 0,
    }
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": space},
        "spec": {**made, **spec},
    }


async def condition(server: ApiServer, name: str, space: str, kind: str) -> Mapping[str, Any]:
    """One condition of a pool as it is now; empty where there is none of its newest generation."""
    found = await server.get(Target(POOL, space, name)) or {}
    generation = found.get("metadata", {}).get("generation")
    conditions = (found.get("status") or {}).get("conditions") or ()
    said = [c for c in conditions if c["type"] == kind and c["observedGeneration"] == generation]
    return said[0] if said else {}


async def until_condition(
    server: ApiServer, name: str, space: str, kind: str, **expected: str
) -> Mapping[str, Any]:
    """Wait until a condition is so; a test's time limit bounds it."""
    while True:
        found = await condition(server, name, space, kind)
        if found and all(found[key] == value for key, value in expected.items()):
            return found
        await asyncio.sleep(0.05)


async def children(server: ApiServer, space: str, *more: ObjectKind) -> dict[tuple[str, str], Json]:
    """Every object of ours in a namespace, by kind and name."""
    kinds = [kind for kind in (*CHILDREN, *more) if kind.optional is None]
    found = [each for kind in kinds for each in await server.find(kind, space, labels=OURS)]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}
