"""Dtype of the KV cache, and the attention backend and block size that it implies. Pure.

The tables are vLLM's: priorities of ``platforms/cuda.py``, and what ``v1/attention/backends`` accept.
"""

from dataclasses import dataclass
from typing import Final

from kvist_operator.errors import SpecError
from kvist_operator.flag_table import Version
from kvist_operator.hardware import Accelerator
from kvist_operator.models.layers import Attention, Latent
from kvist_operator.models.pooling import Pooling
from kvist_operator.models.shape import ModelShape
from kvist_operator.spec.pool import EngineSpec, KvDtype

from .plan import Choice

FLAGS: Final = {
    KvDtype.FP8: "fp8",
    KvDtype.FP8_E5M2: "fp8_e5m2",
    KvDtype.FP8_PER_TOKEN_HEAD: "fp8_per_token_head",
    KvDtype.INT8_PER_TOKEN_HEAD: "int8_per_token_head",
    KvDtype.INT4_PER_TOKEN_HEAD: "int4_per_token_head",
    KvDtype.NVFP4: "nvfp4",
}
SOURCE: Final = "vLLM: v1/attention/backends, platforms"
BLOCKS: Final = {
    "FLASHMLA": 64,
    "FLASHINFER_MLA": 32,
    "TOKENSPEED_MLA": 32,
    "CUTLASS_MLA": 128,
    "ROCM_AITER_UNIFIED_ATTN": 64,
}
"""Tokens per block that backends prefer, where it is not 16."""
NO_FP8: Final = ("FLEX_ATTENTION", "FLASH_ATTN_MLA", "CUTLASS_MLA_FP16")
STUDY: Final = "vLLM's article of 2026-04-22"
"""Source of the rules for Auto: "The State of FP8 KV-Cache and Attention Quantization in vLLM"."""
MEASURED: Final = {
    "llama": "Llama-3.3-70B",
    "qwen3_moe": "Qwen3-30B-A3B",
    "qwen3_5": "Qwen3.5-27B",
}
"""Families (``model_type``) on which that article measured accuracy with uncalibrated FP8, by the model."""
WIDE_HEAD: Final = 128
"""Elements of a head beyond which prefill in FP8 is slower on Hopper (two-level accumulation): 1.6 times at
256."""
SMALL_WINDOW: Final = 256
"""Tokens of a sliding window up to which its layers stay in the model's dtype: they gained nothing from FP8
at 128 tokens (gpt-oss), and did at 512 (Gemma 4)."""
FIELD: Final = "kvCacheDtype"
SPEC_FIELD: Final = "spec.engine.kvCacheDtype"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChoice:
    """Format of the KV cache."""

    dtype: str
    """Dtype for the memory arithmetic."""
    flag: str | None
    """Value of ``--kv-cache-dtype``; None = left to vLLM."""
    block: int
    """Tokens per block with the chosen backend."""
    plain_windows: bool = False
    """Layers with a sliding window keep the model's dtype."""
    note: str = ""
    """Remark of the verdict about the accuracy; empty if there is none."""
    choices: tuple[Choice, ...]


def choose_kv(
    engine: EngineSpec,
    shape: ModelShape,
    gpu: Accelerator,
    version: Version,
    pooling: Pooling | None = None,
    *,
    connector: bool = False,
) -> KvChoice:
    """Return the format of the KV cache.

    Auto chooses FP8 where GPU and backend support it and nothing speaks against it for this family of models,
    but not for ``pooling`` models. ``connector``: blocks are offloaded, for which vLLM leaves out backends.

    Raises:
        SpecError: a dtype or backend with which vLLM would not start.
    """
    if pooling and not pooling.causal:
        nothing = Choice(FIELD, "none", "an encoder has no KV cache", SOURCE)
        return KvChoice(dtype="auto", flag=None, block=16, choices=(nothing,))
    if pooling and engine.kv_dtype is KvDtype.AUTO:
        dtype, flag = "auto", shape.dtype if shape.quantization.kv else None
        choice = Choice(FIELD, shape.dtype, "a prompt is cached only while it is computed", SOURCE)
    else:
        dtype, flag, choice = _dtype(engine, shape, gpu)
    backend = engine.attention_backend or _backend(gpu, shape, dtype, connector=connector)
    if engine.attention_backend:
        chosen = Choice("attentionBackend", backend, "as requested", "spec.engine.attentionBackend")
    else:
        cache = "16-bit" if dtype == "auto" else dtype
        reason = f"vLLM's own choice for a KV cache in {cache}; no flag is set"
        chosen = Choice("attentionBackend", backend, reason, SOURCE)
    choices = [choice, chosen]
    windows = _small_windows(shape) if engine.kv_dtype is KvDtype.AUTO and dtype == "fp8" else ()
    if windows:
        sizes = " and ".join(map(str, windows))
        reason = f"layers with a window of {sizes} tokens are small and gain nothing from FP8"
        choices.append(Choice("kvCacheDtypeSkipLayers", "sliding_window", reason, STUDY))
    return KvChoice(
        dtype=dtype,
        flag=flag,
        block=_block_size(backend, gpu, version),
        plain_windows=bool(windows),
        note=_accuracy_note(shape, gpu, dtype),
        choices=tuple(choices),
    )


