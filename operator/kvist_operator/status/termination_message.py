"""The last error of a container: the relevant lines of its termination message, and the remedy. Pure.

Kubelets keep the last 2 KiB (80 lines) of the log, or 4 KiB of what was written to /dev/termination-log:
mostly frames of a traceback. Engines write the errors of their core processes there
(``manifests/termination_log.py``): their log ends with a traceback that says only "See root cause above".

``SAYINGS`` is a table of the messages of engines, pickers and the hub's client that cannot start: texts of
vLLM 0.32 (``v1/core/kv_cache_utils.py``, ``v1/worker/*``, ``config/*``), transformers, torch, huggingface_hub
and argparse. The first row that is found counts, so exact patterns come before general ones.
"""

import re
from dataclasses import dataclass
from typing import Final

from kvist_operator.engine_flags import OWNED, SHARED

EXTRA: Final = "spec.engine.extraArgs"


@dataclass(frozen=True, slots=True)
class Saying:
    """A known error."""

    pattern: re.Pattern[str]
    reason: str
    """Reason of the condition."""
    remedy: str
    """Sentence in which groups of the pattern and ``{field}`` may stand."""
    words: str = ""
    """Shown instead of the process's own words, of which only the end is kept."""


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
        "Set spec.engine.maxModelLen to {most} at most, or enlarge the KV cache: "
        "spec.engine.gpuMemoryUtilizationPercent, spec.engine.kvCacheDtype, spec.accelerator.count",
    ),
    _saying(
        r"larger than the available KV cache memory",
        MEMORY,
        "Lower spec.engine.maxModelLen, or enlarge the KV cache: spec.engine.gpuMemoryUtilizationPercent, "
        "spec.engine.kvCacheDtype, spec.accelerator.count",
    ),
    _saying(
        r"No available memory for the cache blocks",
        MEMORY,
        "Weights and batch leave no memory for the KV cache: raise "
        "spec.engine.gpuMemoryUtilizationPercent, lower spec.engine.maxNumBatchedTokens or maxNumSeqs, or "
        "use more accelerators (spec.accelerator.count)",
    ),
    _saying(
        r"Failed to load model - not enough GPU memory",
        MEMORY,
        "The weights do not fit: use more accelerators (spec.accelerator.count) or larger ones "
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
        "Another process holds memory of this GPU: find it on the node, or leave memory for it with "
        "spec.engine.gpuMemoryUtilizationPercent",
    ),
    _saying(
        r"(CUDA|HIP|XPU) out of memory|OutOfMemoryError",
        MEMORY,
        "Lower spec.engine.gpuMemoryUtilizationPercent (the rest is for such peaks), "
        "spec.engine.maxNumBatchedTokens or maxNumSeqs, and check that no other process uses the GPU",
    ),
    _saying(
        r"No space left on device",
        DISK,
        "Use a larger volume (spec.podTemplate.spec.volumes: cache, tmp or shm), or weights from a claim "
        "(spec.model.source: pvc://…)",
    ),
    _saying(
        r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: not enough memory",
        MEMORY,
        "Raise the container's memory, spec.podTemplate.spec.containers[engine].resources",
    ),
    _saying(
        r"(?<!private or )gated repo",
        MODEL,
        "Accept the model's terms on the hub, and name the Secret with a token of that account in "
        "spec.model.tokenSecretRef",
    ),
    _saying(r"Revision Not Found|is not a valid git identifier", MODEL, "Check spec.model.revision"),
    _saying(
        r"429 Client Error|Too Many Requests",
        MODEL,
        "The hub limits requests: a token (spec.model.tokenSecretRef) raises the limit, a claim "
        "(spec.model.source: pvc://…) needs no request",
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
        "Pods cannot reach the hub: allow the traffic, set HTTPS_PROXY or HF_ENDPOINT in spec.engine.env, "
        "or take the model from a claim or an image (spec.model.source: pvc://…, oci://…)",
    ),
    _saying(
        r"trust_remote_code",
        UNSUPPORTED,
        "The model comes with its own code: review it, pin it with spec.model.revision, then add "
        f"--trust-remote-code to {EXTRA}",
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
        "This version of vLLM does not support the model: use a newer image (spec.engine.image)",
    ),
    _saying(
        r"'\]\) \[type=value_error, input_value=ArgsKwargs",
        UNSUPPORTED,
        "This version of vLLM does not support the model: use a newer image (spec.engine.image)",
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
        f"This version of vLLM has no such flag: remove it from {EXTRA}, or set spec.engine.version if the "
        "image is an older one",
    ),
    _saying(
        r"error: argument (?P<flag>--[a-z0-9-]+)",
        ARGUMENTS,
        "This version of vLLM rejects the value: check {field}",
    ),
    _saying(r"error: ambiguous option: (?P<flag>\S+)", ARGUMENTS, f"Write the flag in full in {EXTRA}"),
    _saying(
        r"Failed to infer device type|No (CUDA|HIP) GPUs are available|no CUDA-capable device|libcuda\.so",
        DEVICE,
        "The container sees no accelerator: check that its device plugin is installed, that "
        "spec.accelerator.resourceName names its resource, and whether it needs "
        "spec.podTemplate.spec.runtimeClassName",
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
        "needs them (spec.engine.kvCacheDtype, attentionBackend, quantization)",
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


MOST: Final = 400
"""Characters of a message that are shown."""
FALLBACK_LINES: Final = 3

_PREFIX: Final = re.compile(
    r"^(?:\[[\d-]+ [\d:.]+\]\[\d+\]\[\w+\]\[\w+\] \[[^]]*\] )?"
    r"(\([\w-]+( pid=\d+)?\) ?)?"
    r"((INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\]\s?)?"
)
"""Envoy's ``[2026-11-21 12:00:00.123][1][critical][main] [source/server/server.cc:430] ``, or vLLM's
``(EngineCore pid=123) ERROR 11-21 12:00:00 [core.py:99] ``."""
_NOISE: Final = re.compile(
    r"^\s*(File \"|[\^~]+\s*$|Traceback \(most recent call last\)|During handling of|The above exception was"
    r"|usage:|warnings\.warn|nanobind:|\[rank\d+\]:\s*$)|leaked (shared_memory|semaphore)"
)
_RAISED: Final = re.compile(
    r"^[A-Za-z_][\w.]*(Error|Exception|Refused|Exit|Timeout|Interrupt)\b(:|$)|\berror: "
)
_LOGGED: Final = re.compile(
    r"\(<class '(?P<kind>[\w.]+)'>, (?P<shown>.*), <traceback object at 0x[0-9a-f]+>\)\s*$"
)
"""An exception as the formatter of ``manifests/termination_log.py`` writes it."""
_ADVICE: Final = re.compile(
    r"\s*\b(Try (increasing|lowering|setting)|See https?:|For further information|Decrease GPU memory"
    r"|Check your internet|If this is a private|Please update your)(?:(?!\.(\s|$)).)*\.?(?=\s|$)"
)
"""Sentences that name vLLM's flags or web pages; the remedy names the field of the pool instead."""
_ELSEWHERE: Final = re.compile(
    r"See root cause above|See stack trace for (the )?root cause|WorkerProc initialization failed"
    r"|EngineDeadError|EngineCore encountered an issue|CancelledError|SystemExit|KeyboardInterrupt"
)
"""Errors of processes that only noticed the failure of another one."""

_SECRETS: Final = (
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), "hf_…"),
    (re.compile(r"\b(sk|nvapi|ghp|gho|github_pat|glpat|xox[abp])[-_][A-Za-z0-9_-]{8,}"), r"\1-…"),
    (re.compile(r"\bAKIA[0-9A-Z]{12,}"), "AKIA…"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}(\.[A-Za-z0-9_-]*){0,2}"), "eyJ…"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 …"),
    (re.compile(r"(://)[^/\s:@]*:[^/\s@]+@"), r"\1…@"),
    (
        re.compile(
            r"(?i)((?:token|password|passwd|secret|api[-_]?key|access[-_]?key|credential)s?[\"']?\s*[=:]\s*)"
            r"[\"']?(?!None|True|False|\s|\d{1,9}(?:[\s,;.)]|$))[^\s\"',;)]{4,}[\"']?"
        ),
        r"\1…",
    ),
)


