"""vLLM's command line: ``EngineArgs`` ⇄ argv, per engine version. The only module that spells vLLM's flags.
Pure.

Every flag was looked up in the sources of 0.30 and 0.32 (``engine/arg_utils.py``,
``entrypoints/…/cli_args.py``); 0.33 has them all. What users add (``spec.engine.extraArgs``) may not
touch a flag the plan owns: vLLM's parser takes unique abbreviations and underscores, so those are refused
too.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kvist_operator.errors import SpecError

VERSIONS: Final = ((0, 30), (0, 31), (0, 32), (0, 33))
"""Engines whose flags and memory arithmetic are known; a plan for another is unverified."""
LATEST: Final = VERSIONS[-1]
Version = tuple[int, int]


def _flag(name: str, default: Any = None, *, since: Version = VERSIONS[0], **kinds: Any) -> Any:
    return field(default=default, metadata={"flag": name, "since": since, **kinds})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Arguments the plan decides. None and False are left out: what vLLM derives well stays its own.

    Field order is the order on the command line.
    """

    model: str
    served_model_name: str | None = _flag("--served-model-name")
    revision: str | None = _flag("--revision")
    host: str | None = _flag("--host")
    port: int | None = _flag("--port")
    trust_remote_code: bool = _flag("--trust-remote-code", default=False)
    tensor_parallel_size: int | None = _flag("--tensor-parallel-size")
    pipeline_parallel_size: int | None = _flag("--pipeline-parallel-size")
    data_parallel_size: int | None = _flag("--data-parallel-size")
    enable_expert_parallel: bool = _flag("--enable-expert-parallel", default=False)
    nnodes: int | None = _flag("--nnodes")
    node_rank: str | None = _flag("--node-rank")
    master_addr: str | None = _flag("--master-addr")
    master_port: int | None = _flag("--master-port")
    headless: bool = _flag("--headless", default=False)
    max_model_len: int | None = _flag("--max-model-len")
    max_num_seqs: int | None = _flag("--max-num-seqs")
    max_num_batched_tokens: int | None = _flag("--max-num-batched-tokens")
    gpu_memory_utilization: float | None = _flag("--gpu-memory-utilization")
    kv_cache_memory_bytes: int | None = _flag("--kv-cache-memory-bytes")
    kv_cache_dtype: str | None = _flag("--kv-cache-dtype")
    quantization: str | None = _flag("--quantization")
    attention_backend: str | None = _flag("--attention-backend")
    enable_prefix_caching: bool | None = _flag("--enable-prefix-caching", both=True)
    prefix_caching_hash_algo: str | None = _flag("--prefix-caching-hash-algo")
    kv_events_config: Mapping[str, Any] | None = _flag("--kv-events-config")
    kv_offloading_size: float | None = _flag("--kv-offloading-size")
    kv_transfer_config: Mapping[str, Any] | None = _flag("--kv-transfer-config")
    speculative_config: Mapping[str, Any] | None = _flag("--speculative-config")
    scheduling_policy: str | None = _flag("--scheduling-policy")
    hf_overrides: Mapping[str, Any] | None = _flag("--hf-overrides")
    limit_mm_per_prompt: Mapping[str, Any] | None = _flag("--limit-mm-per-prompt")
    language_model_only: bool = _flag("--language-model-only", default=False)
    enable_lora: bool = _flag("--enable-lora", default=False)
    max_loras: int | None = _flag("--max-loras")
    max_lora_rank: int | None = _flag("--max-lora-rank")
    lora_modules: tuple[str, ...] | None = _flag("--lora-modules")
    enable_auto_tool_choice: bool = _flag("--enable-auto-tool-choice", default=False)
    tool_call_parser: str | None = _flag("--tool-call-parser")
    reasoning_parser: str | None = _flag("--reasoning-parser")
    enable_prompt_tokens_details: bool = _flag("--enable-prompt-tokens-details", default=False)
    shutdown_timeout: int | None = _flag("--shutdown-timeout")
    extra: tuple[str, ...] = ()
    """What the user added, last."""

    def to_argv(self, version: Version = LATEST) -> list[str]:
        """The whole command after ``vllm``. A flag younger than the engine is left out."""
        words = ["serve", self.model]
        for f in _flags():
            if version >= f.metadata["since"]:
                words += _words(f, getattr(self, f.name))
        return [*words, *self.extra]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self:
        """The arguments a plan rendered; what is not among its flags goes to ``extra``.

        Raises:
            ValueError: not a ``serve`` command.
        """
        if list(argv[:1]) != ["serve"] or len(argv) < 2:
            raise ValueError("not a `vllm serve MODEL` command")
        values, extra = _parsed(list(argv[2:]))
        return cls(model=argv[1], extra=tuple(extra), **values)


def _flags() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(EngineArgs) if "flag" in f.metadata]


