"""One reconciliation of a pool: plan, objects, writes, status.

It is the same call after every event, after a restart, after a failure; no state is kept that changes its
result. An error becomes a condition. Temporary errors (a busy API server, a conflicting write) are raised,
and the pool is reconciled again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from kvist_operator import status as statuses
from kvist_operator.apply.upgrades import hold_upgrade
from kvist_operator.cluster.capabilities import Capabilities, with_planned_first, with_required_labels
from kvist_operator.cluster.cluster_api import Cluster, Json
from kvist_operator.cluster.pool_cache import PoolCache, PoolKey
from kvist_operator.cluster.presets import Presets
from kvist_operator.errors import ClusterError, Conflict, InternalError, NotServed, OperatorError, Unavailable
from kvist_operator.manifests import Rendered, Site, render
from kvist_operator.manifests.gateway_policies import kept_controllers
from kvist_operator.manifests.object_names import ENGINE, ENVOY, KV_CLEANER, PICKER, ObjectNames
from kvist_operator.plan import Plan, PlanVerdict, make_plan
from kvist_operator.spec import Pool, read_pool
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.pool import DEFAULT_IMAGE
from kvist_operator.spec.preset import preset_name
from kvist_operator.status import ObservedPool, Subject
from kvist_operator.status.diagnosis import refused, troubles
from kvist_operator.status.known_model import known_model
from kvist_operator.status.mesh import mesh_notes
from kvist_operator.status.pairs import pairs_of
from kvist_operator.status.referrers import referrers
from kvist_operator.status.views import Trouble, controllers

from .applier import Applier, ApplyResult
from .certificate_secret import CertificateSecrets
from .model_cache import ModelCache, ModelFacts, pinned
from .picker_client import PickerClient
from .pool_observer import PoolObserver

logger = logging.getLogger(__name__)

RELEASE: Final = "kvist.dev/operator"
"""Annotation of a pool: the release that manages it, if not the one in its status."""
CACHED_INTENTS: Final = 64
"""Intents that are kept, of the pools reconciled last: each has 100 KB and is computed again in ten
milliseconds."""
WAIT_SECONDS: Final = 5.0
"""Time until a pool that waits is reconciled again, should no event arrive."""


@dataclass(frozen=True, slots=True)
class Intent:
    """Plan and objects of a pool, as far as they could be made, and the error that prevented more."""

    pool: Pool | None = None
    plan: Plan | None = None
    rendered: Rendered | None = None
    error: OperatorError | None = None
    facts: ModelFacts | None = None
    preset: Json | None = None
    """The object that ``spec.presetRef`` names."""


@dataclass(slots=True)
class Reconciler:
    """Reconciles the pools of one cluster."""

    cluster: Cluster
    cache: PoolCache
    capabilities: Capabilities
    models: ModelCache
    pickers: PickerClient
    presets: Presets
    images: Site
    """A site with only the images of pickers and Envoy."""
    engine_image: str = DEFAULT_IMAGE
    """Image of engines, for pools that set none."""
    release: str = ""
    """Name under which this release manages pools, ``namespace/name``; empty: it manages any pool."""
    identity: str = ""
    """Name of this build of the operator: another one may make other objects of the same pool."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Prices of accelerators for an hour, by name."""
    observer: PoolObserver = field(default_factory=PoolObserver)
    """Notified of each pool."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    pending: set[PoolKey] = field(default_factory=set)
    """Pools whose model is being looked up."""
    _intents: dict[PoolKey, tuple[tuple[Any, ...], Intent]] = field(default_factory=dict)
    """Intents with all their inputs, the one used last at the end."""
    _written: dict[PoolKey, tuple[str, Json]] = field(default_factory=dict)
    """Statuses that the API server accepted but returns in another form, by resource version."""
    _foreign: set[PoolKey] = field(default_factory=set)
    """Pools that another release manages, of which the log has a line."""
    _secrets: CertificateSecrets = field(init=False)
    _applier: Applier = field(init=False)

    def __post_init__(self) -> None:
        self._secrets = CertificateSecrets(self.cluster, self.cache)
        self._applier = Applier(self.cluster, self.cache, self._on_scale_down)

    async def reconcile(self, key: PoolKey) -> float | None:
        """Bring a pool closer to its intent. Return the seconds until it should be reconciled again, None to
        wait for events.

        Raises:
            ClusterError: writes failed; the status says so where it matters.
        """
        resource = self.cache.get(key.target)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            self._forget(key, resource)
            return None
        if self._of_another_release(key, resource):
            self.observer.on_gone(key)
            return None
        self.observer.on_managed(key)
        intent = await self._intent(key, resource)
        if key in self.pending and resource.get("status"):
            return None  # the status stands until the model is known: each process looks it up again
        outcome = await self._apply(resource, intent)
        try:
            await self._write_status(key, resource, intent, outcome)
        except (Conflict, NotServed):
            return await self._reread(key)
        if outcome.failures:
            raise outcome.failures[0]
        if outcome.waits:
            return WAIT_SECONDS
        until = outcome.pending.until if outcome.pending else None
        return max(0.0, (until - self.now()).total_seconds()) if until else None

    def _of_another_release(self, key: PoolKey, resource: Json) -> bool:
        """Return whether another release manages a pool: its annotation says so, else its status."""
        named = (resource["metadata"].get("annotations") or {}).get(RELEASE)
        release = named or (resource.get("status") or {}).get("operator", "")
        if not (self.release and release and release != self.release):
            self._foreign.discard(key)
            return False
        if key not in self._foreign:
            self._foreign.add(key)
            logger.warning(
                "%s: the release %s manages this pool, so %s leaves it alone; to hand it over: "
                "kubectl annotate -n %s kvp %s --overwrite %s=%s",
                *(key, release, self.release, key.namespace, key.name, RELEASE, self.release),
            )
        return True

    async def _intent(self, key: PoolKey, resource: Json) -> Intent:
        """Return the intent of a pool; it is computed again only when one of its inputs has changed."""
        pool: Pool | None = None
        preset: Json | None = None
        try:
            if name := preset_name(resource):
                preset = await self.presets.find(key.namespace, name)
            pool = read_pool(resource, default_image=self.engine_image, preset=preset)
            found = await self.models.of(pool, known_model(pool, resource.get("status") or {}))
        except Unavailable:
            raise
        except OperatorError as error:
            return Intent(pool=pool, error=error)
        (self.pending.discard if found else self.pending.add)(key)
        if found is None:
            return Intent(pool=pool)
        seen = self.capabilities.latest
        children = self.cache.children(key)
        there = children_of(pool.name, children)
        site = replace(
            self.images,
            apis=seen.apis,
            claims=await self.capabilities.claims(pool),
            storage=self._storage(key, pool),
            node_labels=with_required_labels(
                with_required_labels(seen.labels, there.workload), there.prefill
            ),
            assigns_users=seen.assigns_users,
        )
        site = await self._with_gateways(site, pool, there, children)
        accelerators = with_planned_first(self.capabilities.latest.accelerators, resource.get("status") or {})
        version = preset["metadata"].get("resourceVersion") if preset else None
        inputs = (pool.uid, pool.generation, version, id(found), site, tuple(accelerators))
        known, intent = self._intents.pop(key, ((), Intent()))
        if known != inputs:
            intent = make_intent(pool, found, site, accelerators, self.prices)
            intent = replace(intent, preset=preset)
        self._intents[key] = (inputs, intent)
        while len(self._intents) > CACHED_INTENTS:
            del self._intents[next(iter(self._intents))]
        return intent

    async def _with_gateways(
        self, site: Site, pool: Pool, there: ObservedPool, children: Iterable[Json]
    ) -> Site:
        """Return the site with the pool's gateways: those of its route, or those with other routes to it."""
        if pool.gateway.has_route or not pool.gateway.of_extension:
            return replace(
                site, gateways=controllers(there.route) | await self.capabilities.controllers(pool)
            )
        found = await self.capabilities.resolved(referrers(there.extension, pool.namespace))
        known = frozenset(each.controller for each in found) - {""}
        return replace(site, gateways=known | kept_controllers(children), referring=found)

    def _storage(self, key: PoolKey, pool: Pool) -> dict[str, dict[str, str]]:
        """Return what engines of other pools of the namespace agree on to share blocks on a claim."""
        if pool.offload.shared is None:
            return {}
        found = {}
        for other in self.cache.pools():
            if other.namespace == key.namespace and other != key:
                status = (self.cache.get(other.target) or {}).get("status") or {}
                if storage := (status.get("plan") or {}).get("storage"):
                    found[other.name] = storage
        return found

    async def _apply(self, resource: Json, intent: Intent) -> ApplyResult:
        """Write the objects of an intent; without a plan nothing is changed, and engines keep running."""
        pool = intent.pool
        if pool is None or intent.rendered is None:
            return ApplyResult()
        try:
            kept = await self._secrets.reconcile(pool, self.now())
        except ClusterError as error:
            if error.aborts:
                raise
            self._secrets.forget(pool.uid)
            return ApplyResult(failures=(error,))
        self.observer.on_certificate(PoolKey(pool.namespace, pool.name), self._secrets.expiry(pool.uid))
        settings = self.engine_image, self.images.picker_image, self.images.envoy_image, str(self.prices)
        rendered, pending = hold_upgrade(
            *(pool, resource, intent.rendered, self.cache.children(PoolKey(pool.namespace, pool.name))),
            identity=" ".join((self.identity, *settings)),
            default_image=self.engine_image,
            now=self.now(),
            preset=intent.preset,
        )
        if pool.paused:
            return ApplyResult(conflicts=kept.conflicts, waits=kept.waits, pending=pending)
        found = await self._applier.apply(pool, rendered)
        conflicts = tuple(dict.fromkeys([*kept.conflicts, *found.conflicts]))
        return replace(found, conflicts=conflicts, waits=(*kept.waits, *found.waits), pending=pending)

    async def _on_scale_down(self, pool: Pool, replicas: int) -> None:
        await self.pickers.set_deletion_costs(
            pool, self.cache.pods(PoolKey(pool.namespace, pool.name)), replicas
        )

    async def _write_status(self, key: PoolKey, resource: Json, intent: Intent, outcome: ApplyResult) -> None:
        """Write the status if it has changed."""
        current = self.cache.get(key.target) or resource
        old = current.get("status") or {}
        made = self._status(key, current, intent, outcome, old)
        self.observer.on_status(key, intent.pool, made)
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
        pods = self.cache.pods(key)
        subject = Subject(
            name=key.name,
            generation=int(resource["metadata"].get("generation") or 0),
            pool=intent.pool,
            plan=intent.plan,
            error=intent.error,
            notes=(*intent.rendered.notes, *outcome.notes, *mesh_notes(pods)) if intent.rendered else (),
            facts=intent.facts,
            release=self.release,
        )
        found = children_of(key.name, self.cache.children(key))
        tokens = self.pickers.kv_tokens(key)
        if tokens is None and found.workload:
            tokens = old.get("reportedKvTokens")  # the last figure stands as long as there are engines
        advice: tuple[str, ...] = ()
        if intent.pool and intent.plan and intent.rendered:
            advice = self.pickers.advice(key, intent.pool, intent.plan, list(old.get("advice") or ()))
        failure = None
        if outcome.failures:
            messages = "; ".join(dict.fromkeys(str(each) for each in outcome.failures))
            failure = Trouble(outcome.failures[0].reason, messages)
        observed = replace(
            found,
            troubles=_troubles(found, pods),
            pairs=pairs_of(pods),
            conflicts=tuple(map(str, outcome.conflicts)),
            waits=outcome.waits,
            failure=failure,
            kv_tokens=tokens,
            advice=advice,
            pending=outcome.pending,
        )
        return statuses.status(subject, observed, old, self.now())

    async def _reread(self, key: PoolKey) -> float:
        """Read a pool that was modified or deleted meanwhile."""
        found = await self.cluster.get(key.target)
        if found is None:
            self.cache.remove(key.target)
        else:
            self.cache.update(found)
        return 0.0

    def _forget(self, key: PoolKey, resource: Json | None) -> None:
        self.observer.on_gone(key)
        self._intents.pop(key, None)
        self._written.pop(key, None)
        self.pending.discard(key)
        self._applier.forget(key)
        if resource is not None:
            self._secrets.forget(str(resource["metadata"].get("uid")))


