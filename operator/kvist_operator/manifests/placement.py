"""Nodes of the engines' pods: the spread of replicas, and the pods of one replica near each other. Pure.

A replica over several nodes is a group of a LeaderWorkerSet. Groups are spread by their leaders; the other
pods of a group follow their leader, since the traffic between them is in every step of the engine. Labels and
the annotation are those of ``leaderworkerset.x-k8s.io/v1`` (LWS 0.10, ``api/leaderworkerset/v1``).
"""

from typing import Any, Final

from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

from . import pods
from .object_names import ENGINE, Json, ObjectNames, Site

_LWS: Final = "leaderworkerset.sigs.k8s.io"
EXCLUSIVE: Final = f"{_LWS}/exclusive-topology"
"""Annotation of a LeaderWorkerSet: one group for each value of a node label, and no other group there."""
GROUP: Final = f"{_LWS}/group-key"
"""Label that the pods of one group share."""
REVISION: Final = f"{_LWS}/template-revision-hash"
WEIGHT: Final = 100


def engine_nodes(names: ObjectNames, pool: Pool, plan: Plan, site: Site, *, leads: bool) -> Json:
    """Return tolerations, affinity and spread constraints of an engine's pod."""
    found = pods.placing(plan, site)
    if plan.nodes == 1:
        return {**found, "topologySpreadConstraints": pods.spread(names.engine_pods)}
    near = _near_its_group(names, pool)
    if near:
        found["affinity"] = {**found.get("affinity", {}), "podAffinity": near}
    if leads:
        leaders = {**names.engine_pods, **names.served} if names.role else names.served
        found["topologySpreadConstraints"] = pods.spread(leaders, REVISION)
    return found


def _near_its_group(names: ObjectNames, pool: Pool) -> Json:
    """Return the affinity to the pods of the same group; empty where the LeaderWorkerSet sets it.

    ``matchLabelKeys`` compares the group, so that the first pod of a group finds no other and goes anywhere.
    """
    link = pool.interconnect
    term: Json = {
        "topologyKey": link.topology_key,
        "labelSelector": {"matchLabels": names.selector(ENGINE)},
        "matchLabelKeys": [GROUP],
    }
    if link.placement == "Exclusive":
        return {}
    if link.placement == "Required":
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    preferred = {"weight": WEIGHT, "podAffinityTerm": term}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}


def group_annotations(pool: Pool) -> dict[str, str]:
    """Return the annotations of the LeaderWorkerSet."""
    link = pool.interconnect
    return {EXCLUSIVE: link.topology_key} if link.placement == "Exclusive" else {}


def rdma_resources(pool: Pool) -> dict[str, str]:
    """Return the RDMA devices of one pod, as a request and a limit."""
    rdma = pool.interconnect.rdma
    return {rdma.resource: str(rdma.count)} if rdma else {}


def locks_memory(pool: Pool) -> bool:
    """Return whether engines have the capability IPC_LOCK, to register memory with RDMA devices."""
    rdma = pool.interconnect.rdma
    return bool(rdma and rdma.ipc_lock)


def pod_security(pool: Pool, user: int, site: Site) -> Json:
    """Return the security context of an engine's pod. A capability has no effect on a user other than root
    (kubernetes/kubernetes#56374); root keeps the group, to which the volumes belong."""
    found = pods.pod_security(user, site)
    if pool.offload.shared:
        # a volume with millions of blocks is not walked through whenever a pod starts
        found["fsGroupChangePolicy"] = "OnRootMismatch"
    return {**found, "runAsNonRoot": False, "runAsUser": 0} if locks_memory(pool) else found


def container_security(pool: Pool) -> dict[str, Any]:
    """Return the security context of an engine's container."""
    found = dict(pods.CONTAINER_SECURITY)
    return {**found, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}} if locks_memory(pool) else found
