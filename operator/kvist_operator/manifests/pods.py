"""Parts of all pods, Services and budgets. Pure.

Pod Security *restricted*, the spread over nodes, the nodes that pods are scheduled to, ``spec.podTemplate``
as an overlay, and the volumes and variables by which pods read models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.hardware import PRODUCT_LABELS, Accelerator, find_accelerator
from kvist_operator.plan import Plan
from kvist_operator.plan.resources import ADAPTER_MOUNT, MODEL_MOUNT
from kvist_operator.spec.pool import ModelRef, Pool, Source
from kvist_operator.spec.pool_reader import split_source

from .cluster_facts import Json, Note, Site
from .object_names import ObjectNames


def placing(plan: Plan, site: Site) -> Json:
    """Tolerations and node affinity; affinity only by labels that nodes are seen to have."""
    row = plan.hardware.accelerator
    if row.vendor == "cpu":
        return {}
    found: Json = {"tolerations": [{"key": row.resource, "operator": "Exists", "effect": "NoSchedule"}]}
    terms = _terms(row, site.node_labels)
    if terms:
        required = {"nodeSelectorTerms": terms}
        found["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required},
        }
    return found


def _terms(row: Accelerator, nodes: Sequence[Mapping[str, str]]) -> list[Json]:
    """One for each label that tells the product; any of them will do."""
    seen = {
        label: sorted(
            {node[label] for node in nodes if label in node and find_accelerator(node[label]) == row}
        )
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


MERGED_BY: Final[Mapping[str, str]] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
_DIRECTIVE: Final = "$patch"


def merged(base: Any, patch: Any, key: str = "") -> Any:
    """``base`` under ``patch``; neither is changed. ``key``: the field both are the value of."""
    if isinstance(patch, Mapping) and isinstance(base, Mapping):
        return _objects(base, patch)
    if isinstance(patch, list) and isinstance(base, list) and key in MERGED_BY:
        return _lists(base, patch, MERGED_BY[key])
    return _plain(patch)


def _objects(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    if patch.get(_DIRECTIVE) == "replace":
        base = {}
    found = dict(base)
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif name != _DIRECTIVE:
            found[name] = merged(found.get(name), value, name)
    return found


def _lists(base: list[Any], patch: list[Any], by: str) -> list[Any]:
    if any(isinstance(item, Mapping) and item.get(_DIRECTIVE) == "replace" for item in patch):
        return [_plain(item) for item in patch if item.get(_DIRECTIVE) != "replace"]
    patches = {item.get(by): item for item in patch if isinstance(item, Mapping)}
    kept = [
        merged(item, patches.pop(item.get(by), {}))
        for item in base
        if patches.get(item.get(by), {}).get(_DIRECTIVE) != "delete"
    ]
    added = [item for item in patch if not isinstance(item, Mapping) or item.get(by) in patches]
    return [*kept, *(_plain(item) for item in added if not _deletes(item))]


def _deletes(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get(_DIRECTIVE) == "delete"


def _plain(value: Any) -> Any:
    """Without directives and nulls, which mean nothing where there was nothing."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None and k != _DIRECTIVE}
    return [_plain(v) for v in value] if isinstance(value, list) else value


TOKEN_VARIABLE: Final = "HF_TOKEN"  # a name, not a token


@dataclass(frozen=True, slots=True)
class Mounted:
    """A volume, and where a container has it."""

    volume: Json
    mount: Json


def model_mounts(pool: Pool) -> list[Mounted]:
    """The model and its adapters, where they are claims or images; all of them read-only."""
    found = [mounted("model", pool.model.kind, pool.model.location, MODEL_MOUNT, whole=True)]
    for i, adapter in enumerate(pool.model.adapters):
        kind, location = split_source(adapter.source, f"spec.model.adapters[{i}].source")
        found.append(mounted(f"adapter-{i}", kind, location, f"{ADAPTER_MOUNT}/{adapter.name}"))
    return [each for each in found if each]


def mounted(name: str, kind: Source, location: str, path: str, *, whole: bool = False) -> Mounted | None:
    """None for what is fetched from the hub or is in the container's image.

    ``whole``: the claim is mounted as it is, else the folder of it that ``location`` names.
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
    """The variable with the hub's token, from the user's Secret: the operator never reads it."""
    if model.token is None:
        return ()
    key = {"name": model.token.name, "key": model.token.key}
    return ({"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": key}},)


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
