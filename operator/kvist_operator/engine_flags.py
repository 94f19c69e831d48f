"""vLLM's command line: the arguments of a plan, and who sets which flag. Pure.

No other module spells vLLM's flags; ``flag_table`` has all that exist, ``extra_args`` checks the flags that
users add. A flag belongs to the plan always (``OWNED``), in the plans that set it (``SHARED``), or unless
the user sets it (``YIELDING``); every other flag is the user's.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


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
    load_format: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    enable_expert_parallel: bool = False
    runner: str | None = None
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
    otlp_traces_endpoint: str | None = None
    extra: tuple[str, ...] = ()
    """``spec.engine.extraArgs``, which come last."""

    def names(self) -> set[str]:
        """Return the flags that are set, without those of ``extra``."""
        fields = dataclasses.fields(self)[1:-1]
        values = ((field.name, getattr(self, field.name)) for field in fields)
        off = "enable_prefix_caching"
        return {
            name.replace("_", "-")
            for name, value in values
            if value is not None and (value is not False or name == off)
        }

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


PLAN_ONLY: Final = """
host port uds grpc config nnodes node-rank master-addr master-port headless
kv-events-config enable-prompt-tokens-details disable-log-stats ssl-keyfile ssl-certfile
data-parallel-rank data-parallel-start-rank data-parallel-size-local data-parallel-address
data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb
data-parallel-multi-port-external-lb prefill-context-parallel-size
"""
"""Flags that no field sets, because gateway, picker or the number of GPUs depend on them."""
OWNED: Final[Mapping[str, str]] = {
    "model": "spec.model.source",
    "served-model-name": "spec.model.servedName",
    "revision": "spec.model.revision",
    "tensor-parallel-size": "spec.engine.tensorParallelSize",
    "pipeline-parallel-size": "spec.engine.pipelineParallelSize",
    "data-parallel-size": "spec.engine.dataParallelSize",
    "decode-context-parallel-size": "spec.engine.decodeContextParallelSize",
    "runner": "spec.model.task",
    "max-model-len": "spec.engine.maxModelLen",
    "max-num-seqs": "spec.engine.maxNumSeqs",
    "max-num-batched-tokens": "spec.engine.maxNumBatchedTokens",
    "gpu-memory-utilization": "spec.engine.gpuMemoryUtilizationPercent",
    "kv-cache-dtype": "spec.engine.kvCacheDtype",
    "attention-backend": "spec.engine.attentionBackend",
    "enable-prefix-caching": "spec.engine.prefixCaching",
    "speculative-config": "spec.engine.speculative",
    "spec-method": "spec.engine.speculative",
    "spec-model": "spec.engine.speculative",
    "spec-tokens": "spec.engine.speculative",
    "scheduling-policy": "spec.engine.schedulingPolicy",
    "kv-offloading-size": "spec.offload",
    "kv-offloading-backend": "spec.offload",
    "lora-modules": "spec.model.adapters",
    "shutdown-timeout": "spec.rollout.drainSeconds",
    **dict.fromkeys(PLAN_ONLY.split(), ""),
}
"""Flag → the field that sets it; empty where no field does."""
SHARED: Final[Mapping[str, str]] = {
    "quantization": "spec.engine.quantization",
    "kv-cache-memory-bytes": "spec.accelerator.memory",
    "kv-transfer-config": "spec.offload",
    "limit-mm-per-prompt": "spec.workload.imagesPerRequest",
    "language-model-only": "spec.workload.imagesPerRequest",
    "enable-lora": "spec.model.adapters",
    "max-loras": "spec.engine.maxLoras",
    "max-cpu-loras": "spec.engine.maxCpuLoras",
    "max-lora-rank": "spec.model.adapters",
    "prefix-caching-hash-algo": "spec.engine.prefixCaching",
    "enable-expert-parallel": "",
}
"""Flag → the field by which a plan sets it, or empty; users may set it where their plan does not."""
YIELDING: Final = (
    "tool-call-parser",
    "reasoning-parser",
    "enable-auto-tool-choice",
    "trust-remote-code",
    "load-format",
    "kv-cache-dtype-skip-layers",
    "otlp-traces-endpoint",
)
"""Flags that the plan sets unless the user sets them."""
MERGED: Final = "hf-overrides"
"""The flag whose keys by the plan and by the user are merged."""

SECRETS: Final[Mapping[str, str]] = {
    "api-key": "set spec.engine.apiKeySecretRef",
    "hf-token": "set spec.model.tokenSecretRef",
}
"""Flag → what to set instead, so that the secret is not in the pool's object."""

GONE: Final[Mapping[str, str]] = {
    "swap-space": "vLLM has no swap; set spec.offload.cpu, which keeps evicted blocks in memory",
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
    "device": "removed; the image decides",
}
"""Flags that vLLM no longer has or never had, and what to do instead."""

_MEMORY: Final = """
additional-config all2all-backend attention-config aux-output-config block-size compilation-config convert
cpu-offload-gb cpu-offload-params cudagraph-capture-sizes dcp-comm-backend dcp-q-replicate
diffusion-config disable-custom-all-reduce disable-hybrid-kv-cache-manager
disable-sliding-window dtype ec-manager-config ec-transfer-config elastic-ep-max-dp-size
enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo enable-elastic-ep
enable-eplb enable-expert-parallel enable-hc-sp enable-lora enable-mamba-shared-prefix-checkpoint
enable-mixed-moe-lora-format enable-moe-shared-loras enable-return-routed-experts enable-sleep-mode
enable-tower-connector-lora engram-config eplb-config fully-sharded-loras hf-config-path hf-overrides
kernel-config kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-sharing-fast-prefill kv-transfer-config
language-model-only limit-mm-per-prompt linear-backend load-format lora-dtype lora-target-modules
mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-ssm-cache-dtype max-cpu-loras
max-cudagraph-capture-size max-logprobs max-lora-cls-labels max-lora-rank max-loras media-io-kwargs
mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-only mm-encoder-tp-mode mm-ipc-gpu-memory-gb
mm-processor-device mm-processor-kwargs model-class-overrides model-impl moe-backend num-gpu-blocks-override
offload-backend offload-group-size offload-num-in-group offload-params offload-prefetch-step
optimization-level performance-mode pooler-config quantization quantization-config replayssm-buffer-len
scheduler-cls skip-mm-profiling sleep-mode-backend sleep-mode-offload-cudagraph
specialize-active-lora ubatch-size use-fp64-gumbel use-replayssm watermark weight-transfer-config worker-cls
worker-extension-cls
"""
AFFECTS_MEMORY: Final = frozenset(_MEMORY.split())
"""Flags that users may set but that change the computed memory, or may, so the plan is unverified."""
