"""vLLM's command line: the arguments of a plan, and the flags that users may not set. Pure.

No other module spells vLLM's flags. Each flag was looked up in the sources of 0.30 and 0.32
(``engine/arg_utils.py``, ``entrypoints/…/cli_args.py``); 0.33 has them all. ``spec.engine.extraArgs`` may
not set a flag the plan sets. vLLM's parser accepts unique abbreviations and underscores, so those are refused
too.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import SpecError

VERSIONS: Final = ((0, 30), (0, 31), (0, 32), (0, 33))
"""Engines whose flags and memory arithmetic are known; a plan for another one is unverified."""
LATEST: Final = VERSIONS[-1]
Version = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Arguments that a plan sets, in the order of the command line; the name of a field is that of its flag.

    Arguments that are None or False are left out, so vLLM decides them.
    """

    model: str
    served_model_name: str | None = None
    revision: str | None = None
    port: int | None = None
    trust_remote_code: bool = False
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    enable_expert_parallel: bool = False
    nnodes: int | None = None
    node_rank: str | None = None
    master_addr: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str | None = None
    kv_cache_dtype_skip_layers: tuple[str, ...] | None = None
    quantization: str | None = None
    attention_backend: str | None = None
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str | None = None
    kv_events_config: Mapping[str, Any] | None = None
    kv_offloading_size: float | None = None
    kv_transfer_config: Mapping[str, Any] | None = None
    speculative_config: Mapping[str, Any] | None = None
    scheduling_policy: str | None = None
    hf_overrides: Mapping[str, Any] | None = None
    limit_mm_per_prompt: Mapping[str, Any] | None = None
    language_model_only: bool = False
    enable_lora: bool = False
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    lora_modules: tuple[str, ...] | None = None
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_prompt_tokens_details: bool = False
    shutdown_timeout: int | None = None
    extra: tuple[str, ...] = ()
    """``spec.engine.extraArgs``, which come last."""

    def to_argv(self) -> list[str]:
        """Return the whole command after ``vllm``."""
        words = ["serve", self.model]
        for field in dataclasses.fields(self)[1:-1]:
            value, flag = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value is False and field.name == "enable_prefix_caching":
                words.append("--no-enable-prefix-caching")
            elif isinstance(value, tuple):
                words += [flag, *value]
            elif isinstance(value, Mapping):
                words += [flag, json.dumps(value, separators=(",", ":"))]
            elif value is not None and value is not False:
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return [*words, *self.extra]


