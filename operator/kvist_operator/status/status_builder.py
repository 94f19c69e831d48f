"""The status of a pool: its conditions, counts and plan. Pure.

The same input gives the same status, so at rest nothing is written. Conditions follow the API conventions:
their time changes only with their status.

- Accepted: the spec can be planned.
- Available: requests are answered, by replicas of any generation.
- Progressing: a change is under way.
- GatewayAttached: the gateway accepts the pool; absent without a gateway.
- Precise: picks use the engines' KV events; absent where requests are routed by load, or by choice.
- Monitored: present only while PodMonitors are missing that the spec asks for.
- Disaggregated: engines for prefill and for decode find each other; absent without roles.
- UpgradePending: present while a new operator would change pods of the pool.
- Ready: the pool is as its spec describes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvist_epp.names import POOL_GROUP
from kvist_operator.apply.upgrades import APPROVED, PendingChange
from kvist_operator.errors import OperatorError
from kvist_operator.manifests.object_names import (
    DOWNLOAD,
    ENGINE,
    ENGINE_PORT,
    ENVOY,
    KV_CLEANER,
    LMCACHE,
    PICKER,
    Note,
    ObjectNames,
)
from kvist_operator.manifests.weights_cache import progress
from kvist_operator.models.shape import Facts
from kvist_operator.plan import Plan, PlanVerdict
from kvist_operator.spec.pool import Pool

from .condition import FALSE, TRUE, UNKNOWN, Condition, written
from .diagnosis import refused, worst
from .known_model import model_status
from .pairs import disaggregated
from .referrers import attachment, refused_by
from .views import (
    Counts,
    Object,
    ObservedPool,
    added,
    counts,
    parents,
    plan_status,
    role_status,
    selector,
    summary,
    unmet,
)

Json = dict[str, Any]
ACCEPTED: Final = "Accepted"
AVAILABLE: Final = "Available"
PROGRESSING: Final = "Progressing"
ATTACHED: Final = "GatewayAttached"
PRECISE: Final = "Precise"
UPGRADE: Final = "UpgradePending"
MONITORED: Final = "Monitored"
READY: Final = "Ready"


def accepted(plan: Plan | None, error: OperatorError | None) -> Condition:
    """Return Accepted, from the plan or the error that prevented it."""
    if error is not None:
        return Condition(ACCEPTED, FALSE, error.reason, str(error))
    if plan is None:
        return Condition(ACCEPTED, UNKNOWN, "Pending", "the pool has not been planned yet")
    if plan.verdict is PlanVerdict.REFUSED:
        return Condition(ACCEPTED, FALSE, "DoesNotFit", plan.refusal)
    if plan.verdict is PlanVerdict.UNVERIFIED:
        return Condition(ACCEPTED, TRUE, "Unverified", "; ".join(plan.doubts))
    return Condition(ACCEPTED, TRUE, "Planned", f"{summary(plan)}: the reasons are in status.plan.choices")


def available(found: Counts) -> Condition:
    """Return Available: true with one replica that has been ready for ``minReadySeconds``, since a gateway
    that resolves names does not know it earlier."""
    if found.available:
        return Condition(
            AVAILABLE, TRUE, "Serving", f"ready for requests: {found.ready} of {found.wanted} replicas"
        )
    if found.current and not found.wanted and not found.there:
        return Condition(AVAILABLE, FALSE, "ScaledToZero", "spec.replicas is 0: raise it to serve requests")
    if found.ready:
        message = f"ready for less than minReadySeconds: {found.ready} of {found.wanted} replicas"
        return Condition(AVAILABLE, FALSE, "JustReady", message)
    return Condition(AVAILABLE, FALSE, "NoReplicaReady", f"ready for requests: 0 of {found.wanted} replicas")


def progressing(observed: ObservedPool, found: Counts, *, paused: bool = False) -> Condition:
    """Return Progressing: true while a change is under way, false when it is complete, stuck or paused."""
    where = (
        f"ready: {found.ready} of {found.wanted}, running the current plan: {found.updated} of {found.wanted}"
    )
    if observed.failure:
        return Condition(PROGRESSING, FALSE, observed.failure.reason, observed.failure.message)
    if observed.waits:
        trouble = worst(observed.troubles, None, DOWNLOAD)
        if trouble is None and observed.download:
            # a Job does not say that its pods are refused; the pickers' Deployment does, if theirs are, too
            trouble = refused(observed.picker, PICKER)
        if trouble:
            text = "; ".join((*observed.waits, trouble.message))
            return Condition(PROGRESSING, TRUE, trouble.reason, text)
        return Condition(PROGRESSING, TRUE, "Waiting", "; ".join(observed.waits))
    if paused:
        message = f"{where}; spec.paused is true, so nothing is changed until it is false"
        return Condition(PROGRESSING, FALSE, "Paused", message)
    if observed.workload is None:
        return Condition(PROGRESSING, FALSE, "NotStarted", "the engines have not been created yet")
    if found.settled:
        return Condition(PROGRESSING, FALSE, "Settled", where)
    trouble = worst(observed.troubles, observed.workload, ENGINE)
    if trouble:
        status = FALSE if found.overdue else TRUE
        return Condition(PROGRESSING, status, trouble.reason, f"{where}; {trouble.message}")
    if found.overdue:
        more = "no pod became ready in time: see the pods' logs, or raise spec.rollout.startupSeconds"
        return Condition(PROGRESSING, FALSE, "DeadlineExceeded", f"{where}; {more}")
    if found.settling:
        young = f"{found.wanted - found.available} of them became ready less than minReadySeconds ago"
        return Condition(PROGRESSING, TRUE, "JustReady", f"{where}, {young}")
    if trouble := worst(observed.troubles, None, LMCACHE):
        return Condition(PROGRESSING, TRUE, trouble.reason, f"{where}; {trouble.message}")
    reason = "RollingOut" if found.updated < found.wanted else "Scaling"
    return Condition(PROGRESSING, TRUE, reason, where)


def attached(pool: Pool, observed: ObservedPool, notes: Sequence[Note]) -> Condition | None:
    """Return GatewayAttached; None for pools without a gateway."""
    if pool.gateway.mode == "None":
        return None
    missing = [note for note in notes if note.condition == ATTACHED]
    if missing:
        return _noted(missing)
    if pool.gateway.mode == "Envoy":
        ready = counts(observed.envoy).ready
        if ready:
            return Condition(ATTACHED, TRUE, "EnvoyServing", f"{ready} Envoy pods are ready")
        why = _why(observed, observed.envoy, ENVOY)
        return Condition(ATTACHED, FALSE, "EnvoyUnavailable", f"no Envoy pod is ready: {why}")
    if not pool.gateway.has_route:
        return _named_by_others(pool, observed)
    return _routed(observed)


def _named_by_others(pool: Pool, observed: ObservedPool) -> Condition:
    """Return the condition of a pool that only routes of the user's own name."""
    message = (
        f"the pool has no route, and no gateway reports one that names the InferencePool {pool.name} of "
        f"{POOL_GROUP}: create it, or set spec.gateway.parentRefs"
    )
    found = attachment(observed.extension, pool.namespace, ATTACHED)
    return found or Condition(ATTACHED, UNKNOWN, "NoRoute", message)


