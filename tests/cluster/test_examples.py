"""The pools of examples/ in a real API server: our CRD with its rules, core kinds, HTTPRoutes by their
CRD."""

from pathlib import Path
from typing import Any

import pytest
from tests.cluster.client import Namespace
from tests.examples import documents, is_pool, manifests, name_of

from kvist_operator.spec import read_pool

pytestmark = pytest.mark.timeout(300)
WHERE = {
    "ConfigMap": "api/v1/configmaps",
    "Deployment": "apis/apps/v1/deployments",
    "HTTPRoute": "apis/gateway.networking.k8s.io/v1/httproutes",
    "HorizontalPodAutoscaler": "apis/autoscaling/v2/horizontalpodautoscalers",
    "PersistentVolumeClaim": "api/v1/persistentvolumeclaims",
    "Service": "api/v1/services",
}
ELSEWHERE = ("EnvoyProxy", "Gateway", "GatewayClass", "Telemetry", "ScaledObject")
"""Kinds that are held to their shape (tests/shapes.yaml); tests/e2e applies all but the last."""
Json = dict[str, Any]


def path_of(space: Namespace, made: Json) -> str:
    """The collection that an object belongs to."""
    if made["kind"] == "InferencePool":
        group, _, version = made["apiVersion"].partition("/")
        return space.of(group, version, "inferencepools")
    folder, _, plural = WHERE[made["kind"]].rpartition("/")
    return f"/{folder}/namespaces/{space.name}/{plural}"


async def test_every_object_is_taken(restricted: Namespace) -> None:
    """Unknown fields refused; pools come back as what was meant, defaults filled in; pods are restricted."""
    seen: set[str] = set()
    for path, made in everything():
        if made["kind"] in ELSEWHERE:
            continue
        seen.add(made["kind"])
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        answer = await restricted.client.ask("POST", path_of(restricted, made), made, params=query)
        if is_pool(made):
            assert spec_of(answer) == spec_of(made), name_of(path)
        if made["kind"] == "Deployment":
            name = made["metadata"]["name"]
            pod = {"metadata": {"name": name}, "spec": made["spec"]["template"]["spec"]}
            await restricted.client.ask("POST", f"{restricted.path}/pods", pod, params=query)
    assert seen == {*WHERE, "InferencePool"}


def everything() -> list[tuple[Path, Json]]:
    """Every object of every example."""
    return [(path, made) for path in manifests() for made in documents(path)]


def spec_of(resource: Json) -> Any:
    """Return a pool as the operator reads it."""
    return read_pool({**resource, "metadata": {"name": resource["metadata"]["name"], "namespace": "n"}})
