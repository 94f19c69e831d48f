"""The fault of one pod, from what the scheduler, the kubelet, its containers and events say. Pure.

The scheduler's message is read like ``0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) were
unschedulable.`` Its wording: ``pkg/scheduler/framework/plugins`` of Kubernetes 1.36, and of 1.30 where that
differs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvist_operator.hardware import RESOURCES
from kvist_operator.manifests.disk_tier import CLEANER
from kvist_operator.manifests.disk_tier import VOLUME as BLOCKS_VOLUME
from kvist_operator.manifests.object_names import ENGINE
from kvist_operator.plan.resources import HOME_VOLUME

from .container_diagnosis import ComponentFields, PodFinding, ended, part_of, waiting
from .termination_message import cleaned, masked, shortened
from .views import Object

_PREEMPTION: Final = re.compile(r"[.,;]? *(no new claims to deallocate|preemption:).*", re.DOTALL)
"""The end of the scheduler's message, which says why preemption would not help."""
_LACKING: Final = re.compile(r"Insufficient ([\w./-]+\w)")
_CORE: Final = ("cpu", "memory", "ephemeral-storage", "pods")
_NETWORK: Final = re.compile("rdma|roce|infiniband|hca")
"""Parts of usual names of network cards."""
_AFFINITY: Final = re.compile("node affinity/selector|node selector")
_TAINTED: Final = re.compile("untolerated taint|taints that the pod didn't tolerate")
_VOLUME: Final = re.compile(r"PersistentVolume|persistentvolume|persistent volume|pvc\(s\)")


def scheduling_remedy(message: str, pod: Object, part: ComponentFields) -> str:
    """Return the remedy for everything that the scheduler's message names, most urgent first."""
    lacking = list(dict.fromkeys(_LACKING.findall(message)))
    core = ", ".join(name for name in lacking if name in _CORE)
    devices = [name for name in lacking if name not in _CORE]
    found = [
        _device_remedy(devices[0], pod) if devices else "",
        # nodes that lack only the devices have the labels
        _label_remedy(pod, part) if not devices and _AFFINITY.search(message) else "",
        _taint_remedy(message, part) if _TAINTED.search(message) else "",
        _claim_remedy(message, pod, part) if _VOLUME.search(message) else "",
        f"Nodes lack {core}: add some, or lower {part.resources}" if core else "",
        "Nodes are cordoned: kubectl uncordon them" if "were unschedulable" in message else "",
    ]
    return ". ".join(filter(None, found)) or "Check the nodes' conditions and taints"


def _device_remedy(device: str, pod: Object) -> str:
    limits = [(c.get("resources") or {}).get("limits") or {} for c in pod["spec"].get("containers") or ()]
    amount = next((str(each[device]) for each in limits if each.get(device)), "some")
    if _is_network(device, [name for each in limits for name in each if name != device]):
        return (
            f"Each pod needs {amount} {device} beside its accelerators: run the RDMA device plugin on their "
            "nodes, write the name that it gives in spec.interconnect.rdma.resourceName, or leave "
            "spec.interconnect.rdma out, so that engines use TCP"
        )
    return (
        f"Each pod needs {amount} {device} free on one node: add nodes, lower spec.replicas, or ask for "
        "other accelerators with spec.accelerator (product, count, resourceName); a rollout needs no spare "
        "ones with spec.rollout.strategy: ReplaceFirst"
    )


def _is_network(device: str, others: Sequence[str]) -> bool:
    """Return whether a device is a network card, as far as its name and the other devices of the pod show."""
    accelerators = RESOURCES.values()
    return device not in accelerators and (
        any(name in accelerators for name in others) or bool(_NETWORK.search(device))
    )


