"""Keeps the ``Store`` in step with the cluster: a list of everything at first, then what is heard, and a
look at everything now and then, since what is heard may have gaps.

A watch that was interrupted for too long does not tell what was deleted meanwhile. The look compares names
and versions alone, and asks for what differs.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvist_operator.errors import NotServed
from kvist_operator.manifests.names import OURS

from .kinds import CHILDREN, POD, POOL, SECRET, Kind, Target, target_of
from .port import Cluster, Json
from .store import PoolKey, Store

logger = logging.getLogger(__name__)

ALWAYS: Final = tuple(kind for kind in CHILDREN if kind.optional is None and kind != SECRET)
"""Kinds of children that every cluster has, and that are watched."""


@dataclass(slots=True)
class Watching:
    """``changed`` is told which pool something matters to."""

    cluster: Cluster
    store: Store
    namespaces: Sequence[str]
    changed: Callable[[PoolKey], None]
    kinds: frozenset[Kind] = frozenset()
    """Followed at present."""
    loaded: set[Kind] = field(default_factory=set)

    async def follow(self, optional: Iterable[Kind]) -> bool:
        """Follow these optional kinds and those that are always there; True = others than before. Those
        that are new are listed, what was known of those that have gone is dropped.

        Raises ClusterError.
        """
        wanted = frozenset((POOL, POD, *ALWAYS, *optional))
        for kind in self.kinds - wanted:
            self._drop(kind)
        for kind in sorted(wanted - self.loaded):
            await self._load(kind)
        different, self.kinds = wanted != self.kinds, wanted
        return different

    def heard(self, verb: str | None, found: Json) -> None:
        """An event of a watch."""
        if verb == "DELETED":
            key = self.store.forget(target_of(found), str(found["metadata"].get("uid", "")))
        else:
            key = self.store.tell(found)
        if key is not None:
            self.changed(key)

    async def look(self) -> None:
        """Compare what is known with what is there. Raises ClusterError."""
        for kind in sorted(self.kinds):
            await self._look(kind)

    async def _look(self, kind: Kind) -> None:
        listed = await self._list(kind, bare=True)
        there = {target_of(each): str(each["metadata"].get("resourceVersion", "")) for each in listed}
        known = self.store.of_kind(kind)
        differing = [
            target for target in known.keys() | there.keys() if known.get(target) != there.get(target)
        ]
        if differing:
            logger.info("%s: %d were not as known", kind.resource, len(differing))
        for target in sorted(differing):
            await self._refresh(target)

    async def _refresh(self, target: Target) -> None:
        """Read it, which is the truth whatever was listed or heard before."""
        found = await self.cluster.get(target)
        key = self.store.forget(target) if found is None else self.store.tell(found)
        if key is not None:
            self.changed(key)

    async def _load(self, kind: Kind) -> None:
        for found in await self._list(kind):
            self.heard(None, found)
        self.loaded.add(kind)

    async def _list(self, kind: Kind, *, bare: bool = False) -> list[Json]:
        labels = "" if kind == POOL else OURS
        try:
            spaces = self.namespaces or ("",)
            pages = [await self.cluster.find(kind, space, labels=labels, bare=bare) for space in spaces]
        except NotServed:
            if kind == POOL:
                raise
            return []
        return [each for page in pages for each in page]

    def _drop(self, kind: Kind) -> None:
        self.loaded.discard(kind)
        for target in self.store.of_kind(kind):
            key = self.store.forget(target)
            if key is not None:
                self.changed(key)
