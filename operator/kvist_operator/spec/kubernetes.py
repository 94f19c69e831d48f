"""What is written as Kubernetes writes it: Secret keys, variables, amounts, parents, overlays. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

from kvist_epp.names import LABEL_MAX_NUM_SEQS, LABEL_POOL
from kvist_operator.errors import SpecError

from .fields import Fields
from .pool import SecretKey

NAME: Final = 253
"""Characters of a Kubernetes name."""
VARIABLE: Final = r"[-._A-Za-z][-._A-Za-z0-9]*"
AMOUNT: Final = r"[0-9]+(\.[0-9]+)?([KMGTP]i|[numkMGTP])?"

CONTAINER: Final = "engine"
"""Name of the engine's container, which an overlay refers to."""
_OURS: Final = "is set by the operator; leave it out"
OWN_METADATA: Final[Mapping[tuple[str, ...], str]] = {
    ("labels", LABEL_POOL): _OURS,
    ("labels", LABEL_MAX_NUM_SEQS): _OURS,
    ("name",): _OURS,
    ("namespace",): _OURS,
}
OWN_POD: Final[Mapping[tuple[str, ...], str]] = {
    ("terminationGracePeriodSeconds",): "is set by the plan: use spec.rollout.drainSeconds",
    ("restartPolicy",): _OURS,
}
OWN_CONTAINER: Final[Mapping[tuple[str, ...], str]] = {
    ("args",): "is set by the plan: use spec.engine.extraArgs",
    ("command",): "is set by the plan: use spec.engine.image for an image with vLLM on its PATH",
    ("image",): "is set by the plan: use spec.engine.image",
}


def secret(f: Fields | None) -> SecretKey | None:
    """One key of a Secret; None when absent."""
    if f is None:
        return None
    name = f.required("name", "the Secret's name", most=NAME)
    found = SecretKey(name=name, key=f.text("key", "token", most=NAME))
    f.done()
    return found


def env(f: Fields) -> Mapping[str, Any]:
    """One entry of a container's ``env``."""
    name = f.required("name", "the variable's name", pattern=VARIABLE, most=128)
    value, source = f.get("value"), _origin(f.optional("valueFrom"))
    if value is not None and source is not None:
        raise SpecError(f.path, "value and valueFrom exclude each other")
    text = f.text("value", most=8192)
    f.done()
    return {"name": name, "value": text} if source is None else {"name": name, "valueFrom": source}


def _origin(f: Fields | None) -> Mapping[str, Any] | None:
    if f is None:
        return None
    found = {
        "secretKeyRef": _key(f.optional("secretKeyRef")),
        "configMapKeyRef": _key(f.optional("configMapKeyRef")),
        "fieldRef": _field(f.optional("fieldRef")),
    }
    f.done()
    given = {key: value for key, value in found.items() if value is not None}
    if len(given) != 1:
        raise SpecError(f.path, f"needs exactly one of {', '.join(found)}")
    return given


def _field(f: Fields | None) -> Mapping[str, Any] | None:
    if f is None:
        return None
    path = f.required("fieldPath", "such as status.podIP", most=NAME)
    f.done()
    return {"fieldPath": path}


def _key(f: Fields | None) -> Mapping[str, Any] | None:
    if f is None:
        return None
    name, key = (f.required(k, f"the {k} of the object", most=NAME) for k in ("name", "key"))
    optional = f.get("optional")
    if optional is not None and not isinstance(optional, bool):
        raise SpecError(f.at("optional"), "is neither true nor false")
    f.done()
    return {"name": name, "key": key, **({} if optional is None else {"optional": optional})}


def resources(f: Fields) -> Mapping[str, Any]:
    """``requests`` and ``limits``."""
    found = {key: _amounts(f.free(key), f.at(key)) for key in ("requests", "limits")}
    f.done()
    return {key: value for key, value in found.items() if value}


def _amounts(raw: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    if len(raw) > 8:
        raise SpecError(path, f"has {len(raw)} entries; at most 8")
    for name, value in raw.items():
        if isinstance(value, bool | float) or not re.fullmatch(AMOUNT, str(value)):
            raise SpecError(f"{path}.{name}", f"{value!r} is no amount; write it like 500m or 2Gi")
    return dict(raw)


def parent(f: Fields) -> Mapping[str, Any]:
    """A ParentReference of the Gateway API."""
    found = {
        "group": f.text("group", most=NAME),
        "kind": f.text("kind", most=63),
        "namespace": f.text("namespace", most=63),
        "name": f.required("name", "the Gateway's name", most=NAME),
        "sectionName": f.text("sectionName", most=NAME),
        "port": f.whole("port", high=65_535),
    }
    f.done()
    return {key: value for key, value in found.items() if value}


def template(f: Fields) -> Mapping[str, Any]:
    """An overlay of the engines' pods: labels, annotations and any field of a pod but the plan's own."""
    found = {key: f.free(key) for key in ("metadata", "spec")}
    f.done()
    _leave(found["metadata"], f.at("metadata"), OWN_METADATA)
    _leave(found["spec"], f.at("spec"), OWN_POD)
    for container in found["spec"].get("containers") or []:
        if isinstance(container, Mapping) and container.get("name") == CONTAINER:
            _leave(container, f"{f.path}.spec.containers[{CONTAINER}]", OWN_CONTAINER)
    return {key: value for key, value in found.items() if value}


def _leave(raw: Mapping[str, Any], path: str, owned: Mapping[tuple[str, ...], str]) -> None:
    for keys, remedy in owned.items():
        if _at(raw, keys):
            raise SpecError(".".join((path, *keys)), remedy)


def _at(raw: Any, keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(raw, Mapping) or key not in raw:
            return False
        raw = raw[key]
    return True
