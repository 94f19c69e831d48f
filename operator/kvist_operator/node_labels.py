"""Accelerators of a node by its labels: product, memory, compute capability, number, slices and sharing.

The labels are those of NVIDIA's GPU feature discovery (``nvidia.com/gpu.*``; ``nvidia.com/mig-PROFILE.*``
under the MIG strategy ``mixed``), of AMD's node labeller (``amd.com/gpu.*``, before that
``beta.amd.com/gpu.*``), and of clouds, which have the product alone. ``nvidia.com/gpu.memory`` is the total
that ``nvidia-smi`` shows, in MiB: a process gets less (``hardware.process_gib``). That of a MIG slice is what
a process gets (18 GB profile of an H200: 16,384 MiB, of which torch sees 16.0 GiB).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvist_operator.hardware import (
    MIG_RESOURCE,
    RESOURCES,
    Accelerator,
    find_accelerator,
    process_gib,
    shared_accelerator,
    slice_of,
    unlisted_accelerator,
)

NVIDIA: Final = "nvidia.com/gpu"
AMD: Final = ("amd.com/gpu", "beta.amd.com/gpu")
PRODUCT_LABELS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "cloud.google.com/gke-tpu-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
COUNT_LABELS: Final = (
    "nvidia.com/gpu.count",
    "karpenter.k8s.aws/instance-gpu-count",
    "amd.com/gpu.count",
    "beta.amd.com/gpu.count",
    "cloud.google.com/gke-accelerator-count",
    "kvist.dev/accelerator-count",
)
"""The last one is set on no node: it carries what the kubelet reports (``with_reported_count``)."""
DETAIL_LABELS: Final = (
    "nvidia.com/gpu.memory",
    "nvidia.com/gpu.compute.major",
    "nvidia.com/gpu.compute.minor",
    "nvidia.com/gpu.replicas",
    "nvidia.com/gpu.sharing-strategy",
    *(f"{prefix}.{name}" for prefix in AMD for name in ("vram", "device-id")),
)
_MIG: Final = re.compile(
    r"nvidia\.com/mig-(?P<profile>\d+g\.\d+gb[\w.]*?)\.(?P<key>count|memory|product|replicas)"
)
_AMD_COUNT: Final = re.compile(r"beta\.amd\.com/gpu\.device-id\.[0-9a-f]{4}")
"""Label whose value is the number of GPUs with this PCI device id."""
_VRAM: Final = re.compile(r"(\d+)\s*(?:G|GB|GiB|Gi)?", re.IGNORECASE)
AMD_DEVICES: Final = {"740": 90, "74a": 94, "74b": 94, "75a": 95, "75b": 95}
"""Architecture by the first digits of the PCI device id: MI200 (gfx90a), MI300 (gfx942), MI350 (gfx950)."""
AMD_PRODUCTS: Final = {"MI30": 94, "MI32": 94, "MI35": 95, "MI2": 90}
"""Architecture by a part of the product's name."""
SAME: Final = 1.05
"""A label up to this many times the table's memory means the same card: a nominal size."""
SLICE_SOURCE: Final = "memory of the slice in the nodes' labels"
MEMORY_SOURCE: Final = "nvidia.com/gpu.memory of the nodes, less the driver's part"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Accelerators of one kind on one node, as its labels say."""

    accelerator: Accelerator
    per_node: int
    counted: bool = False
    """The number is that of the node; otherwise it is the usual one."""
    planned: bool = False
    """The pool was planned for these before; it stays there as long as it fits."""


def accelerator_labels(labels: Labels) -> dict[str, str]:
    """Return those of a node's labels that say which accelerators it has."""
    read = {*PRODUCT_LABELS, *COUNT_LABELS, *DETAIL_LABELS}
    patterns = (_MIG, _AMD_COUNT)
    return {
        name: value
        for name, value in labels.items()
        if name in read or any(pattern.fullmatch(name) for pattern in patterns)
    }


def lacks_count(labels: Labels) -> str:
    """Return the product label of a node whose labels do not have the number of its accelerators; empty if
    they do, or if it has no accelerator."""
    return next((n for n in PRODUCT_LABELS if labels.get(n)), "") if not _count(labels) else ""


