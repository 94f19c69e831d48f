"""Refusals before a plan is sized, reasons for which it is unverified, and warnings. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvist_operator.engine_version import EngineVersion, image_version, parse_version
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import ExtraFlag, doubts
from kvist_operator.flag_table import dotted, flags
from kvist_operator.flag_values import choice_problem
from kvist_operator.hardware import RESOURCES, Accelerator, find_accelerator
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory
from kvist_operator.models.shape import Facts, ModelShape, parameters
from kvist_operator.spec import consistency
from kvist_operator.spec.pod_template import ENGINES
from kvist_operator.spec.pool import ENGINE_CONTAINER, OBJECT_STORES, AcceleratorSpec, Pool

from .kv_transfer import offload_doubts, offload_warnings
from .nixl import TCP_GIGABITS, nixl_doubts
from .plan import Hardware
from .resources import pod_resources

MIN_BITS: Final = 1.5
"""Fewest bits of a weight in any quantization."""
NOMINAL: Final = 1.1
"""Largest ratio of a card's nominal memory to what a process gets: B300, 288 GB to 265 GiB."""
OFFICIAL: Final = "/vllm-openai"
"""Part of the name of vLLM's own images, whose tags are versions."""
CAPABILITIES: Final = {
    "fp8": 75,
    "compressed-tensors": 75,
    "awq": 75,
    "modelopt": 80,
    "mxfp4": 80,
    "gpt_oss_mxfp4": 80,
}
"""Least compute capability × 10 by quantization. vLLM 0.32: ``get_min_capability`` of
``model_executor/layers/quantization`` and of its schemes; NVFP4 of ModelOpt is 75."""
SPARSE_CAPABILITY: Final = 90
"""Least one of the sparse MLA backends (vLLM 0.32: ``v1/attention/backends/mla/*sparse*.py``)."""
PLATFORMS: Final = {"CPU_": "cpu", "AMX_": "cpu", "ROCM_": "amd", "XPU_": "intel"}
"""Beginning of an attention backend's name → the only vendor that has it."""


def check(pool: Pool, facts: Facts, hardware: Hardware) -> None:
    """Raise SpecError for settings with which vLLM would not start, and for a size without its unit."""
    shape, row = facts.shape, hardware.accelerator
    _check_resource(pool.accelerator)
    _check_devices(pool)
    _check_rdma(pool, row)
    if pool.engine.quantization and shape.quantization.method:
        problem = f"the checkpoint is already {shape.quantization.label}: leave it out"
        raise SpecError("spec.engine.quantization", problem)
    if pool.engine.quantization and not row.fp8:
        raise SpecError("spec.engine.quantization", f"{row.name} does not compute in FP8: leave it out")
    given, weights = facts.checkpoint_bytes, parameters(shape)
    if pool.model.shape and given and given < weights * MIN_BITS / 8:
        raise SpecError(
            "spec.model.shape.checkpointSize",
            f"{given} bytes are too few for the {weights / 1e9:.1f} billion weights of its config: write it "
            f"like {math.ceil(weights * 2 / GIB)}Gi, or leave it out",
        )
    _check_memory(pool.accelerator, row)
    prompt = pool.workload.prompt_tokens or 0
    if prompt > shape.max_len and pool.engine.max_model_len is None:
        problem = f"{prompt} is more than the model's {shape.max_len}: set spec.engine.maxModelLen too"
        raise SpecError("spec.workload.promptTokens", problem)
    _check_backend(pool.engine.attention_backend, facts, hardware)
    _check_group(pool, row)
    problem = too_old(shape, row)
    if problem:
        raise SpecError("spec.accelerator.product", f"{problem}: choose a newer GPU")


def _check_resource(spec: AcceleratorSpec) -> None:
    row = find_accelerator(spec.product)
    owners = {resource: vendor for vendor, resource in RESOURCES.items()}
    if row and spec.resource in owners and owners[spec.resource] != row.vendor:
        problem = f"{spec.resource} is not a resource of {row.name}, which has {row.resource}: leave one out"
        raise SpecError("spec.accelerator.resourceName", problem)


