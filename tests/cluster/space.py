"""Actions of tests in one namespace of a cluster: apply objects, and wait for results with a time limit."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.cluster.client import Client

Json = dict[str, Any]
T = TypeVar("T")
SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1
MANAGER: Final = {"fieldManager": "test", "force": "true"}
APPLY: Final = {"Content-Type": "application/apply-patch+yaml"}
MERGE: Final = {"Content-Type": "application/merge-patch+json"}
TAIL_LINES: Final = 12


class Apis:
    """Paths of the collections of each kind, as the API server reports them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[tuple[str, str], Json] = {}

    async def path(self, version: str, kind: str, namespace: str) -> str:
        """The collection of a kind of ``apiVersion``, of all namespaces where it has none."""
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._known:
            for resource in (await self._client.ask("GET", root))["resources"]:
                if "/" not in resource["name"]:
                    self._known[version, resource["kind"]] = resource
        found = self._known[version, kind]
        inside = f"/namespaces/{namespace}" if found["namespaced"] else ""
        return f"{root}{inside}/{found['name']}"


VERSIONS: Final = {
    "Job": "batch/v1",
    **dict.fromkeys(("Deployment", "ReplicaSet", "StatefulSet"), "apps/v1"),
    "PodDisruptionBudget": "policy/v1",
    "InferencePool": "kvist.dev/v1alpha1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "EndpointSlice": "discovery.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    **dict.fromkeys(
        ("Gateway", "GatewayClass", "HTTPRoute", "BackendTLSPolicy"), "gateway.networking.k8s.io/v1"
    ),
    **dict.fromkeys(("BackendTrafficPolicy", "EnvoyExtensionPolicy"), "gateway.envoyproxy.io/v1alpha1"),
}
"""Of kinds that are not of the core API."""


