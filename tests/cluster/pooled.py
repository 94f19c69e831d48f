"""The operator in a whole cluster, as it is installed, and pools for it to look after."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import yaml
from tests.cluster.client import Client
from tests.cluster.cluster import RESTRICTED, Cluster
from tests.cluster.space import Apis, Space, ready
from tests.cluster.steady import Steady
from tests.crd.cases import CRD

from kvist_operator.cluster.kinds import everywhere
from kvist_operator.process.settings import OperatorSettings
from kvist_sim import model

Json = dict[str, Any]
NAMESPACE: Final = "kvist-system"
NAME: Final = "kvist-operator"
SETTINGS: Final = OperatorSettings(discovery_interval=2.0, log_format="json")
MODEL: Final = "oci://kvist-test/model:1"
"""An image of the test cluster: the simulator's vocabulary and template, for engines and pickers alike."""
CONFIG: Final[Json] = json.loads((model.folder() / "config.json").read_text(encoding="utf-8"))
PICKERS: Final = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
_GROUP: Final = "rbac.authorization.k8s.io"
_RBAC: Final = f"{_GROUP}/v1"


def objects() -> list[Json]:
    """Return the objects that an administrator installs, without the CRD."""
    meta = {"name": NAME, "namespace": NAMESPACE}
    role = {"apiGroup": _GROUP, "kind": "ClusterRole", "name": NAME}
    account = {"kind": "ServiceAccount", **meta}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": _RBAC, "kind": "ClusterRole", "metadata": {"name": NAME}, "rules": everywhere()},
        {
            "apiVersion": _RBAC,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "roleRef": role,
            "subjects": [account],
        },
        _deployment(meta),
    ]


def _deployment(meta: Json) -> Json:
    labels = {"app": NAME}
    pod = {
        "serviceAccountName": NAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container()],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _container() -> Json:
    return {
        "name": "operator",
        "image": "kvist-operator:test",
        "command": ["kvist-operator"],
        "args": SETTINGS.to_args(),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": "metrics", "containerPort": SETTINGS.metrics_port}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "metrics"}, "periodSeconds": 2},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "metrics"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


async def installed(cluster: Cluster, client: Client) -> Space:
    """Install the operator if it is absent; return its namespace once it is ready."""
    await client.install_crds(yaml.safe_load(CRD.read_text()))
    space = Space(client, NAMESPACE, Apis(client), cluster.folder / "logs")
    await space.apply(*objects())
    await space.rolled_out(NAME)
    return space


def pool(name: str, **spec: Any) -> Json:
    """A pool of one engine, one picker and Envoy in front of them; ``spec`` replaces whole sections."""
    usual: Json = {
        "model": {"source": MODEL, "servedName": name, "shape": {"config": CONFIG}},
        "accelerator": {"product": "NVIDIA-H100-80GB-HBM3"},
        "picker": {"replicas": 1, "resources": PICKERS},
        "gateway": {"mode": "Envoy"},
    }
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {**usual, **spec},
    }


def condition(resource: Json, kind: str) -> Json:
    """One of its conditions; empty when there is none, or it is about an older generation."""
    generation = resource["metadata"]["generation"]
    for found in resource.get("status", {}).get("conditions", []):
        if found["type"] == kind and found.get("observedGeneration") == generation:
            return dict(found)
    return {}


async def until_ready(space: Space, name: str, *, seconds: float = 120.0) -> Json:
    """The pool, as soon as it is as it was asked for; else the test fails with what its status says."""

    async def done() -> Json | None:
        found = await space.get("InferencePool", name)
        return found if condition(found, "Ready").get("status") == "True" else None

    try:
        found = await space.until(done, f"pool {name}", seconds=seconds)
    except AssertionError as error:
        status = (await space.get("InferencePool", name)).get("status", {})
        raise AssertionError(f"{error}\n{json.dumps(status.get('conditions'), indent=1)}") from None
    assert found is not None
    return found


@dataclass
class Served:
    """A pool that serves, behind its own Envoy or behind a Gateway."""

    cluster: Cluster
    room: Space
    operator: Space
    name: str = "twig"
    gateway: str = ""
    """Address of the Gateway before it; empty: the pool's own Envoy."""
    host: str = ""
    """What the Gateway knows it by."""

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        there = self.gateway or f"{self.name}-envoy.{self.room.name}.svc"
        return f"http://{there}/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that clients send."""
        return {"Host": self.host} if self.host else {}

    async def ask(self, text: str, tokens: int = 4) -> Json:
        """A chat completion; fails the test for anything but 200."""
        async with (
            self.cluster.http() as http,
            http.post(self.url, json=self._body(text, tokens), headers=self.headers) as response,
        ):
            assert response.status == 200, await response.text()
            answer: Json = await response.json()
            return answer

    def _body(self, text: str, tokens: int, **more: Any) -> Json:
        messages = [{"role": "user", "content": text}]
        return {"model": self.name, "messages": messages, "max_tokens": tokens, **more}

    def load(self) -> Steady:
        """Clients that chat: mostly short answers to few prompts, and among them streams of some seconds,
        each about something new."""

        def body(number: int) -> Json:
            if number % 11:
                return self._body(f"Tell me about number {number % 5}. " * 8, 4)
            return self._body(f"{number} is a number. " * 8, 100, stream=True, ignore_eos=True)

        def whole(text: str) -> bool:
            return text.rstrip().endswith("data: [DONE]") if text.startswith("data:") else "choices" in text

        return Steady(self.cluster, self.url, body=body, whole=whole, headers=self.headers)

    async def get(self) -> Json:
        """Return the resource."""
        return await self.room.get("InferencePool", self.name)

    async def patch(self, **spec: Any) -> None:
        """A merge into its spec."""
        await self.room.patch("InferencePool", self.name, {"spec": spec})

    async def until_ready(self, *, seconds: float = 120.0) -> Json:
        """Wait until the pool is ready in its latest generation."""
        return await until_ready(self.room, self.name, seconds=seconds)

    async def engines(self) -> list[Json]:
        """Pods that serve the model, and are neither unready nor on their way out."""
        found = await self.room.pods(**{"kvist.dev/pool": self.name})
        return [pod for pod in found if ready(pod)]


@asynccontextmanager
async def serving(cluster: Cluster, **spec: Any) -> AsyncIterator[Served]:
    """A pool ``twig`` in a namespace of its own, ready."""
    async with cluster.client() as admin:
        operator = await installed(cluster, admin)
        async with cluster.space(admin) as room:
            await room.apply(pool("twig", **spec))
            made = Served(cluster, room, operator)
            await made.until_ready()
            yield made
