"""What children tell: numbers off a workload's status, a route's parents; and a plan as the status shows it.
Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_operator.manifests.object_names import ENGINE
from kvist_operator.plan import Plan

Json = dict[str, Any]
Object = Mapping[str, Any]
MOST_CHOICES: Final = 64


@dataclass(frozen=True, slots=True)
class Trouble:
    """Fault of pods of the newest generation."""

    reason: str
    """``Unschedulable``, ``ImagePull``, ``OutOfMemory``, ``CrashLoop`` …"""
    message: str
    """The scheduler's, the kubelet's or the engine's own words, and what to do."""
    component: str = ENGINE
    """Whose pods: the engines', the pickers' or Envoy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPool:
    """Children as they were read; None = not there."""

    workload: Object | None = None
    """The engines' Deployment or LeaderWorkerSet."""
    picker: Object | None = None
    envoy: Object | None = None
    route: Object | None = None
    """The HTTPRoute."""
    troubles: Sequence[Trouble] = ()
    """Worst first."""
    failure: Trouble | None = None
    """What the API server would not have."""
    conflicts: Sequence[str] = ()
    """Objects that are somebody else's."""
    waits: Sequence[str] = ()
    """What has to happen before the rest can."""
    kv_tokens: int | None = None
    """What engines report as the size of a replica's cache."""
    advice: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Counts:
    """Replicas of a workload."""

    wanted: int = 0
    there: int = 0
    ready: int = 0
    available: int = 0
    """Ready for as long as the workload asks for (``minReadySeconds``): gateways and pickers know them."""
    updated: int = 0
    current: bool = False
    """Its controller has seen the newest spec."""
    overdue: bool = False
    """A rollout that makes no progress for longer than it may."""

    @property
    def settled(self) -> bool:
        """True if every replica is of the newest generation and available, as a Deployment defines it."""
        return self.settling and self.available == self.wanted

    @property
    def settling(self) -> bool:
        """Settled, but for replicas that have not been ready for long enough."""
        return self.current and self.there == self.ready == self.updated == self.wanted


def counts(workload: Object | None) -> Counts:
    """Off a Deployment or a LeaderWorkerSet."""
    if workload is None:
        return Counts()
    status, meta = workload.get("status") or {}, workload["metadata"]
    late = any(
        c.get("type") == "Progressing" and c.get("reason") == "ProgressDeadlineExceeded"
        for c in status.get("conditions") or ()
    )
    seen, ready = status.get("observedGeneration"), status.get("readyReplicas", 0)
    waits = workload["spec"].get("minReadySeconds")  # LeaderWorkerSets have nothing of the kind
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


def parents(route: Object | None) -> list[tuple[str, Mapping[str, Object]]]:
    """Name of each Gateway that a route asks for, and what its controller says, by type of condition."""
    if route is None:
        return []
    told = (route.get("status") or {}).get("parents") or ()
    return [(ref["name"], _said(ref, told)) for ref in route["spec"].get("parentRefs") or ()]


def _said(ref: Object, told: Sequence[Object]) -> Mapping[str, Object]:
    for parent in told:
        other = parent.get("parentRef") or {}
        if all(other.get(key) == ref.get(key) for key in ("name", "namespace", "sectionName", "port")):
            return {c["type"]: c for c in parent.get("conditions") or ()}
    return {}


def plan_status(plan: Plan) -> Json:
    """The facts of ``kvist plan -o json`` in the API's spelling, values of choices as text."""
    found = {_camel(key): _camels(value) for key, value in plan.to_dict().items()}
    whole = plan.to_dict()
    found["hash"] = plan.hash
    found["env"] = whole["env"]  # names of variables are not ours to spell
    found["accelerator"]["summary"] = summary(plan)
    found["choices"] = [{**c, "value": _shown(c["value"])} for c in whole["choices"][:MOST_CHOICES]]
    return found


def summary(plan: Plan) -> str:
    """``4 × H100-80GB``."""
    nodes = f" on {plan.nodes} nodes" if plan.nodes > 1 else ""
    return f"{plan.layout.gpus} × {plan.hardware.accelerator.name}{nodes}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _camels(value: Any) -> Any:
    return {_camel(k): v for k, v in value.items()} if isinstance(value, dict) else value


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)
