"""The arguments of ``vllm`` and the environment, from everything decided before. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from kvist_epp import names
from kvist_operator.engine_flags import EngineArgs, flag_names
from kvist_operator.errors import SpecError
from kvist_operator.memory.layout import Draft, EngineSettings, Layout
from kvist_operator.models.shape import Facts
from kvist_operator.spec.pool import Adapter, Pool, Source, Speculative

from .kv import KvChoice
from .plan import Choice, Hardware
from .pod import ADAPTER_MOUNT, DISK_MOUNT, MODEL_MOUNT
from .requirements import Wish

PORT: Final = 8000
HASH: Final = "sha256_cbor"
METHODS: Final = {
    "MTP": "mtp",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "DraftModel": "draft_model",
    "NGram": "ngram",
    "Suffix": "suffix",
}
LEADER: Final = "$(LWS_LEADER_ADDRESS)"
RANK: Final = "$(LWS_WORKER_INDEX)"
"""Variables a LeaderWorkerSet gives each pod; Kubernetes puts them into arguments."""


def draft_of(speculative: Speculative | None, mtp_layers: int, facts: Facts | None) -> Draft | None:
    """Return the cost of speculative decoding. Raises SpecError for MTP without the layers for it."""
    if speculative is None:
        return None
    if speculative.method == "MTP" and not mtp_layers:
        raise SpecError(
            "spec.engine.speculative.method",
            "MTP: this model has no layers for it; use EAGLE3, DraftModel or NGram",
        )
    return Draft(
        method=METHODS[speculative.method],
        tokens=speculative.tokens,
        shape=facts.model.shape if facts else None,
        checkpoint_bytes=facts.model.checkpoint_bytes if facts else 0,
    )


def arguments(
    pool: Pool,
    facts: Facts,
    hardware: Hardware,
    layout: Layout,
    settings: EngineSettings,
    kv: KvChoice,
    wish: Wish,
) -> EngineArgs:
    """Everything the plan decides; what vLLM derives well is left unset."""
    cpu = hardware.accelerator.vendor == "cpu"
    return EngineArgs(
        model=model_path(pool),
        served_model_name=pool.served_name,
        revision=pool.model.revision or None if pool.model.kind is Source.HUB else None,
        port=PORT,
        trust_remote_code=facts.remote_code and not _gives(pool, "trust-remote-code"),
        tensor_parallel_size=_above_one(layout.tensor),
        pipeline_parallel_size=_above_one(layout.pipeline),
        data_parallel_size=_above_one(layout.data),
        enable_expert_parallel=layout.expert,
        **_nodes(layout, hardware),
        max_model_len=settings.max_len,
        max_num_seqs=settings.sequences,
        max_num_batched_tokens=settings.batched_tokens,
        gpu_memory_utilization=settings.share / 100,
        kv_cache_memory_bytes=settings.kv_bytes if cpu else None,
        kv_cache_dtype=kv.flag,
        quantization="fp8" if settings.online_fp8 else None,
        attention_backend=pool.engine.attention_backend or None,
        enable_prefix_caching=pool.engine.prefix_caching,
        prefix_caching_hash_algo=HASH if pool.engine.prefix_caching else None,
        kv_events_config=kv_events(pool),
        **_offload(pool),
        speculative_config=speculative_config(pool.engine.speculative),
        scheduling_policy="priority" if by_priority(pool) else None,
        hf_overrides=wish.overrides,
        **_pictures(pool, facts),
        **_adapters(pool),
        **_parsers(pool, facts),
        enable_prompt_tokens_details=True,
        shutdown_timeout=pool.rollout.drain_seconds,
        extra=pool.engine.extra_args,
    )


def model_path(pool: Pool) -> str:
    """Return the model argument of ``vllm serve``."""
    match pool.model.kind:
        case Source.CLAIM:
            return f"{MODEL_MOUNT}/{pool.model.path}".rstrip("/")
        case Source.IMAGE:
            return MODEL_MOUNT
    return pool.model.location


def _above_one(number: int) -> int | None:
    return number if number > 1 else None


def _nodes(layout: Layout, hardware: Hardware) -> dict[str, Any]:
    nodes = -(-layout.gpus // hardware.per_node)
    return {"nnodes": nodes, "node_rank": RANK, "master_addr": LEADER} if nodes > 1 else {}


def events_on(pool: Pool) -> bool:
    """Engines publish KV events only where a picker reads them and prefix caching is on."""
    return pool.engine.prefix_caching and pool.picker.mode != "Off"


def kv_events(pool: Pool) -> Mapping[str, Any] | None:
    """The publisher's configuration: the ports the picker expects, and the replay that fills its gaps."""
    if not events_on(pool):
        return None
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{names.KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{names.KV_REPLAY_PORT}",
    }


def by_priority(pool: Pool) -> bool:
    """Requests carry priorities only where classes of them are declared."""
    if pool.engine.scheduling_policy:
        return pool.engine.scheduling_policy == "Priority"
    return bool(pool.picker.priorities)


def _offload(pool: Pool) -> dict[str, Any]:
    cpu, disk = pool.offload.cpu_bytes, pool.offload.disk_bytes
    if disk:
        return {"kv_transfer_config": _tiers(cpu)}
    return {"kv_offloading_size": round(cpu / 2**30, 2)} if cpu else {}