def _check_devices(pool: Pool) -> None:
    """Raise SpecError for accelerators in the overlay, whose number the plan sets."""
    devices = {*RESOURCES.values(), pool.accelerator.resource} - {"cpu", ""}
    containers = (pool.pod_template.get("spec") or {}).get("containers") or ()
    for container in containers:
        if not isinstance(container, Mapping) or container.get("name") != ENGINE_CONTAINER:
            continue
        for kind, amounts in (container.get("resources") or {}).items():
            for name in amounts if isinstance(amounts, Mapping) else ():
                if name in devices:
                    field = f"{ENGINES.path}.spec.containers[{ENGINE_CONTAINER}].resources.{kind}.{name}"
                    raise SpecError(field, "is set by the plan: use spec.accelerator.count")


def _check_rdma(pool: Pool, row: Accelerator) -> None:
    rdma = pool.interconnect.rdma
    if rdma and rdma.resource in (row.resource, *RESOURCES.values()):
        problem = f"{rdma.resource} is an accelerator: write that of the network cards, such as rdma/hca"
        raise SpecError("spec.interconnect.rdma.resourceName", problem)


def _check_memory(spec: AcceleratorSpec, row: Accelerator) -> None:
    memory, named = spec.memory_bytes / GIB, find_accelerator(spec.product)
    other = bool(spec.product) and named != find_accelerator(row.name)  # --gpu replaces the pool's product
    if row.vendor != "cpu" and not other and memory > row.memory_gib * NOMINAL:
        problem = f"{memory:g} GiB are more than {row.name} has ({row.memory_gib:g} GiB): leave it out"
        raise SpecError("spec.accelerator.memory", problem)


def _check_backend(backend: str, facts: Facts, hardware: Hardware) -> None:
    field, row = "spec.engine.attentionBackend", hardware.accelerator
    vendor = next((vendor for start, vendor in PLATFORMS.items() if backend.startswith(start)), row.vendor)
    if vendor != row.vendor:
        raise SpecError(field, f"{backend} does not run on {row.name}: leave it out")
    if "MLA" in backend and not facts.shape.latent:
        raise SpecError(field, f"{backend} is for models with latent attention (MLA): leave it out")


def too_old(shape: ModelShape, row: Accelerator) -> str:
    """Return why vLLM has no kernels for this checkpoint on a GPU; empty if it has, or if the capability is
    not known."""
    if row.vendor != "nvidia" or not row.capability:
        return ""
    scheme = shape.quantization
    least = 75 if scheme.label == "NVFP4" else CAPABILITIES.get(scheme.method, 0)
    needs = [(least, f"{scheme.label} weights")]
    if shape.latent and shape.latent.sparse:
        needs.append((SPARSE_CAPABILITY, "sparse attention"))
    for capability, what in needs:
        if row.capability < capability:
            found, wanted = (f"{n // 10}.{n % 10}" for n in (row.capability, capability))
            return f"{row.name} has compute capability {found}, and vLLM's kernels for {what} need {wanted}"
    return ""


def _check_group(pool: Pool, row: Accelerator) -> None:
    """Raise SpecError for several MIG slices or shared GPUs in a replica."""
    sizes = {
        "spec.accelerator.count": pool.accelerator.count,
        "spec.engine.tensorParallelSize": pool.engine.tensor,
        "spec.engine.pipelineParallelSize": pool.engine.pipeline,
        "spec.engine.dataParallelSize": pool.engine.data,
    }
    for field, number in sizes.items():
        if row.isolated and (number or 1) > 1:
            problem = f"{number} × {row.name} cannot form a group: leave it out, or choose whole GPUs"
            raise SpecError(field, problem)


def unverified(
    pool: Pool, facts: Facts, hardware: Hardware, version: EngineVersion, extra: Sequence[ExtraFlag]
) -> list[str]:
    """Return why the plan is unverified; empty if it is not."""
    shape, row = facts.shape, hardware.accelerator
    found = [*shape.notes]
    if not row.verified:
        speed = f"; times are those of {row.like}" if row.like else ""
        text = f"vLLM's memory on {row.name} is not modelled; figures are estimates ({row.source}){speed}"
        found.append(text)
    label = shape.quantization.label
    if not shape.quantization.exact and not facts.checkpoint_bytes:
        found.append(f"the size of {label} weights is an estimate: set spec.model.shape.checkpointSize")
    if label == "NVFP4" and row.vendor != "nvidia":
        found.append(f"vLLM is not known to have kernels for NVFP4 weights on {row.name}")
    if version.doubt:
        found.append(version.doubt)
    if pool.model.kind in OBJECT_STORES and row.vendor == "cpu":
        found.append(
            f"spec.model.source: images for CPUs may lack the Run:ai Model Streamer, which reads "
            f"{pool.model.kind}://: use one with vllm[runai] in spec.engine.image, or pvc://"
        )
    given = pool.engine.attention_backend
    if given and not version.known and choice_problem(flags(version.flags)["attention-backend"], given):
        found.append(f"spec.engine.attentionBackend: vLLM {dotted(version.flags)} has no {given}")
    return found + offload_doubts(pool, facts) + nixl_doubts(pool, facts, version) + doubts(extra, version)


