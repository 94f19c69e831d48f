"""Parts of all pods, Services and budgets. Pure.

Pod Security *restricted*, the spread over nodes, the nodes that pods are scheduled to, and the volumes and
variables by which pods read models.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.hardware import Accelerator, is_called
from kvist_operator.node_labels import PRODUCT_LABELS
from kvist_operator.plan import Plan
from kvist_operator.plan.resources import ADAPTER_MOUNT, HOME_VOLUME, MODEL_MOUNT
from kvist_operator.spec.pool import ModelRef, Pool, SecretKey, Source
from kvist_operator.spec.pool_reader import split_source

from .object_names import Json, Note, ObjectNames, Site


def placing(plan: Plan, site: Site) -> Json:
    """Return tolerations and node affinity; affinity only by labels that nodes of the cluster have."""
    row = plan.hardware.accelerator
    if row.vendor == "cpu":
        return {}
    found: Json = {"tolerations": [{"key": row.resource, "operator": "Exists", "effect": "NoSchedule"}]}
    terms = _terms(row, site.node_labels)
    if terms:
        required = {"nodeSelectorTerms": terms}
        found["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return found


def _terms(row: Accelerator, nodes: Sequence[Mapping[str, str]]) -> list[Json]:
    """Return a term for each node label that names the product; a node has to match one of them."""
    seen = {
        label: sorted({node[label] for node in nodes if label in node and is_called(row, node[label])})
        for label in PRODUCT_LABELS
    }
    return [
        {"matchExpressions": [{"key": label, "operator": "In", "values": values}]}
        for label, values in seen.items()
        if values
    ]


def unplaced(plan: Plan, site: Site) -> list[Note]:
    """Return a note where pods may be scheduled to nodes with another accelerator than the plan's."""
    row = plan.hardware.accelerator
    if row.vendor == "cpu" or _terms(row, site.node_labels):
        return []
    return [
        Note(
            "",
            "NodesUnknown",
            f"no node label is known that selects nodes with {row.name}: if the cluster also has other "
            "accelerators, set spec.podTemplate.spec.nodeSelector",
        )
    ]


TOKEN_VARIABLE: Final = "HF_TOKEN"  # a name, not a token


@dataclass(frozen=True, slots=True)
class Mounted:
    """A volume and its mount."""

    volume: Json
    mount: Json


def model_mounts(pool: Pool) -> list[Mounted]:
    """Return the volumes of the model and its adapters that are claims or images; all are read-only."""
    found = [mounted("model", pool.model.kind, pool.model.location, MODEL_MOUNT, whole=True)]
    for i, adapter in enumerate(pool.model.adapters):
        kind, location = split_source(adapter.source, f"spec.model.adapters[{i}].source")
        found.append(mounted(f"adapter-{i}", kind, location, f"{ADAPTER_MOUNT}/{adapter.name}"))
    return [each for each in found if each]


def mounted(name: str, kind: Source, location: str, path: str, *, whole: bool = False) -> Mounted | None:
    """Return a volume for a source; None if it is fetched from the hub or is part of the container's image.

    ``whole``: mount the whole claim instead of the folder that ``location`` names.
    """
    mount: Json = {"name": name, "mountPath": path, "readOnly": True}
    if kind is Source.IMAGE:
        return Mounted({"name": name, "image": {"reference": location, "pullPolicy": "IfNotPresent"}}, mount)
    if kind is not Source.CLAIM:
        return None
    claim, _, folder = location.partition("/")
    if folder and not whole:
        mount["subPath"] = folder
    volume = {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return Mounted(volume, mount)


def token(model: ModelRef) -> Iterable[Json]:
    """Return the variable with the hub's token, by reference: the operator never reads the Secret."""
    return () if model.token is None else (from_secret(TOKEN_VARIABLE, model.token),)


def from_secret(variable: str, source: SecretKey) -> Json:
    """Return a variable with one key of a Secret; a pod without it waits, and the kubelet says for what."""
    key = {"name": source.name, "key": source.key}
    return {"name": variable, "valueFrom": {"secretKeyRef": key}}


CONTAINER_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
CACHE: Final = HOME_VOLUME
"""Name of the volume for everything that a process writes."""


def pod_security(user: int, site: Site) -> Json:
    """Return a security context with a numeric user, for images that name none; ``fsGroup`` makes volumes
    writable. Where the cluster assigns users, it refuses pods that name one."""
    ids = {} if site.assigns_users else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}