@dataclass(frozen=True, slots=True)
class LastWords:
    """Last error of a container."""

    words: str
    """The relevant lines as one, without secrets; empty if the container printed nothing."""
    reason: str = ""
    """Reason of the condition, if the error is known."""
    remedy: str = ""


def last_words(text: str) -> LastWords:
    """Return the relevant lines of a termination message, with reason and remedy if the error is known."""
    lines = _lines(masked(text))
    whole = "\n".join(line.text for line in lines)
    for saying in SAYINGS:
        found = saying.pattern.search(whole)
        if found:
            words = saying.words or _around(lines, whole.count("\n", 0, found.start()))
            groups = {name: value or "" for name, value in found.groupdict().items()}
            field = {**SHARED, **OWNED}.get(groups.get("flag", "").lstrip("-")) or EXTRA
            return LastWords(
                _without_advice(words), saying.reason, saying.remedy.format(**groups, field=field)
            )
    return LastWords(_without_advice(_relevant(lines)))


def _without_advice(words: str) -> str:
    return shortened(_ADVICE.sub("", shortened(words, len(words) + 1)))


def cleaned(message: object) -> str:
    """Return a message of the API, or an empty text for None, masked and shortened."""
    return shortened(masked(str(message or "")))


def masked(text: str) -> str:
    """Replace what looks like a token or a password."""
    for pattern, put in _SECRETS:
        text = pattern.sub(put, text)
    return text


