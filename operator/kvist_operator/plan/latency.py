"""Estimated times of a plan's steps, the step size for a TPOT target, and what becomes of the targets. Pure.

A step computes prompt tokens and decodes a token of each running sequence. The time of the prompt tokens is
their work at a share of the peak; that of decoding is the reading of weights and KV cache at a share of the
memory bandwidth. Both shares are means over GPUs; the picker learns the true rates.
"""

import math
from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import Layout
from kvist_operator.memory.memory_budget import Memory
from kvist_operator.models.shape import ModelShape, active_parameters, checkpoint_bytes
from kvist_operator.spec.pool import Workload

from .layouts import routed_bytes
from .plan import Choice
from .requirements import Requirements

PREFILL_SHARE: Final = 0.45
"""Share of the peak that prefill reaches."""
DECODE_SHARE: Final = 0.6
"""Share of the memory bandwidth that decoding reaches, all other costs of a step included. Llama-3.1-8B in 16
bits takes 6.44 ms a step on an H100 and 3.93 ms on a B200 (vLLM's article of 2026-04-22): 0.74 and 0.53."""
LEAST_STEP: Final = 128
"""Smallest step in tokens: still smaller ones hardly compute prompts at all."""
MISSED_STEP: Final = 512
"""Tokens of a step where no step keeps the target: prompts would wait long for a smaller one, to no end."""
STEP_MULTIPLE: Final = 64


def prefill_rate(shape: ModelShape, gpu: Accelerator, layout: Layout) -> float:
    """Return prompt tokens per second of one data-parallel rank, with two operations per active weight."""
    peak = gpu.peak_tflops if shape.quantization.fp8 else gpu.bf16_tflops
    gpus = layout.gpus // layout.data
    return PREFILL_SHARE * peak * 1e12 * gpus / (2 * active_parameters(shape))


def decode_seconds(shape: ModelShape, gpu: Accelerator, memory: Memory, sequences: int, length: int) -> float:
    """Return the time in which every one of so many sequences of so many tokens gets a token.

    Of the experts those are read to which a token of the step is routed.
    """
    layout, experts = memory.layout, shape.experts
    read = memory.weights
    if experts:
        routed = routed_bytes(shape) / checkpoint_bytes(shape)
        idle = (1 - experts.per_token / experts.count) ** sequences
        read *= 1 - routed * idle
    each = math.ceil(sequences / layout.data)
    read += each * memory.bytes_per_token * min(length, memory.max_len)
    return layout.pipeline * read / (DECODE_SHARE * gpu.bandwidth_gbs * 1e9)


def step_for_target(
    target_ms: int, shape: ModelShape, gpu: Accelerator, memory: Memory, required: Requirements
) -> int:
    """Return the tokens of the largest step that keeps a TPOT target; ``MISSED_STEP`` where none does.

    Each sequence takes a token of a step, so that a step has at least as many tokens.
    """
    decoding = decode_seconds(shape, gpu, memory, required.concurrency, required.typical)
    tokens = int((target_ms / 1000 - decoding) * prefill_rate(shape, gpu, memory.layout))
    least = max(LEAST_STEP, math.ceil(required.concurrency / STEP_MULTIPLE) * STEP_MULTIPLE)
    return tokens // STEP_MULTIPLE * STEP_MULTIPLE if tokens >= least else max(least, MISSED_STEP)


def expected_tpot(
    workload: Workload,
    shape: ModelShape,
    gpu: Accelerator,
    memory: Memory,
    required: Requirements,
    batched_tokens: int,
) -> tuple[list[Choice], tuple[str, ...]]:
    """Return the longest expected step, and a note for the verdict if the target cannot be kept."""
    target = workload.tpot_ms
    if target is None:
        return [], ()
    decoding = 1000 * decode_seconds(shape, gpu, memory, required.concurrency, required.typical)
    prefill = 1000 * batched_tokens / prefill_rate(shape, gpu, memory.layout)
    step = round(decoding + prefill)
    many = f"{required.concurrency} sequences of {min(required.typical, memory.max_len)} tokens"
    parts = (
        f"a step takes about {prefill:.0f} ms for {batched_tokens} prompt tokens and {decoding:.0f} ms for "
        f"decoding {many}"
    )
    source = "spec.workload.tpotMilliseconds"
    if step <= target:
        return [Choice("tpotMilliseconds", step, f"{parts}: the target of {target} ms is kept", source)], ()
    least = step_for_target(target, shape, gpu, memory, required)
    if least < batched_tokens:
        remedy = f"set spec.engine.maxNumBatchedTokens to {least}, or leave it to the plan"
    else:
        remedy = "it needs more GPUs, fewer sequences, or a smaller model"
    reason = f"{parts}: the target of {target} ms cannot be kept; {remedy}"
    note = f"the TPOT target of {target} ms cannot be kept: a step takes about {step} ms"
    return [Choice("tpotMilliseconds", step, reason, source)], (note,)


def expected_ttft(workload: Workload, shape: ModelShape, gpu: Accelerator, layout: Layout) -> list[Choice]:
    """Return whether an idle engine meets the TTFT target, on which nothing else in the plan depends."""
    target, prompt = workload.ttft_ms, workload.prompt_tokens
    if target is None or prompt is None:
        return []
    rate = prefill_rate(shape, gpu, layout)
    fresh = prompt - (workload.shared_prefix_tokens or 0)
    cold, warm = (round(1000 * n / rate) for n in (prompt, fresh))
    result = "met" if cold <= target else "met with the prefix cached" if warm <= target else "missed"
    reason = (
        f"{prompt} tokens take about {cold} ms, {warm} with the shared prefix cached: the target of {target} "
        f"is {result}"
    )
    return [Choice("ttftMilliseconds", cold, reason, "spec.workload.ttftMilliseconds")]
