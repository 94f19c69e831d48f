"""Numbers of a workload's status, states of a route's parents, and a plan as the status shows it. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_epp.names import LABEL_POOL, LABEL_ROLES
from kvist_operator.apply.upgrades import PendingChange
from kvist_operator.manifests.object_names import ENGINE
from kvist_operator.plan import Plan
from kvist_operator.spec.disaggregation import Role

from .pairs import Pairs

Json = dict[str, Any]
Object = Mapping[str, Any]
MOST_CHOICES: Final = 64


@dataclass(frozen=True, slots=True)
class Trouble:
    """Fault of pods of the newest generation."""

    reason: str
    """``Unschedulable``, ``ImagePull``, ``OutOfMemory``, ``CrashLoop`` …"""
    message: str
    """Message of the scheduler, the kubelet or the engine, and the remedy."""
    component: str = ENGINE
    """Component of the pods: engine, picker or Envoy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPool:
    """Children as they were read; None for those that do not exist."""

    workload: Object | None = None
    """The engines' Deployment or LeaderWorkerSet; with roles, that of decode."""
    prefill: Object | None = None
    """The Deployment or LeaderWorkerSet of the engines for prefill."""
    pairs: Pairs = field(default_factory=Pairs)
    """Ready engines that may exchange blocks."""
    picker: Object | None = None
    envoy: Object | None = None
    cleaner: Object | None = None
    """The Deployment that keeps the shared volume for KV cache blocks from filling up."""
    route: Object | None = None
    """The HTTPRoute."""
    extension: Object | None = None
    """The InferencePool of the Gateway API Inference Extension."""
    troubles: Sequence[Trouble] = ()
    """Troubles of pods, the worst first."""
    failure: Trouble | None = None
    """Trouble with objects that the API server rejected."""
    conflicts: Sequence[str] = ()
    """Objects with names of the pool's that the pool does not own."""
    waits: Sequence[str] = ()
    """Events that the remaining changes wait for."""
    kv_tokens: int | None = None
    """Size of a replica's KV cache in tokens, as engines report it."""
    advice: Sequence[str] = field(default_factory=tuple)
    download: Object | None = None
    """The Job that fills the cache for weights."""
    pending: PendingChange | None = None
    """Change of workloads that waits for the pool's owner."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Replicas of a workload."""

    wanted: int = 0
    there: int = 0
    ready: int = 0
    available: int = 0
    """Replicas that have been ready for ``minReadySeconds``: gateways and pickers know them."""
    updated: int = 0
    current: bool = False
    """Whether the workload's controller has seen the newest spec."""
    overdue: bool = False
    """Whether the rollout has exceeded its progress deadline."""

    @property
    def settled(self) -> bool:
        """True if every replica is of the newest generation and available, as a Deployment defines it."""
        return self.settling and self.available == self.wanted

    @property
    def settling(self) -> bool:
        """True if the rollout is complete, except that some replicas became ready only now."""
        return self.current and self.there == self.ready == self.updated == self.wanted


def added(first: Counts, second: Counts) -> Counts:
    """Return the counts of two workloads together."""
    numbers = ("wanted", "there", "ready", "available", "updated")
    return Counts(
        **{name: getattr(first, name) + getattr(second, name) for name in numbers},
        current=first.current and second.current,
        overdue=first.overdue or second.overdue,
    )


def counts(workload: Object | None) -> Counts:
    """Return the counts of a Deployment or a LeaderWorkerSet; zeros if there is none."""
    if workload is None:
        return Counts()
    status, meta = workload.get("status") or {}, workload["metadata"]
    late = any(
        c.get("type") == "Progressing" and c.get("reason") == "ProgressDeadlineExceeded"
        for c in status.get("conditions") or ()
    )
    seen, ready = status.get("observedGeneration"), status.get("readyReplicas", 0)
    waits = workload["spec"].get("minReadySeconds")  # LeaderWorkerSets have no such field
    return Counts(
        wanted=workload["spec"].get("replicas", 1),
        there=status.get("replicas", 0),
        ready=ready,
        available=status.get("availableReplicas", 0) if waits else ready,
        updated=status.get("updatedReplicas", 0),
        # LeaderWorkerSets do not say which generation they have seen
        current=seen is None or seen >= meta.get("generation", 0),
        overdue=late,
    )