def with_reported_count(labels: Labels, node: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels with the number of accelerators that the node's kubelet reports, if they lack it."""
    status = node.get("status")
    amounts = status.get("allocatable") if isinstance(status, Mapping) else None
    found = (
        (str(amounts.get(name, "")) for name in RESOURCES.values()) if isinstance(amounts, Mapping) else ()
    )
    devices = (text for name, text in zip(RESOURCES, found, strict=False) if name != "cpu")
    number = next((text for text in devices if text.isdigit() and int(text)), "")
    return {**labels, COUNT_LABELS[-1]: number} if number and lacks_count(labels) else dict(labels)


def _count(labels: Labels) -> int:
    return _number(labels, (*COUNT_LABELS, *sorted(name for name in labels if _AMD_COUNT.fullmatch(name))))


def node_facts(labels: Labels) -> tuple[NodeFacts, ...]:
    """Return a node's accelerators by its labels; none if no label names a product that is known, or whose
    memory a label has."""
    product = next((labels[name] for name in PRODUCT_LABELS if labels.get(name)), "")
    if not product:
        return ()
    slices = tuple(_slices(labels, product))
    if product.endswith("-MIG-INVALID") or (slices and labels.get(f"{NVIDIA}.replicas") == "0"):
        return slices  # every GPU of the node is divided
    row = _whole(labels, product)
    count = _count(labels)
    if row is None or labels.get(f"{NVIDIA}.count") == "0":
        return slices
    number = 1 if row.isolated else count or row.per_node
    return (NodeFacts(row, number, counted=count > 0), *slices)


def node_kinds(nodes: Iterable[Labels]) -> list[NodeFacts]:
    """Return the kinds of accelerator in a cluster, in an order that does not depend on that of the nodes."""
    found = {facts for labels in nodes for facts in node_facts(labels)}
    return sorted(found, key=lambda f: (f.accelerator.name, f.per_node, f.accelerator.memory_gib))


def _whole(labels: Labels, product: str) -> Accelerator | None:
    """Return the accelerator that the product label names, with the memory and capability of other labels."""
    known = find_accelerator(product.removesuffix("-SHARED"))
    if any(name in labels for prefix in AMD for name in (f"{prefix}.vram", f"{prefix}.product-name")):
        return _amd(labels, product, known)
    mib, capability = _number(labels, (f"{NVIDIA}.memory",)), _capability(labels)
    if known is None and not mib:
        return None
    base, _, profile = product.removesuffix("-SHARED").partition("-MIG-")
    row = find_accelerator(base)
    if row is None:
        total = mib / 1024
        row = unlisted_accelerator(base, process_gib(total), capability=capability, source=MEMORY_SOURCE)
    elif capability:
        row = replace(row, capability=capability)
    if profile:
        row = slice_of(row, profile, round(mib / 1024, 2), SLICE_SOURCE) if mib else known
    elif mib:
        row = _with_total(row, mib / 1024, MEMORY_SOURCE)
    return _divided(row, labels, NVIDIA, product) if row else None


def _with_total(row: Accelerator, total: float, source: str) -> Accelerator:
    """Return the row with the memory of a label, unless the label shows the nominal size of the same card."""
    if row.memory_gib <= total <= SAME * row.memory_gib:
        return row
    return replace(row, memory_gib=process_gib(total), source=source)


def _divided(row: Accelerator, labels: Labels, resource: str, product: str) -> Accelerator:
    """Return the row as one pod gets it: MPS divides the memory, time-slicing does not."""
    replicas = _number(labels, (f"{resource}.replicas",))
    if labels.get(f"{resource}.sharing-strategy") == "mps" and replicas > 1:
        found = shared_accelerator(row)
        memory, source = (
            round(row.memory_gib / replicas, 2),
            f"memory of the GPU, divided by MPS among {replicas}",
        )
        return replace(found, memory_gib=memory, shared=False, source=source)
    return shared_accelerator(row) if replicas > 1 or product.endswith("-SHARED") else row


def _slices(labels: Labels, gpu: str) -> Iterable[NodeFacts]:
    """Yield the MIG slices that are resources of their own."""
    matches = [match for name in labels if (match := _MIG.fullmatch(name))]
    for profile in sorted({match["profile"] for match in matches if match["key"] == "count"}):
        prefix = f"{MIG_RESOURCE}{profile}"
        product = labels.get(f"{prefix}.product") or f"{gpu}-MIG-{profile}"
        mib = _number(labels, (f"{prefix}.memory",))
        whole = _whole({**labels, f"{NVIDIA}.replicas": "1"}, gpu.partition("-MIG-")[0])
        if whole and _number(labels, (f"{prefix}.count",)):
            known = find_accelerator(product.removesuffix("-SHARED"))
            memory = round(mib / 1024, 2) or (known.memory_gib if known else 0.0)
            if memory:
                row = slice_of(whole, profile, memory, SLICE_SOURCE if mib else "")
                row = replace(row, resource=prefix)
                yield NodeFacts(_divided(row, labels, prefix, product), 1, counted=True)


def _amd(labels: Labels, product: str, known: Accelerator | None) -> Accelerator | None:
    vram = next((labels[f"{prefix}.vram"] for prefix in AMD if f"{prefix}.vram" in labels), "")
    match = _VRAM.fullmatch(vram)
    total = float(match[1]) if match else 0.0
    if known:
        return _with_total(known, total, "amd.com/gpu.vram of the nodes") if total else known
    if not total:
        return None
    device = next((labels[f"{prefix}.device-id"] for prefix in AMD if f"{prefix}.device-id" in labels), "")
    named = next((sm for part, sm in AMD_PRODUCTS.items() if part in product.upper()), 0)
    return unlisted_accelerator(
        product,
        process_gib(total),
        capability=AMD_DEVICES.get(device.lower()[:3], named),
        resource=RESOURCES["amd"],
        source="amd.com/gpu.vram of the nodes, less the driver's part",
    )


def _capability(labels: Labels) -> int:
    major = _number(labels, (f"{NVIDIA}.compute.major",))
    return 10 * major + _number(labels, (f"{NVIDIA}.compute.minor",)) if major else 0


def _number(labels: Labels, names: Iterable[str]) -> int:
    """Return the number in the first of these labels that has one; 0 without one."""
    text = next((labels[name] for name in names if labels.get(name, "").isdigit()), "")
    return int(text) if text else 0