def read_only() -> Json:
    """Return the security context of a container that writes only to its volumes."""
    return {**CONTAINER_SECURITY, "readOnlyRootFilesystem": True}


def spread(selector: Mapping[str, str], revision: str = "pod-template-hash") -> list[Json]:
    """Return constraints that spread pods over nodes and zones where possible.

    ``revision``: label by which pods of another generation are not counted (Kubernetes 1.27), since during a
    rollout they leave anyway; that of a Deployment's pods by default.
    """
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selector)},
            "matchLabelKeys": [revision],
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]


def empty(name: str, **options: Any) -> Json:
    """Return an emptyDir volume."""
    return {"name": name, "emptyDir": options}


def field(name: str, path: str) -> Json:
    """Return a variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def service(names: ObjectNames, name: str, component: str, selector: Mapping[str, str], *ports: Json) -> Json:
    """Return a Service inside the cluster."""
    spec = {"type": "ClusterIP", "selector": dict(selector), "ports": list(ports)}
    return names.child("v1", "Service", name, component, spec=spec)


def headless(made: Json, *, unready: bool = False) -> Json:
    """Return the same Service as a headless one: its name resolves to the pods' addresses."""
    more: Json = {"publishNotReadyAddresses": True} if unready else {}
    return {**made, "spec": {**made["spec"], "clusterIP": "None", **more}}


def port(name: str, number: int, *, protocol: str = "", at: int | None = None) -> Json:
    """Return a port of a Service; ``protocol`` is that of the application, for gateways."""
    found: Json = {"name": name, "port": at or number, "targetPort": number, "protocol": "TCP"}
    return {**found, "appProtocol": protocol} if protocol else found


def account(names: ObjectNames, name: str, component: str) -> Json:
    """Return a ServiceAccount whose token is mounted only in pods that request it."""
    return names.child("v1", "ServiceAccount", name, component, automountServiceAccountToken=False)


def budget(names: ObjectNames, name: str, component: str, selector: Mapping[str, str]) -> Json:
    """Return a budget of one evicted pod at a time; an unhealthy pod never blocks the drain of a node."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": dict(selector)},
    }
    return names.child("policy/v1", "PodDisruptionBudget", name, component, spec=spec)


def template(
    names: ObjectNames, component: str, pod: Json, annotations: Mapping[str, str] | None = None
) -> Json:
    """Return the template of a component's pods."""
    meta: Json = {"labels": names.labels(component)}
    if annotations:
        meta["annotations"] = dict(annotations)
    return {"metadata": meta, "spec": pod}


def deployment(names: ObjectNames, name: str, component: str, spec: Json, made: Json) -> Json:
    """Return a Deployment of stateless pods with this template: a pod is deleted once its successor is
    ready."""
    whole = {
        "revisionHistoryLimit": 5,
        "selector": {"matchLabels": names.selector(component)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        **spec,
        "template": made,
    }
    return names.child("apps/v1", "Deployment", name, component, spec=whole)


def mounts(*pairs: Sequence[Any]) -> list[Json]:
    """Return volume mounts for tuples (volume, path) or (volume, path, read-only)."""
    return [
        {"name": name, "mountPath": path, **({"readOnly": True} if rest and rest[0] else {})}
        for name, path, *rest in pairs
    ]


def quantity(number: float) -> str:
    """Return bytes as a quantity of MiB or GiB, rounded up, in the notation that the API server keeps."""
    mebibytes = math.ceil(number / (1 << 20))
    return f"{mebibytes >> 10}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"
