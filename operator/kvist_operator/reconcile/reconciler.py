"""One pool: what is wanted and what is there → writes → status. The same call after every event, after a
restart, after a failure; nothing is remembered that changes what it does.

An error becomes a condition. What is not worth one (the API server is busy, somebody was faster) is raised,
and the pool's turn comes again.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from kvist_operator import status as told
from kvist_operator.cluster.port import Cluster, Json
from kvist_operator.cluster.store import PoolKey, Store
from kvist_operator.cluster.surroundings import Surroundings, remembered, settled
from kvist_operator.errors import ClusterError, Conflict, InternalError, NotServed, OperatorError, Unavailable
from kvist_operator.manifests import Rendered, Site, render
from kvist_operator.manifests.names import ENGINE, ENVOY, PICKER
from kvist_operator.plan import Plan, Verdict, make_plan
from kvist_operator.spec import Pool, read_pool
from kvist_operator.status import Observed, Subject
from kvist_operator.status.troubles import refused, troubles
from kvist_operator.status.views import Trouble

from .carry import Carrier, Outcome, failed
from .keeper import Keeper
from .library import Known, Library
from .observe import children_of

logger = logging.getLogger(__name__)

KEPT: Final = 64
"""Intents of the pools that were looked at last: each is 100 KB, and made again in ten milliseconds."""
WAIT_SECONDS: Final = 5.0
"""Until what is waited for is looked at again, should no event tell."""


class Fleet(Protocol):
    """What is known of the running engines, from their pickers."""

    async def price(self, pool: Pool, pods: list[Json], replicas: int) -> None:
        """Say what each pod's cache is worth, by its deletion cost; called before replicas are lowered to
        this number."""

    def kv_tokens(self, key: PoolKey) -> int | None:
        """What engines report as the size of a replica's cache; None = nothing is known."""

    def advice(self, key: PoolKey, pool: Pool, plan: Plan, before: list[str]) -> tuple[str, ...]:
        """What could be better."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What a pool comes to: as far as it got, and why no further."""

    pool: Pool | None = None
    plan: Plan | None = None
    rendered: Rendered | None = None
    error: OperatorError | None = None


@dataclass(frozen=True, slots=True)
class _Made:
    """An intent, and all that it follows from."""

    inputs: tuple[Any, ...]
    intent: Intent


