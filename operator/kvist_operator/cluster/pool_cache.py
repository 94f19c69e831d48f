"""Pools, their children and their pods, as last seen. No I/O but by the ``Cluster``.

The cache is filled by a list of every kind at the start, by watch events, by the answers to the operator's
own writes and by a periodic resync, in whatever order they arrive: the newest version of an object stands. A
restart fills it again.

Objects are kept as JSON and parsed when a pool is reconciled: as dicts, those of 500 pools take 60 MiB more.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvist_operator.errors import Forbidden, NotServed
from kvist_operator.manifests.object_names import OURS
from kvist_operator.spec.pool import INSTANCE

from .cluster_api import Cluster, Json
from .kinds import CHILDREN, NEWER, POD, POOL, SECRET, ObjectKind, Target, target_of

logger = logging.getLogger(__name__)

ALWAYS: Final = tuple(kind for kind in CHILDREN if kind.optional is None and kind != SECRET)
"""Kinds of children that every cluster has, and that are watched."""
_WITH_STATUS: Final = ("Deployment", "Job", "LeaderWorkerSet", "HTTPRoute", "InferencePool", "Pod")
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
        targets = sorted(self._members.get(pool, ()))
        return [self._objects[target].parse() for target in targets if target.kind != POD]

    def pods(self, pool: PoolKey) -> list[Json]:
        """Return the pods of all components of a pool."""
        targets = sorted(self._members.get(pool, ()))
        return [self._objects[target].parse() for target in targets if target.kind == POD]

    def pools(self) -> list[PoolKey]:
        """Return the keys of all our pools, sorted."""
        return sorted(PoolKey(t.namespace, t.name) for t in self._objects if t.kind == POOL)

    def versions(self, kind: ObjectKind) -> dict[Target, str]:
        """Return the resource version of each object of a kind."""
        return {target: known.version for target, known in self._objects.items() if target.kind == kind}


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


@dataclass(slots=True)
class PoolInformer:
    """Keeps the cache in step with the cluster; ``on_change`` is called with each pool that is affected.

    A watch that was interrupted for too long does not report what was deleted meanwhile. The resync therefore
    lists names and versions only, and reads the objects that differ.
    """

    cluster: Cluster
    cache: PoolCache
    namespaces: Sequence[str]
    on_change: Callable[[PoolKey], None]
    kinds: frozenset[ObjectKind] = frozenset()
    """Kinds that are watched at present."""
    loaded: set[ObjectKind] = field(default_factory=set)
    _refused: set[ObjectKind] = field(default_factory=set)
    """Kinds that may not be listed, of which the log has a line."""

    async def follow(self, optional: Iterable[ObjectKind]) -> bool:
        """Watch these optional kinds and those that every cluster has; return whether the set has changed.

        New kinds are listed, and the objects of kinds that have gone are removed. Raises ClusterError.
        """
        wanted = frozenset((POOL, POD, *ALWAYS, *optional))
        for kind in self.kinds - wanted:
            self.loaded.discard(kind)
            for target in self.cache.versions(kind):
                self._notify(self.cache.remove(target))
        for kind in sorted(wanted - self.loaded):
            try:
                listed = await self._list(kind)
            except Forbidden as error:
                if kind not in NEWER:
                    raise
                if kind not in self._refused:
                    logger.warning("%ss are not followed: %s", kind, error)
                self._refused.add(kind)
                wanted -= {kind}
                continue
            for found in listed:
                self._notify(self.cache.update(found))
            self.loaded.add(kind)
        different, self.kinds = wanted != self.kinds, wanted
        return different

    def on_event(self, verb: str | None, found: Json) -> None:
        """Apply a watch event; ``verb`` is None for an object of the watch's initial list."""
        if verb == "DELETED":
            self._notify(self.cache.remove(target_of(found), str(found["metadata"].get("uid", ""))))
        else:
            self._notify(self.cache.update(found))

    async def resync(self) -> None:
        """Compare the cache with the cluster and read what differs. Raises ClusterError."""
        for kind in sorted(self.kinds):
            listed = await self._list(kind, bare=True)
            actual = {target_of(each): str(each["metadata"].get("resourceVersion", "")) for each in listed}
            known = self.cache.versions(kind)
            differing = [t for t in known.keys() | actual.keys() if known.get(t) != actual.get(t)]
            if differing:
                logger.info("the resync found %d objects of %s out of date", len(differing), kind.resource)
            for target in sorted(differing):
                found = await self.cluster.get(target)
                self._notify(self.cache.remove(target) if found is None else self.cache.update(found))

    async def _list(self, kind: ObjectKind, *, bare: bool = False) -> list[Json]:
        labels = "" if kind == POOL else OURS
        try:
            spaces = self.namespaces or ("",)
            pages = [await self.cluster.find(kind, space, labels=labels, bare=bare) for space in spaces]
        except NotServed:
            if kind == POOL:
                raise
            return []
        return [each for page in pages for each in page]

    def _notify(self, key: PoolKey | None) -> None:
        if key is not None:
            self.on_change(key)
