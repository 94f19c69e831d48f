"""What is wrong with a pool's pods: (pods, events) → troubles, the worst first. Pure.

Of each component's newest generation only: what an old pod suffers from is being replaced. Pods of which no
rights but reading them are needed: their containers' last words are in their status
(``terminationMessagePolicy: FallbackToLogsOnError``), so nobody's logs are read. Events say more, where they
are given.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvist_operator.manifests.object_names import PLAN

from .container_diagnosis import PodFinding, part_of
from .pod_diagnosis import cause
from .termination_message import masked, shortened
from .views import Trouble

Object = Mapping[str, Any]

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
"""Worst first: what somebody has to mend, before what may heal by itself."""
TEMPLATE: Final = "pod-template-hash"


def troubles(pods: Sequence[Object], events: Sequence[Object] = ()) -> tuple[Trouble, ...]:
    """One for each kind of trouble of each component, with the pod it is told by and how many have it.

    ``pods`` are those of one pool, as the API has them; ``events`` those of its namespace (``v1`` Events).
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
    said = [_trouble(component, each) for (component, _), each in found.items()]
    return tuple(sorted(said, key=_rank))


def worst(told: Sequence[Trouble], workload: Object | None, component: str) -> Trouble | None:
    """Of one component: pods that were never made, else what the first of its troubles is."""
    return refused(workload, component) or next((t for t in told if t.component == component), None)


def refused(workload: Object | None, component: str) -> Trouble | None:
    """Pods that were never made: quota, admission, Pod Security; in the Deployment's own words."""
    status = (workload or {}).get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            message = shortened(masked(str(condition.get("message") or condition.get("reason"))))
            return Trouble("PodsRefused", f"{message}. {_refusal_remedy(message)}", component)
    return None


def _refusal_remedy(message: str) -> str:
    if "exceeded quota" in message:
        return (
            "Raise the namespace's quota, or lower spec.replicas or the resources of each replica "
            "(spec.accelerator)"
        )
    if "PodSecurity" in message or "SecurityContext" in message:
        return (
            "The namespace's Pod Security level forbids what spec.podTemplate adds: remove it, or relax the "
            "level"
        )
    if "serviceaccount" in message:
        return "Create that ServiceAccount, or remove serviceAccountName from spec.podTemplate.spec"
    return (
        "The API server rejects these pods: correct what the message names, often something in "
        "spec.podTemplate"
    )


def newest(pods: Iterable[Object]) -> list[Object]:
    """Of each component the pods of the generation that was made last."""
    parts: dict[str, dict[str, list[Object]]] = defaultdict(lambda: defaultdict(list))
    for pod in pods:
        parts[part_of(pod).component][_generation(pod)].append(pod)
    return [pod for generations in parts.values() for pod in max(generations.values(), key=_age)]


def _generation(pod: Object) -> str:
    """Of a Deployment's pod its template; of a group's, whose roles have templates of their own, the plan."""
    meta = pod["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    return str(labels.get(TEMPLATE) or annotations.get(PLAN) or "")


def _age(pods: Sequence[Object]) -> tuple[bool, str]:
    """Creation of the youngest (RFC 3339 in UTC sorts as text). A generation of which all pods are on their
    way out has been taken back."""
    staying = any(not pod["metadata"].get("deletionTimestamp") for pod in pods)
    return staying, max(str(pod["metadata"].get("creationTimestamp") or "") for pod in pods)


def _trouble(component: str, found: Sequence[tuple[str, PodFinding]]) -> Trouble:
    """The first pod by name tells; so the words change only when its own do."""
    name, told = min(found, key=lambda each: each[0])
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Trouble(told.reason, f"pod {name}{more}: {told.words}. {told.remedy}", component)


def _rank(trouble: Trouble) -> tuple[int, str, str]:
    order = ORDER.index(trouble.reason) if trouble.reason in ORDER else len(ORDER)
    return (order, trouble.component, trouble.message)
