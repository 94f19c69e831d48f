"""On which nodes: those with the accelerator the plan is for. Pure."""

from collections.abc import Mapping, Sequence

from kvist_operator.hardware import PRODUCT_LABELS, Accelerator, find
from kvist_operator.plan import Plan

from .cluster_facts import Json, Note, Site


def placing(plan: Plan, site: Site) -> Json:
    """Tolerations and node affinity; affinity only by labels that nodes are seen to have."""
    row = plan.hardware.accelerator
    if row.vendor == "cpu":
        return {}
    found: Json = {"tolerations": [{"key": row.resource, "operator": "Exists", "effect": "NoSchedule"}]}
    terms = _terms(row, site.node_labels)
    if terms:
        required = {"nodeSelectorTerms": terms}
        found["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required},
        }
    return found


def _terms(row: Accelerator, nodes: Sequence[Mapping[str, str]]) -> list[Json]:
    """One for each label that tells the product; any of them will do."""
    seen = {
        label: sorted({node[label] for node in nodes if label in node and find(node[label]) == row})
        for label in PRODUCT_LABELS
    }
    return [
        {"matchExpressions": [{"key": label, "operator": "In", "values": values}]}
        for label, values in seen.items()
        if values
    ]


def unplaced(plan: Plan, site: Site) -> list[Note]:
    """Return a note where pods may be scheduled to nodes with another accelerator than the plan's."""
    row = plan.hardware.accelerator
    if row.vendor == "cpu" or _terms(row, site.node_labels):
        return []
    return [
        Note(
            "",
            "NodesUnknown",
            f"no node label is known that selects nodes with {row.name}: if the cluster also has other "
            "accelerators, set spec.podTemplate.spec.nodeSelector",
        )
    ]
