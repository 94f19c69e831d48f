"""Capabilities of the cluster: optional APIs, node labels, access modes of claims, controllers of gateways;
and the check at the start.

They are discovered periodically and kept in between, so that reconciling a pool sends no request for them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvist_epp.names import OBJECTIVE_GROUPS
from kvist_operator.errors import ClusterError, Forbidden, StartError
from kvist_operator.hardware import find_accelerator, unlisted_accelerator
from kvist_operator.manifests.object_names import Api, Referrer
from kvist_operator.node_labels import (
    PRODUCT_LABELS,
    NodeFacts,
    accelerator_labels,
    lacks_count,
    node_kinds,
    with_reported_count,
)
from kvist_operator.plan import PlanVerdict
from kvist_operator.plan.resources import NODE_LABELS
from kvist_operator.spec.pool import Pool, Source

from .cluster_api import Cluster
from .kinds import (
    CHILDREN,
    CLAIM,
    GATEWAY,
    GATEWAY_CLASS,
    NEWER,
    NODE,
    POOL,
    SECURITY_CONSTRAINTS,
    ObjectKind,
    Right,
    Target,
    everywhere,
    namespaced,
    single_rights,
)

CLAIM_SECONDS: Final = 60.0
"""Time after which an absent claim is looked up again; access modes never change."""
GATEWAY_SECONDS: Final = 60.0
"""Time after which the class of a Gateway is read again."""
PARALLEL_REVIEWS: Final = 16
SHOWN: Final = 8
"""Missing rights that an error names."""
ROUNDED: Final = 0.01
"""GiB by which the memory in a status may differ, because it is rounded."""
OPTIONAL: Final = tuple(kind for kind in CHILDREN if kind.optional)

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CapabilitySnapshot:
    """Result of one discovery."""

    kinds: frozenset[ObjectKind] = frozenset()
    """Optional kinds that are served."""
    accelerators: tuple[NodeFacts, ...] = ()
    """Kinds of accelerators, by name."""
    labels: tuple[Labels, ...] = ()
    """Distinct sets of those node labels that identify accelerators."""
    assigns_users: bool = False
    """The cluster assigns user ids to pods (OpenShift)."""

    @property
    def apis(self) -> frozenset[Api]:
        """Optional APIs of these kinds."""
        return frozenset(kind.optional for kind in self.kinds if kind.optional)


@dataclass(slots=True)
class Capabilities:
    """Discovers what the cluster offers. ``nodes_allowed``: an operator of some namespaces must not read
    nodes."""

    cluster: Cluster
    nodes_allowed: bool
    latest: CapabilitySnapshot = CapabilitySnapshot()
    _claims: dict[Target, tuple[frozenset[str] | None, float]] = field(default_factory=dict)
    """Access modes of claims, or the time from which an absent one is looked up again."""
    _controllers: dict[Target, tuple[str | None, float]] = field(default_factory=dict)
    """Controller of each Gateway as ``_controller`` returns it, and the time from which it is read again."""
    _counts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Label with the number of accelerators of nodes that have none themselves, by the node's name."""

    async def discover(self) -> CapabilitySnapshot:
        """Discover again. Raises ClusterError, and then keeps the previous result."""
        served = await self.cluster.served((*OPTIONAL, SECURITY_CONSTRAINTS))
        nodes = await self._nodes() if self.nodes_allowed else []
        distinct = {tuple(sorted(labels.items())): labels for labels in nodes if labels}
        labels = tuple(distinct[key] for key in sorted(distinct))
        self.latest = CapabilitySnapshot(
            served - {SECURITY_CONSTRAINTS},
            tuple(node_kinds(nodes)),
            labels,
            assigns_users=SECURITY_CONSTRAINTS in served,
        )
        return self.latest

    async def _nodes(self) -> list[dict[str, str]]:
        try:
            found = await self.cluster.find(NODE, bare=True)
        except Forbidden:
            return []  # then spec.accelerator is required, and the condition says so
        nodes = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in found}
        labels = {name: accelerator_labels(own) for name, own in nodes.items()}
        await self._read_counts(labels)
        return [{**own, **self._counts.get(name, {})} for name, own in labels.items()]

    async def _read_counts(self, labels: Mapping[str, Labels]) -> None:
        """Read the number of accelerators of nodes whose labels lack it, once for each node: a cloud's labels
        and AMD's newer ones do not have it, and whole nodes are large."""
        lacking = {name: key for name, own in labels.items() if (key := lacks_count(own))}
        self._counts = {name: count for name, count in self._counts.items() if name in lacking}
        for key in sorted({key for name, key in lacking.items() if name not in self._counts}):
            for node in await self.cluster.find(NODE, labels=key):
                name = node["metadata"]["name"]
                counted = with_reported_count(labels.get(name, {}), node)
                if name in lacking and counted != labels[name]:
                    self._counts[name] = {k: v for k, v in counted.items() if k not in labels[name]}

    async def claims(self, pool: Pool) -> dict[str, frozenset[str]]:
        """Return the access modes of the claims with the pool's model or its cache, and with its KV cache
        blocks, by their names. Claims that are not known are left out.
        """
        own = pool.model.claim if pool.model.kind is Source.CLAIM else ""
        name = own or (pool.model.cache.claim if pool.model.cache else "")
        blocks = pool.offload.shared.claim if pool.offload.shared else ""
        found: dict[str, frozenset[str]] = {}
        for each in dict.fromkeys((name, blocks)):
            if each:
                found |= await self._modes(Target(CLAIM, pool.namespace, each))
        return found

    async def _modes(self, target: Target) -> dict[str, frozenset[str]]:
        known, until = self._claims.get(target, (None, 0.0))
        if known is None and time.monotonic() >= until:
            until = time.monotonic() + CLAIM_SECONDS
            try:
                found = await self.cluster.get(target)
            except ClusterError:
                found = None
            modes = ((found or {}).get("spec") or {}).get("accessModes")
            known = frozenset(modes) if modes else None
            self._claims[target] = (known, until)
        return {} if known is None else {target.name: known}

    async def controllers(self, pool: Pool) -> frozenset[str]:
        """Return the controllers of the Gateways that a pool names, by the Gateways' classes. Those that are
        absent or may not be read are left out; their answer to the route names them later."""
        if pool.gateway.mode != "Route":
            return frozenset()
        named = [each for each in pool.gateway.parents if each.get("kind", "Gateway") == "Gateway"]
        targets = [Target(GATEWAY, each.get("namespace", pool.namespace), each["name"]) for each in named]
        return frozenset([await self._controller(target) or "" for target in targets]) - {""}

    async def resolved(self, referring: Iterable[Referrer]) -> tuple[Referrer, ...]:
        """Return these Gateways with the controllers of their classes; with none if there is no such Gateway,
        and with those that they came with if it may not be read."""
        found = []
        for each in referring:
            known = None
            if each.is_gateway:
                known = await self._controller(Target(GATEWAY, each.namespace, each.name))
            found.append(each if known is None else replace(each, controller=known))
        return tuple(found)

    async def _controller(self, gateway: Target) -> str | None:
        """Return the controller of a Gateway: empty if it or its class is absent, None if it has never been
        readable."""
        known, until = self._controllers.get(gateway, (None, 0.0))
        if time.monotonic() >= until:
            with suppress(ClusterError):
                name = await self._field(gateway, "gatewayClassName")
                known = await self._field(Target(GATEWAY_CLASS, "", name), "controllerName") if name else ""
            self._controllers[gateway] = known, time.monotonic() + GATEWAY_SECONDS
        return known

    async def _field(self, target: Target, name: str) -> str:
        """Return a field of an object's spec; empty if either does not exist. Raises ClusterError."""
        found = await self.cluster.get(target)
        return str(((found or {}).get("spec") or {}).get(name) or "")


