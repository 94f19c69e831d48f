"""Writes the difference between desired and observed objects, until none is left or something has to happen
first.

It may be interrupted after any write and started again: the remaining steps follow from the state of the
cluster.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_operator.apply import Key, Step, Verb, changes, key_of
from kvist_operator.apply.changes import owned
from kvist_operator.apply.upgrades import PendingChange
from kvist_operator.cluster.cluster_api import Cluster, Json
from kvist_operator.cluster.kinds import (
    BACKEND_TLS_POLICY,
    DEPLOYMENT,
    GATEWAY_POLICIES,
    Target,
    kind_named,
    target_of,
)
from kvist_operator.cluster.pool_cache import PoolCache, PoolKey
from kvist_operator.errors import ClusterError
from kvist_operator.manifests import Note, Rendered
from kvist_operator.manifests.object_names import ENGINE, INTENT
from kvist_operator.spec.pool import COMPONENT, Pool

logger = logging.getLogger(__name__)

ROUNDS: Final = 4
"""A round may reveal something (a name in use, an absent object) that the next one deals with."""

REFUSED_SECONDS: Final = 300.0
"""Time after which a policy that was refused is tried again."""

OnScaleDown = Callable[[Pool, int], Awaitable[None]]
"""Called before the engines' replicas are lowered to this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """State after the writes."""

    conflicts: tuple[Key, ...] = ()
    waits: tuple[str, ...] = ()
    failures: tuple[ClusterError, ...] = ()
    """Errors of the API server, in the order of the objects."""
    notes: tuple[Note, ...] = ()
    """Policies that were refused, or are a user's own; the pool is attached all the same."""
    pending: PendingChange | None = None
    """Change of workloads that waits for the pool's owner."""


@dataclass(slots=True)
class Applier:
    """Applies the objects of all pools."""

    cluster: Cluster
    cache: PoolCache
    on_scale_down: OnScaleDown
    settled: dict[Target, tuple[str, str]] = field(default_factory=dict)
    """Objects that an apply did not change although they differ from the intent: hash of the intent and
    resource version. Applying again would not change them either."""
    _refused: dict[Target, tuple[str, float, Note]] = field(default_factory=dict)
    """Policies that were refused: hash of the intent, time of the next attempt, and what to say."""

    async def apply(self, pool: Pool, rendered: Rendered) -> ApplyResult:
        """Write what differs. Raises Unavailable (the API server does not answer) or Conflict to be called
        again; completed writes stay."""
        run = _ApplyState()
        for _ in range(ROUNDS):
            children = self.cache.children(PoolKey(pool.namespace, pool.name))
            known = {key_of(each) for each in children}
            others = [each for key, each in run.unlabelled.items() if key not in known]
            found = changes(pool, rendered, [*children, *others])
            steps = [step for step in found.steps if self._is_open(pool, step, run)]
            if not steps:
                break
            for step in steps:
                try:
                    await self._do(pool, step, run)
                except ClusterError as error:
                    if error.aborts:
                        raise
                    run.tried.add(step.key)
                    if step.body is not None and self._spared(pool, step.key, step.body, error):
                        continue
                    logger.warning("%s/%s: writing its objects failed: %s", pool.namespace, pool.name, error)
                    run.failures.append(error)
        if tried := {key for key in run.tried if target_in(pool, key) not in self._refused}:
            names = ", ".join(map(str, sorted(tried)))
            done, failed = len(tried) - len(run.failures), len(run.failures)
            logger.info(
                "%s/%s: objects written or deleted: %d, failed: %d (%s)",
                *(pool.namespace, pool.name, done, failed, names),
            )
        return ApplyResult(
            conflicts=tuple(key for key in found.conflicts if not _optional(pool, key)),
            waits=found.waits,
            failures=tuple(run.failures),
            notes=(*self._notes(pool, rendered), *_foreign(pool, found.conflicts)),
        )

    def forget(self, pool: PoolKey) -> None:
        """Drop what is known of a pool that was deleted."""
        for known in (self.settled, self._refused):
            gone = [t for t in known if t.namespace == pool.namespace and t.name.startswith(pool.name)]
            for target in gone:
                del known[target]

    def _spared(self, pool: Pool, key: Key, body: Json, error: ClusterError) -> bool:
        """Remember a refused policy without which the pool is attached all the same; return whether it is
        one."""
        target = target_in(pool, key)
        if not _optional(pool, key):
            return False
        text = f"{key} could not be written, so the gateway does what it does without it: {error}"
        logger.warning("%s/%s: %s", target.namespace, target.name, text)
        note = Note("", "PolicyRefused", text)
        self._refused[target] = _intent(body), time.monotonic() + REFUSED_SECONDS, note
        return True

    def _notes(self, pool: Pool, rendered: Rendered) -> tuple[Note, ...]:
        wanted = {target_in(pool, key_of(made)) for made in rendered.objects}
        return tuple(note for target, (_, _, note) in sorted(self._refused.items()) if target in wanted)

    def _is_open(self, pool: Pool, step: Step, run: "_ApplyState") -> bool:
        """Return whether a step is still to be done and may have an effect."""
        if step.key in run.tried:
            return False
        target = target_in(pool, step.key)
        known = self.cache.get(target)
        if step.body is None:
            return True
        if target in self._refused:
            intent, until, _ = self._refused[target]
            if intent == _intent(step.body) and time.monotonic() < until:
                return False
        if known is None:
            return True
        return self.settled.get(target) != (_intent(step.body), _version(known))

    async def _do(self, pool: Pool, step: Step, run: "_ApplyState") -> None:
        target = target_in(pool, step.key)
        if step.verb is Verb.CREATE:
            found = await self.cluster.get(target)
            if found is not None:
                run.unlabelled[step.key] = found
                return
        run.tried.add(step.key)
        if step.verb is Verb.DELETE or step.body is None:
            await self._delete(pool, target, run.unlabelled.get(step.key))
            return
        before = self.cache.get(target)
        fewer = fewer_engines(before, step.body)
        if fewer is not None:
            await self.on_scale_down(pool, fewer)
        made = await self.cluster.apply(step.body)
        self._refused.pop(target, None)
        if before is not None and _version(before) == _version(made):
            self.settled[target] = (_intent(step.body), _version(made))
        self.cache.update(made)
        logger.debug("applied %s", target)

    async def _delete(self, pool: Pool, target: Target, unlabelled: Mapping[str, Any] | None) -> None:
        found = self.cache.get(target) or unlabelled
        if found is None or not owned(pool, found):
            return
        await self.cluster.delete(target, str(found["metadata"]["uid"]))
        logger.debug("deleted %s", target)
        left = await self.cluster.get(target)
        if left is None:
            self.cache.remove(target)
        else:
            self.cache.update(left)


