"""``spec.podTemplate`` on a pod template, as ``kubectl patch --type strategic`` would merge it. Pure.

Objects are merged, null takes a field away, ``$patch: replace`` and ``$patch: delete`` are heeded. Lists are
replaced, but those below are merged by a key, as the API's own types say (``patchMergeKey`` in
``k8s.io/api/core/v1``); new items come after those that are there.
"""

from collections.abc import Mapping
from typing import Any, Final

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
