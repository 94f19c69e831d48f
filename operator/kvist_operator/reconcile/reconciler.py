"""One reconciliation of a pool: plan, objects, writes, status.

It is the same call after every event, after a restart, after a failure; no state is kept that changes its
result. An error becomes a condition. Temporary errors (a busy API server, a conflicting write) are raised,
and the pool is reconciled again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from kvist_operator import status as statuses
from kvist_operator.cluster.capabilities import Capabilities, with_planned_first, with_required_labels
from kvist_operator.cluster.cluster_api import Cluster, Json
from kvist_operator.cluster.kinds import DEPLOYMENT, ObjectKind, kind_of
from kvist_operator.cluster.pool_cache import PoolCache, PoolKey
from kvist_operator.errors import ClusterError, Conflict, InternalError, NotServed, OperatorError, Unavailable
from kvist_operator.manifests import Rendered, Site, render
from kvist_operator.manifests.object_names import ENGINE, ENVOY, PICKER, ObjectNames
from kvist_operator.plan import Plan, PlanVerdict, make_plan
from kvist_operator.spec import Pool, read_pool
from kvist_operator.status import ObservedPool, Subject
from kvist_operator.status.diagnosis import refused, troubles
from kvist_operator.status.views import Trouble

from .applier import Applier, ApplyResult, failure_message
from .certificate_secret import CertificateSecrets
from .model_cache import ModelCache, ModelFacts

logger = logging.getLogger(__name__)

CACHED_INTENTS: Final = 64
"""Intents that are kept, of the pools reconciled last: each has 100 KB and is made again in ten
milliseconds."""
WAIT_SECONDS: Final = 5.0
"""Time until a pool that waits is reconciled again, should no event arrive."""
_ROUTE: Final = "HTTPRoute"
_GROUPS: Final = ("LeaderWorkerSet",)


class PickerFigures(Protocol):
    """Figures of the running engines, from their pickers."""

    async def set_deletion_costs(self, pool: Pool, pods: list[Json], replicas: int) -> None:
        """Set each pod's deletion cost by what its cache has saved; called before replicas are lowered to
        this number."""

    def kv_tokens(self, key: PoolKey) -> int | None:
        """Return the size of a replica's KV cache in tokens, as engines report it; None when not known."""

    def advice(self, key: PoolKey, pool: Pool, plan: Plan, before: list[str]) -> tuple[str, ...]:
        """Return advice for the pool; ``before`` is the earlier advice."""


@dataclass(frozen=True, slots=True)
class Intent:
    """Plan and objects of a pool, as far as they could be made, and the error that prevented more."""

    pool: Pool | None = None
    plan: Plan | None = None
    rendered: Rendered | None = None
    error: OperatorError | None = None


@dataclass(frozen=True, slots=True)
class _CachedIntent:
    """An intent with all its inputs."""

    inputs: tuple[Any, ...]
    intent: Intent


