"""Fields of a pool that contradict each other, and fields that have no effect. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvist_kube.quantity import parse_quantity
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import flag_names

from .pod_template import ENVOYS, remarks
from .pool import AcceleratorSpec, GatewaySpec, Pool, Source

GIB: Final = 1 << 30
MOST_MEMORY: Final = 32 << 40
"""Bytes of memory of the largest nodes that clouds offer (AWS U7inh: 32 TiB); those with GPUs have less."""
MOST_DISK: Final = 1 << 50
"""Bytes of local disk beyond those of any node that clouds offer."""
MOST_GPU_MEMORY: Final = 4 << 40
"""Bytes of memory beyond those of one accelerator."""
SECRETS: Final[Mapping[str, str]] = {
    "HF_TOKEN": "set spec.model.tokenSecretRef",
    "HUGGING_FACE_HUB_TOKEN": "set spec.model.tokenSecretRef",
    "VLLM_API_KEY": "set spec.engine.apiKeySecretRef",
    "AWS_SECRET_ACCESS_KEY": "use valueFrom.secretKeyRef",
    "OPENAI_API_KEY": "use valueFrom.secretKeyRef",
}
"""Variables that hold a secret, and what to write instead of its value."""
API_KEY_VARIABLE: Final = "VLLM_API_KEY"
"""Read by vLLM if it has no ``--api-key`` (0.33: ``entrypoints/serve/middleware/register.py``); one key."""
DEVICES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
IMAGE: Final = (
    r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@[A-Za-z0-9]+:[A-Za-z0-9]+)?"
)
"""An image reference: registry and port, path, tag, digest."""
RESOURCE_NAMES: Final = ("cpu", "memory", "ephemeral-storage")


def check_pool(pool: Pool) -> None:
    """Raise SpecError for fields that contradict each other, or have a value that no cluster can give."""
    _check_names(pool)
    _check_images(pool)
    _check_accelerator(pool.accelerator)
    _check_sizes(pool)
    _check_lengths(pool)
    _check_environment(pool)
    _check_resources(pool.picker.resources)
    _check_gateway(pool)


def warnings(pool: Pool) -> list[str]:
    """Return the fields without effect, and unknown fields of the pods, in a sentence each."""
    return [*_ignored(pool), *remarks(pool)]


def _check_names(pool: Pool) -> None:
    for i, adapter in enumerate(pool.model.adapters):
        if adapter.name == pool.served_name:
            own = "spec.model.servedName" if pool.model.served_name else "the pool"
            problem = f"{adapter.name!r} is also the model's name, by {own}: give the adapter another name"
            raise SpecError(f"spec.model.adapters[{i}].name", problem)


def _check_images(pool: Pool) -> None:
    for field, image in (("spec.engine.image", pool.engine.image), ("spec.picker.image", pool.picker.image)):
        if image and not re.fullmatch(IMAGE, image):
            problem = f"{image!r} is not an image reference: write it like vllm/vllm-openai:v0.33.0"
            raise SpecError(field, problem)


def _check_accelerator(spec: AcceleratorSpec) -> None:
    cpu = "cpu" in (spec.resource, spec.product.lower())
    if not cpu and spec.memory_bytes > MOST_GPU_MEMORY:
        problem = f"{_text(spec.memory_bytes)} is more than one accelerator has: write that of one, like 80Gi"
        raise SpecError("spec.accelerator.memory", problem)
    count, per_node = spec.count, spec.per_node
    if count and per_node and count > per_node and count % per_node:
        problem = f"{count} accelerators do not fill nodes with {per_node}: use a multiple of perNode"
        raise SpecError("spec.accelerator.count", problem)


def _check_sizes(pool: Pool) -> None:
    for field, given, most, what in (
        ("spec.offload.cpu", pool.offload.cpu_bytes, MOST_MEMORY, "memory"),
        ("spec.accelerator.memory", pool.accelerator.memory_bytes, MOST_MEMORY, "memory"),
        ("spec.offload.disk", pool.offload.disk_bytes, MOST_DISK, "disk"),
    ):
        if given > most:
            problem = f"{_text(given)} is more {what} than a node has: write that of one pod, like 64Gi"
            raise SpecError(field, problem)


def _text(number: int) -> str:
    return f"{number / GIB:,.0f} GiB"


def _check_lengths(pool: Pool) -> None:
    length, workload = pool.engine.max_model_len, pool.workload
    prompt = workload.prompt_tokens or 0
    whole = prompt + (workload.output_tokens or 0)
    if length and prompt and whole > length:
        added = " and outputTokens add up to" if workload.output_tokens else " is"
        problem = f"promptTokens{added} {whole}, more than spec.engine.maxModelLen ({length}): raise that"
        raise SpecError("spec.workload", problem)


def _check_environment(pool: Pool) -> None:
    _check_api_key(pool)
    for part, variables in (("engine", pool.engine.env), ("picker", pool.picker.env)):
        for i, entry in enumerate(variables):
            field, name, value = f"spec.{part}.env[{i}]", entry["name"], str(entry.get("value") or "")
            if name in SECRETS and value and "$(" not in value:
                problem = f"{name} puts a secret into the pool, where many can read it: {SECRETS[name]}"
                raise SpecError(f"{field}.value", problem)
            if name in DEVICES and part == "engine":
                problem = f"{name} is set by the device plugin: leave it out, and set spec.accelerator.count"
                raise SpecError(f"{field}.name", problem)


def _check_api_key(pool: Pool) -> None:
    """Raise SpecError for a second API key, which engines would take instead of that of the picker."""
    if pool.engine.api_key is None:
        return
    others = [f"spec.engine.env[{i}]" for i, e in enumerate(pool.engine.env) if e["name"] == API_KEY_VARIABLE]
    if "api-key" in (name for _, name in flag_names(pool.engine.extra_args)):
        others.append("spec.engine.extraArgs")
    if others:
        problem = "is a second API key beside spec.engine.apiKeySecretRef: leave one of them out"
        raise SpecError(others[0], problem)


def _check_gateway(pool: Pool) -> None:
    if pool.gateway.of_extension and not pool.gateway.has_route and pool.picker.mode == "Off":
        raise SpecError(
            "spec.gateway.parentRefs",
            "is missing: with spec.picker.mode Off there is no InferencePool that routes of your own could "
            "name; name the Gateway, or set spec.gateway.mode to None and route to the pool's Service",
        )


def _check_resources(found: Mapping[str, Any]) -> None:
    """Raise SpecError for an unknown resource, and for a request beyond its limit."""
    for kind, amounts in found.items():
        for name in amounts:
            if name not in RESOURCE_NAMES and "/" not in name and not name.startswith("hugepages-"):
                problem = f"is not a resource: use one of {', '.join(RESOURCE_NAMES)}"
                raise SpecError(f"spec.picker.resources.{kind}.{name}", problem)
    limits = found.get("limits") or {}
    for name, request in (found.get("requests") or {}).items():
        if name in limits and parse_quantity(str(request)) > parse_quantity(str(limits[name])):
            problem = f"{request} is more than the limit of {limits[name]}: raise limits.{name}"
            raise SpecError(f"spec.picker.resources.requests.{name}", problem)


def _ignored(pool: Pool) -> Iterator[str]:
    model, picker = pool.model, pool.picker
    if model.kind is not Source.HUB:
        if model.revision:
            yield f"spec.model.revision has no effect: {model.kind} has no revisions; leave it out"
        hub = [each.source for each in model.adapters if each.source.startswith(Source.HUB)]
        draft = pool.engine.speculative.model if pool.engine.speculative else ""
        if model.token and not hub and not draft:
            yield "spec.model.tokenSecretRef has no effect: nothing is loaded from the hub; leave it out"
    if picker.mode == "Off":
        names = ("priorities", "tokenizer", "image", "resources", "env")
        for name in (name for name in names if getattr(picker, name)):
            yield f"spec.picker.{name} has no effect: spec.picker.mode is Off; leave it out"
        helpers = (model.cache and model.cache.claim) or pool.offload.shared
        if picker.pod_template and not helpers:
            yield "spec.picker.podTemplate has no effect: spec.picker.mode is Off; leave it out"
    by_hand = [e for e in pool.engine.env if e["name"] == API_KEY_VARIABLE]
    if by_hand and picker.mode != "Off":
        yield (
            f"spec.engine.env: {API_KEY_VARIABLE} is not known to the picker, which then cannot prewarm: set "
            "spec.engine.apiKeySecretRef"
        )
    preset = pool.preset.fields if pool.preset else ()  # one that is for pools with and without these
    yield from _ignored_gateway(pool.gateway, preset)
    if (pool.engine.max_loras or pool.engine.max_cpu_loras) and not model.adapters:
        yield "spec.engine.maxLoras and maxCpuLoras have no effect without spec.model.adapters; drop both"
    if pool.engine.scheduling_policy == "FCFS" and picker.priorities:
        yield (
            "spec.engine.schedulingPolicy is FCFS, so priorities order requests in the picker only: set "
            "Priority, or leave it out"
        )
    if pool.offload.needs_connector and not pool.engine.prefix_caching:
        yield "spec.offload has no effect while prefixCaching is Disabled; leave it out"
    if pool.workload.shared_prefix_tokens and not pool.engine.prefix_caching:
        yield "spec.workload.sharedPrefixTokens has no effect while prefixCaching is Disabled; leave it out"


def _ignored_gateway(gateway: GatewaySpec, preset: Sequence[str]) -> Iterator[str]:
    own = not any(each.startswith(ENVOYS.path) for each in preset)
    if gateway.pod_template and gateway.mode != "Envoy" and own:
        yield f"spec.gateway.podTemplate has no effect: spec.gateway.mode is {gateway.mode}; leave it out"
    if gateway.mode == "Route":
        if gateway.hostnames and not gateway.has_route and "spec.gateway.hostnames" not in preset:
            yield "spec.gateway.hostnames has no effect without parentRefs: routes of your own name theirs"
        return
    given = {"parentRefs": gateway.parents, "hostnames": gateway.hostnames}
    for name in (name for name, value in given.items() if value):
        remedy = "set it to Route, or leave it out"
        yield f"spec.gateway.{name} has no effect: spec.gateway.mode is {gateway.mode}; {remedy}"
    if gateway.flavor != "InferencePool":
        yield f"spec.gateway.flavor has no effect: spec.gateway.mode is {gateway.mode}; set it to Route"
