"""What the pods need besides accelerators: shared memory, memory, time to start and to drain. Pure."""

import math
from typing import Final

from kvist_operator.memory.layout import GIB, Layout
from kvist_operator.memory.memory_budget import Memory
from kvist_operator.spec.pool import Pool

from .plan import Choice, Hardware, PodNeeds

MODEL_MOUNT: Final = "/model"
"""Where manifests mount a claim or an image with weights."""
ADAPTER_MOUNT: Final = "/adapters"
"""Where they mount adapters of claims and images, each in a folder of its name."""
DISK_MOUNT: Final = "/kv"
"""Where manifests mount the volume for blocks on disk."""
PRE_STOP: Final = 15
"""Seconds until every picker and gateway has heard that the pod is going."""
SPARE: Final = 20
"""Seconds vLLM's workers get beyond the drain."""
LOAD: Final = GIB / 2
"""Bytes a second that a slow store gives one node: 0.5 GiB."""
COMPILE: Final = 600
"""Seconds for compilation and graph capture, generously."""
BASE_MEMORY: Final = 12 * GIB
PER_GPU: Final = 6 * GIB


def pod_needs(
    pool: Pool, hardware: Hardware, layout: Layout, memory: Memory
) -> tuple[PodNeeds, list[Choice]]:
    """From the plan so far; offloaded blocks live in shared memory and count against the memory limit."""
    on_node = min(layout.gpus, hardware.per_node)
    shm = pool.offload.cpu_bytes + (8 * GIB if on_node > 1 else 2 * GIB)
    loaded = memory.weights * on_node
    startup = pool.rollout.startup_seconds or 60 * math.ceil((COMPILE + loaded / LOAD) / 60)
    drain = pool.rollout.drain_seconds
    cpu = hardware.accelerator.vendor == "cpu"
    needs = PodNeeds(
        shm_bytes=shm,
        memory_bytes=int(memory.total) if cpu else BASE_MEMORY + PER_GPU * on_node + shm,
        startup_seconds=startup,
        pre_stop_seconds=PRE_STOP,
        drain_seconds=drain,
        grace_seconds=PRE_STOP + drain + SPARE,
        disk_bytes=pool.offload.disk_bytes,
    )
    return needs, _choices(pool, needs, loaded)


def _choices(pool: Pool, needs: PodNeeds, loaded: float) -> list[Choice]:
    given = pool.rollout.startup_seconds is not None
    why = (
        "as asked"
        if given
        else f"{loaded / GIB:.0f} GiB at 0.5 GiB/s, and ten minutes to compile and capture"
    )
    source = "spec.rollout.startupSeconds" if given else "weights"
    stop = f"{PRE_STOP} s until pickers know, {needs.drain_seconds} s to finish, {SPARE} s to end"
    return [
        Choice("startupSeconds", needs.startup_seconds, why, source),
        Choice("terminationGracePeriodSeconds", needs.grace_seconds, stop, "spec.rollout.drainSeconds"),
    ]
