"""What engines, pickers and the hub's client say when they cannot start, and what to do about it: a table.

Words of vLLM 0.32 (``v1/core/kv_cache_utils.py``, ``v1/worker/*``, ``config/*``), transformers, torch,
huggingface_hub and argparse. The first row that is found anywhere in a container's last words counts, so what
is exact comes before what is general.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvist_operator.engine_flags import OWNED

EXTRA: Final = "spec.engine.extraArgs"


@dataclass(frozen=True, slots=True)
class Saying:
    """One thing a process may say."""

    pattern: re.Pattern[str]
    reason: str
    """Of the condition."""
    remedy: str
    """What to do, as a sentence; groups of the pattern may stand in it."""
    words: str = ""
    """In place of its own words, where only their end is kept."""


def _saying(pattern: str, reason: str, remedy: str, words: str = "") -> Saying:
    return Saying(re.compile(pattern, re.IGNORECASE | re.DOTALL), reason, remedy, words)


MEMORY: Final = "OutOfMemory"
MODEL: Final = "ModelUnavailable"
UNSUPPORTED: Final = "ModelUnsupported"
ARGUMENTS: Final = "BadArguments"
DEVICE: Final = "AcceleratorUnusable"
LINKS: Final = "CommunicationFailed"
DISK: Final = "DiskFull"
WRITING: Final = "CannotWrite"

SAYINGS: Final = (
    _saying(
        r"larger than the available KV cache memory.{0,200}?maximum model length is (?P<most>\d+)",
        MEMORY,
        "Set spec.engine.maxModelLen to {most} at most, or give the cache more: "
        "spec.engine.gpuMemoryUtilizationPercent, spec.engine.kvCacheDtype, spec.accelerator.count",
    ),
    _saying(
        r"larger than the available KV cache memory",
        MEMORY,
        "Lower spec.engine.maxModelLen, or give the cache more: spec.engine.gpuMemoryUtilizationPercent, "
        "spec.engine.kvCacheDtype, spec.accelerator.count",
    ),
    _saying(
        r"No available memory for the cache blocks",
        MEMORY,
        "Weights and batch leave nothing for the cache: raise spec.engine.gpuMemoryUtilizationPercent, lower "
        "spec.engine.maxNumBatchedTokens or maxNumSeqs, or take more accelerators (spec.accelerator.count)",
    ),
    _saying(
        r"Failed to load model - not enough GPU memory",
        MEMORY,
        "The weights do not fit: take more accelerators (spec.accelerator.count) or larger ones "
        "(spec.accelerator.product), or spec.engine.quantization",
    ),
    _saying(
        r"out of memory occurred when warming up",
        MEMORY,
        "Lower spec.engine.maxNumSeqs or spec.engine.gpuMemoryUtilizationPercent",
    ),
    _saying(
        r"Free memory on device .{0,80}?on startup|Error in memory profiling",
        MEMORY,
        "Another process holds memory of this GPU: find it on the node, or leave it memory with "
        "spec.engine.gpuMemoryUtilizationPercent",
    ),
    _saying(
        r"(CUDA|HIP|XPU) out of memory|OutOfMemoryError",
        MEMORY,
        "Lower spec.engine.gpuMemoryUtilizationPercent (the rest is for such peaks), "
        "spec.engine.maxNumBatchedTokens or maxNumSeqs, and see that nothing else uses the GPU",
    ),
    _saying(
        r"No space left on device",
        DISK,
        "Give it a larger volume (spec.podTemplate.spec.volumes: cache, tmp or shm), or weights from a claim "
        "(spec.model.source: pvc://…)",
    ),
    _saying(
        r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: not enough memory",
        MEMORY,
        "Raise the container's memory, spec.podTemplate.spec.containers[engine].resources",
    ),
    _saying(
        r"gated repo",
        MODEL,
        "Accept the model's terms on the hub, and name the Secret with a token of that account in "
        "spec.model.tokenSecretRef",
    ),
    _saying(
        r"Revision Not Found|is not a valid git identifier",
        MODEL,
        "Check spec.model.revision",
    ),
    _saying(
        r"429 Client Error|Too Many Requests",
        MODEL,
        "The hub limits requests: a token (spec.model.tokenSecretRef) raises the limit, a claim "
        "(spec.model.source: pvc://…) needs none",
    ),
    _saying(
        r"Repository Not Found|is not a valid model identifier|401 Client Error|Invalid credentials in Auth",
        MODEL,
        "Check spec.model.source; for a private repository name the Secret with a token that may read it in "
        "spec.model.tokenSecretRef",
    ),
    _saying(
        r"couldn't connect to|LocalEntryNotFoundError|Name or service not known|name resolution"
        r"|Max retries exceeded|ConnectTimeout|ConnectError|Network is unreachable|OfflineModeIsEnabled",
        MODEL,
        "Pods cannot reach the hub: allow the traffic, set HTTPS_PROXY or HF_ENDPOINT in spec.engine.env, or "
        "take "
        "the model from a claim or an image (spec.model.source: pvc://…, oci://…)",
    ),
    _saying(
        r"trust_remote_code",
        UNSUPPORTED,
        "The model comes with its own code: review it, pin it with spec.model.revision, then add "
        "--trust-remote-code to "
        f"{EXTRA}",
    ),
    _saying(
        r"does not appear to have a file named|Entry Not Found|no config file found"
        r"|Cannot find any model weights|Invalid repository ID or local directory",
        MODEL,
        "The model was not found: check the repository or path of spec.model.source, and spec.model.revision",
    ),
    _saying(
        r"does not recognize this architecture|are not supported for now|not supported in-tree",
        UNSUPPORTED,
        "This vLLM does not know the model: use a newer image (spec.engine.image)",
    ),
    _saying(
        r"'\]\) \[type=value_error, input_value=ArgsKwargs",
        UNSUPPORTED,
        "This vLLM does not know the model: use a newer image (spec.engine.image)",
        "vLLM lists the hundreds of architectures that it supports, and the model's is not among them",
    ),
    _saying(
        r"User-specified max_model_len \(\d+\) is greater",
        ARGUMENTS,
        "Lower spec.engine.maxModelLen to the model's own context length",
    ),
    _saying(
        r"must be divisible by tensor parallel size",
        ARGUMENTS,
        "Set spec.engine.tensorParallelSize to a divisor of the heads, or leave it to the plan",
    ),
    _saying(
        r"unrecognized arguments?: (?P<flag>[^\n]{1,200})",
        ARGUMENTS,
        f"This vLLM has no such flag: remove it from {EXTRA}, or set spec.engine.version if the image is an "
        "older one",
    ),
    _saying(
        r"error: argument (?P<flag>--[a-z0-9-]+)",
        ARGUMENTS,
        "This vLLM rejects the value: check {field}",
    ),
    _saying(
        r"error: ambiguous option: (?P<flag>\S+)",
        ARGUMENTS,
        f"Write the flag in full in {EXTRA}",
    ),
    _saying(
        r"Failed to infer device type|No (CUDA|HIP) GPUs are available|no CUDA-capable device|libcuda\.so",
        DEVICE,
        "The container sees no accelerator: is its device plugin installed, does "
        "spec.accelerator.resourceName name its resource, does it need "
        "spec.podTemplate.spec.runtimeClassName?",
    ),
    _saying(
        r"driver version is insufficient|driver on your system is too old|unsupported display driver",
        DEVICE,
        "The node's driver is too old for this image: update it, or use an image for its CUDA version: "
        "spec.engine.image",
    ),
    _saying(
        r"no kernel image is available|not supported on this (GPU|device)|requires compute capability"
        r"|compute capability .{0,60}(is not|isn't|not) supported",
        DEVICE,
        "The image has no kernels for this GPU: use another spec.engine.image, or remove the setting that "
        "needs them "
        "(spec.engine.kvCacheDtype, attentionBackend, quantization)",
    ),
    _saying(
        r"NCCL error|DistBackendError|ncclUnhandledCudaError|ncclSystemError|Gloo connectFullMesh",
        LINKS,
        "The accelerators of a replica cannot reach each other: set NCCL_DEBUG=INFO in spec.engine.env and "
        "see the log",
    ),
    _saying(
        r"Permission denied|Read-only file system",
        WRITING,
        "Engines run as user 2000 and may write to /cache and /tmp: check spec.engine.env, and the rights on "
        "volumes of spec.podTemplate (fsGroup)",
    ),
    _saying(
        r"validation errors? for",
        ARGUMENTS,
        f"vLLM rejects its configuration: compare status.plan.args, and check spec.engine and {EXTRA}",
    ),
)


def remedy(saying: Saying, found: re.Match[str]) -> str:
    """The sentence, with the field that sets a flag in question."""
    groups = {name: value or "" for name, value in found.groupdict().items()}
    flag = groups.get("flag", "").lstrip("-")
    return saying.remedy.format(**groups, field=OWNED.get(flag) or EXTRA)