def _routed(observed: ObservedPool) -> Condition:
    gateways = parents(observed.route)
    silent = [name for name, conditions in gateways if not conditions]
    if silent or not gateways:
        names = ", ".join(silent) or "a route"
        message = (
            f"no controller has reported a status for {names}: check that the Gateway exists and allows "
            "routes from this namespace"
        )
        return Condition(ATTACHED, UNKNOWN, "NoAnswer", message)
    for name, conditions in gateways:
        if refusal := unmet(conditions):
            return refused_by(name, refusal, ATTACHED, FALSE)
    return Condition(ATTACHED, TRUE, "RouteAccepted", ", ".join(name for name, _ in gateways))


def precise(pool: Pool, plan: Plan | None, notes: Sequence[Note]) -> Condition | None:
    """Return Precise: whether the picker uses the engines' KV events; None if the mode is not Auto or
    requests are routed by load alone."""
    by_load = not pool.engine.prefix_caching or (plan is not None and not plan.routes_by_prefix)
    if pool.picker.mode != "Auto" or by_load:
        return None
    found = [note for note in notes if note.condition == PRECISE]
    return _noted(found) if found else Condition(PRECISE, TRUE, "KvEvents", "the picker follows KV events")


def monitored(notes: Sequence[Note]) -> Condition | None:
    """Return Monitored; None unless monitoring was requested and is not possible."""
    found = [note for note in notes if note.condition == MONITORED]
    return _noted(found) if found else None


