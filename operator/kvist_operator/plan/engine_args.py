"""Arguments of ``vllm serve`` and environment of the engine, from all that was decided before. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from kvist_epp import names
from kvist_operator.engine_flags import MERGED, YIELDING, EngineArgs
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import ExtraFlag, check_shared, flag_names, merge_json
from kvist_operator.memory.layout import Draft, EngineSettings, Layout
from kvist_operator.models.shape import Facts
from kvist_operator.spec.pool import OBJECT_STORES, Adapter, Pool, Source, Speculative, Task

from .kv import KvChoice
from .kv_transfer import HASH, transfer_arguments, transfer_environment
from .plan import Choice, Hardware
from .requirements import Requirements
from .resources import ADAPTER_MOUNT, MODEL_MOUNT, STREAM_BUFFER

STORE_FORMATS: Final = ("runai_streamer", "runai_streamer_sharded", "modelexpress", "auto")
"""Values of ``--load-format`` with which vLLM reads object stores; auto becomes the first one."""
STREAM_LIMIT: Final = "RUNAI_STREAMER_MEMORY_LIMIT"

PORT: Final = 8000
METHODS: Final = {
    "MTP": "mtp",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "DraftModel": "draft_model",
    "NGram": "ngram",
    "Suffix": "suffix",
}
ADAPTERS_AT_ONCE: Final = 8
"""Most adapters of one step unless the user sets a number: each takes GPU memory whether used or not."""
LEAST_CACHE: Final = 1 << 20
"""Bytes for the KV cache that an encoder on a CPU does not have: without a number vLLM starts only if the
memory share of the whole node is free (vLLM 0.32: ``v1/worker/cpu_worker.py``)."""
LEADER: Final = "$(LWS_LEADER_ADDRESS)"
RANK: Final = "$(LWS_WORKER_INDEX)"
"""Variables that a LeaderWorkerSet sets in each pod; Kubernetes expands them in arguments."""


def read_draft(speculative: Speculative | None, mtp_layers: int, facts: Facts | None) -> Draft | None:
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
        shape=facts.shape if facts else None,
        checkpoint_bytes=facts.checkpoint_bytes if facts else 0,
    )


def arguments(
    pool: Pool,
    facts: Facts,
    hardware: Hardware,
    layout: Layout,
    settings: EngineSettings,
    kv: KvChoice,
    required: Requirements,
    extra: Sequence[ExtraFlag],
    folder: str = "",
) -> EngineArgs:
    """Return all arguments that the plan decides; arguments that vLLM derives well are left unset.

    ``folder``: the namespace of blocks that outlive a pod.

    Raises:
        SpecError: a flag of ``spec.engine.extraArgs`` that this plan sets, too.
    """
    cpu = hardware.accelerator.vendor == "cpu"
    nodes = hardware.nodes(layout)
    over_nodes = {"nnodes": nodes, "node_rank": RANK, "master_addr": LEADER} if nodes > 1 else {}
    planned = EngineArgs(
        model=model_argument(pool),
        served_model_name=pool.served_name,
        revision=pool.model.revision or None if pool.model.kind is Source.HUB else None,
        port=PORT,
        trust_remote_code=facts.remote_code and not _user_sets(pool, "trust-remote-code"),
        load_format=_load_format(pool, extra),
        tensor_parallel_size=layout.tensor if layout.tensor > 1 else None,
        pipeline_parallel_size=layout.pipeline if layout.pipeline > 1 else None,
        data_parallel_size=layout.data if layout.data > 1 else None,
        decode_context_parallel_size=layout.context if layout.context > 1 else None,
        enable_expert_parallel=layout.expert,
        **over_nodes,  # type: ignore[arg-type]
        runner=_runner(pool, facts, settings),
        max_model_len=_max_model_len(pool, facts, settings),
        max_num_seqs=settings.sequences,
        max_num_batched_tokens=settings.batched_tokens,
        gpu_memory_utilization=settings.share / 100,
        kv_cache_memory_bytes=(settings.kv_bytes or LEAST_CACHE) if cpu else None,
        kv_cache_dtype=kv.flag,
        kv_cache_dtype_skip_layers=("sliding_window",)
        if kv.plain_windows and not _user_sets(pool, "kv-cache-dtype-skip-layers")
        else None,
        quantization="fp8" if settings.online_fp8 else None,
        attention_backend=pool.engine.attention_backend or None,
        **_prefix_caching(pool, settings),
        **transfer_arguments(
            pool, hardware, layout, settings, folder, events=publishes_kv_events(pool, settings)
        ),
        speculative_config=_speculative_config(pool.engine.speculative),
        scheduling_policy="priority" if pool.by_priority else None,
        hf_overrides=required.overrides,
        **_images(pool, facts),
        **_adapters(pool),
        **_parsers(pool, facts),
        enable_prompt_tokens_details=settings.pooling is None,
        otlp_traces_endpoint=pool.tracing.endpoint if pool.tracing and pool.tracing.engines else None,
        shutdown_timeout=pool.rollout.drain_seconds,
        extra=pool.engine.extra_args,
    )
    return _with_extra(planned, extra)


def _with_extra(planned: EngineArgs, extra: Sequence[ExtraFlag]) -> EngineArgs:
    """Return the arguments with the user's flags: those that yield are left to the user, JSON is merged."""
    given = {each.name for each in extra}
    yielding = {name.replace("-", "_") for name in YIELDING if name in given}
    unset: dict[str, Any] = {f.name: f.default for f in fields(planned) if f.name in yielding}
    planned = replace(planned, **unset)
    check_shared(extra, planned.names())
    if not planned.hf_overrides or MERGED not in given:
        return planned
    merged = merge_json(extra, MERGED, dict(planned.hf_overrides), "spec.engine.maxModelLen")
    own = {at for each in extra if each.name == MERGED for at in range(each.at, each.at + each.words)}
    words = tuple(word for at, word in enumerate(planned.extra) if at not in own)
    return replace(planned, hf_overrides=merged, extra=words)