def _words(f: dataclasses.Field[Any], value: Any) -> list[str]:
    name: str = f.metadata["flag"]
    if value is None or (value is False and not f.metadata.get("both")):
        return []
    if isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if isinstance(value, tuple):
        return [name, *value]
    return [name, _text(value)]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, separators=(",", ":"))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parsed(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    by_flag = {f.metadata["flag"]: f for f in _flags()}
    values: dict[str, Any] = {}
    while words:
        word = words[0]
        negated = word.startswith("--no-")
        f = by_flag.get(f"--{word.removeprefix('--no-')}" if negated else word)
        if f is None:
            break
        values[f.name], words = _value(f, negated, words[1:])
    return values, words


def _value(f: dataclasses.Field[Any], negated: bool, rest: list[str]) -> tuple[Any, list[str]]:
    kind = getattr(f.type, "__name__", "") if isinstance(f.type, type) else str(f.type)
    if kind.startswith("bool"):
        return not negated, rest
    if kind.startswith("tuple"):
        end = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        return tuple(rest[:end]), rest[end:]
    return _read(kind, rest[0]), rest[1:]


def _read(kind: str, word: str) -> Any:
    if "Mapping" in kind:
        return json.loads(word)
    if kind.startswith("int"):
        return int(word)
    return float(word) if kind.startswith("float") else word


def parse_version(text: str) -> Version | None:
    """``v0.32.1``, ``0.33.0rc1-cu130`` … → (0, 32); None for ``latest``, ``nightly`` and digests."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\D|$)", text)
    return (int(found[1]), int(found[2])) if found else None


def image_version(image: str) -> Version | None:
    """From the tag of an image."""
    name, _, _ = image.partition("@")
    _, colon, tag = name.rpartition(":")
    return parse_version(tag) if colon and "/" not in tag else None


OWNED: Final[Mapping[str, str]] = {
    "model": "spec.model.source",
    "served-model-name": "spec.model.servedName",
    "revision": "spec.model.revision",
    "tensor-parallel-size": "spec.engine.tensorParallelSize",
    "pipeline-parallel-size": "spec.engine.pipelineParallelSize",
    "data-parallel-size": "spec.engine.dataParallelSize",
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
    "max-loras": "spec.model.adapters",
    "max-lora-rank": "spec.model.adapters",
    "shutdown-timeout": "spec.rollout.drainSeconds",
    **dict.fromkeys(
        (
            "host",
            "port",
            "uds",
            "config",
            "nnodes",
            "node-rank",
            "master-addr",
            "master-port",
            "headless",
            "kv-cache-memory-bytes",
            "prefix-caching-hash-algo",
            "kv-events-config",
            "enable-prompt-tokens-details",
            "enable-expert-parallel",
            "hf-overrides",
            "disable-log-stats",
            "ssl-keyfile",
            "ssl-certfile",
            "data-parallel-rank",
            "data-parallel-start-rank",
            "data-parallel-size-local",
            "data-parallel-address",
            "data-parallel-rpc-port",
            "data-parallel-backend",
            "data-parallel-hybrid-lb",
            "data-parallel-external-lb",
            "data-parallel-multi-port-external-lb",
            "prefill-context-parallel-size",
            "decode-context-parallel-size",
        ),
        "",
    ),
}
"""Flag → the field that sets it; empty where none does, because gateway, picker or plan depend on it."""

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
    "swap-space": "vLLM has no swap any more; spec.offload.cpu keeps evicted blocks in memory",
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
"""Flags that are gone from vLLM (or were never there, but are in circulation), and what to do instead."""

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
"""Allowed, but they change what the plan counted: it is unverified then."""

YIELDING: Final = ("tool-call-parser", "reasoning-parser", "enable-auto-tool-choice", "trust-remote-code")
"""Set from the catalogue unless the user gives them."""


def flag_names(words: Sequence[str]) -> list[tuple[int, str]]:
    """Position and plain name of each flag: no dashes in front, no ``=value``, no dotted key, no ``no-``."""
    return [(i, _plain(word)) for i, word in enumerate(words) if re.match(r"-{1,2}[A-Za-z]", word)]


def _plain(word: str) -> str:
    bare = word.lstrip("-").partition("=")[0].partition(".")[0].replace("_", "-")
    if not word.startswith("--"):
        return SHORT.get(bare, SHORT.get(bare.rstrip("0123456789"), f"-{bare}"))
    return bare


def check_extra(words: Sequence[str], path: str = "spec.engine.extraArgs") -> None:
    """Refuses flags the plan owns, in every spelling vLLM takes, and flags that vLLM no longer has.

    Raises:
        SpecError: names the word, and the field or flag to use instead.
    """
    for i, word in enumerate(words):
        if not word.strip("-= \t\n"):
            raise SpecError(f"{path}[{i}]", f"{word!r} is no flag and no value: leave it out")
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
