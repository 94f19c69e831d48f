"""Desired × observed → steps, in an order that never breaks what serves and never lets two generations of
engines claim the same accelerators. Pure.

The same function is called again after every step, after a crash, after a change of mind: it keeps no memory,
so what it says must lead to the same end from wherever things stand.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvist_operator.manifests import Rendered
from kvist_operator.manifests.names import COMPONENT, ENGINE, MANAGED, MANAGER
from kvist_operator.manifests.nouns import Json
from kvist_operator.manifests.render import ORDER
from kvist_operator.spec.pool import Pool

from .compare import as_intended, stamped

WORKLOADS: Final = ("Deployment", "LeaderWorkerSet")


class Verb(StrEnum):
    """What is done to an object."""

    CREATE = "create"
    """Apply, after a look that nobody has one of this name: it would be somebody else's."""
    UPDATE = "update"
    """Apply."""
    DELETE = "delete"
    """In the foreground: the object stays until its pods are gone, and with it their accelerators."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """An object of the pool's namespace; versions of an API are the same object."""

    group: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do."""

    verb: Verb
    key: Key
    body: Json | None = None
    """What to apply; None for a deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What to do now; nothing is left to do when there are neither steps nor waits."""

    steps: tuple[Step, ...] = ()
    conflicts: tuple[Key, ...] = ()
    """Wanted, but somebody else's: never touched."""
    waits: tuple[str, ...] = ()
    """What has to happen first, for people."""


def key_of(made: Mapping[str, Any]) -> Key:
    """The key of an object."""
    group, slash, _ = str(made["apiVersion"]).partition("/")
    return Key(group if slash else "", str(made["kind"]), str(made["metadata"]["name"]))


def changes(pool: Pool, rendered: Rendered, observed: Iterable[Json]) -> Changes:
    """``observed``: everything of the pool's labels, and whatever has a name that is wanted."""
    there = {key_of(each): each for each in observed}
    wanted = {key_of(each): each for each in rendered.objects}
    conflicts = [key for key in wanted if key in there and not owned(pool, there[key])]
    stale = _stale(pool, rendered, wanted, there)
    rivals = [key for key in stale if _runs_engines(there[key])]
    ahead, held, waits = _generations(pool, wanted, there, rivals)
    busy = [key for key in wanted if key in there and leaving(there[key])]
    waits += [f"{key} is being deleted" for key in busy]
    skipped = {*conflicts, *busy, *held}
    applies = [_apply(wanted[key], there.get(key)) for key in wanted if key not in skipped]
    later = [key for key in stale if key not in rivals]
    steps = [
        *(Step(Verb.DELETE, key) for key in ahead if not leaving(there[key])),
        *(step for step in applies if step),
        *(Step(Verb.DELETE, key) for key in _backwards(later) if not leaving(there[key])),
    ]
    return Changes(steps=tuple(steps), conflicts=tuple(conflicts), waits=tuple(waits))


def owned(pool: Pool, found: Mapping[str, Any]) -> bool:
    """Whether this pool, not one of the same name before it, controls the object."""
    owners = found["metadata"].get("ownerReferences") or ()
    return any(ref.get("controller") and ref.get("uid") == pool.uid for ref in owners)


def _apply(desired: Json, found: Json | None) -> Step | None:
    if found is None:
        return Step(Verb.CREATE, key_of(desired), stamped(desired))
    if as_intended(desired, found):
        return None
    return Step(Verb.UPDATE, key_of(desired), stamped(desired))


def _stale(
    pool: Pool, rendered: Rendered, wanted: Mapping[Key, Json], there: Mapping[Key, Json]
) -> list[Key]:
    """Ours, and no longer wanted. What the operator makes besides is not in ``wanted``."""
    expected = {(ref.kind, ref.name) for ref in rendered.expects}
    return [
        key
        for key, found in there.items()
        if key not in wanted
        and (key.kind, key.name) not in expected
        and owned(pool, found)
        and _labels(found).get(MANAGED) == MANAGER
    ]


def _generations(
    pool: Pool, wanted: Mapping[Key, Json], there: Mapping[Key, Json], rivals: Sequence[Key]
) -> tuple[list[Key], list[Key], list[str]]:
    """Which rivals go now, which wanted workload is held back, and what is waited for.

    Within one Deployment its controller sees to generations. There are rivals only where a replica begins or
    ceases to span nodes, and the workload becomes another kind of object.
    """
    new = [key for key, made in wanted.items() if _runs_engines(made)]
    if not rivals:
        return [], [], []
    if pool.rollout.strategy == "SurgeFirst":
        if all(key in there and _serves(there[key]) for key in new):
            return list(rivals), [], []
        return [], [], [f"{rival} goes when its successor serves" for rival in rivals]
    absent = [key for key in new if key not in there]
    return list(rivals), absent, [f"accelerators of {rival} are given back first" for rival in rivals]


def _serves(workload: Mapping[str, Any]) -> bool:
    """Whether it has as many ready replicas as it should, at the generation that counts."""
    status, spec = workload.get("status") or {}, workload.get("spec") or {}
    seen = status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 0)
    return bool(seen and status.get("readyReplicas", 0) >= spec.get("replicas", 1))


def _runs_engines(made: Mapping[str, Any]) -> bool:
    return made["kind"] in WORKLOADS and _labels(made).get(COMPONENT) == ENGINE


def _labels(made: Mapping[str, Any]) -> Mapping[str, str]:
    return made["metadata"].get("labels") or {}


def leaving(found: Mapping[str, Any]) -> bool:
    """Whether its deletion has begun."""
    return "deletionTimestamp" in found["metadata"]


def _backwards(keys: Iterable[Key]) -> list[Key]:
    """The way in goes first, what others stand on last."""
    place = {kind: i for i, kind in enumerate(ORDER)}
    return sorted(keys, key=lambda key: (-place.get(key.kind, len(ORDER)), key))
