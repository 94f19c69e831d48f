"""The fault of one pod, from what the scheduler, the kubelet, its containers and events say. Pure.

The scheduler's message is read like ``0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) were
unschedulable.`` Its wording: ``pkg/scheduler/framework/plugins`` of Kubernetes 1.36, and of 1.30 where that
differs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.manifests.object_names import ENGINE

from .container_diagnosis import ComponentFields, PodFinding, ended, part_of, waiting
from .termination_message import masked, shortened

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


def scheduling_message(message: str) -> str:
    """Return the scheduler's message without what it says of preemption."""
    return _AFTERTHOUGHT.sub("", message).strip()


def scheduling_remedy(message: str, pod: Object, part: ComponentFields) -> str:
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


Events = Sequence[Object]

ADMISSION: Final = re.compile(
    r"UnexpectedAdmissionError|OutOf\S+|NodeAffinity|TopologyAffinityError|NodePorts"
)
"""``status.reason`` of a pod that its node turned away."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One pod, its events and the fields that remedies name."""

    pod: Object
    part: ComponentFields
    events: Events

    @property
    def status(self) -> Object:
        return self.pod.get("status") or {}

    @property
    def spec(self) -> Object:
        return self.pod["spec"]  # type: ignore[no-any-return]

    def condition(self, kind: str) -> Object:
        """Empty where there is none."""
        told = self.status.get("conditions") or ()
        return next((c for c in told if c.get("type") == kind), {})

    def latest(self, *reasons: str) -> str:
        """Return the message of the newest event with one of these reasons; empty if there is none."""
        found = [each for each in self.events if each.get("reason") in reasons]
        newest = max(found, key=_time, default=None)
        return _said(newest.get("message") or newest["reason"]) if newest else ""


def cause(pod: Object, events: Events = ()) -> PodFinding | None:
    """The one thing to mend first; None for a pod that is ready, or on its way."""
    seen = _Seen(pod, part_of(pod), events)
    if _lost(seen):
        return _lost_finding(seen)
    if pod["metadata"].get("deletionTimestamp") or seen.condition("Ready").get("status") == "True":
        return None
    found = (look(seen) for look in (_failed, _unscheduled, _containers, _mounted, _probed))
    return next((each for each in found if each), None)


def _lost(seen: _Seen) -> bool:
    gone = ("DeletionByTaintManager", "DeletionByPodGC")
    return seen.status.get("reason") == "NodeLost" or seen.condition("DisruptionTarget").get("reason") in gone


def _lost_finding(seen: _Seen) -> PodFinding:
    node = seen.spec.get("nodeName", "its node")
    words = _said(seen.status.get("message")) or f"node {node} does not answer"
    remedy = (
        f"Restore {node}, or delete it from the cluster (kubectl delete node): then its pods are replaced"
    )
    return PodFinding("NodeLost", words, remedy)


def _failed(seen: _Seen) -> PodFinding | None:
    """The whole pod, by its node: evicted or turned away."""
    why, message = str(seen.status.get("reason") or ""), _said(seen.status.get("message"))
    if seen.status.get("phase") != "Failed":
        return None
    if why == "Evicted":
        return PodFinding("Evicted", message, _eviction_remedy(message, seen.part))
    if why in SHUTDOWN:
        return PodFinding("Evicted", message or why, "Nothing to do: another pod replaces it")
    if ADMISSION.fullmatch(why):
        return PodFinding("NodeRefused", message or why, ADMISSION_REMEDY)
    return None


SHUTDOWN: Final = ("Preempting", "Terminated", "Shutdown", "NodeShutdown")
ADMISSION_REMEDY: Final = (
    "The node no longer had the resources that the scheduler counted on, and another pod is created. If this "
    "goes on, restart the node's device plugin; failed pods may be deleted"
)
DISK: Final = re.compile(r"ephemeral|nodefs|imagefs|emptydir", re.IGNORECASE)


def _eviction_remedy(message: str, part: ComponentFields) -> str:
    if not DISK.search(message):
        return (
            f"The node ran out of it: raise the requests in {part.resources}, so that pods go where there is "
            "enough"
        )
    if part.component != ENGINE:
        return "Use nodes with larger disks"
    return (
        "Put the cache on a claim (spec.podTemplate.spec.volumes: cache) or load the weights from one "
        "(spec.model.source: pvc://…), or use nodes with larger disks"
    )


def _unscheduled(seen: _Seen) -> PodFinding | None:
    found = seen.condition("PodScheduled")
    message = masked(str(found.get("message") or ""))
    if found.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in seen.spec.get("schedulingGates") or ())
        return PodFinding(
            "SchedulingGated",
            f"the pod has the scheduling gates {gates}",
            "The controller that set the gate, such as a queue, has to remove it",
        )
    if found.get("reason") != "Unschedulable":
        return None
    remedy = scheduling_remedy(message, seen.pod, seen.part)
    return PodFinding("Unschedulable", shortened(scheduling_message(message)), remedy)


def _containers(seen: _Seen) -> PodFinding | None:
    """The first container that is in trouble, init containers first."""
    spec, status = seen.spec, seen.status
    made = {c["name"]: c for c in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))}
    told = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    found = (_container(each, made.get(each["name"], {}), seen.part) for each in told)
    return next((each for each in found if each), None)


def _container(told: Object, made: Object, part: ComponentFields) -> PodFinding | None:
    state, last = told.get("state") or {}, (told.get("lastState") or {}).get("terminated")
    found = waiting(state.get("waiting") or {}, {"name": told["name"], **made}, part)
    if found or told.get("ready"):
        return found
    over = state.get("terminated") or last
    restarts = int(told.get("restartCount") or 0)
    if not over or (not over.get("exitCode") and not restarts):
        return None
    crashes = restarts if state.get("terminated") else restarts - 1
    return ended(over, {"name": told["name"], **made}, max(0, crashes), part)


def _mounted(seen: _Seen) -> PodFinding | None:
    message = seen.latest("FailedMount", "FailedAttachVolume", "FailedMapVolume")
    if message:
        return PodFinding("VolumeMount", message, _mount_remedy(message, seen.part))
    message = seen.latest("FailedCreatePodSandBox", "NetworkNotReady", "FailedPrepareDynamicResources")
    if message:
        return PodFinding(
            "SandboxFailed", message, "The node cannot set up pods: check its network plugin and kubelet"
        )
    return None


def _mount_remedy(message: str, part: ComponentFields) -> str:
    absent = re.search(r'(secret|configmap) "(?P<name>[^"]+)" not found', message)
    if absent and absent["name"].endswith(("-epp-tls", "-epp-ca")):
        return "The operator creates it: check that the operator runs, and its log"
    if absent:
        return f"Create it in this namespace, or change {part.volumes}"
    if "Multi-Attach" in message:
        return (
            "The claim can be attached to one node only: spec.model.source needs a claim with access mode "
            "ReadOnlyMany"
        )
    return f"Check the claim and its storage class; it is mounted because of {part.volumes}"


def _probed(seen: _Seen) -> PodFinding | None:
    """Runs, is not ready, and its probes fail with something other than a closed port: that is loading."""
    message = seen.latest("Unhealthy")
    if not message.startswith("Readiness") or "connection refused" in message:
        return None
    return PodFinding("ProbeFailed", message, f"See the pod's log; check {seen.part.command}")


def _said(message: object) -> str:
    return shortened(masked(str(message or "")))


def _time(event: Object) -> str:
    """RFC 3339 in UTC: sorts as text."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
