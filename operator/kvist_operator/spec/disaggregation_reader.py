"""Reader of ``spec.disaggregation``, and the pool of each role. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvist_epp.names import LABEL_KV_COMPATIBILITY, LABEL_ROLES
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import flag_names

from .disaggregation import Disaggregation, Role, RoleSpec
from .fields import Fields, check_unique, read_env
from .pool import AcceleratorSpec, Pool

MODES: Final = ("Fluid", "Roles")
SCALING: Final = ("Spec", "External")
MIN_BYTES: Final = 1 << 20
SIZES: Final[Mapping[str, tuple[str, int, int]]] = {
    "tensorParallelSize": ("tensor", 1, 64),
    "pipelineParallelSize": ("pipeline", 1, 64),
    "dataParallelSize": ("data", 1, 64),
    "maxNumSeqs": ("max_num_seqs", 1, 65_536),
    "maxNumBatchedTokens": ("max_num_batched_tokens", 64, 1_048_576),
    "gpuMemoryUtilizationPercent": ("memory_percent", 10, 99),
}
"""Field of a role's ``engine`` → field of ``EngineSpec``, and its bounds."""
COMMON_FLAGS: Final = frozenset(
    (
        *("dtype", "block-size", "quantization", "hf-overrides", "model-impl", "load-format"),
        *("disable-hybrid-kv-cache-manager", "no-disable-hybrid-kv-cache-manager", "disable-sliding-window"),
        *("kv-cache-dtype-skip-layers", "kv-transfer-config", "prefix-caching-hash-algo"),
        *("mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode"),
        *("prefix-match-unit", "tokenizer", "tokenizer-revision", "tokenizer-mode", "enable-lora"),
        *("chat-template", "chat-template-content-format", "default-chat-template-kwargs"),
        *("reasoning-effort-map", "anthropic-disabled-thinking-effort"),
        "exclude-tools-when-tool-choice-none",
    )
)
"""Flags in which both roles have to agree: those behind the hash of NIXL's handshake
(``compute_nixl_compatibility_hash`` of vLLM 0.33), the size of blocks, and how prompts become tokens."""


def read_disaggregation(f: Fields | None) -> Disaggregation | None:
    """Return the fields; None without the section. Raises SpecError."""
    if f is None:
        return None
    mode = f.required("mode", f"one of {', '.join(MODES)}")
    mode = f.text("mode", choices=MODES)
    lease = f.number("leaseSeconds", 30, low=10, high=3600)
    roles = {role: f.optional(role) for role in (Role.PREFILL, Role.DECODE)}
    if mode == "Fluid":
        for role, given in roles.items():
            if given is not None:
                problem = "is for mode Roles; engines of mode Fluid are alike: leave it out"
                raise SpecError(f.at(role), problem)
        return f.done(Disaggregation(lease_seconds=lease))
    found = {role: _role(given or Fields({}, f.at(role))) for role, given in roles.items()}
    return f.done(
        Disaggregation(
            fluid=False, lease_seconds=lease, prefill=found[Role.PREFILL], decode=found[Role.DECODE]
        )
    )


def _role(f: Fields) -> RoleSpec:
    replicas = f.whole("replicas", low=0, high=10_000)
    external = f.text("scaling", "Spec", choices=SCALING) == "External"
    if external and replicas is not None:
        problem = "has no effect with scaling External, where an autoscaler sets it: leave one of them out"
        raise SpecError(f.at("replicas"), problem)
    return f.done(
        RoleSpec(
            replicas=replicas,
            external=external,
            accelerator=_accelerator(f.section("accelerator")),
            engine=_engine(f.section("engine")),
        )
    )


def _accelerator(f: Fields) -> dict[str, Any]:
    found = {
        "product": f.text("product", most=128),
        "memory_bytes": f.quantity("memory", low=MIN_BYTES),
        "resource": f.text("resourceName", pattern=r"[A-Za-z0-9./_-]+", like="nvidia.com/gpu", most=128),
        "count": f.whole("count", high=512),
        "per_node": f.whole("perNode", high=64),
    }
    return f.done({name: value for name, value in found.items() if value})