def upgrade_pending(pool: Pool, pending: PendingChange | None) -> Condition | None:
    """Return UpgradePending; None if this operator would change no pods."""
    if pending is None:
        return None
    number = len(pending.changes)
    what = f"this operator would make {number} change{'s' if number > 1 else ''}: {pending.changes[0]}"
    if number > 1:
        what += "; the others are in status.pendingPlan.changes"
    if pending.until is not None:
        begin = pending.until.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return Condition(UPGRADE, TRUE, "WaitingForWindow", f"{what}. They are applied from {begin} on")
    command = f"kubectl annotate kvp {pool.name} --overwrite {APPROVED}={pending.hash}"
    return Condition(UPGRADE, TRUE, "WaitingForApproval", f"{what}. To apply: {command}")


def _noted(notes: Sequence[Note]) -> Condition:
    return Condition(notes[0].condition, FALSE, notes[0].reason, "; ".join(note.message for note in notes))


def ready(pool: Pool | None, observed: ObservedPool, others: Iterable[Condition]) -> Condition:
    """Return Ready: the first condition that is not met, in the order in which they have to be corrected."""
    by_type = {each.type: each for each in others}
    if observed.conflicts:
        names = ", ".join(observed.conflicts)
        message = (
            f"these names are used by objects that the pool does not own, which were not modified: {names}. "
            "Delete or rename them, or rename the pool"
        )
        return Condition(READY, FALSE, "NameConflict", message)
    zero = by_type[AVAILABLE].reason == "ScaledToZero"
    for kind in (ACCEPTED, PROGRESSING, AVAILABLE, ATTACHED):
        each = by_type.get(kind)
        if each is None or _fine(each, zero=zero):
            continue
        return Condition(READY, FALSE, each.reason, each.message)
    if pool is not None and pool.picker.mode != "Off" and not counts(observed.picker).ready:
        why = _why(observed, observed.picker, PICKER)
        return Condition(READY, FALSE, "PickerUnavailable", f"no picker pod is ready: {why}")
    message = "; ".join([by_type[AVAILABLE].message, *_degraded(pool, observed)])
    return Condition(READY, TRUE, "ScaledToZero" if zero else "AsAsked", message)


def _why(observed: ObservedPool, workload: Object | None, component: str) -> str:
    """Return why none of a component's pods is ready."""
    trouble = worst(observed.troubles, workload, component)
    if trouble:
        return trouble.message
    return "its pods are starting" if workload else "its Deployment has not been created yet"


def _degraded(pool: Pool | None, observed: ObservedPool) -> list[str]:
    """Return the troubles of single pickers and Envoy pods, while others of them serve, and those of the
    cleaner and of LMCache's servers."""
    shown = [(PICKER, observed.picker)] if pool and pool.picker.mode != "Off" else []
    shown += [(ENVOY, observed.envoy)] if pool and pool.gateway.mode == "Envoy" else []
    found = [(workload, worst(observed.troubles, workload, of)) for of, workload in shown]
    beside = (worst(observed.troubles, observed.cleaner, KV_CLEANER), worst(observed.troubles, None, LMCACHE))
    serving = [each.message for workload, each in found if each and not counts(workload).settled]
    return [*serving, *(each.message for each in beside if each)]