@dataclass
class Space:
    """One namespace of the cluster."""

    client: Client
    name: str
    apis: Apis
    logs: Path
    """Folder with the logs of all pods of the cluster, also of those that are gone."""

    async def path(self, kind: str, name: str = "", *, version: str = "") -> str:
        """Return the path of an object, or of a collection."""
        where = await self.apis.path(version or VERSIONS.get(kind, "v1"), kind, self.name)
        return f"{where}/{name}" if name else where

    async def apply(self, *objects: Mapping[str, Any]) -> list[Json]:
        """Server-side, unknown fields refused; the objects as they are then."""
        made = []
        for one in objects:
            path = await self.path(one["kind"], one["metadata"]["name"], version=one["apiVersion"])
            params = {**MANAGER, "fieldValidation": "Strict"}
            made.append(await self.client.ask("PATCH", path, dict(one), headers=APPLY, params=params))
        return made

    async def get(self, kind: str, name: str) -> Json:
        """An object that there is."""
        return await self.client.ask("GET", await self.path(kind, name))

    async def found(self, kind: str, name: str) -> Json | None:
        """An object, perhaps."""
        answer = await self.client.ask("GET", await self.path(kind, name), expect=(200, 404))
        return None if answer.get("code") == 404 else answer

    async def all_of(self, kind: str, **labels: str) -> list[Json]:
        """All of a kind with these labels; ``app__name`` is the label ``app/name``."""
        selector = ",".join(f"{k.replace('__', '/')}={v}" for k, v in labels.items())
        found = await self.client.ask("GET", await self.path(kind), params={"labelSelector": selector})
        items: list[Json] = found["items"]
        return items

    async def pods(self, **labels: str) -> list[Json]:
        """Pods, those that are on their way out included."""
        return await self.all_of("Pod", **labels)

    async def patch(self, kind: str, name: str, body: Json, *, sub: str = "") -> Json:
        """Merge into an object, or into a subresource of it."""
        path = await self.path(kind, name)
        return await self.client.ask("PATCH", f"{path}/{sub}".rstrip("/"), body, headers=MERGE)

    async def remove(self, kind: str, name: str) -> None:
        """Delete an object, if there is one; what it owns follows."""
        body = {"propagationPolicy": "Background"}
        await self.client.ask("DELETE", await self.path(kind, name), body, expect=(200, 202, 404))

    async def until(
        self, what: Callable[[], Awaitable[T]], about: str = "it", *, seconds: float = SECONDS
    ) -> T:
        """The first answer that is true. Fails the test after so long, and says how the pods are."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not (answer := await what()):
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"{about}: not within {seconds:g} s\n{await self.described()}")
            await asyncio.sleep(POLL_SECONDS)
        return answer

    async def rolled_out(self, name: str, *, seconds: float = SECONDS) -> Json:
        """A Deployment of which every pod is of the newest template and available."""

        async def done() -> Json | None:
            found = await self.get("Deployment", name)
            return found if complete(found) else None

        found = await self.until(done, f"Deployment {name}", seconds=seconds)
        assert found is not None
        return found

    async def log(self, pod: str, *, container: str = "", previous: bool = False) -> str:
        """Return the log of a container, read through the API server and the kubelet."""
        path = f"{await self.path('Pod', pod)}/log"
        query = {"container": container} if container else {}
        query |= {"previous": "true"} if previous else {}
        async with self.client.session.get(path, params=query) as response:
            text = await response.text()
            assert response.status == 200, text
        return text

    async def described(self) -> str:
        """Every pod in a line, and the last lines of those that do not run as they should."""
        lines: list[str] = []
        for pod in await self.pods():
            lines.append(line_of(pod))
            if not ready(pod):
                lines += self.tail(pod["metadata"]["name"])
        return "\n".join(lines)

    def tail(self, pod: str) -> list[str]:
        """The last lines of each container of a pod, of every start."""
        found = sorted(self.logs.glob(f"{self.name}_{pod}_*/*/*.log"))
        texts = [(path, path.read_text(errors="replace").splitlines()[-TAIL_LINES:]) for path in found]
        return [f"    {path.parent.name}/{path.stem} | {line}" for path, said in texts for line in said]

    async def delete(self) -> None:
        """The namespace, with what is in it; pods do not get their grace."""
        await self.client.ask("DELETE", f"/api/v1/namespaces/{self.name}")
        path = await self.path("Pod")
        while await self.pods():
            await self.client.ask("DELETE", path, {"gracePeriodSeconds": 0})
            await asyncio.sleep(POLL_SECONDS)


def complete(deployment: Json) -> bool:
    """Return whether a rollout is complete, by the rule of ``kubectl rollout status``."""
    status, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
    counts = [status.get(key, 0) for key in ("replicas", "updatedReplicas", "availableReplicas")]
    return status.get("observedGeneration") == deployment["metadata"]["generation"] and counts == [wanted] * 3


def ready(pod: Json) -> bool:
    """Whether it is, and stays."""
    conditions = pod.get("status", {}).get("conditions", [])
    return not pod["metadata"].get("deletionTimestamp") and any(
        c["type"] == "Ready" and c["status"] == "True" for c in conditions
    )


def waiting(pod: Json) -> dict[str, str]:
    """Why its containers wait, by name."""
    found = {}
    for status in pod.get("status", {}).get("containerStatuses", []):
        if "waiting" in status["state"]:
            found[status["name"]] = str(status["state"]["waiting"]["reason"])
    return found


def line_of(pod: Json) -> str:
    """For a person."""
    status = pod.get("status", {})
    states = [
        f"{c['name']} ×{c['restartCount']} ready={c['ready']} {c['state']}"
        for c in status.get("containerStatuses", [])
    ]
    scheduled = [c.get("message", "") for c in status.get("conditions", []) if c["type"] == "PodScheduled"]
    going = " (going)" if pod["metadata"].get("deletionTimestamp") else ""
    about = "; ".join(states) or "; ".join(filter(None, scheduled))
    return f"  {pod['metadata']['name']}{going} {status.get('phase')} {status.get('podIP', '')} {about}"