def selector(pool: str, observed: ObservedPool) -> str:
    """Return the label selector of the pods that ``spec.replicas`` counts: with roles those of decode."""
    role = f",{LABEL_ROLES[0]}={Role.DECODE}" if observed.prefill else ""
    return f"{LABEL_POOL}={pool}{role}"


def role_status(pool: str, observed: ObservedPool) -> Json:
    """Return the replicas of each role, and the workload that an autoscaler of the role names; empty without
    roles."""
    if observed.prefill is None or observed.workload is None:
        return {}
    found = {}
    for role, workload in ((Role.PREFILL, observed.prefill), (Role.DECODE, observed.workload)):
        seen = counts(workload)
        found[str(role)] = {
            "kind": workload["kind"],
            "name": workload["metadata"]["name"],
            "replicas": seen.there,
            "readyReplicas": seen.ready,
            "updatedReplicas": seen.updated,
            "selector": f"{LABEL_POOL}={pool},{LABEL_ROLES[0]}={role}",
        }
    return found


def parents(route: Object | None) -> list[tuple[str, Mapping[str, Object]]]:
    """Return the name of each Gateway that a route refers to, with the conditions that its controller
    reports, by type."""
    if route is None:
        return []
    reported = (route.get("status") or {}).get("parents") or ()
    return [(ref["name"], _conditions_of(ref, reported)) for ref in route["spec"].get("parentRefs") or ()]


def unmet(conditions: Mapping[str, Object]) -> Object | None:
    """Return the first condition by which a gateway refuses a route or a pool; None if it accepts it."""
    found = (conditions.get(kind) for kind in ("Accepted", "ResolvedRefs"))
    return next((each for each in found if each and each.get("status") != "True"), None)


def controllers(route: Object | None) -> frozenset[str]:
    """Return the controllers of gateways that report on a route."""
    reported = ((route or {}).get("status") or {}).get("parents") or ()
    return frozenset(str(each["controllerName"]) for each in reported if each.get("controllerName"))


def _conditions_of(ref: Object, reported: Sequence[Object]) -> Mapping[str, Object]:
    for parent in reported:
        other = parent.get("parentRef") or {}
        if all(other.get(key) == ref.get(key) for key in ("name", "namespace", "sectionName", "port")):
            return {c["type"]: c for c in parent.get("conditions") or ()}
    return {}


def plan_status(plan: Plan) -> Json:
    """Return the facts of ``kvist plan -o json`` in the API's spelling, with values of choices as text."""
    whole = plan.to_dict()
    found = {
        _camel(key): {_camel(k): v for k, v in value.items()} if isinstance(value, dict) else value
        for key, value in whole.items()
    }
    found["hash"] = plan.hash
    found["env"] = whole["env"]  # names of variables keep their spelling
    found["accelerator"]["summary"] = summary(plan)
    found["tiers"] = [{_camel(key): value for key, value in tier.items()} for tier in whole["tiers"]]
    found["neighbours"] = [str(each) for each in plan.neighbours]
    if plan.price_per_hour is None:
        del found["pricePerHour"]
    if plan.prefill:
        found["prefill"] = plan_status(plan.prefill)
    found["choices"] = [
        {**c, "value": c["value"] if isinstance(c["value"], str) else json.dumps(c["value"], sort_keys=True)}
        for c in whole["choices"][:MOST_CHOICES]
    ]
    return found


def summary(plan: Plan) -> str:
    """Return the accelerators of a replica, such as ``4 × H100-80GB``."""
    nodes = f" on {plan.nodes} nodes" if plan.nodes > 1 else ""
    return f"{plan.layout.gpus} × {plan.hardware.accelerator.name}{nodes}"


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)