def _engine(f: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: f.whole(key, low=low, high=high) for key, (name, low, high) in SIZES.items()
    }
    found["extra_args"] = f.texts("extraArgs", most=64, each=4096)
    found["env"] = tuple(read_env(e) for e in f.sections("env", most=64))
    check_unique([entry["name"] for entry in found["env"]], f.at("env"), "leave one out")
    for _, flag in flag_names(found["extra_args"]):
        if flag in COMMON_FLAGS:
            problem = (
                f"--{flag} has to be equal in both roles, or they cannot exchange blocks: set it in "
                "spec.engine.extraArgs"
            )
            raise SpecError(f.at("extraArgs"), problem)
    return f.done({name: value for name, value in found.items() if value})


def check_disaggregation(pool: Pool) -> None:
    """Raise SpecError for a disaggregated pool whose other fields contradict that."""
    if pool.disaggregation is None:
        return
    if pool.picker.mode == "Off":
        problem = "Off: the picker sends prompts to the engines that prefill; set Auto, or leave it out"
        raise SpecError("spec.picker.mode", problem)
    labels = (pool.pod_template.get("metadata") or {}).get("labels") or {}
    for label in (*LABEL_ROLES, LABEL_KV_COMPATIBILITY):
        if label in labels:
            problem = "is set by the operator for spec.disaggregation; leave it out"
            raise SpecError(f"spec.podTemplate.metadata.labels.{label}", problem)
    for role, own in pools_by_role(pool).items():
        seqs, batched = own.engine.max_num_seqs, own.engine.max_num_batched_tokens
        if seqs and batched and batched < seqs:
            problem = (
                f"{batched} is less than maxNumSeqs ({seqs}), and each sequence takes a token a step: "
                "raise it"
            )
            raise SpecError(field_of_role(pool, role, "spec.engine.maxNumBatchedTokens"), problem)


def pools_by_role(pool: Pool) -> dict[Role, Pool]:
    """Return the pool as each role sees it, decode first; empty for a pool without disaggregation.

    Each has the role's accelerator, parallelism and arguments in the places of the pool's. An accelerator of
    another product or resource replaces the pool's as a whole.
    """
    spec = pool.disaggregation
    if spec is None:
        return {}
    if spec.fluid:
        return {Role.BOTH: replace(pool, role=Role.BOTH)}
    return {role: _of_role(pool, role, spec.of(role)) for role in (Role.DECODE, Role.PREFILL)}


def _of_role(pool: Pool, role: Role, spec: RoleSpec) -> Pool:
    given, engine = dict(spec.engine), pool.engine
    variables = {entry["name"]: entry for entry in (*engine.env, *given.pop("env", ()))}
    words = (*engine.extra_args, *given.pop("extra_args", ()))
    other = {"product", "resource"} & spec.accelerator.keys()
    accelerator = AcceleratorSpec() if other else pool.accelerator
    default = 1 if role is Role.PREFILL else pool.replicas
    return replace(
        pool,
        role=role,
        replicas=default if spec.replicas is None else spec.replicas,
        accelerator=replace(accelerator, **spec.accelerator),
        engine=replace(engine, **given, extra_args=words, env=tuple(variables.values())),
    )


def field_of_role(pool: Pool, role: Role, path: str) -> str:
    """Return the path of a field as the user wrote it: the role's own where the role sets it."""
    spec = pool.disaggregation
    if spec is None or spec.fluid:
        return path
    own, at = spec.of(role), f"spec.disaggregation.{role}"
    section, _, rest = path.removeprefix("spec.").partition(".")
    key = rest.partition("[")[0].partition(".")[0]
    names = {"extraArgs": "extra_args", "env": "env"} | {name: field for name, (field, *_) in SIZES.items()}
    if section == "engine" and names.get(key) in own.engine:
        return f"{at}.engine.{rest}"
    if section == "accelerator" and own.accelerator:
        return f"{at}.accelerator.{rest}"
    return path
