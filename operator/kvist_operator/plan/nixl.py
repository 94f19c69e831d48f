"""vLLM's NixlConnector for ``spec.disaggregation``: what it refuses, its configuration, and who pairs. Pure.

Sources: ``distributed/kv_transfer/kv_connector/v1/nixl`` and ``config/vllm.py`` of vLLM 0.30 to 0.33. Engines
whose handshakes have different hashes (``compute_nixl_compatibility_hash``) exchange no blocks; pods carry a
hash of the same facts, and of those in which weights and prompts have to agree, so that the picker knows that
before it sends a request.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvist_operator.engine_version import EngineVersion
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import ExtraFlag
from kvist_operator.flag_table import Version, dotted
from kvist_operator.json_digest import json_digest
from kvist_operator.memory.layout import GIB, Layout
from kvist_operator.models.layers import Attention, Latent
from kvist_operator.models.shape import Facts, ModelShape
from kvist_operator.spec.disaggregation import Disaggregation, Role
from kvist_operator.spec.pool import Pool

from .plan import Choice, Plan

SINCE: Final[Version] = (0, 30)
"""First version whose connector is known: its parameters, its lease and its metrics."""
CONNECTOR: Final = "NixlConnector"
KV_ROLES: Final[Mapping[Role, str]] = {
    Role.PREFILL: "kv_producer",
    Role.DECODE: "kv_consumer",
    Role.BOTH: "kv_both",
}
SIDE_CHANNEL: Final = 5600
"""Port of rank 0 for handshakes (``VLLM_NIXL_SIDE_CHANNEL_PORT``); the ranks after it have the next ones."""
PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE: Final = "expandable_segments:True"
ROUTED_EXPERTS: Final = "enable-return-routed-experts"
TCP_GIGABITS: Final = 25
"""Speed of a network for which the cost of TCP is stated, as an example."""
EXAMPLE_PROMPT: Final = 8192
"""Tokens of the prompt in that example, where the workload does not say."""
QUIET: Final = ("VLLM_LOGGING_", "VLLM_API_KEY", "VLLM_NO_USAGE_STATS")
"""Beginnings of variables of vLLM that do not change blocks."""
LAYOUT: Final = "VLLM_SSM_CONV_STATE_LAYOUT"
DIGEST: Final = 16


def check_nixl(pool: Pool, version: EngineVersion, extra: Sequence[ExtraFlag]) -> None:
    """Raise SpecError for a pool whose engines could not exchange blocks, whatever their layout."""
    if pool.role is None:
        return
    if version.stated is not None and version.stated < SINCE:
        problem = (
            f"vLLM {dotted(version.stated)} is older than {dotted(SINCE)}, the first whose NixlConnector is "
            "known: use a newer spec.engine.image, or leave it out"
        )
        raise SpecError("spec.disaggregation", problem)
    if any(each.name == ROUTED_EXPERTS and each.on for each in extra):
        problem = f"--{ROUTED_EXPERTS} does not work with blocks of other engines: leave one of the two out"
        raise SpecError("spec.engine.extraArgs", problem)
    sleeps = any(each.name in ("enable-cumem-allocator", "enable-sleep-mode") and each.on for each in extra)
    for i, entry in enumerate(pool.engine.env):
        if entry["name"] == ALLOCATOR and EXPANDABLE in str(entry.get("value", "")) and not sleeps:
            problem = f"{EXPANDABLE} moves the memory that NIXL has registered: leave it out"
            raise SpecError(f"spec.engine.env[{i}].value", problem)


def check_role_layout(pool: Pool, shape: ModelShape, layout: Layout) -> None:
    """Raise SpecError for pipeline stages that the connector does not transfer."""
    if pool.role is None or layout.pipeline == 1:
        return
    if pool.role is Role.PREFILL and not _several_kinds(shape):
        return
    which = "engines that decode" if pool.role is not Role.PREFILL else "models with layers of several kinds"
    problem = (
        f"{layout.pipeline} stages: NixlConnector has none for {which}: let an engine fit one node (larger "
        "accelerators, a smaller spec.engine.maxModelLen, spec.engine.dataParallelSize), or leave "
        "spec.disaggregation out"
    )
    raise SpecError("spec.engine.pipelineParallelSize", problem)


def _several_kinds(shape: ModelShape) -> bool:
    return len({type(mixer) for mixer in shape.mixers}) > 1 or _windows(shape)


def _windows(shape: ModelShape) -> bool:
    return len({m.window for m in shape.mixers if isinstance(m, Attention)}) > 1


def _recurrent(shape: ModelShape) -> bool:
    return any(not isinstance(mixer, Attention | Latent) for mixer in shape.mixers)


def check_sizes(shape: ModelShape, prefill: Layout, decode: Layout) -> None:
    """Raise SpecError for parallel sizes of two roles between which the connector transfers nothing.

    A decode rank reads from the prefill ranks that have its heads, so that sizes divide one another; several
    prefill ranks for one decode rank are for MLA models, of which each rank has everything.
    """
    own, other = decode.tensor, prefill.tensor
    field = "spec.disaggregation.decode.engine.tensorParallelSize"
    if max(own, other) % min(own, other):
        problem = f"{own} and prefill's {other} do not divide one another: set both to powers of two"
        raise SpecError(field, problem)
    if other > own and not shape.latent:
        problem = (
            f"{own} is less than prefill's {other}, from which NixlConnector reads models with latent "
            f"attention (MLA) only: set it to {other}, or prefill's to {own}"
        )
        raise SpecError(field, problem)
    sizes = sorted((decode.context, prefill.context))
    if sizes[1] % sizes[0] or (_recurrent(shape) and sizes[0] != sizes[1]):
        problem = f"{sizes[0]} and {sizes[1]} in the two roles cannot exchange blocks: set one that both have"
        raise SpecError("spec.engine.decodeContextParallelSize", problem)


def nixl_connector(role: Role, spec: Disaggregation) -> dict[str, Any]:
    """Return the configuration of the connector.

    Blocks that cannot be read are computed again: by default vLLM would answer with an error. Engine ids are
    left to vLLM, so that a restarted engine is a new peer (vllm#49238).
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_role": KV_ROLES[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": spec.lease_seconds},
    }


