"""The scheduler's words and what to do about them. Pure.

``0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) were unschedulable.``
Wording: ``pkg/scheduler/framework/plugins`` of Kubernetes 1.36, and of 1.30 where it was another.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.manifests.object_names import ENGINE

from .spec_fields import ComponentFields

Object = Mapping[str, Any]
_AFTERTHOUGHT: Final = re.compile(r"[.,;]? *(no new claims to deallocate|preemption:).*", re.DOTALL)
"""What preemption would not have helped with."""
_LACKING: Final = re.compile(r"Insufficient ([\w./-]+\w)")
_CORE: Final = ("cpu", "memory", "ephemeral-storage", "pods")


@dataclass(frozen=True, slots=True)
class Case:
    """A pod that no node takes."""

    message: str
    """The scheduler's."""
    pod: Object
    part: ComponentFields

    def says(self, *parts: str) -> bool:
        """Whether any of these is in the message."""
        return any(part in self.message for part in parts)

    def lacking(self, *, core: bool) -> list[str]:
        """Resources that nodes have too little of: the common ones, or the others."""
        found = _LACKING.findall(self.message)
        return list(dict.fromkeys(name for name in found if (name in _CORE) is core))


def words(message: str) -> str:
    """Without the afterthoughts on preemption."""
    return _AFTERTHOUGHT.sub("", message).strip()


def remedy(message: str, pod: Object, part: ComponentFields) -> str:
    """Return the remedy for everything that the message names, most urgent first."""
    case = Case(message, pod, part)
    found = [said for rule in RULES if (said := rule(case))]
    return ". ".join(found) or "Check the nodes' conditions and taints"


def _accelerators(case: Case) -> str:
    lacking = case.lacking(core=False)
    if not lacking:
        return ""
    wanted = f"{_asked(case.pod, lacking[0])} {lacking[0]}"
    return (
        f"Each pod needs {wanted} free on one node: add nodes, lower spec.replicas, or ask for other "
        "accelerators with "
        "spec.accelerator (product, count, resourceName); a rollout needs no spare ones with "
        "spec.rollout.strategy: ReplaceFirst"
    )


def _asked(pod: Object, resource: str) -> str:
    for container in pod["spec"].get("containers") or ():
        amount = ((container.get("resources") or {}).get("limits") or {}).get(resource)
        if amount:
            return str(amount)
    return "some"


def _core(case: Case) -> str:
    lacking = ", ".join(case.lacking(core=True))
    return f"Nodes lack {lacking}: add some, or lower {case.part.resources}" if lacking else ""


def _labels(case: Case) -> str:
    if not case.says("node affinity/selector", "node selector") or case.lacking(core=False):
        return ""  # there are such nodes, and they are full
    return f"Nodes must have {_wanted(case.pod)}: label them, or change {_labelled_by(case.part)}"


def _labelled_by(part: ComponentFields) -> str:
    engine = part.component == ENGINE
    return "spec.accelerator.product or spec.podTemplate.spec.nodeSelector" if engine else "the nodes"


def _wanted(pod: Object) -> str:
    spec = pod["spec"]
    pairs = [f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items()]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get(
        "nodeSelectorTerms"
    ) or ()
    either = [_expressions(term) for term in terms]
    return " and ".join([*pairs, *([" or ".join(either[:3])] if either else [])]) or "the labels it asks for"


def _expressions(term: Object) -> str:
    shown = [
        f"{e['key']} {e['operator']} {e.get('values') or ''}".strip()
        for e in term.get("matchExpressions") or ()
    ]
    return ", ".join(shown)


def _taints(case: Case) -> str:
    if not case.says("untolerated taint", "taints that the pod didn't tolerate"):
        return ""
    if case.says("node.kubernetes.io/"):
        return "Nodes have taints that mark them as unhealthy: see kubectl describe nodes"
    if case.part.component == ENGINE:
        return (
            "Add a toleration to spec.podTemplate.spec.tolerations (this list replaces the plan's own "
            "tolerations: repeat those)"
        )
    return "Keep some nodes without taints"


def _claims(case: Case) -> str:
    if not case.says("PersistentVolume", "persistentvolume", "persistent volume", "pvc(s)"):
        return ""
    named = re.search(r'persistentvolumeclaim "([^"]+)"', case.message)
    volumes = case.pod["spec"].get("volumes") or ()
    claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
    which = named[1] if named else ", ".join(claims)
    return f"Claim {which} must exist, be bound, and be reachable from these nodes ({case.part.volumes})"


def _cordoned(case: Case) -> str:
    return "Nodes are cordoned: kubectl uncordon them" if case.says("were unschedulable") else ""


RULES: Final[tuple[Callable[[Case], str], ...]] = (
    _accelerators,
    _labels,
    _taints,
    _claims,
    _core,
    _cordoned,
)
