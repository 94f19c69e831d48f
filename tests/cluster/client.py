"""Actions of a cluster's administrator in tests: objects as plain documents."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from tests.cluster.control_plane import ADMIN, ControlPlane

CRDS = Path(__file__).parent / "crds.yaml"
GAIE = "inferencepools.inference.networking.k8s.io"
"""CRD of the Inference Extension's pools, one of ``CRDS``."""
NODE = "a-node"
"""Named in pods only: there is no kubelet, so a pod that is deleted goes when the test says so."""
Document = dict[str, Any]
_MERGE = {"Content-Type": "application/merge-patch+json"}


@dataclass
class Client:
    """The API as its administrator."""

    session: aiohttp.ClientSession

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        expect: Sequence[int] = (200, 201, 202),
        **more: Any,
    ) -> Document:
        """The answer; fails the test for a status that is not expected."""
        async with self.session.request(method, path, json=body, **more) as response:
            answer: Document = await response.json(content_type=None)
            assert response.status in expect, f"{method} {path}: {response.status} {answer}"
            return answer

    async def install(self, *names: str) -> None:
        """These CRDs of ``crds.yaml``, served."""
        found = yaml.safe_load_all(CRDS.read_text())
        await self.install_crds(*(crd for crd in found if crd["metadata"]["name"] in names))

    async def install_crds(self, *crds: Document) -> None:
        """Install CRDs and wait until they are served."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for crd in crds:
            await self.ask("POST", path, crd, expect=(201, 409))
            await self._served(f"{path}/{crd['metadata']['name']}")

    async def uninstall(self, name: str) -> None:
        """Take a CRD away, and wait until it has gone."""
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        await self.ask("DELETE", path, expect=(200, 404))
        while (await self.ask("GET", path, expect=(200, 404))).get("code") != 404:
            await asyncio.sleep(0.05)

    async def collection(self, path: str) -> None:
        """Wait until it is served: the API server knows a CRD as established before its handlers do."""
        while True:
            async with self.session.get(path) as response:
                if response.status != 404:
                    return
            await asyncio.sleep(0.05)

    async def _served(self, path: str) -> None:
        while True:
            conditions = (await self.ask("GET", path)).get("status", {}).get("conditions") or []
            if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def client(plane: ControlPlane, token: str = ADMIN) -> AsyncIterator[Client]:
    """A client of this control plane."""
    connector = aiohttp.TCPConnector(ssl=plane.tls())
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(plane.url, connector=connector, headers=headers) as session:
        yield Client(session)


@dataclass
class Namespace:
    """One namespace, and pods that a test plays the kubelet for."""

    client: Client
    name: str

    @property
    def path(self) -> str:
        """Return the path of the core objects in the namespace."""
        return f"/api/v1/namespaces/{self.name}"

    def of(self, group: str, version: str, plural: str) -> str:
        """Path of a collection of another API."""
        return f"/apis/{group}/{version}/namespaces/{self.name}/{plural}"

    async def pod(
        self,
        name: str,
        address: str,
        *,
        ready: bool = True,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> Document:
        """A running pod."""
        body = {
            "metadata": {
                "name": name,
                "labels": {"app": "vllm", **(labels or {})},
                "annotations": dict(annotations or {}),
            },
            "spec": {"nodeName": NODE, "containers": [{"name": "engine", "image": "vllm"}]},
        }
        await self.client.ask("POST", f"{self.path}/pods", body)
        return await self.status(name, address, ready=ready)

    async def status(
        self, name: str, address: str = "", *, ready: bool = True, phase: str = "Running"
    ) -> Document:
        """Write a pod's status as a kubelet would."""
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        status: Document = {"phase": phase, "conditions": conditions}
        if address:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        path = f"{self.path}/pods/{name}/status"
        return await self.client.ask("PATCH", path, {"status": status}, headers=_MERGE)

    async def label(self, name: str, **labels: str | None) -> None:
        """Other labels for a pod."""
        body = {"metadata": {"labels": {key.replace("__", "/"): value for key, value in labels.items()}}}
        await self.client.ask("PATCH", f"{self.path}/pods/{name}", body, headers=_MERGE)

    async def delete(self, name: str, *, seconds: int = 30) -> None:
        """Delete a pod; with 0 seconds it has gone, else it terminates until it is deleted so."""
        await self.client.ask("DELETE", f"{self.path}/pods/{name}", {"gracePeriodSeconds": seconds})

    async def account(self, name: str, rules: Sequence[Document]) -> str:
        """A service account with a Role of these rules; its uid."""
        made = await self.client.ask("POST", f"{self.path}/serviceaccounts", {"metadata": {"name": name}})
        rbac = "rbac.authorization.k8s.io"
        role = {"metadata": {"name": name}, "rules": list(rules)}
        await self.client.ask("POST", self.of(rbac, "v1", "roles"), role)
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.name}],
        }
        await self.client.ask("POST", self.of(rbac, "v1", "rolebindings"), binding)
        return str(made["metadata"]["uid"])

    async def rules(self, name: str, rules: Sequence[Document]) -> None:
        """Other rules for its Role."""
        path = f"{self.of('rbac.authorization.k8s.io', 'v1', 'roles')}/{name}"
        await self.client.ask("PATCH", path, {"rules": list(rules)}, headers=_MERGE)

    async def pool(self, name: str, labels: Mapping[str, str], *ports: int) -> None:
        """An InferencePool of the Gateway API Inference Extension, or its new spec."""
        path = self.of("inference.networking.k8s.io", "v1", "inferencepools")
        spec = {"selector": {"matchLabels": dict(labels)}, "targetPorts": [{"number": p} for p in ports]}
        body = {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": spec,
        }
        made = await self.client.ask("POST", path, body, expect=(201, 409))
        if made.get("code") == 409:
            patch = [{"op": "replace", "path": "/spec", "value": spec}]
            headers = {"Content-Type": "application/json-patch+json"}
            await self.client.ask("PATCH", f"{path}/{name}", patch, headers=headers)


async def namespace(client: Client, name: str) -> Namespace:
    """A new namespace, with the service account that pods are admitted with."""
    await client.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    made = Namespace(client, name)
    await client.ask("POST", f"{made.path}/serviceaccounts", {"metadata": {"name": "default"}})
    return made