@dataclass(slots=True)
class Reconciler:
    """Reconciles the pools of one cluster."""

    cluster: Cluster
    cache: PoolCache
    capabilities: Capabilities
    models: ModelCache
    pickers: PickerFigures
    images: Site
    """A site with only the images of pickers and Envoy."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    pending: set[PoolKey] = field(default_factory=set)
    """Pools whose model is being looked up."""
    _intents: dict[PoolKey, _CachedIntent] = field(default_factory=dict)
    _written: dict[PoolKey, tuple[str, Json]] = field(default_factory=dict)
    """Statuses that the API server accepted but returns in another form, by resource version."""
    _secrets: CertificateSecrets = field(init=False)
    _applier: Applier = field(init=False)

    def __post_init__(self) -> None:
        self._secrets = CertificateSecrets(self.cluster, self.cache)
        self._applier = Applier(self.cluster, self.cache, self._on_scale_down)

    async def reconcile(self, key: PoolKey) -> float | None:
        """Bring a pool closer to its intent, mostly all the way. Return the seconds until it should be
        reconciled again, None to wait for events.

        Raises:
            ClusterError: writes failed; the status says so where it matters.
        """
        resource = self.cache.get(key.target)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._forget(key, resource)
            return None
        intent = await self._intent(key, resource)
        if key in self.pending and resource.get("status"):
            return None  # the status stands until the model is known: each process looks it up again
        outcome = await self._apply(intent)
        try:
            await self._write_status(key, resource, intent, outcome)
        except (Conflict, NotServed):
            return await self._reread(key)
        if outcome.failures:
            raise outcome.failures[0]
        return WAIT_SECONDS if outcome.waits else None

    async def _intent(self, key: PoolKey, resource: Json) -> Intent:
        """Return the intent of a pool; it is made again only when one of its inputs has changed."""
        try:
            pool = read_pool(resource)
        except OperatorError as error:
            return Intent(error=error)
        try:
            found = await self._facts(key, pool)
        except OperatorError as error:
            return Intent(pool=pool, error=error)
        if found is None:
            return Intent(pool=pool)
        return await self._cached_intent(key, pool, found, resource)

    async def _facts(self, key: PoolKey, pool: Pool) -> ModelFacts | None:
        found = await self.models.of(pool)
        (self.pending.discard if found else self.pending.add)(key)
        return found

    async def _cached_intent(self, key: PoolKey, pool: Pool, found: ModelFacts, resource: Json) -> Intent:
        site = await self._site(key, pool)
        accelerators = with_planned_first(self.capabilities.latest.accelerators, resource.get("status") or {})
        inputs = (pool.uid, pool.generation, id(found), site, tuple(accelerators))
        made = self._intents.pop(key, None)
        if made is None or made.inputs != inputs:
            made = _CachedIntent(inputs, make_intent(pool, found, site, accelerators))
        self._intents[key] = made
        while len(self._intents) > CACHED_INTENTS:
            del self._intents[next(iter(self._intents))]
        return made.intent

    async def _site(self, key: PoolKey, pool: Pool) -> Site:
        seen = self.capabilities.latest
        workload = children_of(pool.name, self.cache.children(key)).workload
        return replace(
            self.images,
            apis=seen.apis,
            claims=await self.capabilities.claims(pool),
            node_labels=with_required_labels(seen.labels, workload),
        )

    async def _apply(self, intent: Intent) -> ApplyResult:
        """Write the objects of an intent; without a plan nothing is changed, and engines keep running."""
        if intent.pool is None or intent.rendered is None:
            return ApplyResult()
        try:
            kept = await self._secrets.reconcile(intent.pool, self.now())
        except (Unavailable, Conflict):
            raise
        except ClusterError as error:
            self._secrets.forget(intent.pool.uid)
            return ApplyResult(failures=(error,))
        found = await self._applier.apply(intent.pool, intent.rendered)
        conflicts = tuple(dict.fromkeys([*kept.conflicts, *found.conflicts]))
        return replace(found, conflicts=conflicts, waits=(*kept.waits, *found.waits))

    async def _on_scale_down(self, pool: Pool, replicas: int) -> None:
        await self.pickers.set_deletion_costs(
            pool, self.cache.pods(PoolKey(pool.namespace, pool.name)), replicas
        )

    async def _write_status(self, key: PoolKey, resource: Json, intent: Intent, outcome: ApplyResult) -> None:
        """Write the status if it has changed."""
        current = self.cache.get(key.target) or resource
        old = current.get("status") or {}
        made = self._status(key, current, intent, outcome, old)
        version = str(current["metadata"].get("resourceVersion", ""))
        if made == old or self._written.get(key) == (version, made):
            return
        answer = await self.cluster.patch_status(current, made)
        if (answer.get("status") or {}) != made:
            self._written[key] = (str(answer["metadata"].get("resourceVersion", "")), made)
        self.cache.update(answer)

    def _status(
        self, key: PoolKey, resource: Json, intent: Intent, outcome: ApplyResult, old: Mapping[str, Any]
    ) -> Json:
        subject = Subject(
            name=key.name,
            generation=int(resource["metadata"].get("generation") or 0),
            pool=intent.pool,
            plan=intent.plan,
            error=intent.error,
            notes=intent.rendered.notes if intent.rendered else (),
        )
        found = children_of(key.name, self.cache.children(key))
        pods = self.cache.pods(key)
        observed = replace(
            found,
            troubles=_troubles(found, pods),
            conflicts=tuple(map(str, outcome.conflicts)),
            waits=outcome.waits,
            failure=_failure(outcome),
            kv_tokens=self._reported_kv_tokens(key, found, old),
            advice=self._advice(key, intent, old),
        )
        return statuses.status(subject, observed, old, self.now())

    def _reported_kv_tokens(self, key: PoolKey, found: ObservedPool, old: Mapping[str, Any]) -> int | None:
        """Return the reported cache size; the last one stands as long as there are engines."""
        earlier: int | None = old.get("reportedKvTokens") if found.workload else None
        latest = self.pickers.kv_tokens(key)
        return earlier if latest is None else latest

    def _advice(self, key: PoolKey, intent: Intent, old: Mapping[str, Any]) -> tuple[str, ...]:
        if intent.pool is None or intent.plan is None or intent.rendered is None:
            return ()
        return self.pickers.advice(key, intent.pool, intent.plan, list(old.get("advice") or ()))

    async def _reread(self, key: PoolKey) -> float:
        """Read a pool that was modified or deleted meanwhile."""
        found = await self.cluster.get(key.target)
        if found is None:
            self.cache.remove(key.target)
        else:
            self.cache.update(found)
        return 0.0

    def _forget(self, key: PoolKey, resource: Json | None) -> None:
        self._intents.pop(key, None)
        self._written.pop(key, None)
        self.pending.discard(key)
        self._applier.forget(key)
        if resource is not None:
            self._secrets.forget(str(resource["metadata"].get("uid")))


def make_intent(pool: Pool, found: ModelFacts, site: Site, accelerators: list[Any]) -> Intent:
    """Return plan and objects, or the error that prevents them. Pure."""
    facts, draft = found
    plan: Plan | None = None
    try:
        plan = make_plan(pool, facts, nodes=accelerators, draft=draft)
        if plan.verdict is PlanVerdict.REFUSED:
            return Intent(pool, plan)
        return Intent(pool, plan, render(pool, plan, site))
    except OperatorError as error:
        return Intent(pool, plan, error=error)
    except Exception as error:
        logger.exception("%s/%s: planning failed with an internal error", pool.namespace, pool.name)
        return Intent(pool, plan, error=InternalError(f"{type(error).__name__}: {error}; please report it"))


def _troubles(found: ObservedPool, pods: list[Json]) -> tuple[Trouble, ...]:
    """Return pods that were never created before those with problems."""
    parts = ((found.workload, ENGINE), (found.picker, PICKER), (found.envoy, ENVOY))
    never = [trouble for each, component in parts if (trouble := refused(each, component))]
    return (*never, *troubles(pods))


def _failure(outcome: ApplyResult) -> Trouble | None:
    if not outcome.failures:
        return None
    return Trouble(outcome.failures[0].reason, failure_message(outcome.failures))


def children_of(pool: str, children: Iterable[Json]) -> ObservedPool:
    """Return the workloads and the route among a pool's children, by their names."""
    by_name = {(kind_of(each), each["metadata"]["name"]): each for each in children}
    names = ObjectNames(pool, "")

    def deployment(name: str) -> Json | None:
        return by_name.get((DEPLOYMENT, name))

    return ObservedPool(
        workload=deployment(names.engine) or _other(by_name, _GROUPS, names.engine),
        picker=deployment(names.picker),
        envoy=deployment(names.envoy),
        route=_other(by_name, (_ROUTE,), names.engine),
    )


def _other(by_name: dict[tuple[ObjectKind, str], Json], kinds: tuple[str, ...], name: str) -> Json | None:
    return next((made for (kind, of), made in by_name.items() if kind.kind in kinds and of == name), None)