def nixl_environment(pool: Pool, facts: Facts) -> dict[str, str]:
    """Return the variables of engines that exchange blocks, besides the pod's address.

    UCX chooses devices and transports by itself; its cache of registrations is bounded as vLLM does where
    the variable is absent (``distributed/nixl_utils.py``).
    """
    if pool.role is None:
        return {}
    found = {PORT_VARIABLE: str(SIDE_CHANNEL), "UCX_RCACHE_MAX_UNRELEASED": "1024"}
    return found | ({LAYOUT: "DS"} if _recurrent(facts.shape) else {})


def nixl_doubts(pool: Pool, facts: Facts, version: EngineVersion) -> list[str]:
    """Return why engines that exchange blocks may not run as planned."""
    if pool.role is None:
        return []
    found = []
    if version.stated is None:
        found.append(
            f"spec.disaggregation: the vLLM of {pool.engine.image} is not known, nor whether it has NIXL: "
            "set spec.engine.version"
        )
    if _recurrent(facts.shape):
        found.append(
            "spec.disaggregation: vLLM's transfer of recurrent states (Mamba, linear attention) is new, and "
            "the last tokens of a prompt are computed again"
        )
    return found


def describe_role(pool: Pool, plan_bytes: float) -> list[Choice]:
    """Return what the role of the engines means for their plan, and what a transfer costs.

    ``plan_bytes``: bytes of the blocks of one token, the parts of all ranks of an engine.
    """
    if pool.role is None or pool.disaggregation is None:
        return []
    reasons = {
        Role.PREFILL: "prompts are computed here and their blocks sent to engines that decode; prefill is "
        "bound by compute: large steps, few sequences, little cache",
        Role.DECODE: "answers are written here; decoding is bound by the cache and by memory bandwidth: many "
        "sequences, much cache; it computes prompts by itself where that is sooner",
        Role.BOTH: "every engine computes prompts and writes answers, and sends blocks to the others; the "
        "picker decides for each request",
    }
    lease = pool.disaggregation.lease_seconds
    kept = f"blocks of a computed prompt are kept for {lease} s; what cannot be read is computed again"
    return [
        Choice("role", str(pool.role), reasons[pool.role], "spec.disaggregation"),
        Choice("kvTransfer", *_transfer(pool, plan_bytes), "spec.interconnect.rdma"),
        Choice("kvLease", f"{lease} s", kept, "spec.disaggregation.leaseSeconds"),
    ]


def _transfer(pool: Pool, plan_bytes: float) -> tuple[str, str]:
    tokens = pool.workload.prompt_tokens or EXAMPLE_PROMPT
    size = tokens * plan_bytes
    amount = f"the blocks of {tokens:,} tokens have {size / GIB:.1f} GiB"
    rdma = pool.interconnect.rdma
    if rdma:
        return f"{CONNECTOR} over {rdma.resource}", f"{amount}, which RDMA sends without the CPUs"
    seconds = size * 8 / (TCP_GIGABITS * 1e9)
    cost = f"{amount} and take {1000 * seconds:,.0f} ms at {TCP_GIGABITS} Gbit/s, beside other traffic"
    return f"{CONNECTOR} over TCP", cost


def kv_compatibility(pool: Pool, plan: Plan, version: EngineVersion, facts: Facts) -> str:
    """Return the value of the label ``kvist.dev/kv-compatibility`` of the engines of a pool, all roles alike.

    ``pool`` is the whole pool, not that of a role: what roles may differ in (parallelism, sizes of steps,
    their own arguments) is not among the facts.
    """
    chosen = {choice.field: str(choice.value) for choice in plan.choices}
    draft, settings = pool.engine.speculative, plan.settings
    offload = pool.offload
    tiers = "lmcache" if offload.lmcache else "offloading" if offload.needs_connector else ""
    agreed = {
        "connector": f"{CONNECTOR} {tiers}".strip(),
        "image": pool.engine.image,
        "engine": dotted(version.stated) if version.stated else "",
        "model": plan.argv[1],
        "revision": pool.model.revision,
        "dtype": f"{facts.shape.dtype} {pool.engine.quantization}".strip(),
        "kvCacheDtype": f"{settings.kv_dtype}{', without windows' if settings.plain_windows else ''}",
        "attentionBackend": f"{chosen.get('attentionBackend', '')} {plan.hardware.accelerator.vendor}",
        "block": str(settings.block),
        "speculative": f"{draft.method} {draft.tokens} {draft.model}" if draft else "",
        "adapters": sorted(f"{each.name}={each.source}" for each in pool.model.adapters),
        "extraArgs": list(pool.engine.extra_args),
        "variables": block_variables(pool, "VLLM_NIXL_SIDE_CHANNEL_"),
    }
    return json_digest(agreed, DIGEST)


def block_variables(pool: Pool, *also_quiet: str) -> list[str]:
    """Return the engines' own variables that may change what blocks contain, as ``name=value``, sorted.

    ``also_quiet``: beginnings of more variables that do not.
    """
    own = {entry["name"]: str(entry.get("value", "")) for entry in pool.engine.env}
    quiet = (*QUIET, *also_quiet)
    return [
        f"{name}={value}"
        for name, value in sorted(own.items())
        if name.startswith("VLLM_") and not name.startswith(quiet)
    ]
