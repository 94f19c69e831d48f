"""Padding of 4-bit experts by the kernel that multiplies with them. Pure.

A kernel takes matrices whose sides are multiples of its tiles; vLLM pads each rank's shard of an expert with
zeros up to the next one, so experts can take more memory than in the files. The alignments are those of
vLLM 0.33: ``fused_moe/oracle/mxfp4.py`` (``mxfp4_round_up_hidden_size_and_intermediate_size``),
``quantization/utils/marlin_utils.py`` (``marlin_moe_padded_intermediate``), ``marlin_utils_fp4.py`` and
``flashinfer_fp4_moe.py``; MXFP4 on SM100 was padded to 256 before 0.30 (``quantization/mxfp4.py`` of 0.11).
"""

import math

from kvist_operator.flag_table import Version
from kvist_operator.hardware import Accelerator
from kvist_operator.models.layers import Experts
from kvist_operator.models.quantization import Quantization

from .layout import Layout


def expert_padding(
    experts: Experts, quantization: Quantization, layout: Layout, gpu: Accelerator, version: Version
) -> float:
    """Return by what an expert's weights are multiplied for the tiles of its kernel; 1 = not padded.

    Where several kernels may be chosen for a GPU, the one that pads most counts: MXFP4 on Hopper takes 66.0
    GiB for gpt-oss-120b with Marlin (vllm#23278) and 64.4 with Triton (vllm#33155).
    """
    if not quantization.covers("experts") or quantization.bits >= 8:
        return 1.0
    width = experts.width if layout.expert else math.ceil(experts.width / layout.tensor)
    wide, high = _tiles(experts, quantization, gpu, version)
    width, hidden = _up(width, wide), _up(experts.hidden, high)
    shards = 1 if layout.expert else layout.tensor
    padded = quantization.bits * experts.matrices * width * hidden
    if quantization.mxfp4:
        # experts of gpt-oss have biases, which the computed size of the files leaves out
        padded += 16 * (2 * width + hidden)
    return padded * shards / (quantization.bits * experts.expert_params)


def _tiles(
    experts: Experts, quantization: Quantization, gpu: Accelerator, version: Version
) -> tuple[int, int]:
    """Return of what the width of a rank's expert and its hidden size are made multiples."""
    blackwell = gpu.vendor == "nvidia" and gpu.capability // 10 == 10
    if quantization.mxfp4:
        if gpu.vendor == "amd":
            return 256, 256
        return (256 if blackwell and version < (0, 30) else 128), 256
    if quantization.label == "NVFP4":
        if blackwell:
            return 64, 256
        return (64 if experts.hidden % 128 == 0 else 128), 1
    return math.lcm(64, quantization.block or 1), 1


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