def _small_windows(shape: ModelShape) -> tuple[int, ...]:
    """Return the sizes of the sliding windows, if all of them are small, beside layers without one."""
    windows = {layer.mixer.window for layer in shape.layers if isinstance(layer.mixer, Attention)}
    sliding = sorted(windows - {0})
    return tuple(sliding) if 0 in windows and sliding and sliding[-1] <= SMALL_WINDOW else ()


def _accuracy_note(shape: ModelShape, gpu: Accelerator, dtype: str) -> str:
    if dtype == "auto" or (dtype.startswith("fp8") and (shape.quantization.kv or _scaled_rows(shape, gpu))):
        return ""
    if dtype.startswith("fp8") and shape.key_bias:
        return f"{dtype} KV cache without calibrated scales: known to break the answers of such models"
    if dtype in ("fp8", "fp8_e4m3") and shape.model_type in MEASURED:
        return ""
    return f"{dtype} KV cache: accuracy not measured for this model"


def _scaled_rows(shape: ModelShape, gpu: Accelerator) -> bool:
    """Return whether rows have scales of their own: the packed rows of sparse MLA (``fp8_ds_mla``)."""
    return bool(shape.latent and shape.latent.sparse and gpu.capability // 10 != 10)


def _dtype(engine: EngineSpec, shape: ModelShape, gpu: Accelerator) -> tuple[str, str | None, Choice]:
    # without a flag vLLM would follow the checkpoint's own KV scheme, if it has one
    native = shape.dtype if shape.quantization.kv else None
    if engine.kv_dtype is KvDtype.MODEL:
        return "auto", native, Choice(FIELD, shape.dtype, "the model's own dtype, as requested", SPEC_FIELD)
    if engine.kv_dtype is not KvDtype.AUTO:
        flag = FLAGS[engine.kv_dtype]
        _check(engine, shape, gpu, flag)
        return flag, flag, Choice(FIELD, flag, "as requested", SPEC_FIELD)
    obstacle, source = _fp8_obstacle(engine, shape, gpu)
    if obstacle:
        return "auto", native, Choice(FIELD, shape.dtype, obstacle, source)
    if shape.quantization.kv:
        scales = "the scales of the checkpoint"
    elif _scaled_rows(shape, gpu):
        scales = "scales in every row"
    else:
        measured = MEASURED.get(shape.model_type, "")
        scales = "scale 1, not calibrated"
        scales += f" (measured on {measured}, {STUDY})" if measured else ""
    backends = f"{gpu.name} and {_backend(gpu, shape, 'fp8')}"
    reason = f"halves the KV cache; {backends} support FP8; {scales}. Model keeps {shape.dtype}"
    return "fp8", "fp8", Choice(FIELD, "fp8", reason, SOURCE)


def _fp8_obstacle(engine: EngineSpec, shape: ModelShape, gpu: Accelerator) -> tuple[str, str]:
    """Return why Auto does not choose FP8, and the source of that; empty if it does."""
    if gpu.vendor not in ("nvidia", "amd"):
        return f"support for an FP8 cache on {gpu.name} is not known", SOURCE
    if not gpu.fp8:
        return f"{gpu.name} does not compute in FP8", SOURCE
    if engine.attention_backend and not _accepts_fp8(engine.attention_backend, gpu):
        return f"{engine.attention_backend} does not accept FP8 on {gpu.name}", SOURCE
    if shape.quantization.kv:
        return "", ""
    if shape.model_type == "gpt_oss" and gpu.capability // 10 != 10:
        return "vLLM's own recipes cache gpt-oss in FP8 on Blackwell only", SOURCE
    if shape.key_bias and shape.model_type != "gpt_oss":
        problem = (
            "keys have a bias and are not normalized, so that FP8 without calibrated scales breaks answers"
        )
        return problem, "QwenLM/Qwen3#840, vllm#41343"
    backend = engine.attention_backend or _backend(gpu, shape, "fp8")
    if backend in ("FLASHMLA", "TRITON_MLA"):
        return f"{backend} lost accuracy in FP8 without calibrated scales (Kimi-K2.5)", STUDY
    widest = max((m.key_dim for m in shape.mixers if isinstance(m, Attention)), default=0)
    if backend == "FLASH_ATTN" and gpu.capability // 10 == 9 and widest > WIDE_HEAD:
        return f"prefill with heads of {widest} is up to 1.6 times slower in FP8 on {gpu.name}", STUDY
    return "", ""


def _check(engine: EngineSpec, shape: ModelShape, gpu: Accelerator, flag: str) -> None:
    """Raise SpecError for a dtype with which vLLM would not start."""
    backend, problem = engine.attention_backend, ""
    if shape.latent and flag != "fp8":
        problem = f"{engine.kv_dtype} is not for MLA models, whose backends accept Model and FP8 only"
    elif flag == "nvfp4" and gpu.vendor != "nvidia":
        problem = f"NVFP4 needs FlashInfer, which {gpu.name} does not have: use FP8 or Model"
    elif flag.startswith("fp8") and gpu.vendor == "nvidia" and 0 < gpu.capability < 80:
        problem = f"no attention backend of {gpu.name} accepts FP8: use Model"
    elif flag == "fp8_e5m2" and shape.quantization.fp8:
        problem = "vLLM refuses FP8E5M2 with an FP8 checkpoint: use FP8"
    elif backend and flag.startswith("fp8") and not _accepts_fp8(backend, gpu):
        problem = f"{backend} does not accept FP8 on {gpu.name}: leave spec.engine.attentionBackend out"
    if problem:
        raise SpecError(SPEC_FIELD, problem)


def _accepts_fp8(backend: str, gpu: Accelerator) -> bool:
    if backend == "FLASH_ATTN":
        return gpu.capability // 10 in (9, 10)
    if backend == "TRITON_ATTN":
        return gpu.capability >= 89 or gpu.vendor == "amd"
    return backend not in NO_FP8


def _backend(gpu: Accelerator, shape: ModelShape, kv: str, *, connector: bool = False) -> str:
    """Return the attention backend that vLLM would choose by itself for a KV dtype.

    With a KV connector ROCm's first choice is left out (``platforms/rocm.py``).
    """
    latent, generation = shape.latent, gpu.capability // 10
    if gpu.vendor == "cpu":
        return "CPU_MLA" if latent else "CPU_ATTN"
    if gpu.vendor == "amd":
        return "ROCM_AITER_MLA" if latent else "ROCM_AITER_UNIFIED_ATTN" if connector else "ROCM_ATTN"
    if gpu.vendor != "nvidia":
        return "the platform's own"
    if latent:
        return _latent_backend(latent, generation, kv.startswith("fp8"))
    if kv.endswith("per_token_head"):
        return "TRITON_ATTN"
    plain = kv == "auto" or (kv in ("fp8", "fp8_e4m3") and generation == 9)
    return "FLASH_ATTN" if plain and generation != 10 else "FLASHINFER"


def _latent_backend(latent: Latent, generation: int, fp8: bool) -> str:
    if latent.sparse:
        other = "FLASHMLA_SPARSE" if fp8 else "FLASH_ATTN_MLA_SPARSE"
        return {10: "FLASHINFER_MLA_SPARSE", 12: "FLASHINFER_MLA_SPARSE_SM120"}.get(generation, other)
    hopper = "FLASHMLA" if fp8 else "FLASH_ATTN_MLA"
    return {10: "FLASHINFER_MLA", 9: hopper}.get(generation, "TRITON_MLA")


def _block_size(backend: str, gpu: Accelerator, version: Version) -> int:
    """Return the default number of tokens per block (``update_block_size_for_backend``)."""
    if gpu.vendor == "cpu":
        return 16 if backend == "CPU_MLA" else 128 if version <= (0, 32) else 32
    return 64 if "SPARSE" in backend else BLOCKS.get(backend, 16)
