"""On which accelerators: what the spec says, else what a flag or the nodes' labels say. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvist_operator.errors import HardwareError, SpecError
from kvist_operator.hardware import CPU, Accelerator, NodeFacts, find, known, other
from kvist_operator.memory.layout import GIB
from kvist_operator.spec.pool import AcceleratorSpec

from .plan import Choice, Hardware

NODE_LABELS: Final = "node labels"
"""Source of a choice."""


def choose_hardware(
    spec: AcceleratorSpec, *, nodes: Sequence[NodeFacts] = (), wanted: str = ""
) -> tuple[Hardware, list[Choice]]:
    """``wanted`` (``kvist plan --gpu``) takes precedence over the spec, and the spec over node labels.

    Raises:
        HardwareError: nothing says which accelerator, or nobody knows it.
        SpecError: memory of a CPU engine is missing.
    """
    row, said, node_count = _row(spec, nodes, wanted)
    row = _with_memory(row, spec)
    per_node = spec.per_node or node_count or row.per_node
    reason = f"{row.memory_gib:g} GiB for a process; {row.source}"
    choices = [Choice("accelerator", row.name, reason, said), _per_node(spec, node_count, per_node)]
    return Hardware(accelerator=row, per_node=per_node, count=spec.count), choices


def _row(
    spec: AcceleratorSpec, nodes: Sequence[NodeFacts], wanted: str
) -> tuple[Accelerator, str, int | None]:
    if wanted:
        return known(wanted, "--gpu"), "--gpu", None
    if spec.product:
        return _named(spec), "spec.accelerator.product", _count_of(spec.product, nodes)
    if spec.resource == "cpu":
        return CPU, "spec.accelerator.resourceName", None
    if nodes:
        return nodes[0].accelerator, NODE_LABELS, nodes[0].per_node
    raise HardwareError(
        "spec.accelerator.product: is not set, and there are no node labels to read it from: set it, or say "
        "--gpu H100-80GB"
    )


def _named(spec: AcceleratorSpec) -> Accelerator:
    if find(spec.product) is None and spec.memory_bytes:
        return other(spec.product, spec.memory_bytes / GIB, spec.resource)
    return known(spec.product)


def _count_of(product: str, nodes: Sequence[NodeFacts]) -> int | None:
    row = find(product)
    return next((facts.per_node for facts in nodes if row and facts.accelerator.name == row.name), None)


def _with_memory(row: Accelerator, spec: AcceleratorSpec) -> Accelerator:
    if row.vendor == "cpu" and not spec.memory_bytes:
        raise SpecError(
            "spec.accelerator.memory", "is missing: a CPU engine needs to know how much memory it may take"
        )
    memory = spec.memory_bytes / GIB
    changed = {"resource": spec.resource} if spec.resource else {}
    if not spec.memory_bytes or (row.vendor != "cpu" and memory >= row.memory_gib):
        return replace(row, **changed)  # type: ignore[arg-type]
    # less than the card has: a slice of it
    verified = row.verified and row.vendor == "cpu"
    return replace(row, memory_gib=memory, verified=verified, source="spec.accelerator.memory", **changed)  # type: ignore[arg-type]


def _per_node(spec: AcceleratorSpec, labelled: int | None, per_node: int) -> Choice:
    if spec.per_node:
        return Choice("perNode", per_node, "as given", "spec.accelerator.perNode")
    if labelled:
        return Choice("perNode", per_node, "what the nodes have", NODE_LABELS)
    return Choice("perNode", per_node, "what nodes with this accelerator usually have", "hardware table")
