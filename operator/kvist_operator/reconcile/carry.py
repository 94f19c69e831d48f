"""Carries ``Changes`` out: desired × known → writes, until nothing is left to do or something has to happen
first.

It can be ended after any write and begun again: what is to be done follows from what is there.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_operator.apply import Changes, Key, Step, Verb, changes, key_of
from kvist_operator.apply.changes import owned
from kvist_operator.cluster.kinds import DEPLOYMENT, Target, kind_named, target_of
from kvist_operator.cluster.port import Cluster, Json
from kvist_operator.cluster.store import PoolKey, Store
from kvist_operator.errors import ClusterError, Conflict, Unavailable
from kvist_operator.manifests import Rendered
from kvist_operator.manifests.names import COMPONENT, ENGINE, INTENT
from kvist_operator.spec.pool import Pool

logger = logging.getLogger(__name__)

ROUNDS: Final = 4
"""What one round brings to light (a name that is taken, an object that has gone) the next takes up."""

Shrinks = Callable[[Pool, int], Awaitable[None]]
"""Called before the engines' replicas are lowered to this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where it stands now."""

    conflicts: tuple[Key, ...] = ()
    waits: tuple[str, ...] = ()
    failures: tuple[ClusterError, ...] = ()
    """What the API server would not have, in the order of the objects."""


@dataclass(slots=True)
class Carrier:
    """For all pools."""

    cluster: Cluster
    store: Store
    shrinks: Shrinks
    settled: dict[Target, tuple[str, str]] = field(default_factory=dict)
    """Objects that an apply left as they were, though they do not read as intended: the intent's hash and
    the version. It would leave them again."""

    async def carry(self, pool: Pool, rendered: Rendered) -> Outcome:
        """Do what is to be done. Raises Unavailable or Conflict: not now; what was done stands."""
        run = _Run(pool)
        for _ in range(ROUNDS):
            found = self._found(pool, rendered, run)
            steps = [step for step in found.steps if self._open(pool, step, run)]
            if not steps:
                break
            for step in steps:
                await self._try(pool, step, run)
        if run.tried:
            said = ", ".join(map(str, sorted(run.tried)))
            logger.info("%s/%s: %d written: %s", pool.namespace, pool.name, len(run.tried), said)
        return Outcome(conflicts=found.conflicts, waits=found.waits, failures=tuple(run.failures))

    def forget(self, pool: PoolKey) -> None:
        """The pool has gone."""
        gone = [t for t in self.settled if t.namespace == pool.namespace and t.name.startswith(pool.name)]
        for target in gone:
            del self.settled[target]

    def _found(self, pool: Pool, rendered: Rendered, run: "_Run") -> Changes:
        children = self.store.children(PoolKey(pool.namespace, pool.name))
        known = {key_of(each) for each in children}
        others = [each for key, each in run.strangers.items() if key not in known]
        return changes(pool, rendered, [*children, *others])

    def _open(self, pool: Pool, step: Step, run: "_Run") -> bool:
        """Whether there is any sense in a step."""
        if step.key in run.tried:
            return False
        known = self.store.get(target_in(pool, step.key))
        if step.body is None or known is None:
            return True
        return self.settled.get(target_in(pool, step.key)) != (_intent(step.body), _version(known))

    async def _try(self, pool: Pool, step: Step, run: "_Run") -> None:
        try:
            await self._do(pool, step, run)
        except (Unavailable, Conflict):
            raise
        except ClusterError as error:
            logger.warning("%s/%s: %s", pool.namespace, pool.name, error)
            run.tried.add(step.key)
            run.failures.append(error)

    async def _do(self, pool: Pool, step: Step, run: "_Run") -> None:
        target = target_in(pool, step.key)
        if step.verb is Verb.CREATE:
            found = await self.cluster.get(target)
            if found is not None:
                run.strangers[step.key] = found
                return
        run.tried.add(step.key)
        if step.verb is Verb.DELETE or step.body is None:
            await self._delete(pool, target, run.strangers.get(step.key))
            return
        before = self.store.get(target)
        fewer = fewer_engines(before, step.body)
        if fewer is not None:
            await self.shrinks(pool, fewer)
        await self._apply(target, before, step.body)

    async def _apply(self, target: Target, before: Mapping[str, Any] | None, body: Json) -> None:
        made = await self.cluster.apply(body)
        if before is not None and _version(before) == _version(made):
            self.settled[target] = (_intent(body), _version(made))
        self.store.tell(made)
        logger.debug("applied %s", target)

    async def _delete(self, pool: Pool, target: Target, stranger: Mapping[str, Any] | None) -> None:
        found = self.store.get(target) or stranger
        if found is None or not owned(pool, found):
            return
        await self.cluster.delete(target, str(found["metadata"]["uid"]))
        logger.debug("deleted %s", target)
        left = await self.cluster.get(target)
        if left is None:
            self.store.forget(target)
        else:
            self.store.tell(left)


@dataclass(slots=True)
class _Run:
    """One pass over a pool."""

    pool: Pool
    tried: set[Key] = field(default_factory=set)
    strangers: dict[Key, Json] = field(default_factory=dict)
    """What has a name that is wanted, and none of our labels."""
    failures: list[ClusterError] = field(default_factory=list)


def target_in(pool: Pool, key: Key) -> Target:
    """Where an object of the pool is."""
    return Target(kind_named(key.group, key.kind), pool.namespace, key.name)


def fewer_engines(before: Mapping[str, Any] | None, body: Mapping[str, Any]) -> int | None:
    """The number of engines an apply leaves, where it is lower than before and pods are chosen by what it
    costs to delete them, which ReplicaSets do; else None."""
    if before is None or target_of(body).kind != DEPLOYMENT:
        return None
    if body["metadata"].get("labels", {}).get(COMPONENT) != ENGINE:
        return None
    wanted = int(body["spec"].get("replicas", 1))
    return wanted if wanted < int((before.get("spec") or {}).get("replicas", 1)) else None


def failed(failures: Sequence[ClusterError]) -> str:
    """All of them, for people."""
    return "; ".join(dict.fromkeys(str(each) for each in failures))


def _intent(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("annotations", {}).get(INTENT, ""))


def _version(found: Mapping[str, Any]) -> str:
    return str(found["metadata"].get("resourceVersion", ""))
