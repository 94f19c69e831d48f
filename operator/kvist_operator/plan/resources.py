"""Resources of one replica: its accelerators, and shared memory, memory and times of its pods. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvist_operator.errors import HardwareError, SpecError
from kvist_operator.hardware import (
    CPU,
    Accelerator,
    NodeFacts,
    find_accelerator,
    known_accelerator,
    unlisted_accelerator,
)
from kvist_operator.memory.layout import GIB, Layout
from kvist_operator.memory.memory_budget import Memory
from kvist_operator.spec.pool import AcceleratorSpec, Pool

from .plan import Choice, Hardware, PodResources

NODE_LABELS: Final = "node labels"
"""Source of a choice that comes from the labels of the cluster's nodes."""
MODEL_MOUNT: Final = "/model"
"""Mount path of a claim or an image with weights."""
ADAPTER_MOUNT: Final = "/adapters"
"""Mount path of adapters from claims and images, each in a folder of its name."""
DISK_MOUNT: Final = "/kv"
"""Mount path of the volume for offloaded blocks on disk."""
PRE_STOP: Final = 15
"""Seconds until every picker and gateway has learned that the pod is terminating."""
SPARE: Final = 20
"""Seconds that vLLM's workers get beyond the drain."""
LOAD: Final = GIB / 2
"""Bytes per second that slow storage delivers to one node: 0.5 GiB."""
COMPILE: Final = 600
"""Seconds for compilation and CUDA graph capture, with a margin."""
BASE_MEMORY: Final = 12 * GIB
PER_GPU: Final = 6 * GIB


def choose_hardware(
    spec: AcceleratorSpec, *, nodes: Sequence[NodeFacts] = (), gpu: str = ""
) -> tuple[Hardware, list[Choice]]:
    """Return the accelerators; ``gpu`` (``kvist plan --gpu``) overrides the spec, the spec the node labels.

    Raises:
        HardwareError: no source names the accelerator, or it is not known.
        SpecError: the memory of a CPU engine is missing.
    """
    row, source, labelled = _accelerator(spec, nodes, gpu)
    if spec.resource:
        row = replace(row, resource=spec.resource)
    cpu = row.vendor == "cpu"
    if cpu and not spec.memory_bytes:
        raise SpecError("spec.accelerator.memory", "is missing: set the memory that a CPU engine may use")
    memory = spec.memory_bytes / GIB
    if memory and (cpu or memory < row.memory_gib):
        # less than the GPU has: a slice of it
        row = replace(row, memory_gib=memory, verified=row.verified and cpu, source="spec.accelerator.memory")
    choices = [Choice("accelerator", row.name, f"{row.memory_gib:g} GiB per process; {row.source}", source)]
    if spec.per_node:
        choices.append(Choice("perNode", spec.per_node, "as requested", "spec.accelerator.perNode"))
    elif labelled:
        choices.append(Choice("perNode", labelled, "number on the cluster's nodes", NODE_LABELS))
    else:
        choices.append(Choice("perNode", row.per_node, "usual with this accelerator", "hardware table"))
    return Hardware(accelerator=row, per_node=choices[-1].value, count=spec.count), choices


def _accelerator(
    spec: AcceleratorSpec, nodes: Sequence[NodeFacts], gpu: str
) -> tuple[Accelerator, str, int | None]:
    """Return the accelerator, the source of that choice, and the number on a node if labels have it."""
    if gpu:
        return known_accelerator(gpu, "--gpu"), "--gpu", None
    if spec.product:
        row = find_accelerator(spec.product)
        if row is None and spec.memory_bytes:
            new = unlisted_accelerator(spec.product, spec.memory_bytes / GIB, spec.resource)
            return new, "spec.accelerator.product", None
        labelled = next((n.per_node for n in nodes if row and n.accelerator.name == row.name), None)
        return known_accelerator(spec.product), "spec.accelerator.product", labelled
    if spec.resource == "cpu":
        return CPU, "spec.accelerator.resourceName", None
    if nodes:
        return nodes[0].accelerator, NODE_LABELS, nodes[0].per_node
    raise HardwareError(
        "spec.accelerator.product: is not set, and no node has a label with it: set it, or pass "
        "--gpu H100-80GB to kvist plan"
    )


def pod_resources(
    pool: Pool, hardware: Hardware, layout: Layout, memory: Memory
) -> tuple[PodResources, list[Choice]]:
    """Return the resources of a replica's pods; offloaded blocks are in shared memory and count as memory."""
    on_node = min(layout.gpus, hardware.per_node)
    shm = pool.offload.cpu_bytes + (8 * GIB if on_node > 1 else 2 * GIB)
    loaded = memory.weights * on_node
    given, drain = pool.rollout.startup_seconds, pool.rollout.drain_seconds
    startup = given or 60 * math.ceil((COMPILE + loaded / LOAD) / 60)
    cpu = hardware.accelerator.vendor == "cpu"
    found = PodResources(
        shm_bytes=shm,
        memory_bytes=int(memory.total) if cpu else BASE_MEMORY + PER_GPU * on_node + shm,
        startup_seconds=startup,
        pre_stop_seconds=PRE_STOP,
        drain_seconds=drain,
        grace_seconds=PRE_STOP + drain + SPARE,
        disk_bytes=pool.offload.disk_bytes,
    )
    computed = f"{loaded / GIB:.0f} GiB at 0.5 GiB/s, plus ten minutes for compilation and graph capture"
    reason, source = ("as requested", "spec.rollout.startupSeconds") if given else (computed, "weights")
    stop = (
        f"{PRE_STOP} s until pickers send no more requests, {drain} s to finish requests, {SPARE} s to exit"
    )
    return found, [
        Choice("startupSeconds", startup, reason, source),
        Choice("terminationGracePeriodSeconds", found.grace_seconds, stop, "spec.rollout.drainSeconds"),
    ]