def with_planned_first(found: Sequence[NodeFacts], status: Mapping[str, Any]) -> list[NodeFacts]:
    """Return kinds of accelerators, first the one that node labels had when the pool was planned, even if no
    node has it now. Nodes come and go, and a pool that does not set ``spec.accelerator`` would otherwise be
    planned again with each cheaper kind of node."""
    plan = status.get("plan") or {}
    chosen = {c["field"]: c.get("value") for c in plan.get("choices") or () if c.get("source") == NODE_LABELS}
    if plan.get("verdict") == PlanVerdict.REFUSED or not chosen.keys() & {"accelerator", "perNode"}:
        return list(found)
    accelerator = plan.get("accelerator") or {}
    same = [f for f in found if f.accelerator.product == accelerator.get("product")]
    number = str(chosen.get("perNode") or "")
    first = next((f for f in same if str(f.per_node) == number), same[0] if same else None)
    first = first or _planned_before(plan, number)
    if first is None:
        return list(found)
    return [replace(first, planned=True), *(facts for facts in found if facts != first)]


def _planned_before(plan: Mapping[str, Any], number: str) -> NodeFacts | None:
    """Return the kind of accelerator of a plan in a status, of which no node is left."""
    accelerator = plan.get("accelerator") or {}
    product = str(accelerator.get("product") or "")
    row = find_accelerator(product)
    memory = float((plan.get("memory") or {}).get("perGpuGib") or 0)
    if row is None and product and memory:
        row = unlisted_accelerator(product, memory, capability=int(accelerator.get("capability") or 0))
    if row and memory and abs(row.memory_gib - memory) > ROUNDED:
        row = replace(row, memory_gib=memory, source="memory of the plan before")
    if row and accelerator.get("resource"):
        row = replace(row, resource=str(accelerator["resource"]))
    if row is None:
        return None
    return NodeFacts(row, int(number) if number.isdigit() else row.per_node, counted=number.isdigit())