def _fine(condition: Condition, *, zero: bool) -> bool:
    if condition.type == PROGRESSING:
        return condition.reason in ("Settled", "Paused")
    if condition.type == ATTACHED and condition.status == UNKNOWN and condition.reason == "NoRoute":
        return True  # the pool waits for no route, and some gateways report none
    return condition.holds or (condition.type == AVAILABLE and zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Input of a status."""

    name: str
    generation: int
    pool: Pool | None = None
    """None where the spec cannot be read."""
    plan: Plan | None = None
    error: OperatorError | None = None
    notes: Sequence[Note] = ()
    facts: tuple[Facts, Facts | None] | None = None
    """Facts of the model and of its draft model; None while they are not known."""
    release: str = ""
    """Release of the operator that manages the pool."""


def status(subject: Subject, observed: ObservedPool, old: Mapping[str, Any], now: datetime) -> Json:
    """Return the status of a pool.

    ``old`` is its previous status: conditions that stay as they are keep their times, and the previous plan
    is kept while a new spec cannot be planned.
    """
    found, pool = counts(observed.workload), subject.pool
    whole = added(found, counts(observed.prefill)) if observed.prefill else found
    paused = pool is not None and pool.paused
    others = [
        accepted(subject.plan, subject.error),
        available(found),
        progressing(observed, whole, paused=paused),
    ]
    if pool:
        optional = (
            attached(pool, observed, subject.notes),
            precise(pool, subject.plan, subject.notes),
            monitored(subject.notes),
            disaggregated(pool, subject.plan, observed.pairs),
            upgrade_pending(pool, observed.pending),
        )
        others += [condition for condition in optional if condition]
    conditions = [ready(pool, observed, others), *others]
    made: Json = {
        "observedGeneration": subject.generation,
        "replicas": found.there,
        "readyReplicas": found.ready,
        "updatedReplicas": found.updated,
        "selector": selector(subject.name, observed),
        "targetPorts": [{"number": ENGINE_PORT}],
        "url": url(pool) if pool else old.get("url", ""),
        "conditions": written(conditions, old.get("conditions") or (), subject.generation, now),
        "advice": [*observed.advice, *(note.message for note in subject.notes if not note.condition)],
    }
    if roles := role_status(subject.name, observed):
        made["roles"] = roles
    refused = subject.plan is not None and subject.plan.verdict is PlanVerdict.REFUSED
    held = observed.pending is not None and observed.pending.engines
    if subject.plan is None or ((refused or held) and observed.workload is not None):
        plan = old.get("plan")  # engines of the last good plan keep running
    else:
        plan = plan_status(subject.plan)
    if plan:
        made["plan"] = plan
    if pool is not None and subject.facts is not None and pool.model.shape is None:
        made["model"] = model_status(pool, *subject.facts)
    elif "model" in old:
        made["model"] = old["model"]
    if pool is not None and pool.preset:
        made["preset"] = f"{pool.preset}, generation {pool.preset.generation}"
    if subject.release:
        made["operator"] = subject.release
    if observed.pending is not None:
        made["pendingPlan"] = _pending_status(subject.plan, observed.pending)
    if observed.download is not None:
        made["cache"] = progress(observed.download)
    if observed.kv_tokens is not None and (subject.plan is None or subject.plan.memory.caches):
        made["reportedKvTokens"] = observed.kv_tokens
    return made


def _pending_status(plan: Plan | None, pending: PendingChange) -> Json:
    made: Json = {
        "hash": pending.hash,
        "changes": list(pending.changes),
        "restartsEngines": pending.engines,
    }
    if plan is not None:
        made["summary"] = summary(plan)
    if pending.until is not None:
        made["nextWindow"] = pending.until.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return made


def url(pool: Pool) -> str:
    """Return the address for requests; empty if only the Gateway knows it."""
    names = ObjectNames.of(pool)
    if pool.gateway.mode == "Envoy":
        return f"http://{names.host(names.envoy)}"
    if pool.gateway.mode == "Route":
        named = pool.gateway.hostnames if pool.gateway.has_route else ()
        return f"http://{named[0]}" if named else ""
    return f"http://{names.host(names.engine)}:{ENGINE_PORT}"
