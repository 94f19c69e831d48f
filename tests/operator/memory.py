"""A ``Cluster`` in memory, for the logic above it: versions, owners, selectors; no schema, no admission."""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import SECURITY_CONSTRAINTS, ObjectKind, Target, target_of
from kvist_operator.errors import ClusterError, Conflict, NotServed

_KEPT = ("uid", "resourceVersion", "creationTimestamp", "generation")


class Memory:
    """Objects by target. ``refuse`` may return an error for a write."""

    def __init__(self) -> None:
        self.objects: dict[Target, Json] = {}
        self.absent: set[ObjectKind] = set()
        """Kinds whose API is not there."""
        self.openshift = False
        self.writes: list[str] = []
        self.refuse: Callable[[str, Target], ClusterError | None] = lambda _verb, _target: None
        self._versions = itertools.count(1)

    def put(self, made: Json) -> Json:
        """Store an object as another client created or changed it."""
        target = target_of(made)
        known = self.objects.get(target, {"metadata": {}})
        meta = {
            "uid": f"u-{next(self._versions)}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **{key: known["metadata"][key] for key in _KEPT if key in known["metadata"]},
            **made["metadata"],
        }
        meta["generation"] = known["metadata"].get("generation", 0) + 1
        meta["resourceVersion"] = str(next(self._versions))
        status = {"status": known["status"]} if "status" in known else {}
        self.objects[target] = {**status, **copy.deepcopy(made), "metadata": meta}
        return self._shown(target)

    async def get(self, target: Target) -> Json | None:
        """Implement ``Cluster.get`` in memory."""
        return self._shown(target) if target in self.objects else None

    async def find(
        self, kind: ObjectKind, namespace: str = "", *, labels: str = "", bare: bool = False
    ) -> list[Json]:
        """Implement ``Cluster.find`` in memory."""
        if kind in self.absent:
            raise NotServed(f"{kind.resource} is not there", 404)
        found = [t for t in self.objects if t.kind == kind and namespace in ("", t.namespace)]
        shown = [self._shown(target) for target in sorted(found) if _matches(self.objects[target], labels)]
        return [{k: v for k, v in each.items() if not bare or k in _BARE} for each in shown]

    async def served(self, kinds: Iterable[ObjectKind]) -> frozenset[ObjectKind]:
        """Implement ``Cluster.served`` in memory."""
        hidden = set() if self.openshift else {SECURITY_CONSTRAINTS}
        return frozenset(kinds) - self.absent - hidden

    async def apply(self, made: Json) -> Json:
        """Implement ``Cluster.apply`` in memory; fields that are absent from the intent stay."""
        target = target_of(made)
        self._write("apply", target)
        known = self.objects.get(target)
        merged = _merged(known or {}, made)
        if known is not None and merged == known:
            return self._shown(target)
        return self.put(merged)

    async def delete(self, target: Target, uid: str) -> None:
        """Implement ``Cluster.delete`` in memory; the object is gone at once."""
        self._write("delete", target)
        if target in self.objects and self.objects[target]["metadata"]["uid"] == uid:
            del self.objects[target]

    async def patch_status(self, found: Json, status: Json) -> Json:
        """Implement ``Cluster.patch_status`` in memory."""
        target = target_of(found)
        self._write("status", target)
        known = self.objects.get(target)
        version = found["metadata"]["resourceVersion"]
        if known is None or known["metadata"]["resourceVersion"] != version:
            raise Conflict(f"{target} has changed", 409)
        known["status"] = copy.deepcopy(status)
        known["metadata"]["resourceVersion"] = str(next(self._versions))
        return self._shown(target)

    async def create(self, made: Json) -> Json:
        """Implement ``LeaseStore.create`` in memory."""
        target = target_of(made)
        self._write("create", target)
        if target in self.objects:
            raise Conflict(f"{target} exists", 409)
        return self.put(made)

    async def replace(self, made: Json) -> Json:
        """Implement ``LeaseStore.replace`` in memory."""
        target = target_of(made)
        self._write("replace", target)
        known = self.objects.get(target)
        if known is None or known["metadata"]["resourceVersion"] != made["metadata"].get("resourceVersion"):
            raise Conflict(f"{target} has changed", 409)
        return self.put(made)

    async def annotate(self, target: Target, annotations: Mapping[str, str | None]) -> None:
        """Implement ``Cluster.annotate`` in memory."""
        self._write("annotate", target)
        if target in self.objects:
            kept = self.objects[target]["metadata"].setdefault("annotations", {})
            kept.update({key: value for key, value in annotations.items() if value is not None})

    def _write(self, verb: str, target: Target) -> None:
        error = self.refuse(verb, target)
        if error is not None:
            raise error
        self.writes.append(f"{verb} {target.kind} {target.name}")

    def _shown(self, target: Target) -> Json:
        return copy.deepcopy(self.objects[target])


_BARE = ("apiVersion", "kind", "metadata")


def _matches(found: Mapping[str, Any], labels: str) -> bool:
    wanted = [part.partition("=") for part in labels.split(",") if part]
    have = found["metadata"].get("labels") or {}
    return all(have.get(key) == value if sign else key in have for key, sign, value in wanted)


def _merged(known: Any, made: Any) -> Any:
    if isinstance(known, Mapping) and isinstance(made, Mapping):
        return {**known, **{key: _merged(known.get(key), value) for key, value in made.items()}}
    return copy.deepcopy(made)