def _label_remedy(pod: Object, part: ComponentFields) -> str:
    spec = pod["spec"]
    wanted = [f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items()]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [
        ", ".join(
            f"{e['key']} {e['operator']} {e.get('values') or ''}".strip()
            for e in term.get("matchExpressions") or ()
        )
        for term in required.get("nodeSelectorTerms") or ()
    ]
    if terms:
        wanted.append(" or ".join(terms[:3]))
    product = "spec.accelerator.product or " if part.component == ENGINE else ""
    field = f"{product}{part.overlay}.spec.nodeSelector"
    return (
        f"Nodes must have {' and '.join(wanted) or 'the labels it asks for'}: label them, or change {field}"
    )


def _taint_remedy(message: str, part: ComponentFields) -> str:
    if "node.kubernetes.io/" in message:
        return "Nodes have taints that mark them as unhealthy: see kubectl describe nodes"
    replaced = " (this list replaces the plan's own tolerations: repeat those)"
    return (
        f"Add a toleration to {part.overlay}.spec.tolerations{replaced if part.component == ENGINE else ''}"
    )


def _claim_remedy(message: str, pod: Object, part: ComponentFields) -> str:
    named = re.search(r'persistentvolumeclaim "([^"]+)"', message)
    volumes = pod["spec"].get("volumes") or ()
    claims = [v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v]
    which = named[1] if named else ", ".join(claims)
    return f"Claim {which} must exist, be bound, and be reachable from these nodes ({part.volumes})"


Events = Sequence[Object]

ADMISSION: Final = re.compile(
    r"UnexpectedAdmissionError|OutOf\S+|NodeAffinity|TopologyAffinityError|NodePorts"
)
"""``status.reason`` of a pod that the kubelet of its node did not admit."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A pod, its events and the fields that remedies name."""

    pod: Object
    spec: Object
    status: Object
    part: ComponentFields
    events: Events

    def condition(self, kind: str) -> Object:
        """Return the condition of this type; empty if there is none."""
        return next((c for c in self.status.get("conditions") or () if c.get("type") == kind), {})

    def latest(self, *reasons: str) -> str:
        """Return the message of the newest event with one of these reasons; empty if there is none."""
        found = [each for each in self.events if each.get("reason") in reasons]
        newest = max(found, key=_time, default=None)
        return cleaned(newest.get("message") or newest["reason"]) if newest else ""


def cause(pod: Object, events: Events = ()) -> PodFinding | None:
    """Return the fault to correct first; None for a pod that is ready or still starting."""
    seen = _Seen(pod, pod["spec"], pod.get("status") or {}, part_of(pod), events)
    if found := _lost(seen):
        return found
    if pod["metadata"].get("deletionTimestamp") or seen.condition("Ready").get("status") == "True":
        return None
    checks = (check(seen) for check in (_failed, _unscheduled, _containers, _mounted, _probed))
    return next((found for found in checks if found), None)


def _lost(seen: _Seen) -> PodFinding | None:
    gone = ("DeletionByTaintManager", "DeletionByPodGC")
    disrupted = seen.condition("DisruptionTarget").get("reason") in gone
    if seen.status.get("reason") != "NodeLost" and not disrupted:
        return None
    node = seen.spec.get("nodeName", "its node")
    return PodFinding(
        "NodeLost",
        cleaned(seen.status.get("message")) or f"node {node} does not answer",
        f"Restore {node}, or delete it from the cluster (kubectl delete node): then its pods are replaced",
    )


def _failed(seen: _Seen) -> PodFinding | None:
    """Return the fault of a pod that its node evicted or did not admit."""
    why, message = str(seen.status.get("reason") or ""), cleaned(seen.status.get("message"))
    if seen.status.get("phase") != "Failed":
        return None
    if why == "Evicted":
        return PodFinding("Evicted", message, _eviction_remedy(message, seen.part))
    if why in ("Preempting", "Terminated", "Shutdown", "NodeShutdown"):
        return PodFinding("Evicted", message or why, "Nothing to do: another pod replaces it")
    if ADMISSION.fullmatch(why):
        return PodFinding(
            "NodeRefused",
            message or why,
            "The node no longer had the resources that the scheduler counted on, and another pod is created. "
            "If this goes on, restart the node's device plugin; failed pods may be deleted",
        )
    return None