def model_argument(pool: Pool) -> str:
    """Return the first argument, the name or path of the model."""
    match pool.model.kind:
        case Source.CLAIM:
            return f"{MODEL_MOUNT}/{pool.model.path}".rstrip("/")
        case Source.IMAGE:
            return MODEL_MOUNT
        case Source.S3 | Source.GCS:
            return f"{pool.model.kind}://{pool.model.location}"
    return pool.model.location


def _load_format(pool: Pool, extra: Sequence[ExtraFlag]) -> str | None:
    """Return the loader for weights in an object store; None where vLLM or the user chooses.

    Raises:
        SpecError: the user's loader does not read object stores (``vllm/config/vllm.py`` of 0.30 to 0.33).
    """
    if pool.model.kind not in OBJECT_STORES:
        return None
    given = next((each.values[-1] for each in reversed(extra) if each.name == "load-format"), "")
    if given and given not in STORE_FORMATS:
        problem = f"--load-format {given} does not read {pool.model.kind}://: leave it out"
        raise SpecError("spec.engine.extraArgs", problem)
    return None if given else STORE_FORMATS[0]


def publishes_kv_events(pool: Pool, settings: EngineSettings) -> bool:
    """Return whether engines publish KV events: a picker reads them, and routes by prefixes."""
    return settings.routes_by_prefix and pool.picker.mode != "Off"


def _runner(pool: Pool, facts: Facts, settings: EngineSettings) -> str | None:
    """Return vLLM's runner where it matters: vLLM's own rules depend on files that it looks for."""
    if settings.pooling:
        return "pooling"
    return "generate" if pool.model.task is Task.GENERATE and facts.shape.pooling else None


def _max_model_len(pool: Pool, facts: Facts, settings: EngineSettings) -> int | None:
    """Return the length, or None to leave that of a pooling model to vLLM: a file that was not read may
    limit it further, and vLLM refuses to start with more."""
    shape = facts.shape
    unknown = settings.pooling and not shape.length_known and settings.max_len == shape.max_len
    return None if unknown and not pool.engine.max_model_len else settings.max_len