def _tiers(cpu: int) -> Mapping[str, Any]:
    tier = {"type": "fs", "root_dir": DISK_MOUNT}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": cpu, "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def speculative_config(speculative: Speculative | None) -> Mapping[str, Any] | None:
    """Return the value of ``--speculative-config``."""
    if speculative is None:
        return None
    config: dict[str, Any] = {
        "method": METHODS[speculative.method],
        "num_speculative_tokens": speculative.tokens,
    }
    if speculative.model:
        config["model"] = speculative.model.removeprefix("hf://")
    if speculative.method == "NGram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return config


def _pictures(pool: Pool, facts: Facts) -> dict[str, Any]:
    images = pool.workload.images
    if facts.model.shape.encoder is None or images is None:
        return {}
    return {"limit_mm_per_prompt": {"image": images}} if images else {"language_model_only": True}


def _adapters(pool: Pool) -> dict[str, Any]:
    adapters = pool.model.adapters
    if not adapters:
        return {}
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": max(adapter.rank for adapter in adapters),
        "lora_modules": tuple(f"{a.name}={adapter_path(a)}" for a in adapters),
    }


def _parsers(pool: Pool, facts: Facts) -> dict[str, Any]:
    """Return the parsers from the catalogue, unless the user sets them."""
    tool = "" if _gives(pool, "tool-call-parser") else facts.tool_parser
    reasoning = "" if _gives(pool, "reasoning-parser") else facts.reasoning_parser
    return {
        "enable_auto_tool_choice": bool(tool) and not _gives(pool, "enable-auto-tool-choice"),
        "tool_call_parser": tool or None,
        "reasoning_parser": reasoning or None,
    }


def adapter_path(adapter: Adapter) -> str:
    """Return the model's location: a repository, a path of the image, or the mount path."""
    scheme, colon, rest = adapter.source.partition("://")
    if colon and scheme != Source.HUB:
        return f"{ADAPTER_MOUNT}/{adapter.name}"
    return rest if colon else adapter.source


def _gives(pool: Pool, flag: str) -> bool:
    return any(name in (flag, f"no-{flag}") for _, name in flag_names(pool.engine.extra_args))


def environment(pool: Pool) -> dict[str, str]:
    """Return the variables that the plan sets, and the user's literal ones."""
    own = {"VLLM_NO_USAGE_STATS": "1"}
    given = {entry["name"]: entry["value"] for entry in pool.engine.env if "value" in entry}
    return {**own, **given}


def describe(pool: Pool, facts: Facts, settings: EngineSettings) -> list[Choice]:
    """The choices these arguments stand for, where others have not said them."""
    found = [_prefix(pool), _events(pool), *_spoken(facts), *_policy(pool)]
    if facts.remote_code:
        reason = (
            "the model's tokenizer is code of its repository; pin spec.model.revision to code you have read"
        )
        found.append(Choice("trustRemoteCode", True, reason, "catalogue"))
    if settings.online_fp8:
        found.append(
            Choice(
                "quantization",
                "fp8",
                "as asked: weights are quantised while loading",
                "spec.engine.quantization",
            )
        )
    if settings.draft:
        found.append(_speculating(settings.draft))
    if pool.offload.cpu_bytes:
        found.append(_offloading(pool))
    if pool.workload.images == 0 and facts.model.shape.encoder:
        found.append(
            Choice(
                "languageModelOnly",
                True,
                "no request has pictures: the tower stays out",
                "spec.workload.imagesPerRequest",
            )
        )
    return found


def _prefix(pool: Pool) -> Choice:
    if not pool.engine.prefix_caching:
        return Choice(
            "prefixCaching", False, "as asked; the picker routes by load alone", "spec.engine.prefixCaching"
        )
    reason = f"repeated prompts are computed once; {HASH} names blocks alike in every process"
    return Choice("prefixCaching", True, reason, "default")


def _events(pool: Pool) -> Choice:
    if events_on(pool):
        ports = f"{names.KV_EVENTS_PORT}, replay {names.KV_REPLAY_PORT}"
        return Choice(
            "kvEvents", ports, "the picker learns from them which pod holds which prefix", "spec.picker.mode"
        )
    why = "no prefix cache to announce" if not pool.engine.prefix_caching else "there is no picker"
    return Choice("kvEvents", "off", why, "spec.picker.mode")


def _spoken(facts: Facts) -> list[Choice]:
    named = {"toolCallParser": facts.tool_parser, "reasoningParser": facts.reasoning_parser}
    return [Choice(f, v, "what the model was trained to write", "catalogue") for f, v in named.items() if v]


def _policy(pool: Pool) -> list[Choice]:
    if not by_priority(pool):
        return []
    asked = bool(pool.engine.scheduling_policy)
    source = "spec.engine.schedulingPolicy" if asked else "spec.picker.priorities"
    return [Choice("schedulingPolicy", "priority", "as asked" if asked else "requests have classes", source)]


def _speculating(draft: Draft) -> Choice:
    what = (
        "its weights and cache are in the budget"
        if draft.shape or draft.method == "mtp"
        else "it takes no memory"
    )
    return Choice(
        "speculative",
        f"{draft.method}, {draft.tokens} tokens",
        f"as asked; {what}",
        "spec.engine.speculative",
    )


def _offloading(pool: Pool) -> Choice:
    size = f"{pool.offload.cpu_bytes / 2**30:g} GiB"
    disk = f", then {pool.offload.disk_bytes / 2**30:g} GiB of disk" if pool.offload.disk_bytes else ""
    reason = "blocks that leave the GPU are kept in /dev/shm; it and the memory limit are raised by as much"
    return Choice("offload", f"{size} of memory{disk}", reason, "spec.offload")
