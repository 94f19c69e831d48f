"""Resources of one replica: its accelerators, and shared memory, memory and times of its pods. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.errors import HardwareError, SpecError
from kvist_operator.hardware import (
    CPU,
    MIG_RESOURCE,
    Accelerator,
    find_accelerator,
    is_called,
    known_accelerator,
    unlisted_accelerator,
)
from kvist_operator.memory.layout import GIB, Draft, Layout
from kvist_operator.memory.memory_budget import Memory
from kvist_operator.models.shape import Facts, checkpoint_bytes
from kvist_operator.node_labels import NodeFacts
from kvist_operator.spec.pool import OBJECT_STORES, AcceleratorSpec, Pool, Source

from .plan import Choice, Hardware, PodResources

NODE_LABELS: Final = "node labels"
"""Source of a choice that comes from the labels of the cluster's nodes."""
PRICES: Final = "prices"
"""Source of a choice that comes from the prices of accelerators."""
MODEL_MOUNT: Final = "/model"
"""Mount path of a claim or an image with weights."""
ADAPTER_MOUNT: Final = "/adapters"
"""Mount path of adapters from claims and images, each in a folder of its name."""
DISK_MOUNT: Final = "/kv"
"""Mount path of the volume for offloaded blocks on disk."""
SHARED_MOUNT: Final = "/kv-shared"
"""Mount path of the claim for blocks that replicas share."""
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
STREAM_BUFFER: Final = 5 * GIB
"""Host memory in which a process streams weights from an object store; unlimited unless it is set
(``docs/src/env-vars.md`` of the Run:ai Model Streamer). The largest single tensor has to fit: 3.9 GiB for the
embedding of Llama 3.1 405B (128,256 × 16,384 in BF16)."""
HOME_VOLUME: Final = "cache"
"""Volume for everything that a process writes: downloads, compiled kernels."""
DOWNLOAD: Final = 1.3
"""Space for downloaded weights by their size: files that are fetched but not loaded, and parts of files."""
SCRATCH: Final = 16 * GIB
"""Bytes on the node's disk for compiled kernels, logs and temporary files of a pod: an allowance, not
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOption:
    """Accelerators for which a plan may be made, with the choices that name them."""

    hardware: Hardware
    choices: tuple[Choice, ...]
    planned: bool = False
    """The pool runs there now."""


def hardware_options(
    spec: AcceleratorSpec,
    *,
    nodes: Sequence[NodeFacts] = (),
    gpu: str = "",
    prices: Mapping[str, float] | None = None,
) -> list[HardwareOption]:
    """Return the accelerators among which the plan chooses.

    ``gpu`` (``kvist plan --gpu``) overrides the spec, the spec the labels of nodes. Without any of them the
    kinds that have a price (USD or any other currency per GPU and hour, by name) are the options.

    Raises:
        HardwareError: no source names an accelerator, or it is not known.
        SpecError: a resource or memory that the accelerator does not have.
    """
    kinds, source = _kinds(spec, nodes, gpu, prices or {})
    found: dict[Hardware, HardwareOption] = {}
    errors: list[SpecError] = []
    for facts in kinds:
        try:
            each = _candidate(spec, facts, source, prices or {})
            found.setdefault(each.hardware, each)
        except SpecError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return list(found.values())


def _kinds(
    spec: AcceleratorSpec, nodes: Sequence[NodeFacts], gpu: str, prices: Mapping[str, float]
) -> tuple[list[NodeFacts], str]:
    """Return kinds of accelerators and their source."""
    if gpu:
        return [_usual(known_accelerator(gpu, "--gpu"))], "--gpu"
    if spec.product:
        source = "spec.accelerator.product"
        on_nodes = [f for f in nodes if _is_product(f.accelerator, spec)]
        if on_nodes:
            return on_nodes, source
        if find_accelerator(spec.product) is None and spec.memory_bytes:
            memory = spec.memory_bytes / GIB
            return [_usual(unlisted_accelerator(spec.product, memory, resource=spec.resource))], source
        return [_usual(known_accelerator(spec.product))], source
    if spec.resource == "cpu":
        return [_usual(CPU)], "spec.accelerator.resourceName"
    if nodes:
        same = [facts for facts in nodes if facts.accelerator.resource == spec.resource]
        return same or list(nodes), NODE_LABELS
    if prices:
        return [_usual(known_accelerator(name, "--price")) for name in prices], PRICES
    raise HardwareError(
        "spec.accelerator.product: is not set, and no node has a label with it: set it, or pass "
        "--gpu H100-80GB to the command"
    )


def _usual(row: Accelerator) -> NodeFacts:
    return NodeFacts(row, row.per_node)


def _is_product(row: Accelerator, spec: AcceleratorSpec) -> bool:
    """Return whether the spec means this kind: its name and, if it is set, its resource."""
    known = find_accelerator(spec.product)
    named = is_called(row, spec.product) or bool(known and known.name == row.name)
    return named and row.resource == (spec.resource or row.resource)


def _candidate(
    spec: AcceleratorSpec, facts: NodeFacts, source: str, prices: Mapping[str, float]
) -> HardwareOption:
    row = _as_requested(spec, facts.accelerator)
    price = next((number for name, number in prices.items() if is_called(row, name)), None)
    each = f"; {price:g} per hour" if price is not None else ""
    choices = [
        Choice("accelerator", row.name, f"{row.memory_gib:g} GiB per process; {row.source}{each}", source)
    ]
    if row.isolated:
        reason = "a slice or a shared GPU cannot form a group with others"
        choices.append(Choice("perNode", 1, reason, "NCCL"))
    elif spec.per_node:
        choices.append(Choice("perNode", spec.per_node, "as requested", "spec.accelerator.perNode"))
    elif facts.counted:
        choices.append(Choice("perNode", facts.per_node, "number on the cluster's nodes", NODE_LABELS))
    else:
        choices.append(Choice("perNode", facts.per_node, "usual with this accelerator", "hardware table"))
    hardware = Hardware(accelerator=row, per_node=choices[-1].value, count=spec.count, price=price)
    return HardwareOption(hardware=hardware, choices=tuple(choices), planned=facts.planned)


def _as_requested(spec: AcceleratorSpec, row: Accelerator) -> Accelerator:
    """Return the accelerator with the resource and memory of the spec. Raises SpecError."""
    memory = spec.memory_bytes / GIB
    if spec.resource.startswith(MIG_RESOURCE) and not row.isolated:
        profile = spec.resource.removeprefix(MIG_RESOURCE)
        row = find_accelerator(f"{row.product}-MIG-{profile}") or replace(row, isolated=True, verified=False)
    if spec.resource:
        row = replace(row, resource=spec.resource)
    if row.vendor == "cpu":
        if not memory:
            raise SpecError("spec.accelerator.memory", "is missing: set the memory that a CPU engine may use")
        return replace(row, memory_gib=memory, source="spec.accelerator.memory")
    if memory and memory < row.memory_gib:
        # less than the GPU has: a slice of it
        return replace(row, memory_gib=memory, verified=False, source="spec.accelerator.memory")
    return row


def checkpoint_size(facts: Facts, draft: Draft | None) -> float:
    """Return the bytes of the files of a model and its draft model."""
    found = facts.checkpoint_bytes or checkpoint_bytes(facts.shape)
    if draft is None or draft.shape is None:
        return found
    return found + (draft.checkpoint_bytes or checkpoint_bytes(draft.shape))


def _downloads(pool: Pool) -> bool:
    """Return whether pods download the weights to the disk of their node: the user puts no volume there."""
    volumes = (pool.pod_template.get("spec") or {}).get("volumes") or ()
    own = pool.model.kind is Source.HUB and pool.model.cache is None
    return own and all(each.get("name") != HOME_VOLUME for each in volumes)


def pod_resources(
    pool: Pool, hardware: Hardware, layout: Layout, memory: Memory, checkpoint: float
) -> tuple[PodResources, list[Choice]]:
    """Return the resources of a replica's pods; offloaded blocks are in shared memory and count as memory.

    ``checkpoint``: bytes of the files of the model and its draft model.
    """
    on_node = min(layout.gpus, hardware.per_node)
    shm = pool.offload.cpu_bytes + (8 * GIB if on_node > 1 else 2 * GIB)
    loaded = memory.weights * on_node
    given, drain = pool.rollout.startup_seconds, pool.rollout.drain_seconds
    startup = given or 60 * math.ceil((COMPILE + loaded / LOAD) / 60)
    cpu = hardware.accelerator.vendor == "cpu"
    stream = STREAM_BUFFER * on_node if pool.model.kind in OBJECT_STORES else 0
    home = int(checkpoint * DOWNLOAD) + SCRATCH if _downloads(pool) else 0
    local = home + pool.offload.node_disk_bytes
    found = PodResources(
        shm_bytes=shm,
        memory_bytes=stream + (int(memory.total) if cpu else BASE_MEMORY + PER_GPU * on_node + shm),
        startup_seconds=startup,
        pre_stop_seconds=PRE_STOP,
        drain_seconds=drain,
        grace_seconds=PRE_STOP + drain + SPARE,
        disk_bytes=pool.offload.disk_bytes,
        checkpoint_bytes=int(checkpoint),
        home_bytes=home,
        ephemeral_bytes=local + (0 if home else SCRATCH) if local else 0,
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