def _prefix_caching(pool: Pool, settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments for prefixes, with the ports of KV events that the picker expects and the replay
    for its gaps. For pooling models vLLM decides by itself whether prefixes can be cached."""
    if settings.pooling:
        off = settings.pooling.caches_prefixes and not pool.engine.prefix_caching
        return {"enable_prefix_caching": False} if off else {}
    found: dict[str, Any] = {"enable_prefix_caching": pool.engine.prefix_caching}
    if pool.engine.prefix_caching:
        found["prefix_caching_hash_algo"] = HASH
    if publishes_kv_events(pool, settings):
        found["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{names.KV_EVENTS_PORT}",
            "replay_endpoint": f"tcp://*:{names.KV_REPLAY_PORT}",
        }
    return found


def _speculative_config(speculative: Speculative | None) -> Mapping[str, Any] | None:
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


def _images(pool: Pool, facts: Facts) -> dict[str, Any]:
    images = pool.workload.images
    if facts.shape.encoder is None or images is None:
        return {}
    return {"limit_mm_per_prompt": {"image": images}} if images else {"language_model_only": True}


def _adapters(pool: Pool) -> dict[str, Any]:
    adapters = pool.model.adapters
    if not adapters:
        return {}
    at_once, kept = adapter_numbers(pool)
    return {
        "enable_lora": True,
        "max_loras": at_once,
        "max_cpu_loras": kept if kept > at_once else None,
        "max_lora_rank": max(adapter.rank for adapter in adapters),
        "lora_modules": tuple(f"{adapter.name}={_adapter_path(adapter)}" for adapter in adapters),
    }


def adapter_numbers(pool: Pool) -> tuple[int, int]:
    """Return how many adapters a step may use, in GPU memory, and how many are kept in the host's memory."""
    count = len(pool.model.adapters)
    at_once = pool.engine.max_loras or min(count, ADAPTERS_AT_ONCE)
    return at_once, pool.engine.max_cpu_loras or max(count, at_once)


def _adapter_path(adapter: Adapter) -> str:
    scheme, colon, rest = adapter.source.partition("://")
    if colon and scheme != Source.HUB:
        return f"{ADAPTER_MOUNT}/{adapter.name}"
    return rest if colon else adapter.source


def _parsers(pool: Pool, facts: Facts) -> dict[str, Any]:
    """Return the parsers from the catalogue, unless the user sets them."""
    tool = "" if _user_sets(pool, "tool-call-parser") else facts.tool_parser
    reasoning = "" if _user_sets(pool, "reasoning-parser") else facts.reasoning_parser
    return {
        "enable_auto_tool_choice": bool(tool) and not _user_sets(pool, "enable-auto-tool-choice"),
        "tool_call_parser": tool or None,
        "reasoning_parser": reasoning or None,
    }


def _user_sets(pool: Pool, flag: str) -> bool:
    return any(name in (flag, f"no-{flag}") for _, name in flag_names(pool.engine.extra_args))


def environment(pool: Pool, facts: Facts) -> dict[str, str]:
    """Return the variables that the plan sets, and the user's literal ones."""
    given = {entry["name"]: entry["value"] for entry in pool.engine.env if "value" in entry}
    stream = {STREAM_LIMIT: str(STREAM_BUFFER)} if pool.model.kind in OBJECT_STORES else {}
    return {"VLLM_NO_USAGE_STATS": "1", **stream, **transfer_environment(pool, facts), **given}


def describe_arguments(pool: Pool, facts: Facts, settings: EngineSettings) -> list[Choice]:
    """Return the choices behind these arguments, except those that other modules describe."""
    found = [] if settings.pooling else [_describe_prefix_caching(pool), _describe_kv_events(pool, settings)]
    for field, parser in (
        ("toolCallParser", facts.tool_parser),
        ("reasoningParser", facts.reasoning_parser),
    ):
        if parser:
            found.append(
                Choice(field, parser, "the format the model was trained to write", facts.parser_source)
            )
    if pool.by_priority:
        asked = bool(pool.engine.scheduling_policy)
        source = "spec.engine.schedulingPolicy" if asked else "spec.picker.priorities"
        reason = "as requested" if asked else "requests have priority classes"
        found.append(Choice("schedulingPolicy", "priority", reason, source))
    if facts.remote_code:
        reason = "the tokenizer is code of the repository; pin spec.model.revision to code you have read"
        found.append(Choice("trustRemoteCode", True, reason, "catalogue"))
    if settings.online_fp8:
        reason = "as requested: weights are quantized while loading"
        found.append(Choice("quantization", "fp8", reason, "spec.engine.quantization"))
    if pool.model.adapters:
        found += _describe_adapters(pool)
    draft = settings.draft
    if draft is None and facts.shape.mtp_layers:
        reason = (
            "the checkpoint has layers for multi-token prediction: spec.engine.speculative with method MTP "
            "and tokens 1 shortens the time per token at low load; measure it on your prompts"
        )
        found.append(Choice("speculative", "off", reason, "config.json: num_nextn_predict_layers"))
    if draft:
        counted = "the memory includes its weights and cache" if draft.shape or draft.is_mtp else "no memory"
        value = f"{draft.method}, {draft.tokens} tokens"
        found.append(Choice("speculative", value, f"as requested; {counted}", "spec.engine.speculative"))
    if pool.workload.images == 0 and facts.shape.encoder:
        reason = "no request has images: the vision tower is not loaded"
        found.append(Choice("languageModelOnly", True, reason, "spec.workload.imagesPerRequest"))
    return found


def _describe_adapters(pool: Pool) -> list[Choice]:
    at_once, kept = adapter_numbers(pool)
    found = []
    for field, value, given, reason in (
        ("maxLoras", at_once, pool.engine.max_loras, "adapters that one step may use, each in GPU memory"),
        (
            "maxCpuLoras",
            kept,
            pool.engine.max_cpu_loras,
            "adapters in the host's memory; others are read again",
        ),
    ):
        source = f"spec.engine.{field}" if given else "spec.model.adapters"
        found.append(Choice(field, value, reason, source))
    return found


def _describe_prefix_caching(pool: Pool) -> Choice:
    if not pool.engine.prefix_caching:
        reason = "as requested; the picker routes by load alone"
        return Choice("prefixCaching", False, reason, "spec.engine.prefixCaching")
    reason = f"repeated prefixes are computed once; {HASH} gives equal block hashes in every process"
    return Choice("prefixCaching", True, reason, "default")


def _describe_kv_events(pool: Pool, settings: EngineSettings) -> Choice:
    if publishes_kv_events(pool, settings):
        ports = f"{names.KV_EVENTS_PORT}, replay {names.KV_REPLAY_PORT}"
        reason = "the picker learns from them which endpoint caches which prefix"
        return Choice("kvEvents", ports, reason, "spec.picker.mode")
    reason = "there is no picker" if pool.engine.prefix_caching else "there is no prefix cache to report"
    return Choice("kvEvents", "off", reason, "spec.picker.mode")
