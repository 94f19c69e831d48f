"""Overlays such as ``spec.podTemplate``, merged into the templates of pods. Pure.

The merge is that of ``kubectl patch --type strategic``. What comes out has to be a pod of its component:
Services and the operator find it by its labels, its container is there, and it has all that is mounted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvist_operator.errors import SpecError
from kvist_operator.spec.pod_template import CONTAINERS, DIRECTIVE, Overlay
from kvist_operator.spec.pool import MANAGED, Pool

from .object_names import CONFIG, KEPT_LABELS, PLAN, Json

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
DROPPED: Final = ("delete", "replace")
"""Directives of items that are no items of the result."""
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
HANDLERS: Final = ("exec", "grpc", "httpGet", "tcpSocket")
"""Ways to probe, of which a probe has one."""
PLACING: Final = ("nodeSelector", "tolerations", "schedulerName", "priorityClassName", "imagePullSecrets")
"""Fields of an overlay that apply to other pods of the pool, too: on which nodes they are, and what they need
to be there."""
OUT_OF_MESH: Final = ("sidecar.istio.io/inject", "istio.io/dataplane-mode", "linkerd.io/inject")
"""Labels and annotations that leave a pod out of a service mesh."""


def overlaid(template: Json, overlay: Overlay, given: Mapping[str, Any]) -> Json:
    """Return a template with the overlay that is ``given`` for it.

    Raises:
        SpecError: it takes away something without which these are no pods of the component.
    """
    made: Json = merged(template, given)
    for field, problem in _problems(template, made, overlay):
        raise SpecError(f"{overlay.path}.{field}", problem)
    if own := (template["metadata"].get("labels") or {}).get(MANAGED):
        # some charts set this label for all pods; the operator lists its own by it
        made["metadata"]["labels"] = {**made["metadata"]["labels"], MANAGED: own}
    return made


def helper(pool: Pool, template: Json) -> Json:
    """Return the template of a pod from the picker's image that is no picker (a download, a cleaner): it is
    placed and labelled as pickers are by ``spec.picker.podTemplate``."""
    given = pool.picker.pod_template
    return _beside(template, given.get("metadata") or {}, given.get("spec") or {}, (*PLACING, "affinity"))


def server(pool: Pool, template: Json) -> Json:
    """Return the template of a server beside the engines: by ``spec.podTemplate`` it is placed as they are,
    and in no service mesh if they are not. Their other labels are about engines."""
    given = pool.pod_template.get("metadata") or {}
    out = {
        kind: {key: value for key, value in (given.get(kind) or {}).items() if key in OUT_OF_MESH}
        for kind in ("labels", "annotations")
    }
    out = {kind: found for kind, found in out.items() if found}
    return _beside(template, out, pool.pod_template.get("spec") or {}, PLACING)


def _beside(template: Json, metadata: Json, spec: Json, fields: Sequence[str]) -> Json:
    """Return a template of pods that are not of the overlay's component, and keep their own labels."""
    placing = {key: spec[key] for key in fields if key in spec}
    found: Json = merged(template, {"metadata": metadata, "spec": placing})
    labels = found["metadata"].get("labels") or {}
    found["metadata"]["labels"] = labels | template["metadata"]["labels"]
    return found


def _problems(base: Json, made: Json, overlay: Overlay) -> Iterator[tuple[str, str]]:
    """Yield the fields of an overlay that leave no pod of the component, and why."""
    for kind, kept in (("labels", KEPT_LABELS), ("annotations", (PLAN, CONFIG))):
        before, after = (each["metadata"].get(kind) or {} for each in (base, made))
        for name in kept:
            if name in before and before[name] != after.get(name):
                yield f"metadata.{kind}", f"changes {name}, which the operator needs: leave it as it is"
    spec = made.get("spec") or {}
    old, own = (_container(each, overlay.container) for each in (base, made))
    if not own.get("image"):
        yield "spec.containers", f"takes the container {overlay.container} away: merge into it by its name"
        return
    for probe in PROBES:
        ways = [way for way in HANDLERS if (own.get(probe) or {}).get(way)]
        if len(ways) > 1:
            unwanted = next((way for way in ways if way in (old.get(probe) or {})), ways[0])
            problem = f"has {' and '.join(ways)}, and a probe has one: write {unwanted}: null as well"
            yield f"spec.containers[{overlay.container}].{probe}", problem
    volumes = [each.get("name") for each in spec.get("volumes") or ()]
    if not all(volumes):
        yield "spec.volumes", "has a volume without a name: write one"
    gone = {each["name"] for each in base["spec"].get("volumes") or ()} - set(volumes)
    for container in (each for kind in CONTAINERS for each in spec.get(kind) or ()):
        for mount in container.get("volumeMounts") or ():
            if mount.get("name") in gone:  # one that nobody has may come from a webhook
                problem = f"takes {mount['name']} away, which container {container.get('name')} mounts"
                yield "spec.volumes", f"{problem}: leave the volume, or take the mount away as well"


def _container(template: Json, name: str) -> Json:
    """Return a container of a template; empty if there is none of this name."""
    containers = (template.get("spec") or {}).get("containers") or ()
    return next((each for each in containers if each.get("name") == name), {})


def merged(base: Any, patch: Any, key: str = "") -> Any:
    """Return ``base`` merged with ``patch``; neither is modified. ``key``: the field whose values they
    are."""
    if isinstance(patch, Mapping) and isinstance(base, Mapping):
        return _objects(base, patch)
    if isinstance(patch, list) and isinstance(base, list) and key in MERGED_BY:
        return _lists(base, patch, MERGED_BY[key])
    return _plain(patch)


def _objects(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    if patch.get(DIRECTIVE) == "replace":
        base = {}
    found = dict(base)
    for name, value in patch.items():
        if value is None or (isinstance(value, Mapping) and value.get(DIRECTIVE) == "delete"):
            found.pop(name, None)
        elif name != DIRECTIVE:
            found[name] = merged(found.get(name), value, name)
    return found


def _lists(base: list[Any], patch: list[Any], by: str) -> list[Any]:
    if any(isinstance(item, Mapping) and item.get(DIRECTIVE) == "replace" for item in patch):
        return [_plain(item) for item in patch if item.get(DIRECTIVE) != "replace"]
    patches = {item.get(by): item for item in patch if isinstance(item, Mapping)}
    kept = [
        merged(item, patches.pop(item.get(by), {}))
        for item in base
        if patches.get(item.get(by), {}).get(DIRECTIVE) != "delete"
    ]
    added = [item for item in patch if not isinstance(item, Mapping) or item.get(by) in patches]
    deleted = [item for item in added if isinstance(item, Mapping) and item.get(DIRECTIVE) == "delete"]
    return [*kept, *(_plain(item) for item in added if item not in deleted)]


def _plain(value: Any) -> Any:
    """Return a value without directives and nulls, which have no effect on an absent field."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items() if v is not None and k != DIRECTIVE}
    if not isinstance(value, list):
        return value
    return [_plain(v) for v in value if not (isinstance(v, Mapping) and v.get(DIRECTIVE) in DROPPED)]