def with_required_labels(nodes: Sequence[Labels], workload: Mapping[str, Any] | None) -> tuple[Labels, ...]:
    """Return the nodes' labels and those that the engines' pods already require: the pods' template must not
    change because an autoscaler removed the last such node."""
    spec = (workload or {}).get("spec") or {}
    template = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("workerTemplate") or {}
    affinity = ((template.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    required = [
        {rule["key"]: value}
        for term in terms.get("nodeSelectorTerms") or ()
        for rule in term.get("matchExpressions") or ()
        if rule.get("key") in PRODUCT_LABELS
        for value in rule.get("values") or ()
    ]
    return (*nodes, *required)


May = Callable[[Right, str], Awaitable[bool]]
"""Returns whether the operator has a right in a namespace; an empty namespace means all. Raises
ClusterError."""


async def check(cluster: Cluster, may: May, namespaces: Sequence[str]) -> None:
    """Check CRD and rights. Raises StartError that names what is missing and the remedy."""
    if POOL not in await cluster.served([POOL]):
        raise StartError(
            f"there is no {POOL.resource} {POOL.version} in this cluster: "
            "kubectl apply --server-side -f crds/inferencepools.yaml"
        )
    lacking = [
        f"{right} in {space or 'all namespaces'}"
        for space in namespaces or ("",)
        for right in await _lacking(may, space, required_rights(bool(namespaces)))
    ]
    if lacking:
        more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        raise StartError(
            f"the operator's service account may not {', '.join(lacking[:SHOWN])}{more}: give it the rules "
            "of docs/guides/operator.md" + ("" if namespaces else ", or set --namespaces")
        )


def required_rights(within: bool) -> list[Right]:
    """Return the rights without which the operator cannot work; those for optional APIs are checked when
    used.

    ``within``: the operator manages some namespaces only.
    """
    optional = {(kind.group, kind.plural) for kind in CHILDREN if kind.optional}
    spare = {(group, "inferenceobjectives") for group in OBJECTIVE_GROUPS}
    spare |= {(kind.group, kind.plural) for kind in NEWER}
    spare.add(("kvist.dev", "inferencepools/finalizers"))
    found = single_rights(namespaced() if within else everywhere())
    return [right for right in found if (right.group, right.resource) not in optional | spare]


async def _lacking(may: May, namespace: str, rights: Sequence[Right]) -> list[Right]:
    semaphore = asyncio.Semaphore(PARALLEL_REVIEWS)

    async def one(right: Right) -> bool:
        async with semaphore:
            return await may(right, namespace)

    answers = await asyncio.gather(*(one(right) for right in rights))
    return [right for right, granted in zip(rights, answers, strict=True) if not granted]


def review(right: Right, namespace: str) -> dict[str, Any]:
    """Return a SelfSubjectAccessReview."""
    resource, _, part = right.resource.partition("/")
    attributes = {
        "group": right.group,
        "resource": resource,
        "subresource": part,
        "verb": right.verb,
        "namespace": namespace,
    }
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
    }
