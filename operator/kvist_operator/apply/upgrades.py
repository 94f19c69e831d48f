"""Workloads that a new operator would change stay as they are until the pool's owner agrees. Pure.

Each workload carries what was applied last, and by which operator, in the annotation ``kvist.dev/applied``.
If the operator has changed since (another version, other default images), or the pool's preset has, the
pool's spec has not, and the rendered pods differ, the workload keeps its old pods: only its number of
replicas follows the spec. The difference is reported as *pending*, and applied when ``spec.rollout.upgrade``
says so:

- ``Manual``: when the pool's annotation ``kvist.dev/apply-plan`` names the hash of the pending change.
- ``Window``: in the hours of ``spec.rollout.window``.
- ``Automatic``: at once.

A change of the pool's own spec is applied at once, with all that a new operator does differently: a rollout
is expected then.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from kvist_operator.errors import SpecError
from kvist_operator.json_digest import json_digest
from kvist_operator.manifests import Rendered
from kvist_operator.manifests.object_names import ENGINE, LMCACHE, Json
from kvist_operator.spec import Pool, read_pool
from kvist_operator.spec.disaggregation import Disaggregation, Role
from kvist_operator.spec.pool import COMPONENT, GatewaySpec, NetworkPolicySpec, PickerSpec, Upgrade

APPLIED: Final = "kvist.dev/applied"
"""Annotation of a workload: its spec as it was applied, the spec of the pool, and the operator's identity."""
APPROVED: Final = "kvist.dev/apply-plan"
"""Annotation of a pool: the hash of the pending change that may be applied."""
WORKLOADS: Final = ("DaemonSet", "Deployment", "LeaderWorkerSet")
SCALED: Final = (Role.PREFILL, Role.DECODE)
MOST_CHANGES: Final = 32
"""Differences that are listed; the rest is counted."""
LENGTH: Final = 256
"""Characters of a listed difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingChange:
    """A change of workloads that waits for the owner of the pool."""

    hash: str
    changes: tuple[str, ...]
    """``Deployment twig: image: a → b``."""
    engines: bool
    """Whether engines are among the workloads, so that their cache would be lost."""
    until: datetime | None = None
    """Begin of the next window; None without windows."""


def hold_upgrade(
    pool: Pool,
    resource: Json,
    rendered: Rendered,
    observed: Iterable[Json],
    *,
    identity: str,
    default_image: str,
    now: datetime,
    preset: Json | None = None,
) -> tuple[Rendered, PendingChange | None]:
    """Return the objects to apply, with workloads as they were where a change has to wait, and that change.

    ``resource`` is the pool's object; ``identity`` names the operator as far as its objects depend on it.
    ``preset`` is the object that ``spec.presetRef`` names: a change of it waits as well, since the pool's own
    spec stays the same.
    """
    if preset is not None:
        identity += f" preset {json_digest(preset.get('spec'), 12)}"
    approved = (resource["metadata"].get("annotations") or {}).get(APPROVED, "")
    asked = {name: value for name, value in resource["spec"].items() if name not in ("replicas", "paused")}
    there = {_key(each): each for each in observed if each["kind"] in WORKLOADS}
    # these may have another name now: engines of another kind, servers of another namespace
    former = {_component(each): each for each in there.values() if _component(each) in (ENGINE, LMCACHE)}
    made: list[Json] = []
    held: dict[int, Json] = {}
    changes: list[str] = []
    for each in rendered.objects:
        if each["kind"] not in WORKLOADS:
            made.append(each)
            continue
        found = there.get(_key(each)) or former.get(_component(each))
        kept = _kept(found)
        made.append(_annotated(each, identity, asked))
        if found is None or not kept or kept["operator"] == identity:
            continue
        before = _pool_before({**resource, "spec": kept["pool"]}, default_image, preset)
        if _parts(pool, each) != _parts(before, each):
            continue
        differences = list(spec_changes(kept["spec"], _without_replicas(each["spec"])))
        if found["kind"] != each["kind"]:
            differences.insert(0, f"kind: {found['kind']} → {each['kind']}")
        if differences:
            held[len(made) - 1] = _as_before(each, found, kept)
            name = f"{found['kind']} {found['metadata']['name']}"
            changes += [f"{name}: {text}"[:LENGTH] for text in differences]
    if not held:
        return replace(rendered, objects=tuple(made)), None
    digest = json_digest([_without_replicas(made[at]["spec"]) for at in held], 12)
    if pool.rollout.upgrade is Upgrade.AUTOMATIC or approved == digest:
        return replace(rendered, objects=tuple(made)), None
    window = pool.rollout.window
    if pool.rollout.upgrade is Upgrade.WINDOW and window and window.is_open(now):
        return replace(rendered, objects=tuple(made)), None
    shown = changes[:MOST_CHANGES]
    if len(changes) > len(shown):
        shown.append(f"and {len(changes) - len(shown)} more")
    pending = PendingChange(
        hash=digest,
        changes=tuple(shown),
        engines=any(_component(made[at]) == ENGINE for at in held),
        until=window.next_opening(now) if pool.rollout.upgrade is Upgrade.WINDOW and window else None,
    )
    objects = (_service_as_before(held.get(at, each), held.values()) for at, each in enumerate(made))
    return replace(rendered, objects=tuple(objects)), pending


def _service_as_before(made: Json, held: Iterable[Json]) -> Json:
    """Return an object; the Service of LMCache's servers under the name of servers that are held, because the
    engines that use them are held, too."""
    servers = [each for each in held if _component(each) == LMCACHE]
    if made["kind"] != "Service" or _component(made) != LMCACHE or not servers:
        return made
    [kept] = servers
    meta = {**made["metadata"], "name": kept["metadata"]["name"]}
    selector = kept["spec"]["selector"]["matchLabels"]
    return {**made, "metadata": meta, "spec": {**made["spec"], "selector": selector}}


def spec_changes(before: Any, after: Any, path: str = "") -> Iterable[str]:
    """Yield the differences of two specs, a line each; arguments and lists of named items by their names."""
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from spec_changes(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
        return
    if isinstance(before, list) and isinstance(after, list):
        old, new = _by_name(before), _by_name(after)
        if old is not None and new is not None:
            for key in dict.fromkeys([*old, *new]):
                yield from spec_changes(old.get(key), new.get(key), f"{path}[{key}]")
            return
    yield f"{path.rpartition('template.spec.')[2]}: {_shown(before)} → {_shown(after)}"


def _by_name(items: list[Any]) -> dict[str, Any] | None:
    """Return items by ``name``, or the words of a command line by flag; None for other lists."""
    if items and all(isinstance(each, Mapping) and "name" in each for each in items):
        return {str(each["name"]): each for each in items}
    if not all(isinstance(each, str) for each in items):
        return None
    found: dict[str, list[str]] = {}
    flag = ""
    for word in items:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            found[flag] = [value] if value else []
        else:
            found.setdefault(flag, []).append(word)
    return {name: " ".join(words) or "on" for name, words in found.items()}


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _as_before(new: Json, found: Json, kept: Mapping[str, Any]) -> Json:
    """Return the workload with its old name and pods, the replicas of the new one, and the annotation as it
    was."""
    replicas = {"replicas": new["spec"]["replicas"]} if "replicas" in new["spec"] else {}
    meta = new["metadata"]
    annotations = {**meta.get("annotations", {}), APPLIED: found["metadata"]["annotations"][APPLIED]}
    return {
        **new,
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "metadata": {**meta, "name": found["metadata"]["name"], "annotations": annotations},
        "spec": {**kept["spec"], **replicas},
    }


def _annotated(made: Json, identity: str, asked: Json) -> Json:
    spec = _without_replicas(made["spec"])
    text = json.dumps({"operator": identity, "pool": asked, "spec": spec}, sort_keys=True)
    meta = made["metadata"]
    return {**made, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), APPLIED: text}}}


def _kept(found: Json | None) -> Mapping[str, Any]:
    """Return what the annotation says; nothing where it is absent or was edited by hand."""
    annotations = (found or {}).get("metadata", {}).get("annotations") or {}
    try:
        kept = json.loads(annotations.get(APPLIED, "{}"))
    except ValueError:
        return {}
    whole = isinstance(kept, dict) and {"operator", "pool", "spec"} <= kept.keys()
    return kept if whole and isinstance(kept["spec"], dict) and isinstance(kept["pool"], dict) else {}


def _pool_before(resource: Json, default_image: str, preset: Json | None) -> Pool | None:
    """Return the pool as it was when the workload was applied, with today's defaults; None if invalid."""
    try:
        return read_pool(resource, default_image=default_image, preset=preset)
    except SpecError:
        return None


