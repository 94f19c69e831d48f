"""The steps that lead from observed to desired objects. Pure.

Their order never interrupts serving, and never lets two generations of engines claim the same accelerators.
The function is called again after every step, after a crash, after a change of the spec: it keeps no state,
so its steps must lead to the same end from any state of the cluster.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

from kvist_kube.quantity import parse_quantity
from kvist_operator.json_digest import json_digest
from kvist_operator.manifests import Rendered
from kvist_operator.manifests.object_names import ENGINE, INTENT, MANAGER, Json
from kvist_operator.manifests.overlays import MERGED_BY
from kvist_operator.manifests.render import ORDER
from kvist_operator.manifests.weights_cache import is_complete, progress
from kvist_operator.spec.pool import COMPONENT, MANAGED, Pool

from .paired_rollout import in_step

AMOUNTS: Final = ("limits", "requests", "sizeLimit")
"""Fields with quantities, which the API server may return in another notation."""
_KEYS: Final[Mapping[str, str]] = {**MERGED_BY, "ownerReferences": "uid"}


def stamped(desired: Json) -> Json:
    """Return the object with the hash of its intent in an annotation, as it is applied."""
    digest = json_digest(desired, 16)
    meta = desired["metadata"]
    return {**desired, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), INTENT: digest}}}


def as_intended(desired: Json, observed: Json) -> bool:
    """Return whether applying ``desired`` (stamped or not) would change none of our fields."""
    return _within(stamped(_bare(desired)), observed, "")


def _bare(desired: Json) -> Json:
    """Return the object without the hash of its intent."""
    meta = desired["metadata"]
    if INTENT not in meta.get("annotations", {}):
        return desired
    annotations = {name: value for name, value in meta["annotations"].items() if name != INTENT}
    rest = {name: value for name, value in meta.items() if name != "annotations"}
    return {**desired, "metadata": {**rest, **({"annotations": annotations} if annotations else {})}}


def _within(wanted: Any, found: Any, key: str) -> bool:
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return not wanted and found is None  # the API server leaves out what is empty
        return all(_within(v, found.get(k), key if key in AMOUNTS else k) for k, v in wanted.items())
    if isinstance(wanted, list):
        return _lists(wanted, found, key)
    return wanted == found or (key in AMOUNTS and _amount(wanted) == _amount(found) is not None)


def _lists(wanted: list[Any], found: Any, key: str) -> bool:
    if not isinstance(found, list):
        return not wanted and found is None
    by = _KEYS.get(key)
    if by and all(isinstance(item, Mapping) and by in item for item in (*wanted, *found)):
        known = {item[by]: item for item in found}
        return all(_within(item, known.get(item[by]), "") for item in wanted)
    return len(wanted) == len(found) and all(_within(a, b, "") for a, b in zip(wanted, found, strict=True))


def _amount(value: Any) -> Decimal | None:
    try:
        return parse_quantity(str(value))
    except ValueError:
        return None


WORKLOADS: Final = ("Deployment", "LeaderWorkerSet")
JOB: Final = "Job"
"""Never updated: the pods of a Job cannot be changed."""


_OUTAGE: Final = (
    "; nothing serves from then until a successor is ready, which spec.rollout.strategy: SurgeFirst avoids "
    "where accelerators are spare"
)

_Order = tuple[list["Key"], list["Key"], list[str]]
"""Workloads to delete now, workloads to hold back, and waits."""


class Verb(StrEnum):
    """Operation on an object."""

    CREATE = "create"
    """Apply, after a check that no object has this name: it would belong to another owner."""
    UPDATE = "update"
    """Apply to an object of ours."""
    DELETE = "delete"
    """Delete in the foreground: the object stays until its pods have gone and their accelerators are free."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Identifies an object in the pool's namespace, whatever the version of its API."""

    group: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on one object."""

    verb: Verb
    key: Key
    body: Json | None = None
    """Object to apply; None for a deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Operations to do now; the pool is complete when there are neither steps nor waits."""

    steps: tuple[Step, ...] = ()
    conflicts: tuple[Key, ...] = ()
    """Wanted names that objects of another owner have; those are never modified."""
    waits: tuple[str, ...] = ()
    """Events that have to happen first, as texts for conditions."""


def key_of(made: Mapping[str, Any]) -> Key:
    """Return the key of an object."""
    group, slash, _ = str(made["apiVersion"]).partition("/")
    return Key(group if slash else "", str(made["kind"]), str(made["metadata"]["name"]))


def changes(pool: Pool, rendered: Rendered, observed: Iterable[Json]) -> Changes:
    """Return what to do now. ``observed``: all objects with the pool's labels, and objects with wanted
    names."""
    there = {key_of(each): each for each in observed}
    wanted = in_step({key_of(each): each for each in rendered.objects}, there)
    conflicts = [key for key in wanted if key in there and not owned(pool, there[key])]
    stale = _stale(pool, rendered, wanted, there)
    replaced = [key for key in stale if _runs_engines(there[key])]
    first, held, waits = _filling(wanted, there) or _generations(pool, wanted, there, replaced)
    ending = [key for key in wanted if key in there and leaving(there[key])]
    waits += [f"{key} is being deleted" for key in ending]
    differing = {
        key: made
        for key, made in wanted.items()
        if key not in (*conflicts, *ending, *held)
        and (key not in there or not (key.kind == JOB or as_intended(made, there[key])))
    }
    outdated = [
        key for key in wanted if key not in conflicts and _is_outdated_job(wanted[key], there.get(key))
    ]
    # routes are deleted first, and what other objects depend on last
    place = {kind: i for i, kind in enumerate(ORDER)}
    rest = sorted(set(stale) - set(replaced), key=lambda key: (-place.get(key.kind, len(ORDER)), key))
    steps = [
        *(Step(Verb.DELETE, key) for key in (*first, *outdated) if not leaving(there[key])),
        *(
            Step(Verb.UPDATE if key in there else Verb.CREATE, key, stamped(made))
            for key, made in differing.items()
        ),
        *(Step(Verb.DELETE, key) for key in rest if not leaving(there[key])),
    ]
    return Changes(steps=tuple(steps), conflicts=tuple(conflicts), waits=tuple(waits))


def owned(pool: Pool, found: Mapping[str, Any]) -> bool:
    """Return whether this pool, not an earlier one of the same name, controls the object."""
    owners = found["metadata"].get("ownerReferences") or ()
    return any(ref.get("controller") and ref.get("uid") == pool.uid for ref in owners)


def _stale(
    pool: Pool, rendered: Rendered, wanted: Mapping[Key, Json], there: Mapping[Key, Json]
) -> list[Key]:
    """Return our objects that are no longer wanted. ``expects`` names those that are made elsewhere."""
    expected = {(ref.kind, ref.name) for ref in rendered.expects}
    return [
        key
        for key, found in there.items()
        if key not in wanted
        and (key.kind, key.name) not in expected
        and owned(pool, found)
        and _labels(found).get(MANAGED) == MANAGER
    ]


def _filling(wanted: Mapping[Key, Json], there: Mapping[Key, Json]) -> _Order | None:
    """Return the engines' workload as held back while the cache for weights is being filled; None after it.

    Engines that run stay as they are: the new ones would not find their weights.
    """
    open_jobs = [key for key in wanted if key.kind == JOB and not is_complete(there.get(key, {}))]
    if not open_jobs:
        return None
    held = [key for key, made in wanted.items() if _runs_engines(made)]
    return [], held, [_share(key, there.get(key)) for key in open_jobs]


def _is_outdated_job(made: Json, found: Json | None) -> bool:
    """Return whether a Job that has not succeeded would be made differently now, with another token or image:
    its pods cannot be changed, so it is deleted and created again. What it has downloaded stays."""
    return (
        made["kind"] == JOB and found is not None and not is_complete(found) and not as_intended(made, found)
    )


def _share(key: Key, job: Json | None) -> str:
    if job is None:
        return f"{key} has to download the weights first"
    found = progress(job)
    text = f"{key} has downloaded {found['partsFilled']} of {found['parts']} parts of the weights"
    failed = int((job.get("status") or {}).get("failed") or 0)
    again = f"; {failed} of its pods failed: kubectl logs job/{key.name}" if failed else ""
    return text + again


def _generations(
    pool: Pool, wanted: Mapping[Key, Json], there: Mapping[Key, Json], replaced: Sequence[Key]
) -> _Order:
    """Return the replaced workloads to delete now, the wanted workloads to hold back, and the waits.

    Within one Deployment its controller replaces generations. A workload is replaced by another object only
    when a replica begins or ceases to span nodes, so that the kind of the workload changes, or when engines
    get roles or lose them, so that its name does.
    """
    new = [key for key, made in wanted.items() if _runs_engines(made)]
    if not replaced:
        return [], [], []
    if pool.rollout.strategy == "SurgeFirst":
        if all(key in there and _serves(there[key]) for key in new):
            return list(replaced), [], []
        return [], [], [f"{key} is deleted once its successor is ready" for key in replaced]
    absent = [key for key in new if key not in there]
    outage = "" if any(key in there and _serves(there[key]) for key in new) else _OUTAGE
    return (
        list(replaced),
        absent,
        [f"{key} has to release its accelerators first{outage}" for key in replaced],
    )


def _serves(workload: Mapping[str, Any]) -> bool:
    """Return whether all replicas are ready at the current generation."""
    status, spec = workload.get("status") or {}, workload.get("spec") or {}
    seen = status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 0)
    return bool(seen and status.get("readyReplicas", 0) >= spec.get("replicas", 1))


def _runs_engines(made: Mapping[str, Any]) -> bool:
    return made["kind"] in WORKLOADS and _labels(made).get(COMPONENT) == ENGINE


def _labels(made: Mapping[str, Any]) -> Mapping[str, str]:
    return made["metadata"].get("labels") or {}


def leaving(found: Mapping[str, Any]) -> bool:
    """Return whether the deletion of an object has begun."""
    return "deletionTimestamp" in found["metadata"]
