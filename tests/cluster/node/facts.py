"""Facts that a pod's containers may read: fields of the pod, data of Secrets and ConfigMaps, variables."""

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvist_kube.quantity import parse_quantity

from .errors import WaitingError
from .follow import Json, Store

CONFIG_ERROR: Final = "CreateContainerConfigError"
API_ADDRESS: Final = "10.96.0.1"
UNLIMITED: Final = {"cpu": "2", "memory": "8Gi"}
"""Limits of a container that sets none: less than the nodes claim to have, since Go programs make as many
threads as they are given."""
_KEYED: Final = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_REFERENCE: Final = re.compile(r"\$(\$|\(([^)]+)\))")


@dataclass
class Facts:
    """The facts of one pod."""

    pod: Json
    """As the API server reported it last."""
    node: str
    node_address: str
    store: Store
    address: str = ""
    """Of the pod, once it has one."""

    @property
    def namespace(self) -> str:
        """Return the pod's namespace."""
        return str(self.pod["metadata"]["namespace"])

    @property
    def name(self) -> str:
        """Return the pod's name."""
        return str(self.pod["metadata"]["name"])

    def field(self, path: str) -> str:
        """A field by the path of a ``fieldRef``. Raises WaitingError for one that there is not."""
        meta, spec = self.pod["metadata"], self.pod["spec"]
        keyed = _KEYED.fullmatch(path)
        if keyed:
            return str((meta.get(keyed[1]) or {}).get(keyed[2], ""))
        found = {
            "metadata.name": meta["name"],
            "metadata.namespace": meta["namespace"],
            "metadata.uid": meta["uid"],
            "metadata.labels": _lines(meta.get("labels", {})),
            "metadata.annotations": _lines(meta.get("annotations", {})),
            "spec.nodeName": self.node,
            "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
            "status.podIP": self.address,
            "status.podIPs": self.address,
            "status.hostIP": self.node_address,
        }.get(path)
        if found is None:
            raise WaitingError(CONFIG_ERROR, f"unsupported fieldPath: {path}")
        return str(found)

    def data(self, kind: str, name: str, *, optional: bool = False) -> dict[str, bytes]:
        """Return the data of a Secret or ConfigMap (``kind``: plural). Raises WaitingError if it does not
        exist."""
        found = self.store.get(kind, self.namespace, name)
        if found is None:
            if optional:
                return {}
            raise WaitingError(CONFIG_ERROR, f'{kind[:-1]} "{name}" not found')
        if kind == "secrets":
            return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
        plain = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        return plain | {k: base64.b64decode(v) for k, v in (found.get("binaryData") or {}).items()}


def environment(container: Json, facts: Facts, image: Mapping[str, str]) -> dict[str, str]:
    """Variables of a container; ``image``: what its image sets. Raises WaitingError for what is not there."""
    found = {
        **image,
        "HOSTNAME": facts.name,
        "KUBERNETES_SERVICE_HOST": API_ADDRESS,
        "KUBERNETES_SERVICE_PORT": "443",
    }
    for source in container.get("envFrom", []):
        for key, kind in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if key in source:
                data = facts.data(kind, source[key]["name"], optional=source[key].get("optional", False))
                found |= {name: value.decode() for name, value in data.items()}
    for variable in container.get("env", []):
        value = _value(variable, facts, found, container)
        if value is not None:
            found[variable["name"]] = value
    return found


def _lines(values: Mapping[str, str]) -> str:
    """Labels or annotations as files of the downward API have them."""
    return "\n".join(f"{key}={json.dumps(value)}" for key, value in values.items())


def _value(variable: Json, facts: Facts, before: Mapping[str, str], container: Json) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return expanded(variable.get("value", ""), before)
    if "fieldRef" in source:
        return facts.field(source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource(source["resourceFieldRef"], container)
    for key, kind in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
        if key in source:
            return _keyed(kind, source[key], facts)
    raise WaitingError(CONFIG_ERROR, f"{variable['name']}: unsupported source {', '.join(source)}")


def _resource(reference: Json, container: Json) -> str:
    """A limit or request in units of the divisor, rounded up; ``UNLIMITED`` where there is none."""
    section, _, name = reference["resource"].partition(".")
    found = container.get("resources", {}).get(section, {}).get(name, UNLIMITED.get(name))
    if found is None:
        raise WaitingError(CONFIG_ERROR, f"unsupported resource: {reference['resource']}")
    divisor = str(reference.get("divisor", "1"))
    units = parse_quantity(str(found)) / parse_quantity("1" if divisor == "0" else divisor)
    return str(math.ceil(units))


def _keyed(kind: str, reference: Json, facts: Facts) -> str | None:
    optional = reference.get("optional", False)
    data = facts.data(kind, reference["name"], optional=optional)
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if optional:
        return None
    raise WaitingError(
        CONFIG_ERROR, f"couldn't find key {reference['key']} in {kind[:-1]} {reference['name']}"
    )


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` replaced; what is not known stays, ``$$`` is a dollar."""
    return _REFERENCE.sub(lambda m: "$" if m[1] == "$" else variables.get(m[2], m[0]), text)