@dataclass(slots=True)
class Reconciler:
    """For all pools of one cluster."""

    cluster: Cluster
    store: Store
    surroundings: Surroundings
    library: Library
    fleet: Fleet
    images: Site
    """A site with nothing but the images of pickers and Envoy."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    pending: set[PoolKey] = field(default_factory=set)
    """Pools whose model is being looked up."""
    _made: dict[PoolKey, _Made] = field(default_factory=dict)
    _shown: dict[PoolKey, tuple[str, Json]] = field(default_factory=dict)
    """Statuses that the API server took, though it shows them otherwise; by version."""
    _keeper: Keeper = field(init=False)
    _carrier: Carrier = field(init=False)

    def __post_init__(self) -> None:
        self._keeper = Keeper(self.cluster, self.store)
        self._carrier = Carrier(self.cluster, self.store, self._shrinks)

    async def reconcile(self, key: PoolKey) -> float | None:
        """Bring one pool a step nearer to what it asks for, mostly the last; seconds until it wants to be
        looked at again, None = until something happens.

        Raises:
            ClusterError: it was not possible just now; the status says so where it matters.
        """
        resource = self.store.get(key.target)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._forget(key, resource)
            return None
        intent = await self._intent(key, resource)
        if key in self.pending and resource.get("status"):
            return None  # what was said stands until the model is known: it is asked for anew by each process
        outcome = await self._carried(intent)
        try:
            await self._show(key, resource, intent, outcome)
        except (Conflict, NotServed):
            return await self._again(key)
        if outcome.failures:
            raise outcome.failures[0]
        return WAIT_SECONDS if outcome.waits else None

    async def _intent(self, key: PoolKey, resource: Json) -> Intent:
        """From the spec and what is known beside it; made again only when one of them has changed."""
        try:
            pool = read_pool(resource)
        except OperatorError as error:
            return Intent(error=error)
        try:
            known = await self._known(key, pool)
        except OperatorError as error:
            return Intent(pool=pool, error=error)
        if known is None:
            return Intent(pool=pool)
        return await self._cached(key, pool, known, resource)

    async def _known(self, key: PoolKey, pool: Pool) -> Known | None:
        known = await self.library.of(pool)
        (self.pending.discard if known else self.pending.add)(key)
        return known

    async def _cached(self, key: PoolKey, pool: Pool, known: Known, resource: Json) -> Intent:
        site = await self._site(key, pool)
        seats = settled(self.surroundings.seen.accelerators, resource.get("status") or {})
        inputs = (pool.uid, pool.generation, id(known), site, tuple(seats))
        made = self._made.pop(key, None)
        if made is None or made.inputs != inputs:
            made = _Made(inputs, intended(pool, known, site, seats))
        self._made[key] = made
        while len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        return made.intent

    async def _site(self, key: PoolKey, pool: Pool) -> Site:
        seen = self.surroundings.seen
        workload = children_of(pool.name, self.store.children(key)).workload
        return replace(
            self.images,
            apis=seen.apis,
            claims=await self.surroundings.claims(pool),
            node_labels=remembered(seen.labels, workload),
        )

    async def _carried(self, intent: Intent) -> Outcome:
        """Nothing is done for what has no plan: what runs, runs on."""
        if intent.pool is None or intent.rendered is None:
            return Outcome()
        try:
            kept = await self._keeper.keep(intent.pool, self.now())
        except (Unavailable, Conflict):
            raise
        except ClusterError as error:
            self._keeper.forget(intent.pool.uid)
            return Outcome(failures=(error,))
        found = await self._carrier.carry(intent.pool, intent.rendered)
        conflicts = tuple(dict.fromkeys([*kept.conflicts, *found.conflicts]))
        return replace(found, conflicts=conflicts, waits=(*kept.waits, *found.waits))

    async def _shrinks(self, pool: Pool, replicas: int) -> None:
        """The pods whose caches are worth least are to go."""
        await self.fleet.price(pool, self.store.pods(PoolKey(pool.namespace, pool.name)), replicas)

    async def _show(self, key: PoolKey, resource: Json, intent: Intent, outcome: Outcome) -> None:
        """Write the status where it is not what it should be."""
        current = self.store.get(key.target) or resource
        old = current.get("status") or {}
        made = self._status(key, current, intent, outcome, old)
        version = str(current["metadata"].get("resourceVersion", ""))
        if made == old or self._shown.get(key) == (version, made):
            return
        answer = await self.cluster.patch_status(current, made)
        if (answer.get("status") or {}) != made:
            self._shown[key] = (str(answer["metadata"].get("resourceVersion", "")), made)
        self.store.tell(answer)

    def _status(
        self, key: PoolKey, resource: Json, intent: Intent, outcome: Outcome, old: Mapping[str, Any]
    ) -> Json:
        subject = Subject(
            name=key.name,
            generation=int(resource["metadata"].get("generation") or 0),
            pool=intent.pool,
            plan=intent.plan,
            error=intent.error,
            notes=intent.rendered.notes if intent.rendered else (),
        )
        found = children_of(key.name, self.store.children(key))
        pods = self.store.pods(key)
        observed = replace(
            found,
            troubles=_troubles(found, pods),
            conflicts=tuple(map(str, outcome.conflicts)),
            waits=outcome.waits,
            failure=_failure(outcome),
            kv_tokens=self._reported(key, found, old),
            advice=self._advice(key, intent, old),
        )
        return told.status(subject, observed, old, self.now())

    def _reported(self, key: PoolKey, found: Observed, old: Mapping[str, Any]) -> int | None:
        """What was reported stands until something else is, as long as there are engines."""
        told_of: int | None = old.get("reportedKvTokens") if found.workload else None
        known = self.fleet.kv_tokens(key)
        return told_of if known is None else known

    def _advice(self, key: PoolKey, intent: Intent, old: Mapping[str, Any]) -> tuple[str, ...]:
        if intent.pool is None or intent.plan is None or intent.rendered is None:
            return ()
        return self.fleet.advice(key, intent.pool, intent.plan, list(old.get("advice") or ()))

    async def _again(self, key: PoolKey) -> float:
        """Somebody changed the pool meanwhile, or deleted it."""
        found = await self.cluster.get(key.target)
        if found is None:
            self.store.forget(key.target)
        else:
            self.store.tell(found)
        return 0.0

    def _forget(self, key: PoolKey, resource: Json | None) -> None:
        self._made.pop(key, None)
        self._shown.pop(key, None)
        self.pending.discard(key)
        self._carrier.forget(key)
        if resource is not None:
            self._keeper.forget(str(resource["metadata"].get("uid")))


def intended(pool: Pool, known: Known, site: Site, seats: list[Any]) -> Intent:
    """Plan and objects, or why there are none. Pure."""
    facts, draft = known
    plan: Plan | None = None
    try:
        plan = make_plan(pool, facts, nodes=seats, draft=draft)
        if plan.verdict is Verdict.REFUSED:
            return Intent(pool, plan)
        return Intent(pool, plan, render(pool, plan, site))
    except OperatorError as error:
        return Intent(pool, plan, error=error)
    except Exception as error:
        logger.exception("%s/%s cannot be planned", pool.namespace, pool.name)
        return Intent(pool, plan, error=InternalError(f"{type(error).__name__}: {error}; please report it"))


def _troubles(found: Observed, pods: list[Json]) -> tuple[Trouble, ...]:
    """Pods that were never made come before those that are in trouble."""
    parts = ((found.workload, ENGINE), (found.picker, PICKER), (found.envoy, ENVOY))
    never = [trouble for each, component in parts if (trouble := refused(each, component))]
    return (*never, *troubles(pods))


def _failure(outcome: Outcome) -> Trouble | None:
    if not outcome.failures:
        return None
    return Trouble(outcome.failures[0].reason, failed(outcome.failures))
