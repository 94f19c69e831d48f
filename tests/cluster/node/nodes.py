"""A node: registered, its heart beating, its pods looked after, their logs to be had."""

import asyncio
import ssl
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final, Self

from aiohttp import web
from tests.cluster.binaries import VERSION
from tests.cluster.client import Client

from .follow import Followed, Json, Store, now
from .images import Images
from .network import Addresses
from .pods import STRATEGIC, Pod, Surroundings

KUBELET_PORT: Final = 10250
HEARTBEAT_SECONDS: Final = 10.0
LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


@dataclass(frozen=True)
class NodeSpec:
    """One node of a test cluster."""

    name: str
    address: str
    pods: str
    """Network of its pods."""
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)
    """What it has besides CPU and memory."""

    def json(self) -> Json:
        """To another process."""
        return asdict(self)

    @classmethod
    def read(cls, told: Json) -> Self:
        """From another process."""
        return cls(**told)


class Node:
    """Everything a kubelet does on one node."""

    def __init__(self, spec: NodeSpec, client: Client, store: Store, images: Images, folder: Path) -> None:
        self.spec = spec
        self._client = client
        self._pods: dict[str, Pod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        addresses = Addresses(IPv4Network(spec.pods))
        self._around = Surroundings(client, store, images, addresses, folder, spec.name, spec.address)

    async def register(self) -> None:
        """A Node object, Ready."""
        labels = {
            "kubernetes.io/hostname": self.spec.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.spec.labels,
        }
        body = {"metadata": {"name": self.spec.name, "labels": labels}, "spec": {"podCIDR": self.spec.pods}}
        await self._client.ask("POST", "/api/v1/nodes", body, expect=(201, 409))
        await self._beat()

    async def run(self) -> None:
        """Run the node until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beats())
            group.create_task(self._follows())

    async def _follows(self) -> None:
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.spec.name}"
        async for kind, found in Followed(self._client, path).changes():
            self._see(kind, found)

    def _see(self, kind: str, found: Json) -> None:
        uid = found["metadata"]["uid"]
        pod = self._pods.get(uid)
        if kind == "DELETED":
            if pod is not None:
                pod.end(0, forced=True)
        elif pod is not None:
            pod.update(found)
        elif found.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            self._begin(found)

    def _begin(self, found: Json) -> None:
        pod = Pod(found, self._around)
        self._pods[pod.uid] = pod
        pod.update(found)
        task = asyncio.create_task(pod.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(pod, done))

    def _over(self, pod: Pod, done: asyncio.Task[None]) -> None:
        self._pods.pop(pod.uid, None)
        self._tasks.discard(done)
        if not done.cancelled() and done.exception() is not None:
            sys.stderr.write(f"{pod.path}: {done.exception()!r}\n")

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._beat()

    async def _beat(self) -> None:
        """Lease and status: once the controller manager has written Unknown, only a status ends that."""
        path = f"/api/v1/nodes/{self.spec.name}/status"
        body = {"status": self._status()}
        await self._client.ask("PATCH", path, body, headers=STRATEGIC, expect=(200, 404, 409))
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        merge = {"Content-Type": "application/merge-patch+json"}
        path, body = f"{LEASES}/{self.spec.name}", {"spec": {"renewTime": time}}
        done = await self._client.ask("PATCH", path, body, headers=merge, expect=(200, 404))
        if done.get("code") == 404:
            spec = {"holderIdentity": self.spec.name, "leaseDurationSeconds": 40, "renewTime": time}
            body = {"metadata": {"name": self.spec.name}, "spec": spec}
            await self._client.ask("POST", LEASES, body, expect=(201, 404, 409))

    def _status(self) -> Json:
        capacity = {"cpu": "64", "memory": "1Ti", "pods": "110", "ephemeral-storage": "100Ti"}
        capacity |= self.spec.capacity
        return {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [
                {"type": "InternalIP", "address": self.spec.address},
                {"type": "Hostname", "address": self.spec.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            "nodeInfo": _INFO,
            "conditions": [
                _condition("Ready", good=True),
                *(_condition(f"{kind}Pressure", good=False) for kind in ("Memory", "Disk", "PID")),
            ],
        }

    async def serve_logs(self, tls: ssl.SSLContext) -> None:
        """Serve ``…/pods/x/log`` for the API server, over TLS, until the process ends."""
        application = web.Application()
        application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self.spec.address, KUBELET_PORT, ssl_context=tls).start()

    async def _logs(self, request: web.Request) -> web.Response:
        """Options ``previous``, ``tailLines``."""
        asked = request.match_info
        for pod in self._pods.values():
            if (pod.facts.namespace, pod.facts.name) == (asked["namespace"], asked["pod"]):
                return web.Response(body=self._log(pod, asked["container"], request.query))
        return web.Response(status=404, text="no such pod on this node")

    @staticmethod
    def _log(pod: Pod, name: str, query: Mapping[str, str]) -> bytes:
        [container] = [c for c in (*pod.init, *pod.containers) if c.spec["name"] == name]
        back = 1 if query.get("previous") == "true" else 0
        path = container.log(container.condition.restarts - back)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return b"".join(lines[-int(query["tailLines"]) :] if "tailLines" in query else lines)


def _condition(kind: str, *, good: bool) -> Json:
    status, time = "True" if good else "False", now()
    return {"type": kind, "status": status, "reason": "Told", "lastHeartbeatTime": time}


_INFO: Final = {
    "kubeletVersion": f"v{VERSION}",
    "operatingSystem": "linux",
    "architecture": "amd64",
    "osImage": "processes",
    "kernelVersion": "0",
    "containerRuntimeVersion": "process://1",
    "machineID": "m",
    "systemUUID": "s",
    "bootID": "b",
    "kubeProxyVersion": "",
}