def _parts(pool: Pool | None, workload: Json) -> tuple[Pool, str] | None:
    """Return what a workload depends on: the pool without the fields that never change it, and its preset.

    Every other field counts, also one that is new.
    """
    if pool is None:
        return None
    own = replace(
        pool,
        generation=0,
        replicas=1,
        paused=False,
        disaggregation=_without_role_replicas(pool.disaggregation),
        pod_monitor="Auto",
        network=NetworkPolicySpec(),
        preset=None,
        rollout=replace(pool.rollout, upgrade=Upgrade.MANUAL, window=None),
    )
    if _component(workload) == ENGINE:
        picker = PickerSpec(mode=pool.picker.mode, priorities=pool.picker.priorities)
        own = replace(own, picker=picker, gateway=GatewaySpec())
    return own, pool.preset.name if pool.preset else ""


def _without_role_replicas(spec: Disaggregation | None) -> Disaggregation | None:
    if spec is None:
        return None
    roles = {role: replace(spec.of(role), replicas=None, external=False) for role in SCALED}
    return replace(spec, prefill=roles[Role.PREFILL], decode=roles[Role.DECODE])


def _without_replicas(spec: Mapping[str, Any]) -> Json:
    return {key: value for key, value in spec.items() if key != "replicas"}


def _component(made: Json) -> str:
    return str((made["metadata"].get("labels") or {}).get(COMPONENT, ""))


def _key(made: Json) -> tuple[str, str]:
    return made["kind"], made["metadata"]["name"]
