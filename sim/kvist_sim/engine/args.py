"""Settings of the simulator from a parsed command line: the vLLM flags it uses, and its own.

What vLLM derives is derived the same way where the outside can see it (``vllm/engine/arg_utils.py``,
``vllm/config/{scheduler,kv_events}.py``); what only hardware could tell has a default of ours (``timing``).
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from kvist_epp.errors import SettingsError
from kvist_sim import model
from kvist_sim.engine import flags
from kvist_sim.engine.offload import OffloadSettings, read_offload
from kvist_sim.engine.tiers import NVME, PCIE
from kvist_sim.engine.timing import KV_BYTES_PER_TOKEN, KV_CACHE_TOKENS, Timing

BLOCK: Final = 16
"""vLLM's block on CUDA with the usual backends."""
H100_SEQUENCES: Final = 1_024
H100_BATCHED_TOKENS: Final = 8_192
"""``get_batch_defaults`` for ``vllm serve`` on a device of at least 70 GiB."""
EIGHT_BIT: Final = ("fp8", "int8")
"""Prefixes of cache types that halve the bytes per token."""


@dataclass(frozen=True, slots=True)
class KvEvents:
    """vLLM's ``KVEventsConfig``, field by field."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """null or zmq; None is zmq when enabled."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Messages queued for a slow subscriber before some are dropped."""
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def on(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine process."""

    model: str
    """Value of the command line: a folder, an hf:// address, or only a name."""
    served: tuple[str, ...]
    """Names clients may use; metrics carry the first."""
    host: str | None
    port: int
    tokenizer: str
    """Folder or hf:// address of the tokenizer files."""
    block_size: int
    blocks: int
    """KV blocks per rank, one of which vLLM keeps as a placeholder."""
    max_model_len: int | None
    """None: the model's own maximum, bounded by the cache."""
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    long_prefill_token_threshold: int
    reserve_full_prompt: bool
    """Admit only what fits whole (``--scheduler-reserve-full-isl``)."""
    max_queued_requests: int | None
    prefix_caching: bool
    hash_algorithm: str
    hash_seed: str | None
    events: KvEvents
    offload: OffloadSettings | None
    """Slower places for blocks; None: there are none."""
    ranks: tuple[int, ...]
    """Data-parallel ranks of this process."""
    lora: Mapping[str, str]
    """Adapter name to path."""
    api_keys: tuple[str, ...]
    prompt_tokens_details: bool
    force_usage: bool
    request_id_headers: bool
    load_tracking: bool
    stream_interval: int
    shutdown_timeout: float
    dev_mode: bool
    runtime_lora: bool
    timing: Timing
    seed: int
    mean_output_tokens: float
    noncanonical: float
    """Share of generated words whose tokens are not the tokenizer's own, 0..1."""
    version: str
    cache_info: Mapping[str, str] = field(default_factory=dict)
    """Labels of ``vllm:cache_config_info``."""


def parser(prog: str = "kvist sim engine") -> flags.Parser:
    """vLLM's flags and ours, which all begin with ``--sim-``."""
    made = flags.parser(prog)
    own = made.add_argument_group("simulator")
    default = Timing()
    own.add_argument("--sim-prefill-tokens-per-second", type=float, default=default.prefill_tokens_per_second)
    own.add_argument("--sim-step-seconds", type=float, default=default.step_seconds)
    own.add_argument("--sim-sequence-seconds", type=float, default=default.sequence_seconds)
    own.add_argument("--sim-host-bandwidth", type=float, default=PCIE, help="bytes/s from host memory")
    own.add_argument("--sim-disk-bandwidth", type=float, default=NVME, help="bytes/s from each file tier")
    own.add_argument("--sim-time-scale", type=float, default=1.0, help="the hardware is this much faster")
    own.add_argument("--sim-seed", type=int, default=0)
    own.add_argument("--sim-mean-output-tokens", type=float, default=256.0, help="unless ignore_eos")
    own.add_argument("--sim-noncanonical-percent", type=float, default=0.0)
    own.add_argument("--sim-vllm-version", default="0.33.0")
    return made


def read(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from vLLM's arguments.

    Raises SystemExit(2) where vLLM's parser would refuse, SettingsError where its configuration classes
    would.
    """
    made = parser()
    args = made.read(argv)
    return Settings(
        **_model(made, args),
        **_cache(args, environ),
        **_batch(args),
        **_parallel(args),
        **_front(args, environ),
        **_simulated(args),
        events=_events(made, args.kv_events_config),
        offload=read_offload(
            args.kv_transfer_config,
            args.kv_offloading_size,
            host_bandwidth=args.sim_host_bandwidth * args.sim_time_scale,
            disk_bandwidth=args.sim_disk_bandwidth * args.sim_time_scale,
        ),
        lora=_adapters(args),
    )


def _model(made: flags.Parser, args: argparse.Namespace) -> dict[str, Any]:
    given = args.model_tag or (args.model if args.model != made.get_default("model") else model.NAME)
    return {
        "model": given,
        "served": tuple(args.served_model_name or [given]),
        "tokenizer": args.tokenizer or given,
        "max_model_len": None if args.max_model_len in {None, -1} else args.max_model_len,
    }


def _cache(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    size = args.block_size or BLOCK
    if size < 1:
        raise SettingsError(f"--block-size must be positive, not {size}")
    share = args.gpu_memory_utilization
    if not 0 < share <= 1:
        raise SettingsError(f"--gpu-memory-utilization must be in (0, 1], not {share}")
    blocks = args.num_gpu_blocks_override or _tokens(args) // size
    if blocks < 2:
        raise SettingsError("No available memory for the cache blocks. Try a larger --kv-cache-memory-bytes")
    caching = args.enable_prefix_caching is not False
    return {
        "block_size": size,
        "blocks": blocks,
        "prefix_caching": caching,
        "hash_algorithm": args.prefix_caching_hash_algo,
        "hash_seed": environ.get("PYTHONHASHSEED"),
        "cache_info": {
            "block_size": str(size),
            "cache_dtype": args.kv_cache_dtype,
            "enable_prefix_caching": str(caching),
            "gpu_memory_utilization": str(share),
            "hash_block_size": "None",
            "effective_attention_block_size": str(size),
            "cache_hit_alignment_tokens": "None",
            "is_attention_free": "False",
            "kv_cache_layout": "None",
            "kv_offloading_backend": args.kv_offloading_backend,
            "kv_offloading_size": str(args.kv_offloading_size),
            "num_cpu_blocks": "None",
            "prefix_match_unit": str(args.prefix_match_unit),
            "user_specified_block_size": str(args.block_size is not None),
            "kv_cache_memory_bytes": str(args.kv_cache_memory_bytes),
            "kv_cache_size_tokens": str(blocks * size),
            "num_gpu_blocks": str(blocks),
            "num_gpu_blocks_override": str(args.num_gpu_blocks_override),
            "prefix_caching_hash_algo": args.prefix_caching_hash_algo,
            "sliding_window": "None",
        },
    }


def _tokens(args: argparse.Namespace) -> int:
    narrow = 2 if args.kv_cache_dtype.startswith(EIGHT_BIT) else 1
    if args.kv_cache_memory_bytes is not None:
        return int(args.kv_cache_memory_bytes * narrow // KV_BYTES_PER_TOKEN)
    return KV_CACHE_TOKENS * narrow


def _batch(args: argparse.Namespace) -> dict[str, Any]:
    for flag in ("max_num_batched_tokens", "max_num_seqs"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise SettingsError(f"{flag} must be greater than or equal to 1.")
    double = 2 if args.performance_mode == "throughput" else 1
    tokens = args.max_num_batched_tokens or H100_BATCHED_TOKENS * double
    sequences = args.max_num_seqs or min(H100_SEQUENCES * double, tokens)
    if tokens < sequences:
        raise SettingsError(
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({sequences})."
        )
    return {
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens,
        "chunked_prefill": args.enable_chunked_prefill is not False,
        "long_prefill_token_threshold": args.long_prefill_token_threshold,
        "reserve_full_prompt": args.scheduler_reserve_full_isl,
        "max_queued_requests": args.max_num_queued_reqs,
    }


def _parallel(args: argparse.Namespace) -> dict[str, Any]:
    if args.data_parallel_size < 1:
        raise SettingsError(f"--data-parallel-size must be positive, not {args.data_parallel_size}")
    if args.data_parallel_rank is not None:
        return {"ranks": (args.data_parallel_rank,)}
    return {"ranks": tuple(range(args.data_parallel_size))}


def _front(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        "host": args.host,
        "port": args.port,
        "api_keys": tuple(filter(None, args.api_key or [environ.get("VLLM_API_KEY", "")])),
        "prompt_tokens_details": args.enable_prompt_tokens_details,
        "force_usage": args.enable_force_include_usage,
        "request_id_headers": args.enable_request_id_headers,
        "load_tracking": args.enable_server_load_tracking,
        "stream_interval": max(1, args.stream_interval),
        "shutdown_timeout": float(args.shutdown_timeout),
        "dev_mode": environ.get("VLLM_SERVER_DEV_MODE") == "1",
        "runtime_lora": environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") in {"1", "True", "true"},
    }


def _simulated(args: argparse.Namespace) -> dict[str, Any]:
    timing = Timing(
        prefill_tokens_per_second=args.sim_prefill_tokens_per_second,
        step_seconds=args.sim_step_seconds,
        sequence_seconds=args.sim_sequence_seconds,
    )
    names = ("time_scale", "prefill_tokens_per_second", "host_bandwidth", "disk_bandwidth")
    for name in names:
        if getattr(args, f"sim_{name}") <= 0:
            raise SettingsError(f"--sim-{name.replace('_', '-')} must be positive")
    return {
        "timing": timing.scaled(args.sim_time_scale),
        "seed": args.sim_seed,
        "mean_output_tokens": max(1.0, args.sim_mean_output_tokens),
        "noncanonical": args.sim_noncanonical_percent / 100,
        "version": args.sim_vllm_version,
    }


def _events(made: flags.Parser, given: Mapping[str, Any] | None) -> KvEvents:
    defaults = {one.name: one.default for one in fields(KvEvents)}
    for name, value in (given or {}).items():
        problem = _problem(defaults, name, value)
        if problem:
            made.error(
                f"argument --kv-events-config: 1 validation error for KVEventsConfig\n{name}\n  {problem}"
            )
    return KvEvents(**(given or {}))


def _problem(defaults: Mapping[str, Any], name: str, value: Any) -> str:
    if name not in defaults:
        return "Unexpected keyword argument"
    optional = defaults[name] is None
    kind = str if optional else type(defaults[name])
    if type(value) is not kind and not (optional and value is None):
        return f"Input should be a valid {kind.__name__}"
    if name == "publisher" and value not in {None, "null", "zmq"}:
        return "Input should be 'null' or 'zmq'"
    return ""


def _adapters(args: argparse.Namespace) -> dict[str, str]:
    if args.lora_modules and not args.enable_lora:
        raise SettingsError("--lora-modules needs --enable-lora")
    return dict(args.lora_modules or [])
