"""What all pods have in common: Pod Security *restricted*, spread, Services, budgets. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .cluster_facts import Json
from .object_names import ObjectNames

CONTAINER_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
CACHE: Final = "cache"
"""Volume that takes whatever a process wants to write."""


def pod_security(user: int) -> Json:
    """A numeric user that is not root: images need not name one. ``fsGroup``: volumes are writable for it."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def read_only() -> Json:
    """Security of a container that writes to its volumes alone."""
    return {**CONTAINER_SECURITY, "readOnlyRootFilesystem": True}


def spread(selector: Mapping[str, str]) -> list[Json]:
    """Rather on different nodes and in different zones, never at the price of a pod that stays away."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selector)},
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]


def empty(name: str, **options: Any) -> Json:
    """Return an emptyDir volume."""
    return {"name": name, "emptyDir": options}


def field(name: str, path: str) -> Json:
    """A variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def service(names: ObjectNames, name: str, component: str, selector: Mapping[str, str], *ports: Json) -> Json:
    """A Service inside the cluster."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.meta(name, component),
        "spec": {"type": "ClusterIP", "selector": dict(selector), "ports": list(ports)},
    }


def headless(made: Json, *, unready: bool = False) -> Json:
    """Return the same Service as a headless one: its name resolves to the pods' addresses."""
    more: Json = {"publishNotReadyAddresses": True} if unready else {}
    return {**made, "spec": {**made["spec"], "clusterIP": "None", **more}}


def port(name: str, number: int, *, protocol: str = "", at: int | None = None) -> Json:
    """A port of a Service; ``protocol``: the application's, for gateways."""
    found: Json = {"name": name, "port": at or number, "targetPort": number, "protocol": "TCP"}
    return {**found, "appProtocol": protocol} if protocol else found


def account(names: ObjectNames, name: str, component: str) -> Json:
    """A ServiceAccount whose token is mounted only where a pod asks for it."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": names.meta(name, component),
        "automountServiceAccountToken": False,
    }


def budget(names: ObjectNames, name: str, component: str, selector: Mapping[str, str]) -> Json:
    """One pod at a time may be evicted; one that does not work anyway never blocks the drain of a node."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.meta(name, component),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": dict(selector)},
        },
    }


def deployment(
    names: ObjectNames, name: str, component: str, spec: Json, pod: Json, annotations: Json
) -> Json:
    """A Deployment of stateless pods: the successor is there before a pod goes."""
    meta: Json = {"labels": names.labels(component)}
    if annotations:
        meta["annotations"] = annotations
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.meta(name, component),
        "spec": {
            "revisionHistoryLimit": 5,
            "selector": {"matchLabels": names.selector(component)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            **spec,
            "template": {"metadata": meta, "spec": pod},
        },
    }


def mounts(*pairs: Sequence[Any]) -> list[Json]:
    """Volume mounts from (volume, path) or (volume, path, read-only)."""
    return [
        {"name": name, "mountPath": path, **({"readOnly": True} if rest and rest[0] else {})}
        for name, path, *rest in pairs
    ]