_FULL_VOLUME: Final = re.compile(r'EmptyDir volume "(?P<name>[^"]+)" exceeds the limit')
_OVER_LIMIT: Final = re.compile(
    r"total limit of containers|Container \S+ exceeded its local ephemeral storage"
)
"""``pkg/kubelet/eviction/helpers.go``."""


def _eviction_remedy(message: str, part: ComponentFields) -> str:
    full = _FULL_VOLUME.search(message)
    if full:
        return _volume_remedy(full["name"], part)
    if _OVER_LIMIT.search(message):
        more = ", or share one download of the weights (spec.model.cache)" if part.component == ENGINE else ""
        return f"Raise ephemeral-storage, requests and limits, in {part.resources}{more}"
    if not re.search(r"(?i)ephemeral|nodefs|imagefs|emptydir", message):
        return (
            "The node ran out of this resource: raise the requests in "
            f"{part.resources}, so that pods are scheduled to nodes that have enough"
        )
    if part.component != ENGINE:
        return "Use nodes with larger disks"
    return (
        "Share one download of the weights (spec.model.cache), load them from a claim "
        "(spec.model.source: pvc://…), or use nodes with larger disks"
    )


def _volume_remedy(name: str, part: ComponentFields) -> str:
    if part.component == ENGINE and name == BLOCKS_VOLUME:
        return (
            f"Raise spec.offload.disk, and see the log of container {CLEANER}: it removes blocks before the "
            "volume is full"
        )
    if part.component != ENGINE:
        return f"The volume {name} is too small for {part.component}: report it"
    larger = f"give the volume {name} in spec.podTemplate.spec.volumes a larger sizeLimit"
    if name == HOME_VOLUME:
        return f"Share one download of the weights (spec.model.cache), or {larger}"
    return larger[0].upper() + larger[1:]


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
    words = shortened(_PREEMPTION.sub("", message).strip())
    return PodFinding("Unschedulable", words, scheduling_remedy(message, seen.pod, seen.part))


def _containers(seen: _Seen) -> PodFinding | None:
    """Return the fault of the first container that has one, init containers first."""
    spec, status = seen.spec, seen.status
    made = {c["name"]: c for c in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))}
    reported = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    found = (_container(each, made.get(each["name"], {}), seen.part) for each in reported)
    return next((each for each in found if each), None)


def _container(reported: Object, made: Object, part: ComponentFields) -> PodFinding | None:
    state, last = reported.get("state") or {}, (reported.get("lastState") or {}).get("terminated")
    container = {"name": reported["name"], **made}
    found = waiting(state.get("waiting") or {}, container, part)
    if found or reported.get("ready"):
        return found
    over = state.get("terminated") or last
    restarts = int(reported.get("restartCount") or 0)
    if not over or (not over.get("exitCode") and not restarts):
        return None
    crashes = restarts if state.get("terminated") else restarts - 1
    return ended(over, container, max(0, crashes), part)


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
        return "The operator creates this object: check that the operator is running, and its log"
    if absent:
        return f"Create this object in the pool's namespace, or change {part.volumes}"
    if "Multi-Attach" in message:
        return (
            "The claim can be attached to one node only: spec.model.source needs one with access mode "
            "ReadOnlyMany, spec.model.cache one with ReadWriteMany"
        )
    return f"Check the claim and its storage class; it is mounted because of {part.volumes}"


def _probed(seen: _Seen) -> PodFinding | None:
    """Return the fault of a pod whose readiness probe fails, unless its port is closed, as it is while a
    model loads."""
    message = seen.latest("Unhealthy")
    if not message.startswith("Readiness") or "connection refused" in message:
        return None
    return PodFinding("ProbeFailed", message, f"See the pod's log; check {seen.part.command}")


def _time(event: Object) -> str:
    """Return the time of an event in RFC 3339 and UTC, which sorts as text."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
