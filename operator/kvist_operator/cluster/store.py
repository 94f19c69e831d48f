"""What is known of the cluster: pools, their children, their pods. Pure.

Fed by lists, by watches and by the answers to our own writes, in whatever order they come: the newer version
of an object stands. Nothing is kept here that the cluster does not say again after a restart.

Objects are kept as JSON and read when a pool is looked at: as dicts, those of 500 pools are 60 MiB more.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvist_operator.manifests.names import INSTANCE

from .kinds import POD, POOL, Kind, Target, target_of
from .port import Json

_TOLD: Final = ("Deployment", "LeaderWorkerSet", "HTTPRoute", "InferencePool", "Pod")
"""Kinds whose status is read."""
_CONTAINER: Final = ("name", "image")


class PoolKey(NamedTuple):
    """One of our pools."""

    namespace: str
    name: str

    @property
    def target(self) -> Target:
        """The pool itself."""
        return Target(POOL, self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class _Kept:
    """One object."""

    version: str
    uid: str
    pool: "PoolKey | None"
    body: bytes

    def read(self) -> Json:
        found: Json = json.loads(self.body)
        return found


class Store:
    """Objects by where they are, and by the pool they are of."""

    def __init__(self) -> None:
        self._objects: dict[Target, _Kept] = {}
        self._members: dict[PoolKey, set[Target]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def tell(self, found: Mapping[str, Any]) -> PoolKey | None:
        """An object as it is now; the pool it matters to, where this is news."""
        target, meta = target_of(found), found["metadata"]
        version = str(meta.get("resourceVersion", ""))
        known = self._objects.get(target)
        if known is not None and not _newer(version, known.version):
            return None
        pool = pool_of(target, found)
        body = json.dumps(slimmed(target.kind, found), separators=(",", ":")).encode()
        self._objects[target] = _Kept(version, str(meta.get("uid", "")), pool, body)
        if pool is not None and target.kind != POOL:
            self._members.setdefault(pool, set()).add(target)
        return pool

    def forget(self, target: Target, uid: str = "") -> PoolKey | None:
        """It has gone, whatever it was or the one with this uid; the pool it mattered to."""
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
        """What is known of it."""
        known = self._objects.get(target)
        return known.read() if known else None

    def children(self, pool: PoolKey) -> list[Json]:
        """All that has the pool's labels, but pods."""
        return [self._objects[target].read() for target in self._sorted(pool) if target.kind != POD]

    def pods(self, pool: PoolKey) -> list[Json]:
        """Of all components."""
        return [self._objects[target].read() for target in self._sorted(pool) if target.kind == POD]

    def pools(self) -> list[PoolKey]:
        """All of ours."""
        return sorted(PoolKey(t.namespace, t.name) for t in self._objects if t.kind == POOL)

    def of_kind(self, kind: Kind) -> dict[Target, str]:
        """The version of each of one kind."""
        return {target: known.version for target, known in self._objects.items() if target.kind == kind}

    def _sorted(self, pool: PoolKey) -> Iterable[Target]:
        return sorted(self._members.get(pool, ()))


def pool_of(target: Target, found: Mapping[str, Any]) -> PoolKey | None:
    """By name for a pool itself, by label for what is part of one."""
    if target.kind == POOL:
        return PoolKey(target.namespace, target.name)
    name = (found["metadata"].get("labels") or {}).get(INSTANCE)
    return PoolKey(target.namespace, name) if name else None


def slimmed(kind: Kind, found: Mapping[str, Any]) -> Json:
    """What is read of it: of pods what happens to them, of other kinds no status that nobody reads."""
    meta = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    made = {**found, "metadata": meta}
    if kind.kind not in _TOLD:
        made.pop("status", None)
    if kind == POD:
        made["spec"] = _slim_pod(found.get("spec") or {})
    return made


def _slim_pod(spec: Mapping[str, Any]) -> Json:
    parts = {key: spec[key] for key in ("nodeName",) if key in spec}
    for key in ("containers", "initContainers"):
        parts[key] = [{k: each[k] for k in _CONTAINER if k in each} for each in spec.get(key) or ()]
    return parts


def _newer(new: str, old: str) -> bool:
    """Resource versions are numbers that grow (KEP-5504 promises it); others are taken as they come."""
    if new.isdigit() and old.isdigit():
        return int(new) > int(old)
    return new != old