def shortened(text: str, most: int = MOST) -> str:
    """Return the beginning of a text, on one line and without a full stop at its end."""
    found = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return found.rstrip(".") if len(found) <= most else f"{found[: most - 1].rstrip('.… ')}…"


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    whole: bool = False
    """Whether the line is a complete log record, which no other line continues."""

    @property
    def raised(self) -> bool:
        return self.whole or bool(_RAISED.search(self.text))


def _lines(text: str) -> list[_Line]:
    """Return the lines without prefixes, frames of tracebacks and the code they quote."""
    kept: list[_Line] = []
    quoted = False
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw).rstrip()
        noise = _NOISE.search(line)
        if not noise and line and not (quoted and line.startswith("    ")):
            kept.append(_plain(line))
        quoted = line.lstrip().startswith('File "') or (quoted and line.startswith("    "))
    return kept


def _plain(line: str) -> _Line:
    """Convert an exception that was logged as a tuple to the form that Python prints."""
    found = _LOGGED.search(line)
    if not found:
        return _Line(line.removesuffix(" None"), line.endswith(" None"))
    kind = found["kind"].rpartition(".")[2]
    shown = found["shown"].removeprefix(f"{kind}(").removesuffix(")").strip("\"'").replace("\\n", " ")
    return _Line(f"{kind}: {shown}", whole=True)


def _around(lines: list[_Line], index: int) -> str:
    """Return the message that a line belongs to: from the line that raised it to the next such line."""
    before = range(index, max(-1, index - FALLBACK_LINES - 1), -1)
    return _message(lines, next((i for i in before if lines[i].raised), index))


def _message(lines: list[_Line], begin: int) -> str:
    if lines[begin].whole:
        return lines[begin].text
    after = range(begin + 1, len(lines))
    end = next((i for i in after if lines[i].raised), len(lines))
    return " ".join(line.text for line in lines[begin : min(end, begin + 6)])


def _relevant(lines: list[_Line]) -> str:
    """Return the first exception that does not refer to another one, else the last lines."""
    raised = [i for i, line in enumerate(lines) if line.raised]
    own = [i for i in raised if not _ELSEWHERE.search(lines[i].text)]
    chosen = own[:1] or raised[-1:]
    return _message(lines, chosen[0]) if chosen else " ".join(line.text for line in lines[-FALLBACK_LINES:])
