"""In which dtype keys and values are cached, and which attention backend that means. Pure.

The tables are vLLM's: priorities of ``platforms/cuda.py``, and what ``v1/attention/backends`` accept.
"""

from dataclasses import dataclass
from typing import Final

from kvist_operator.errors import SpecError
from kvist_operator.hardware import Accelerator
from kvist_operator.models.layers import Latent
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
NO_FP8: Final = ("FLEX_ATTENTION", "FLASH_ATTN_MLA", "CUTLASS_MLA_FP16")
FIELD: Final = "kvCacheDtype"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChoice:
    """How the KV cache is stored."""

    dtype: str
    """The dtype the memory arithmetic counts with."""
    flag: str | None
    """The value of ``--kv-cache-dtype``; None = left to vLLM."""
    backend: str
    block: int
    """Tokens a block holds with that backend."""
    choices: tuple[Choice, ...]


def choose_kv(engine: EngineSpec, shape: ModelShape, gpu: Accelerator, version: tuple[int, int]) -> KvChoice:
    """Auto takes FP8 where GPU and backend both do. Raises SpecError for what vLLM would not start with."""
    settings, flag, choice = _dtype(engine, shape, gpu)
    backend = engine.attention_backend or backend_of(gpu, shape, settings)
    block = block_of(backend, gpu, version)
    chosen = _backend_choice(engine, backend, settings)
    return KvChoice(dtype=settings, flag=flag, backend=backend, block=block, choices=(choice, chosen))


def _dtype(engine: EngineSpec, shape: ModelShape, gpu: Accelerator) -> tuple[str, str | None, Choice]:
    match engine.kv_dtype:
        case KvDtype.AUTO:
            return _automatic(engine, shape, gpu)
        case KvDtype.MODEL:
            return _model(shape)
    flag = FLAGS[engine.kv_dtype]
    _check(engine, shape, gpu, flag)
    return flag, flag, Choice(FIELD, flag, "as asked", "spec.engine.kvCacheDtype")


def _model(shape: ModelShape) -> tuple[str, str | None, Choice]:
    """Auto would follow the checkpoint's own KV scheme, so the dtype is spelled out where there is one."""
    spelled = shape.dtype if shape.quantization.kv else None
    return (
        "auto",
        spelled,
        Choice(FIELD, shape.dtype, "the model's own dtype, as asked", "spec.engine.kvCacheDtype"),
    )


def _automatic(engine: EngineSpec, shape: ModelShape, gpu: Accelerator) -> tuple[str, str | None, Choice]:
    obstacle = fp8_obstacle(engine, shape, gpu)
    if obstacle:
        return "auto", _spelled(shape), Choice(FIELD, shape.dtype, obstacle, SOURCE)
    backend = backend_of(gpu, shape, "fp8")
    scales = (
        "with the scales of the checkpoint"
        if shape.quantization.kv
        else "with scale 1, nothing is calibrated"
    )
    reason = (
        f"half the bytes: {gpu.name} and {backend} both compute in FP8; {scales}. Model keeps {shape.dtype}"
    )
    return "fp8", "fp8", Choice(FIELD, "fp8", reason, SOURCE)


def _spelled(shape: ModelShape) -> str | None:
    return shape.dtype if shape.quantization.kv else None


def fp8_obstacle(engine: EngineSpec, shape: ModelShape, gpu: Accelerator) -> str:
    """Why Auto does not take FP8; empty when it does."""
    if gpu.vendor not in ("nvidia", "amd") or not gpu.verified:
        return f"what {gpu.name} caches in FP8 is not known here"
    if not gpu.fp8:
        return f"{gpu.name} does not compute in FP8"
    if engine.attention_backend and not takes_fp8(engine.attention_backend, gpu):
        return f"{engine.attention_backend} does not take FP8 on {gpu.name}"
    if shape.model_type == "gpt_oss" and gpu.capability // 10 != 10:
        return "vLLM's own recipes cache gpt-oss in FP8 on Blackwell only"
    return ""


