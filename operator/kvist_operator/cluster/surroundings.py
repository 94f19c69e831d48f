"""What only the cluster can tell: its optional APIs, its nodes' labels, access modes of claims.

Looked at now and then, kept between, so that a reconcile asks for nothing that has not changed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvist_operator.errors import ClusterError, Forbidden
from kvist_operator.hardware import COUNT_LABELS, PRODUCT_LABELS, NodeFacts, find, of_nodes
from kvist_operator.manifests.nouns import Api
from kvist_operator.plan import Verdict
from kvist_operator.plan.seat import NODE_LABELS
from kvist_operator.spec.pool import Pool, Source

from .kinds import CHILDREN, CLAIM, NODE, Kind, Target
from .port import Cluster

CLAIM_SECONDS: Final = 60.0
"""A claim that is not there yet is looked for again so often; access modes never change."""
_READ: Final = (*PRODUCT_LABELS, *COUNT_LABELS)
OPTIONAL: Final = tuple(kind for kind in CHILDREN if kind.optional)

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen last."""

    kinds: frozenset[Kind] = frozenset()
    """Optional kinds that are served."""
    accelerators: tuple[NodeFacts, ...] = ()
    """Kinds of accelerator, the most numerous first."""
    labels: tuple[Labels, ...] = ()
    """What nodes are labelled with that tells it, each set of labels once."""

    @property
    def apis(self) -> frozenset[Api]:
        """The optional APIs among them."""
        return frozenset(kind.optional for kind in self.kinds if kind.optional)


@dataclass(slots=True)
class _Claim:
    modes: frozenset[str] | None
    until: float


@dataclass(slots=True)
class Surroundings:
    """``nodes_allowed``: an operator of some namespaces has no right to read nodes."""

    cluster: Cluster
    nodes_allowed: bool
    seen: Seen = Seen()
    _claims: dict[Target, _Claim] = field(default_factory=dict)

    async def look(self) -> Seen:
        """Look again. Raises ClusterError; what was seen before stands then."""
        kinds = await self.cluster.served(OPTIONAL)
        nodes = await self._nodes() if self.nodes_allowed else []
        distinct = {tuple(sorted(labels.items())): labels for labels in nodes if labels}
        labels = tuple(distinct[key] for key in sorted(distinct))
        self.seen = Seen(kinds, tuple(of_nodes(nodes)), labels)
        return self.seen

    async def _nodes(self) -> list[dict[str, str]]:
        try:
            found = await self.cluster.find(NODE, bare=True)
        except Forbidden:
            return []  # then spec.accelerator has to say, and the condition says so
        return [telling(each["metadata"].get("labels") or {}) for each in found]

    async def claims(self, pool: Pool) -> dict[str, frozenset[str]]:
        """Access modes of the claim that the pool's model is on; empty where there is none, or no answer."""
        if pool.model.kind is not Source.CLAIM:
            return {}
        target = Target(CLAIM, pool.namespace, pool.model.claim)
        known = self._claims.get(target)
        if known is None or (known.modes is None and time.monotonic() >= known.until):
            known = self._claims[target] = await self._claim(target)
        return {} if known.modes is None else {target.name: known.modes}

    async def _claim(self, target: Target) -> _Claim:
        until = time.monotonic() + CLAIM_SECONDS
        try:
            found = await self.cluster.get(target)
        except ClusterError:
            return _Claim(None, until)
        modes = (found.get("spec") or {}).get("accessModes") if found else None
        return _Claim(frozenset(modes) if modes else None, until)


def telling(labels: Labels) -> dict[str, str]:
    """Those of a node's labels that tell its accelerators."""
    return {name: labels[name] for name in _READ if name in labels}


def settled(found: Sequence[NodeFacts], status: Mapping[str, Any]) -> list[NodeFacts]:
    """Kinds of accelerator, those first that node labels told of when the pool was planned, with or without
    nodes that have them: nodes come and go, and a pool that leaves it to them would be planned anew with each
    majority."""
    plan = status.get("plan") or {}
    told = {c["field"]: c.get("value") for c in plan.get("choices") or () if c.get("source") == NODE_LABELS}
    row = find(str((plan.get("accelerator") or {}).get("product") or ""))
    if row is None or plan.get("verdict") == Verdict.REFUSED or not told.keys() & {"accelerator", "perNode"}:
        return list(found)
    same = [facts for facts in found if facts.accelerator.name == row.name]
    first = same[0] if same else NodeFacts(row, int(told.get("perNode") or row.per_node))
    return [first, *(facts for facts in found if facts not in same)]


def remembered(nodes: Sequence[Labels], workload: Mapping[str, Any] | None) -> tuple[Labels, ...]:
    """Nodes' labels and those that the engines' pods already ask for: while no node has them, because an
    autoscaler took it away, the pods' template must not change."""
    terms = _terms(workload or {})
    asked = [
        {rule["key"]: value}
        for term in terms
        for rule in term.get("matchExpressions") or ()
        if rule.get("key") in PRODUCT_LABELS
        for value in rule.get("values") or ()
    ]
    return (*nodes, *asked)


def _terms(workload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    spec = workload.get("spec") or {}
    template = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("workerTemplate") or {}
    affinity = ((template.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    found: Sequence[Mapping[str, Any]] = required.get("nodeSelectorTerms") or ()
    return found