def make_intent(
    pool: Pool, found: ModelFacts, site: Site, accelerators: list[Any], prices: Mapping[str, float]
) -> Intent:
    """Return plan and objects, or the error that prevents them. Pure."""
    facts, draft = found
    plan: Plan | None = None
    commit = pinned(pool, facts)
    try:
        plan = make_plan(commit, facts, nodes=accelerators, draft=draft, prices=prices)
        if plan.verdict is PlanVerdict.REFUSED:
            return Intent(pool, plan, facts=found)
        return Intent(pool, plan, render(commit, plan, site), facts=found)
    except OperatorError as error:
        return Intent(pool, plan, error=error, facts=found)
    except Exception as error:
        logger.exception("%s/%s: planning failed with an internal error", pool.namespace, pool.name)
        return Intent(pool, plan, error=InternalError(f"{type(error).__name__}: {error}; please report it"))


def _troubles(found: ObservedPool, pods: list[Json]) -> tuple[Trouble, ...]:
    """Return pods that were never created before those with problems."""
    parts = (
        (found.workload, ENGINE),
        (found.prefill, ENGINE),
        (found.picker, PICKER),
        (found.envoy, ENVOY),
        (found.cleaner, KV_CLEANER),
    )
    never = [trouble for each, component in parts if (trouble := refused(each, component))]
    return (*never, *troubles(pods))


def _workload(found: Mapping[tuple[str, str], Json], name: str) -> Json | None:
    return found.get(("Deployment", name)) or found.get(("LeaderWorkerSet", name))


def children_of(pool: str, children: Iterable[Json]) -> ObservedPool:
    """Return the workloads and the route among a pool's children, by their names."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in children}
    names = ObjectNames(pool, "")
    prefill, decode = (ObjectNames(pool, "", role).workload for role in (Role.PREFILL, Role.DECODE))
    return ObservedPool(
        workload=_workload(found, decode) or _workload(found, names.engine),
        prefill=_workload(found, prefill),
        picker=found.get(("Deployment", names.picker)),
        envoy=found.get(("Deployment", names.envoy)),
        cleaner=found.get(("Deployment", names.cleaner)),
        route=found.get(("HTTPRoute", names.engine)),
        extension=found.get(("InferencePool", names.pool)),
        download=next((each for (kind, _), each in sorted(found.items()) if kind == "Job"), None),
    )
