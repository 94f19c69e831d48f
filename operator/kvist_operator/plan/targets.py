"""What targets of latency mean: how many tokens a step may compute, and whether a prompt is done in time.
Pure."""

from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import Layout
from kvist_operator.models.shape import ModelShape, active_parameters
from kvist_operator.spec.pool import Workload

from .plan import Choice

EFFICIENCY: Final = 0.45
"""Share of the peak that prefill reaches; the picker learns the true rate."""
LEAST_STEP: Final = 512


def prefill_rate(shape: ModelShape, gpu: Accelerator, gpus: int = 1) -> float:
    """Prompt tokens per second, roughly: two operations for each weight a token passes through."""
    peak = gpu.peak_tflops if shape.quantization.fp8 else gpu.bf16_tflops
    return EFFICIENCY * peak * 1e12 * gpus / (2 * active_parameters(shape))


def step_tokens(target_ms: int, shape: ModelShape, gpu: Accelerator, most: int) -> int:
    """Tokens of a step that takes no longer than the time between two tokens that is wanted, on one GPU."""
    tokens = prefill_rate(shape, gpu) * target_ms / 1000
    return int(min(most, max(LEAST_STEP, tokens // 256 * 256)))


def first_token(workload: Workload, shape: ModelShape, gpu: Accelerator, layout: Layout) -> list[Choice]:
    """Whether an idle engine has the hinted prompt done in the wanted time; nothing is changed for it."""
    target, prompt = workload.ttft_ms, workload.prompt_tokens
    if target is None or prompt is None:
        return []
    fresh = prompt - (workload.shared_prefix_tokens or 0)
    rate = prefill_rate(shape, gpu, layout.gpus // layout.data)
    cold, warm = (round(1000 * n / rate) for n in (prompt, fresh))
    verdict = "kept" if cold <= target else "kept with the prefix cached" if warm <= target else "missed"
    reason = (
        f"{prompt} tokens take about {cold} ms, {warm} with the shared prefix cached: {target} is {verdict}"
    )
    return [Choice("ttftMilliseconds", cold, reason, "spec.workload.ttftMilliseconds")]
