"""Fills the ``PoolCache``: by a list of every kind at the start, by watch events, and by a periodic resync.

A watch that was interrupted for too long does not report what was deleted meanwhile. The resync therefore
lists names and versions only, and reads the objects that differ.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvist_operator.errors import NotServed
from kvist_operator.manifests.object_names import OURS

from .cluster_api import Cluster, Json
from .kinds import CHILDREN, POD, POOL, SECRET, ObjectKind, Target, target_of
from .pool_cache import PoolCache, PoolKey

logger = logging.getLogger(__name__)

ALWAYS: Final = tuple(kind for kind in CHILDREN if kind.optional is None and kind != SECRET)
"""Kinds of children that every cluster has, and that are watched."""


@dataclass(slots=True)
class PoolInformer:
    """Keeps the cache in step with the cluster; ``on_change`` is called with each pool that is affected."""

    cluster: Cluster
    cache: PoolCache
    namespaces: Sequence[str]
    on_change: Callable[[PoolKey], None]
    kinds: frozenset[ObjectKind] = frozenset()
    """Kinds that are followed at present."""
    loaded: set[ObjectKind] = field(default_factory=set)

    async def follow(self, optional: Iterable[ObjectKind]) -> bool:
        """Follow these optional kinds and those that every cluster has; return whether the set has changed.

        New kinds are listed, and the objects of kinds that have gone are removed. Raises ClusterError.
        """
        wanted = frozenset((POOL, POD, *ALWAYS, *optional))
        for kind in self.kinds - wanted:
            self.loaded.discard(kind)
            for target in self.cache.versions(kind):
                self._notify(self.cache.remove(target))
        for kind in sorted(wanted - self.loaded):
            for found in await self._list(kind):
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
                await self._refresh(target)

    async def _refresh(self, target: Target) -> None:
        """Read one object, whatever was listed or reported before."""
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
