"""What gives way before context does: memory share, tokens a step, sequences. Pure."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import EngineSettings
from kvist_operator.models.shape import ModelShape
from kvist_operator.spec.pool import EngineSpec, Pool

from .plan import Choice, Hardware
from .requirements import Wish
from .targets import step_tokens

DEFAULT_SHARE: Final = 92
SHARES: Final = (95, 97)
BATCHES: Final = (4096, 2048)
SEQUENCES: Final = (64, 32)
MOST_SEQUENCES: Final = 1024


def first_run(
    pool: Pool, shape: ModelShape, gpu: Accelerator, wish: Wish, base: EngineSettings
) -> tuple[EngineSettings, list[Choice]]:
    """The settings that is tried first: vLLM's own defaults, unless the user or a target says otherwise."""
    engine = pool.engine
    batched, why = _batched(pool, shape, gpu)
    sequences, reason = _sequences(pool, wish, batched)
    share = engine.memory_percent or DEFAULT_SHARE
    said = "as asked" if engine.memory_percent else "vLLM's default share; the rest is for what it cannot see"
    settings = replace(
        base, share=share, batched_tokens=max(batched, sequences), sequences=sequences, max_len=wish.context
    )
    source = "spec.engine.gpuMemoryUtilizationPercent" if engine.memory_percent else "vLLM: config/cache.py"
    return settings, [Choice("gpuMemoryUtilizationPercent", share, said, source), why, reason]


def _batched(pool: Pool, shape: ModelShape, gpu: Accelerator) -> tuple[int, Choice]:
    field, engine = "maxNumBatchedTokens", pool.engine
    if engine.max_num_batched_tokens:
        chosen = engine.max_num_batched_tokens
        return chosen, Choice(field, chosen, "as asked", f"spec.engine.{field}")
    default = default_batch(gpu)
    target = pool.workload.tpot_ms
    if target is None:
        return default, Choice(field, default, "vLLM's default for this memory", "vLLM: engine/arg_utils.py")
    chosen = step_tokens(target, shape, gpu, default)
    reason = f"a step of so many prompt tokens takes about the {target} ms between two tokens that are wanted"
    return chosen, Choice(field, chosen, reason, "spec.workload.tpotMilliseconds")


def default_batch(gpu: Accelerator) -> int:
    """Return the defaults of ``vllm serve`` by device memory."""
    if gpu.memory_gib >= 160:
        return 16_384
    large = gpu.memory_gib >= 70 and not gpu.name.startswith("A100")
    return 8192 if large and gpu.vendor != "cpu" else 2048


def _sequences(pool: Pool, wish: Wish, batched: int) -> tuple[int, Choice]:
    field, engine = "maxNumSeqs", pool.engine
    if engine.max_num_seqs:
        return engine.max_num_seqs, Choice(field, engine.max_num_seqs, "as asked", f"spec.engine.{field}")
    wanted = max(256, _power(wish.concurrency))
    chosen = min(wanted, MOST_SEQUENCES, batched)
    return chosen, Choice(
        field, chosen, "enough for short requests too; more cost memory for graphs", "rule of size"
    )


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def squeezed(engine: EngineSpec, wish: Wish, settings: EngineSettings) -> Iterator[EngineSettings]:
    """Ever tighter runs, each a step beyond the last; what the user set is left alone."""
    for field, value in _steps(engine, wish):
        tighter = replace(settings, **{field: _tightened(settings, field, value)})  # type: ignore[arg-type]
        if tighter != settings:
            settings = tighter
            yield settings


def _tightened(settings: EngineSettings, field: str, value: int) -> int:
    if field == "share":
        return max(settings.share, value)
    if field == "batched_tokens":
        return max(settings.sequences, min(settings.batched_tokens, value))
    return min(settings.sequences, value)


def _steps(engine: EngineSpec, wish: Wish) -> list[tuple[str, int]]:
    least = min(256, max(_power(wish.concurrency), SEQUENCES[-1]))
    share = [] if engine.memory_percent else [("share", s) for s in SHARES]
    batch = [] if engine.max_num_batched_tokens else [("batched_tokens", b) for b in BATCHES]
    few = [] if engine.max_num_seqs else [("sequences", max(s, least)) for s in SEQUENCES]
    return [*share[:1], *batch[:1], *few[:1], *batch[1:], *few[1:], *share[1:]]


def say(before: EngineSettings, after: EngineSettings, hardware: Hardware) -> list[Choice]:
    """Return what was reduced, and for what."""
    found, gpu = [], hardware.accelerator.name
    if after.share != before.share:
        reason = f"raised from {before.share}: the cache needs it; nothing else may use the {gpu}"
        found.append(Choice("gpuMemoryUtilizationPercent", after.share, reason, "rule of size"))
    if after.batched_tokens != before.batched_tokens:
        reason = f"lowered from {before.batched_tokens}: smaller steps leave more to the cache"
        found.append(Choice("maxNumBatchedTokens", after.batched_tokens, reason, "rule of size"))
    if after.sequences != before.sequences:
        reason = f"lowered from {before.sequences}: the cache would not hold more at once"
        found.append(Choice("maxNumSeqs", after.sequences, reason, "rule of size"))
    return found
