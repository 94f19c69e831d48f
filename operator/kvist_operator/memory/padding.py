"""Padding of 4-bit experts by the kernel that multiplies with them. Pure.

A kernel takes matrices whose sides are multiples of its tiles; vLLM pads each rank's shard of an expert with
zeros up to the next one, so experts can take more memory than in the files. The alignments are those of
vLLM 0.33: ``fused_moe/oracle/mxfp4.py`` (``mxfp4_round_up_hidden_size_and_intermediate_size``),
``quantization/utils/marlin_utils.py`` (``marlin_moe_padded_intermediate``), ``marlin_utils_fp4.py`` and
``flashinfer_fp4_moe.py``; MXFP4 on SM100 was padded to 256 before 0.30 (``quantization/mxfp4.py`` of 0.11).
"""

import math
from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.models.shape import ModelShape

from .layout import EngineSettings, Layout

HOPPER: Final = 90


def expert_padding(shape: ModelShape, layout: Layout, gpu: Accelerator, settings: EngineSettings) -> float:
    """Return by what an expert's weights are multiplied for the tiles of its kernel; 1 = not padded.

    Where several kernels may be chosen for a GPU, the one that pads most counts: MXFP4 on Hopper takes 66.0
    GiB for gpt-oss-120b with Marlin (vllm#23278).
    """
    experts, quantization = shape.experts, shape.quantization
    if experts is None or not quantization.covers("experts") or quantization.bits >= 8:
        return 1.0
    width = experts.width if layout.expert else math.ceil(experts.width / layout.tensor)
    wide, high = _tiles(shape, layout, gpu, settings)
    width, hidden = _up(width, wide), _up(experts.hidden, high)
    shards = 1 if layout.expert else layout.tensor
    padded = quantization.bits * experts.matrices * width * hidden
    if quantization.mxfp4:
        # experts of gpt-oss have biases, which the computed size of the files leaves out
        padded += 16 * (2 * width + hidden)
    return padded * shards / (quantization.bits * experts.expert_params)


def _tiles(shape: ModelShape, layout: Layout, gpu: Accelerator, settings: EngineSettings) -> tuple[int, int]:
    """Return of what the width of a rank's expert and its hidden size are made multiples."""
    quantization, version = shape.quantization, settings.version
    blackwell = gpu.vendor == "nvidia" and gpu.capability // 10 == 10
    if quantization.mxfp4:
        if gpu.vendor == "amd":
            return 256, 256
        if _takes_triton(shape, layout, gpu, settings):
            return 64, 1
        return (256 if blackwell and version < (0, 30) else 128), 256
    if quantization.label == "NVFP4":
        if blackwell:
            return 64, 256
        return (64 if shape.experts and shape.experts.hidden % 128 == 0 else 128), 1
    return math.lcm(64, quantization.block or 1), 1


def _takes_triton(shape: ModelShape, layout: Layout, gpu: Accelerator, settings: EngineSettings) -> bool:
    """Return whether vLLM surely multiplies with Triton's kernels, which its wheel contains.

    They come before Marlin's for gpt-oss on Hopper (``_get_priority_backends_for_gpt_oss`` of 0.30 to 0.33);
    seen on an H200, where gpt-oss-120b took 61.4 GiB (decision 57). With adapters or experts of their own on
    each rank others may be taken.
    """
    plain = not (layout.expert or layout.data > 1 or settings.adapters)
    hopper = gpu.vendor == "nvidia" and gpu.capability == HOPPER
    return plain and hopper and shape.model_type == "gpt_oss" and settings.version >= (0, 30)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
