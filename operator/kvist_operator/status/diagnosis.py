"""The troubles of a pool's pods, the worst first, from pods and events. Pure.

Only pods of each component's newest generation count, since older ones are being replaced. No right to read
logs is needed: the last lines of a container's log are in its pod's status (``terminationMessagePolicy:
FallbackToLogsOnError``). Events are used where they are given.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from kvist_epp.names import LABEL_ROLES
from kvist_operator.manifests.object_names import ENGINE, PLAN

from . import mesh
from .container_diagnosis import PARTS, PodFinding, part_of
from .pod_diagnosis import cause
from .termination_message import cleaned
from .views import Object, Trouble

ORDER: Final = (
    "PodsRefused",
    "InvalidImage",
    "ConfigMissing",
    "CannotStart",
    "BadArguments",
    "ModelUnsupported",
    "ModelUnavailable",
    "AcceleratorUnusable",
    "OutOfMemory",
    "DiskFull",
    "CannotWrite",
    "CommunicationFailed",
    "CrashLoop",
    "ImagePull",
    "StartsTooSlowly",
    "VolumeMount",
    "SandboxFailed",
    "Unschedulable",
    "SchedulingGated",
    "NodeRefused",
    "Evicted",
    "NodeLost",
    "ProbeFailed",
)
"""Reasons, the worst first: those that need a correction, before those that may pass by themselves."""
TEMPLATE: Final = "pod-template-hash"


def troubles(pods: Sequence[Object], events: Sequence[Object] = ()) -> tuple[Trouble, ...]:
    """Return one trouble for each component and reason, which names one of its pods and counts the others.

    ``pods`` are those of one pool, as the API returns them; ``events`` those of its namespace (``v1``
    Events).
    """
    by_pod: dict[str, list[Object]] = defaultdict(list)
    for event in events:
        by_pod[str((event.get("involvedObject") or {}).get("name"))].append(event)
    found: dict[tuple[str, str], list[tuple[str, PodFinding]]] = defaultdict(list)
    for pod in newest(pods):
        name = pod["metadata"]["name"]
        one = cause(pod, by_pod[name])
        if one:
            found[part_of(pod).component, one.reason].append((name, one))
    made = [_trouble(component, each) for (component, _), each in found.items()]
    return tuple(sorted(made, key=_rank))


def worst(found: Sequence[Trouble], workload: Object | None, component: str) -> Trouble | None:
    """Return the worst trouble of one component: pods that could not be created come first."""
    return refused(workload, component) or next((t for t in found if t.component == component), None)


def refused(workload: Object | None, component: str) -> Trouble | None:
    """Return the trouble of a Deployment whose pods the API server rejects (quota, admission, Pod Security),
    in the Deployment's own words."""
    status = (workload or {}).get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            message = cleaned(condition.get("message") or condition.get("reason"))
            overlay = PARTS.get(component, PARTS[ENGINE]).overlay
            return Trouble("PodsRefused", f"{message}. {_refusal_remedy(message, overlay)}", component)
    return None


def _refusal_remedy(message: str, overlay: str) -> str:
    if "exceeded quota" in message:
        return (
            "Raise the namespace's quota, or lower spec.replicas or the resources of each replica "
            "(spec.accelerator)"
        )
    if of_mesh := mesh.refusal_remedy(message, overlay):
        return of_mesh
    if "PodSecurity" in message or "SecurityContext" in message:
        return (
            f"The namespace's Pod Security level forbids what {overlay} adds: remove it, or relax the level"
        )
    if "serviceaccount" in message:
        return f"Create that ServiceAccount, or remove serviceAccountName from {overlay}.spec"
    return f"The API server rejects these pods: correct what the message names, often something in {overlay}"


def newest(pods: Iterable[Object]) -> list[Object]:
    """Return the pods of each component's newest generation, for engines of each role."""
    parts: dict[tuple[str, str], dict[str, list[Object]]] = defaultdict(lambda: defaultdict(list))
    for pod in pods:
        role = (pod["metadata"].get("labels") or {}).get(LABEL_ROLES[0], "")
        parts[part_of(pod).component, role][_generation(pod)].append(pod)
    return [pod for generations in parts.values() for pod in max(generations.values(), key=_age)]


def _generation(pod: Object) -> str:
    """Return the hash of the template of a Deployment's pod, or of the plan of a LeaderWorkerSet's pod, whose
    roles have different templates."""
    meta = pod["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    return str(labels.get(TEMPLATE) or annotations.get(PLAN) or "")


def _age(pods: Sequence[Object]) -> tuple[bool, str]:
    """Return the creation of the youngest pod (RFC 3339 in UTC sorts as text), after whether any pod stays: a
    generation of which all pods are being deleted has been rolled back."""
    staying = any(not pod["metadata"].get("deletionTimestamp") for pod in pods)
    return staying, max(str(pod["metadata"].get("creationTimestamp") or "") for pod in pods)


def _trouble(component: str, found: Sequence[tuple[str, PodFinding]]) -> Trouble:
    """Return the trouble of the first pod by name, so that the message changes only with that pod."""
    name, first = min(found, key=lambda each: each[0])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Trouble(first.reason, f"pod {name}{more}: {first.words}. {first.remedy}", component)


def _rank(trouble: Trouble) -> tuple[int, str, str]:
    order = ORDER.index(trouble.reason) if trouble.reason in ORDER else len(ORDER)
    return (order, trouble.component, trouble.message)
