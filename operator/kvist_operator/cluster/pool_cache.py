"""Pools, their children and their pods, as last seen. Pure.

Filled by lists, by watch events and by the answers to the operator's own writes, in whatever order they
arrive: the newest version of an object stands. Everything here can be read from the cluster again after a
restart.

Objects are kept as JSON and parsed when a pool is reconciled: as dicts, those of 500 pools take 60 MiB more.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvist_operator.manifests.object_names import INSTANCE

from .cluster_api import Json
from .kinds import POD, POOL, ObjectKind, Target, target_of

_WITH_STATUS: Final = ("Deployment", "LeaderWorkerSet", "HTTPRoute", "InferencePool", "Pod")
"""Kinds whose status is read."""
_CONTAINER: Final = ("name", "image")


class PoolKey(NamedTuple):
    """Namespace and name of one of our pools."""

    namespace: str
    name: str

    @property
    def target(self) -> Target:
        """The pool object."""
        return Target(POOL, self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class _CachedObject:
    version: str
    uid: str
    pool: PoolKey | None
    body: bytes

    def parse(self) -> Json:
        found: Json = json.loads(self.body)
        return found


class PoolCache:
    """Objects by target and by the pool that they belong to."""

    def __init__(self) -> None:
        self._objects: dict[Target, _CachedObject] = {}
        self._members: dict[PoolKey, set[Target]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def update(self, found: Mapping[str, Any]) -> PoolKey | None:
        """Add an object or its new state; return the pool it belongs to, if this version is new."""
        target, meta = target_of(found), found["metadata"]
        version = str(meta.get("resourceVersion", ""))
        known = self._objects.get(target)
        if known is not None and not _newer(version, known.version):
            return None
        pool = pool_of(target, found)
        body = json.dumps(slimmed(target.kind, found), separators=(",", ":")).encode()
        self._objects[target] = _CachedObject(version, str(meta.get("uid", "")), pool, body)
        if pool is not None and target.kind != POOL:
            self._members.setdefault(pool, set()).add(target)
        return pool

    def remove(self, target: Target, uid: str = "") -> PoolKey | None:
        """Remove an object, with ``uid`` only that very object; return the pool it belonged to."""
        known = self._objects.get(target)
        if known is None or (uid and known.uid != uid):
            return None
        del self._objects[target]
        pool = known.pool
        members = self._members.get(pool) if pool else None
        if pool and members:
            members.discard(target)
            if not members:
                del self._members[pool]
        return pool

    def get(self, target: Target) -> Json | None:
        """Return an object; None when it is not known."""
        known = self._objects.get(target)
        return known.parse() if known else None

    def children(self, pool: PoolKey) -> list[Json]:
        """Return all objects with the pool's labels except pods."""
        return self._of_pool(pool, pods=False)

    def pods(self, pool: PoolKey) -> list[Json]:
        """Return the pods of all components of a pool."""
        return self._of_pool(pool, pods=True)

    def pools(self) -> list[PoolKey]:
        """Return the keys of all our pools, sorted."""
        return sorted(PoolKey(t.namespace, t.name) for t in self._objects if t.kind == POOL)

    def versions(self, kind: ObjectKind) -> dict[Target, str]:
        """Return the resource version of each object of a kind."""
        return {target: known.version for target, known in self._objects.items() if target.kind == kind}

    def _of_pool(self, pool: PoolKey, *, pods: bool) -> list[Json]:
        targets = sorted(self._members.get(pool, ()))
        return [self._objects[target].parse() for target in targets if (target.kind == POD) is pods]


def pool_of(target: Target, found: Mapping[str, Any]) -> PoolKey | None:
    """Return the pool that an object belongs to: by name for a pool object, by label for others."""
    if target.kind == POOL:
        return PoolKey(target.namespace, target.name)
    name = (found["metadata"].get("labels") or {}).get(INSTANCE)
    return PoolKey(target.namespace, name) if name else None


def slimmed(kind: ObjectKind, found: Mapping[str, Any]) -> Json:
    """Return the parts of an object that are read: few fields of a pod's spec, and a status only of kinds
    whose status is read."""
    meta = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    made = {**found, "metadata": meta}
    if kind.kind not in _WITH_STATUS:
        made.pop("status", None)
    if kind == POD:
        spec = found.get("spec") or {}
        made["spec"] = {key: spec[key] for key in ("nodeName",) if key in spec}
        for key in ("containers", "initContainers"):
            made["spec"][key] = [
                {k: each[k] for k in _CONTAINER if k in each} for each in spec.get(key) or ()
            ]
    return made


def _newer(new: str, old: str) -> bool:
    """Compare resource versions: numbers that grow (KEP-5504 promises it); others are newer if they
    differ."""
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old