def parse_version(text: str) -> Version | None:
    """Return the version in a tag like ``v0.32.1`` or ``0.33.0rc1-cu130``; None for ``latest``."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\D|$)", text)
    return (int(found[1]), int(found[2])) if found else None


def image_version(image: str) -> Version | None:
    """Return the version in the tag of an image; None if it has none."""
    name, _, _ = image.partition("@")
    _, colon, tag = name.rpartition(":")
    return parse_version(tag) if colon and "/" not in tag else None


PLAN_ONLY: Final = """
host port uds config nnodes node-rank master-addr master-port headless kv-cache-memory-bytes
prefix-caching-hash-algo kv-events-config enable-prompt-tokens-details enable-expert-parallel
hf-overrides disable-log-stats ssl-keyfile ssl-certfile data-parallel-rank
data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port
data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb
data-parallel-multi-port-external-lb prefill-context-parallel-size
"""
"""Flags that no field sets, because gateway, picker or plan depend on them."""
OWNED: Final[Mapping[str, str]] = {
    "model": "spec.model.source",
    "served-model-name": "spec.model.servedName",
    "revision": "spec.model.revision",
    "tensor-parallel-size": "spec.engine.tensorParallelSize",
    "pipeline-parallel-size": "spec.engine.pipelineParallelSize",
    "data-parallel-size": "spec.engine.dataParallelSize",
    "decode-context-parallel-size": "spec.engine.decodeContextParallelSize",
    "max-model-len": "spec.engine.maxModelLen",
    "max-num-seqs": "spec.engine.maxNumSeqs",
    "max-num-batched-tokens": "spec.engine.maxNumBatchedTokens",
    "gpu-memory-utilization": "spec.engine.gpuMemoryUtilizationPercent",
    "device-memory-utilization": "spec.engine.gpuMemoryUtilizationPercent",
    "kv-cache-dtype": "spec.engine.kvCacheDtype",
    "quantization": "spec.engine.quantization",
    "attention-backend": "spec.engine.attentionBackend",
    "enable-prefix-caching": "spec.engine.prefixCaching",
    "speculative-config": "spec.engine.speculative",
    "spec-method": "spec.engine.speculative",
    "spec-model": "spec.engine.speculative",
    "spec-tokens": "spec.engine.speculative",
    "scheduling-policy": "spec.engine.schedulingPolicy",
    "kv-offloading-size": "spec.offload",
    "kv-offloading-backend": "spec.offload",
    "kv-transfer-config": "spec.offload",
    "limit-mm-per-prompt": "spec.workload.imagesPerRequest",
    "enable-lora": "spec.model.adapters",
    "lora-modules": "spec.model.adapters",
    "max-loras": "spec.engine.maxLoras",
    "max-cpu-loras": "spec.engine.maxCpuLoras",
    "max-lora-rank": "spec.model.adapters",
    "shutdown-timeout": "spec.rollout.drainSeconds",
    **dict.fromkeys(PLAN_ONLY.split(), ""),
}
"""Flag → the field that sets it; empty where no field does."""

SHORT: Final[Mapping[str, str]] = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "r": "node-rank",
    "q": "quantization",
    "sc": "speculative-config",
    "dpn": "data-parallel-rank",
    "dpr": "data-parallel-start-rank",
    "dpl": "data-parallel-size-local",
    "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port",
    "dpb": "data-parallel-backend",
    "dph": "data-parallel-hybrid-lb",
    "dpe": "data-parallel-external-lb",
    "dpm": "data-parallel-multi-port-external-lb",
    "pcp": "prefill-context-parallel-size",
    "dcp": "decode-context-parallel-size",
}

GONE: Final[Mapping[str, str]] = {
    "swap-space": "vLLM no longer has swap; spec.offload.cpu keeps evicted blocks in memory",
    "cache-eviction-policy": "never existed; the GPU pool is LRU, the CPU tier is set by spec.offload",
    "speculative-model": "replaced by --speculative-config: set spec.engine.speculative",
    "num-speculative-tokens": "replaced by --speculative-config: set spec.engine.speculative.tokens",
    "preemption-mode": "removed; preempted requests are always recomputed",
    "rope-scaling": "replaced by --hf-overrides: set spec.engine.maxModelLen, the plan writes the override",
    "rope-theta": "replaced by --hf-overrides: set spec.engine.maxModelLen, the plan writes the override",
    "calculate-kv-scales": "removed; scales come with the checkpoint, else they are 1",
    "num-scheduler-steps": "removed; asynchronous scheduling took its place",
    "max-num-partial-prefills": "removed; use --long-prefill-token-threshold",
    "max-long-partial-prefills": "removed; use --long-prefill-token-threshold",
    "max-seq-len-to-capture": "replaced by --max-cudagraph-capture-size",
    "use-v2-block-manager": "removed with the first engine",
    "worker-use-ray": "replaced by --distributed-executor-backend ray",
    "engine-use-ray": "removed with the first engine",
    "guided-decoding-backend": "replaced by --structured-outputs-config",
    "enable-reasoning": "removed; --reasoning-parser alone turns it on",
    "disable-log-requests": "removed; requests are not logged unless --enable-log-requests is given",
    "device": "removed; the image decides",
}
"""Flags that vLLM no longer has or never had, and what to do instead."""

AFFECTS_MEMORY: Final = (
    "attention-config",
    "block-size",
    "kv-cache-dtype-skip-layers",
    "dtype",
    "cpu-offload-gb",
    "compilation-config",
    "max-cudagraph-capture-size",
    "cudagraph-capture-sizes",
    "disable-hybrid-kv-cache-manager",
    "mamba-cache-dtype",
    "mamba-ssm-cache-dtype",
    "num-gpu-blocks-override",
    "performance-mode",
    "mm-encoder-tp-mode",
    "mm-processor-kwargs",
)
"""Flags that users may set but that change the computed memory, so the plan is unverified."""

YIELDING: Final = ("tool-call-parser", "reasoning-parser", "enable-auto-tool-choice", "trust-remote-code")
"""Flags that the plan sets from the catalogue unless the user sets them."""


def flag_names(words: Sequence[str]) -> list[tuple[int, str]]:
    """Return position and name of each flag, without dashes in front, ``=value`` and dotted key."""
    return [(i, _plain(word)) for i, word in enumerate(words) if re.match(r"-{1,2}[A-Za-z]", word)]


def _plain(word: str) -> str:
    bare = word.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")
    if not word.startswith("--"):
        return SHORT.get(bare, SHORT.get(bare.rstrip("0123456789"), f"-{bare}"))
    return bare


def check_extra(words: Sequence[str], path: str = "spec.engine.extraArgs") -> None:
    """Refuse flags that the plan sets, in every spelling vLLM accepts, and flags that vLLM no longer has.

    Raises:
        SpecError: the message names the word, and the field or flag to use instead.
    """
    for i, word in enumerate(words):
        if not word.strip("-= \t\n"):
            raise SpecError(f"{path}[{i}]", f"{word!r} is neither a flag nor a value: leave it out")
    for i, name in flag_names(words):
        at = f"{path}[{i}]"
        for candidate in _readings(name):
            if candidate in GONE:
                raise SpecError(at, f"--{candidate} is gone from vLLM: {GONE[candidate]}")
        owned = _owned(name)
        if owned:
            field_of = OWNED[owned]
            remedy = (
                f"set {field_of} instead"
                if field_of
                else "gateway, picker and plan depend on it; leave it out"
            )
            spelled = "" if owned == name else f" (which vLLM reads as --{owned})"
            raise SpecError(at, f"{words[i].partition('=')[0]}{spelled} is set by the plan: {remedy}")


def _readings(name: str) -> list[str]:
    """Return the flags that a name may stand for: itself, or the one that it switches off."""
    stripped = [name.removeprefix(prefix) for prefix in ("no-", "disable-") if name.startswith(prefix)]
    return [name, *stripped, *(f"enable-{rest}" for rest in stripped)]


def _owned(name: str) -> str | None:
    """The owned flag that vLLM's parser would take this name for."""
    readings = _readings(name)
    exact = next((reading for reading in readings if reading in OWNED), None)
    if exact or name in AFFECTS_MEMORY or name in YIELDING:
        return exact
    longer = ((flag, reading) for flag in OWNED for reading in readings if len(reading) > 1)
    return next((flag for flag, reading in longer if flag.startswith(reading)), None)