def warnings(
    pool: Pool, facts: Facts, hardware: Hardware, layout: Layout, settings: EngineSettings, memory: Memory
) -> list[str]:
    """Return fields that have no effect, or probably not the one that is meant, in a sentence each."""
    row, workload = hardware.accelerator, pool.workload
    found = [*consistency.warnings(pool), *offload_warnings(pool)]
    stated, tagged = parse_version(pool.engine.version), image_version(pool.engine.image)
    if OFFICIAL in pool.engine.image and stated and tagged and stated != tagged:
        found.append(
            f"spec.engine.version is {dotted(stated)}, and {pool.engine.image} has {dotted(tagged)}: leave "
            "it out, or change spec.engine.image"
        )
    given = pool.accelerator.memory_bytes / GIB
    if row.vendor != "cpu" and given > row.memory_gib:
        found.append(
            f"spec.accelerator.memory has no effect: a process gets {row.memory_gib:g} GiB of {row.name}, "
            f"less than {given:g}; leave it out"
        )
    if workload.images and not facts.shape.encoder:
        found.append("spec.workload.imagesPerRequest has no effect: this model takes no images; leave it out")
    slots = settings.sequences * layout.data
    if workload.concurrency and workload.concurrency > slots:
        found.append(
            f"spec.workload.concurrency: {workload.concurrency} requests at once, but engines run {slots}; "
            "the others wait: raise spec.engine.maxNumSeqs"
        )
    if (pool.engine.context or 1) > layout.context:
        found.append(
            "spec.engine.decodeContextParallelSize has no effect: this layout has no GPUs that hold the same "
            "KV heads; leave it out"
        )
    found += _interconnect(pool, facts.shape, hardware, layout, settings)
    rollout = pool.rollout
    if rollout.startup_seconds:
        estimate, _ = pod_resources(
            replace(pool, rollout=replace(rollout, startup_seconds=None)), hardware, layout, memory, 0
        )
        if rollout.startup_seconds < estimate.startup_seconds / 2:
            found.append(
                f"spec.rollout.startupSeconds: pods that are not ready after {rollout.startup_seconds} s are "
                f"restarted, and loading may take {estimate.startup_seconds} s; leave it out unless measured"
            )
    return found


def _interconnect(
    pool: Pool, shape: ModelShape, hardware: Hardware, layout: Layout, settings: EngineSettings
) -> list[str]:
    """Return what the network between the nodes of a replica costs without RDMA, and RDMA of no use.

    Between pipeline stages vLLM sends two tensors of the hidden size for each token (``hidden_states`` and
    ``residual`` of the models' ``make_empty_intermediate_tensors_factory``).
    """
    rdma, nodes = pool.interconnect.rdma, hardware.nodes(layout)
    connected = pool.role or any("kv-transfer-config" in word for word in pool.engine.extra_args)
    if rdma and nodes == 1 and not connected:
        return ["spec.interconnect.rdma has no effect: a replica is on one node; leave it out"]
    if nodes == 1 or rdma:
        return []
    if layout.pipeline == 1:
        cost = "the data-parallel ranks exchange the activations of every token in each layer with experts"
    else:
        size = 2 * shape.hidden * shape.dtype_bytes * settings.batched_tokens
        seconds = size * 8 / (TCP_GIGABITS * 1e9)
        cost = (
            f"each step of {settings.batched_tokens} tokens sends {size / (1 << 20):.0f} MiB to the next "
            f"pipeline stage, {seconds * 1000:.0f} ms at {TCP_GIGABITS} Gbit/s"
        )
    return [f"spec.interconnect.rdma is not set, so {nodes} nodes of a replica use TCP: {cost}; set it"]
