"""The cache for weights in a whole cluster: a hub, a Job that fills a claim, and engines that wait for it."""

import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.pooled import CONFIG, NAME, condition, installed, pool
from tests.cluster.space import Space
from tests.fakes import hub

pytestmark = pytest.mark.timeout(300)
Json = dict[str, Any]
PLAIN: Json = {"picker": {"mode": "Off"}, "gateway": {"mode": "None"}}
PORT = 8000
SERVER = f"""
import time

Hub.files = {{"config.json": b"{{}}", **{{f"model-{{i}}.safetensors": bytes([i]) * 1000 for i in range(3)}}}}

class Slow(Hub):
    def do_GET(self) -> None:
        if self.path.endswith(".safetensors"):
            time.sleep(5 * int(self.path[-13]))
        super().do_GET()

ThreadingHTTPServer(("0.0.0.0", {PORT}), Slow).serve_forever()
"""
"""A hub whose second and third file of weights take five and ten seconds."""


def hub_pod() -> Json:
    """Return a pod with the hub of the tests."""
    container = {
        "name": "hub",
        "image": "kvist-test/python:1",
        "command": ["python3", "-c", inspect.getsource(hub) + SERVER],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "hub", "labels": {"app": "hub"}},
        "spec": {"containers": [container], "securityContext": pod},
    }


def cached(room: Space, repository: str, port: int = PORT) -> Json:
    """Return a pool whose weights come from the hub of the namespace."""
    endpoint = {"name": "HF_ENDPOINT", "value": f"http://hub.{room.name}.svc:{port}"}
    return pool(
        "twig",
        **PLAIN,
        model={
            "source": f"hf://{repository}",
            "shape": {"config": CONFIG, "checkpointSize": "15Gi"},
            "cache": {"claim": "weights"},
        },
        engine={"env": [endpoint]},
    )


@pytest.fixture
async def ground(cluster: Cluster, room: Space) -> AsyncIterator[Space]:
    """The operator, a hub and a claim."""
    await installed(cluster, room.client)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "hub"},
        "spec": {"selector": {"app": "hub"}, "ports": [{"port": PORT}]},
    }
    name, size = f"weights-{room.name}", {"storage": "20Gi"}
    shared: Json = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {**shared, "capacity": size, "hostPath": {"path": "/nowhere"}}
    claim = {**shared, "volumeName": name, "resources": {"requests": size}}
    meta = {"name": "weights"}
    await room.apply(
        hub_pod(),
        service,
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": claim},
    )
    yield room
    await room.remove("PersistentVolume", name)


async def test_engines_start_after_the_weights_are_there(ground: Space) -> None:
    """Progress grows in the status, no engine is created before its end, and an operator that is replaced
    in the middle goes on with the same Job."""
    await ground.apply(cached(ground, "kvist/twig"))

    async def some() -> Json | None:
        found = (await ground.get("InferencePool", "twig")).get("status", {}).get("cache", {})
        return found if 0 < found.get("partsFilled", 0) < 3 else None

    found = await ground.until(some, "a part of the weights")
    assert found is not None
    assert (found["phase"], found["totalBytes"]) == ("Filling", 15 << 30)
    assert found["bytes"] == found["partsFilled"] * (5 << 30)
    assert await ground.found("Deployment", "twig") is None
    said = condition(await ground.get("InferencePool", "twig"), "Progressing")
    assert (said["reason"], "parts of the weights" in said["message"]) == ("Waiting", True)
    [job] = await ground.all_of("Job")

    room = Space(ground.client, "kvist-system", ground.apis, ground.logs)
    for pod in await room.pods(app=NAME):
        await room.remove("Pod", pod["metadata"]["name"])

    async def running() -> Json | None:
        return await ground.found("Deployment", "twig")

    engines = await ground.until(running, "the engines' Deployment", seconds=120)
    assert engines is not None
    [same] = await ground.all_of("Job")
    assert same["metadata"]["uid"] == job["metadata"]["uid"]
    assert {c["type"] for c in same["status"]["conditions"] if c["status"] == "True"} >= {"Complete"}
    assert same["metadata"]["creationTimestamp"] <= engines["metadata"]["creationTimestamp"]

    async def ready() -> Json | None:
        found = await ground.get("InferencePool", "twig")
        return found if condition(found, "Ready").get("status") == "True" else None

    whole = await ground.until(ready, "the pool", seconds=120)
    assert whole is not None
    cache = whole["status"]["cache"]
    assert (cache["phase"], cache["bytes"], cache["partsFilled"]) == ("Filled", 15 << 30, 3)


async def test_a_download_that_fails_is_a_condition(ground: Space) -> None:
    """A repository that the hub does not have is named with the hub's words, and no engine is created."""
    await ground.apply(cached(ground, "kvist/none"))

    async def failed() -> Json | None:
        found = condition(await ground.get("InferencePool", "twig"), "Progressing")
        return found if found.get("reason") == "ModelUnavailable" else None

    found = await ground.until(failed, "the failure", seconds=120)
    assert found is not None
    assert "kvist/none cannot be downloaded: RepositoryNotFoundError" in found["message"]
    assert "Check spec.model.source; for a private repository name the Secret" in found["message"]
    assert await ground.found("Deployment", "twig") is None


async def test_a_download_that_is_corrected_goes_on(ground: Space) -> None:
    """A Job with the wrong address of the hub is replaced by one of the same name, and engines start."""
    await ground.apply(cached(ground, "kvist/twig", port=9))

    async def failed() -> Json | None:
        found = condition(await ground.get("InferencePool", "twig"), "Progressing")
        return found if found.get("reason") == "ModelUnavailable" else None

    found = await ground.until(failed, "the failure", seconds=120)
    assert found is not None
    assert "Pods cannot reach the hub" in found["message"]
    [job] = await ground.all_of("Job")
    await ground.apply(cached(ground, "kvist/twig"))

    async def running() -> Json | None:
        return await ground.found("Deployment", "twig")

    assert await ground.until(running, "the engines' Deployment", seconds=120)
    [again] = await ground.all_of("Job")
    assert again["metadata"]["name"] == job["metadata"]["name"]
    assert again["metadata"]["uid"] != job["metadata"]["uid"]