@dataclass(slots=True)
class _ApplyState:
    """State of one call for a pool."""

    tried: set[Key] = field(default_factory=set)
    unlabelled: dict[Key, Json] = field(default_factory=dict)
    """Objects with a wanted name but without our labels."""
    failures: list[ClusterError] = field(default_factory=list)


def _optional(pool: Pool, key: Key) -> bool:
    """Return whether a pool is attached without this object: it is a policy that most gateways do without."""
    kind = kind_named(key.group, key.kind)
    return kind in GATEWAY_POLICIES or (kind == BACKEND_TLS_POLICY and pool.gateway.of_extension)


def _foreign(pool: Pool, conflicts: Iterable[Key]) -> list[Note]:
    """Return a note for each policy of a user's own that has the name of ours, and is left alone."""
    text = (
        "{} does not belong to the pool, so the operator leaves it as it is: delete it to have the operator's"
    )
    return [Note("", "PolicyForeign", text.format(key)) for key in conflicts if _optional(pool, key)]


def target_in(pool: Pool, key: Key) -> Target:
    """Return the target of one of the pool's objects."""
    return Target(kind_named(key.group, key.kind), pool.namespace, key.name)


def fewer_engines(before: Mapping[str, Any] | None, body: Mapping[str, Any]) -> int | None:
    """Return the number of engines after an apply that lowers it, where pods are deleted by their deletion
    cost, as ReplicaSets do; else None."""
    if before is None or target_of(body).kind != DEPLOYMENT:
        return None
    if body["metadata"].get("labels", {}).get(COMPONENT) != ENGINE:
        return None
    wanted = int(body["spec"].get("replicas", 1))
    return wanted if wanted < int((before.get("spec") or {}).get("replicas", 1)) else None


def _intent(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("annotations", {}).get(INTENT, ""))


def _version(found: Mapping[str, Any]) -> str:
    return str(found["metadata"].get("resourceVersion", ""))