def takes_fp8(backend: str, gpu: Accelerator) -> bool:
    """Whether a backend caches in FP8 on this GPU."""
    if backend in NO_FP8:
        return False
    if backend == "FLASH_ATTN":
        return gpu.capability // 10 in (9, 10)
    if backend == "TRITON_ATTN":
        return gpu.capability >= 89 or gpu.vendor == "amd"
    return True


def backend_of(gpu: Accelerator, shape: ModelShape, kv: str) -> str:
    """The backend that vLLM would choose by itself."""
    latent = shape.latent
    if gpu.vendor == "cpu":
        return "CPU_MLA" if latent else "CPU_ATTN"
    if gpu.vendor == "amd":
        return "ROCM_AITER_MLA" if latent else "ROCM_ATTN"
    if gpu.vendor != "nvidia":
        return "the platform's own"
    if latent:
        return _latent_backend(gpu, latent, kv)
    return _dense_backend(gpu, kv)


def _dense_backend(gpu: Accelerator, kv: str) -> str:
    if kv.endswith("per_token_head"):
        return "TRITON_ATTN"
    if gpu.capability // 10 == 10:
        return "FLASHINFER"
    plain = kv == "auto" or (kv in ("fp8", "fp8_e4m3") and gpu.capability // 10 == 9)
    return "FLASH_ATTN" if plain else "FLASHINFER"


def _latent_backend(gpu: Accelerator, latent: Latent, kv: str) -> str:
    fp8, generation = kv.startswith("fp8"), gpu.capability // 10
    if latent.sparse:
        return _sparse_backend(generation, fp8)
    if generation == 10:
        return "FLASHINFER_MLA"
    if generation == 9:
        return "FLASHMLA" if fp8 else "FLASH_ATTN_MLA"
    return "TRITON_MLA"


def _sparse_backend(generation: int, fp8: bool) -> str:
    if generation == 10:
        return "FLASHINFER_MLA_SPARSE"
    if generation == 12:
        return "FLASHINFER_MLA_SPARSE_SM120"
    return "FLASHMLA_SPARSE" if fp8 else "FLASH_ATTN_MLA_SPARSE"


def block_of(backend: str, gpu: Accelerator, version: tuple[int, int]) -> int:
    """Tokens a block holds by default (``update_block_size_for_backend``)."""
    if gpu.vendor == "cpu":
        return 16 if backend == "CPU_MLA" else 128 if version <= (0, 32) else 32
    sizes = {"FLASHMLA": 64, "FLASHINFER_MLA": 32, "TOKENSPEED_MLA": 32, "CUTLASS_MLA": 128}
    return 64 if "SPARSE" in backend else sizes.get(backend, 16)


def _check(engine: EngineSpec, shape: ModelShape, gpu: Accelerator, flag: str) -> None:
    field = "spec.engine.kvCacheDtype"
    latent = shape.latent is not None
    if latent and flag != "fp8":
        raise SpecError(
            field, f"{engine.kv_dtype} is not for MLA models, whose backends take Model and FP8 only"
        )
    if flag == "nvfp4" and gpu.vendor != "nvidia":
        raise SpecError(field, f"NVFP4 needs FlashInfer, which {gpu.name} does not have: use FP8 or Model")
    if flag.startswith("fp8") and gpu.vendor == "nvidia" and 0 < gpu.capability < 80:
        raise SpecError(field, f"no attention backend of {gpu.name} takes FP8: use Model")
    if flag == "fp8_e5m2" and shape.quantization.fp8:
        raise SpecError(field, "vLLM refuses FP8E5M2 with an FP8 checkpoint: use FP8")
    backend = engine.attention_backend
    if backend and flag.startswith("fp8") and not takes_fp8(backend, gpu):
        raise SpecError(
            field, f"{backend} does not take FP8 on {gpu.name}: leave spec.engine.attentionBackend out"
        )


def _backend_choice(engine: EngineSpec, backend: str, kv: str) -> Choice:
    if engine.attention_backend:
        return Choice("attentionBackend", backend, "as asked", "spec.engine.attentionBackend")
    reason = f"left to vLLM, which takes this one for {'a 16-bit' if kv == 'auto' else 'this'} cache"
    return Choice("attentionBackend", backend, reason, SOURCE)
