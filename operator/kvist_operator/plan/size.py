"""The sizing rule, which finds the smallest layout that fits, and the settings reduced for it. Pure.

1. The smallest tensor parallelism in a node that leaves the required context for the required concurrency.
2. More accelerators of the same node come before less context.
3. Tighter engine settings come next, then less context (never under 8k, always reported).
4. Pipeline stages over nodes come last.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory, budget
from kvist_operator.models.shape import Facts, ModelShape
from kvist_operator.spec.pool import EngineSpec, Pool

from .layouts import layouts_over_nodes, layouts_within_node
from .plan import Choice, Hardware
from .requirements import RULE, STEP, Requirements, step_tokens

DEFAULT_SHARE: Final = 92
SHARES: Final = (95, 97)
BATCHES: Final = (4096, 2048)
SEQUENCES: Final = (64, 32)
MAX_SEQUENCES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedLayout:
    """A layout and settings that fit, and the choices that differ from the first settings."""

    layout: Layout
    settings: EngineSettings
    memory: Memory
    reason: str
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingInput:
    """Input of the sizing rule."""

    facts: Facts
    hardware: Hardware
    engine: EngineSpec
    required: Requirements
    settings: EngineSettings
    """The settings to try first."""

    def memory(self, layout: Layout, settings: EngineSettings) -> Memory:
        """Return the memory of one candidate."""
        return budget(self.facts, self.hardware.accelerator, layout, settings)

    def satisfied_by(self, memory: Memory) -> bool:
        """Return whether all requirements are met."""
        r = self.required
        return memory.fits(r.context) and memory.fits(r.typical, r.concurrency)


def first_settings(
    pool: Pool, shape: ModelShape, gpu: Accelerator, required: Requirements, base: EngineSettings
) -> tuple[EngineSettings, list[Choice]]:
    """Return the settings to try first: vLLM's defaults unless the user or a latency target differs."""
    engine, tpot = pool.engine, pool.workload.tpot_ms
    share, batched, sequences = engine.memory_percent, engine.max_num_batched_tokens, engine.max_num_seqs
    source = "vLLM: config/cache.py"
    shared = Choice(
        "gpuMemoryUtilizationPercent",
        share or DEFAULT_SHARE,
        "as requested" if share else "vLLM's default; the rest is for memory that vLLM does not manage",
        "spec.engine.gpuMemoryUtilizationPercent" if share else source,
    )
    reason, source = "as requested", "spec.engine.maxNumBatchedTokens"
    if not batched:
        batched = default_batch(gpu)
        reason, source = "vLLM's default for this GPU memory", "vLLM: engine/arg_utils.py"
        if tpot is not None:
            batched = step_tokens(tpot, shape, gpu, batched)
            reason = f"a step of this many prompt tokens takes about as long as the TPOT target of {tpot} ms"
            source = "spec.workload.tpotMilliseconds"
    step = Choice("maxNumBatchedTokens", batched, reason, source)
    reason, source = "as requested", "spec.engine.maxNumSeqs"
    if not sequences:
        sequences = min(max(256, _power_of_two(required.concurrency)), MAX_SEQUENCES, batched)
        reason, source = "enough for short requests too; more would need memory for CUDA graphs", RULE
    settings = replace(
        base,
        share=share or DEFAULT_SHARE,
        batched_tokens=max(batched, sequences),
        sequences=sequences,
        max_len=required.context,
    )
    return settings, [shared, step, Choice("maxNumSeqs", sequences, reason, source)]


def default_batch(gpu: Accelerator) -> int:
    """Return the default of ``vllm serve`` for tokens per step, which depends on device memory."""
    if gpu.memory_gib >= 160:
        return 16_384
    large = gpu.memory_gib >= 70 and not gpu.name.startswith("A100")
    return 8192 if large and gpu.vendor != "cpu" else 2048


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def tighter_settings(
    engine: EngineSpec, required: Requirements, settings: EngineSettings
) -> Iterator[EngineSettings]:
    """Yield ever tighter settings; values that the user set do not change."""
    least = min(256, max(_power_of_two(required.concurrency), SEQUENCES[-1]))
    share = [] if engine.memory_percent else [("share", s) for s in SHARES]
    batch = [] if engine.max_num_batched_tokens else [("batched_tokens", b) for b in BATCHES]
    few = [] if engine.max_num_seqs else [("sequences", max(s, least)) for s in SEQUENCES]
    for field, value in [*share[:1], *batch[:1], *few[:1], *batch[1:], *few[1:], *share[1:]]:
        if field == "share":
            tighter = replace(settings, share=max(settings.share, value))
        elif field == "batched_tokens":
            tokens = max(settings.sequences, min(settings.batched_tokens, value))
            tighter = replace(settings, batched_tokens=tokens)
        else:
            tighter = replace(settings, sequences=min(settings.sequences, value))
        if tighter != settings:
            settings = tighter
            yield settings


def size(q: SizingInput) -> tuple[SizedLayout | None, list[Layout]]:
    """Return the layout to use, None if none fits, and all layouts that are possible. Raises SpecError."""
    near = layouts_within_node(q.engine, q.facts.shape, q.hardware)
    far = layouts_over_nodes(q.engine, q.facts.shape, q.hardware)
    found = _smallest(q, near) or (_tightened(q, near[-1]) if near else None) or _over_nodes(q, far)
    return found, [*near, *far]


def _smallest(q: SizingInput, layouts: Iterable[Layout]) -> SizedLayout | None:
    tried: tuple[Layout, Memory] | None = None
    for layout in layouts:
        memory = q.memory(layout, q.settings)
        if q.satisfied_by(memory):
            reason = _why_smallest(q, layout, tried)
            return SizedLayout(layout=layout, settings=q.settings, memory=memory, reason=reason)
        tried = layout, memory
    return None


def _why_smallest(q: SizingInput, layout: Layout, tried: tuple[Layout, Memory] | None) -> str:
    if q.engine.tensor:
        return "as requested"
    if q.hardware.count:
        return f"spec.accelerator.count is {q.hardware.count}"
    load = f"{q.required.concurrency} requests of {q.required.typical} tokens"
    if layout.gpus == 1 and not tried:
        return f"one is enough for the weights and {load}"
    reason = f"the smallest with enough KV cache for {load}"
    if tried:
        smaller, memory = tried
        lacks = memory.missing(q.required.typical, q.required.concurrency)
        reason += f"; {smaller.tensor} would lack {lacks / GIB:.1f} GiB on each"
    return reason


def _tightened(q: SizingInput, layout: Layout) -> SizedLayout | None:
    """Return a layout with tighter settings, then with less context, then with fewer requests at once."""
    settings, choices = q.settings, []
    for settings in tighter_settings(q.engine, q.required, q.settings):
        memory = q.memory(layout, settings)
        if q.satisfied_by(memory):
            break
    else:
        length = _longest(q, layout, settings)
        if length is None:
            return None
        settings = replace(settings, max_len=length)
        memory = q.memory(layout, settings)
        choices = _describe_shorter(q, length, memory)
    fixed = q.engine.tensor is not None or q.hardware.count is not None
    reason = "as requested" if fixed else "all accelerators of a node, which comes before a second node"
    choices = [*_describe_tighter(q.settings, settings, q.hardware.accelerator), *choices]
    return SizedLayout(layout=layout, settings=settings, memory=memory, reason=reason, choices=tuple(choices))


def _describe_tighter(before: EngineSettings, after: EngineSettings, gpu: Accelerator) -> list[Choice]:
    found = []
    if after.share != before.share:
        reason = f"raised from {before.share} for the KV cache; no other process may use the {gpu.name}"
        found.append(Choice("gpuMemoryUtilizationPercent", after.share, reason, RULE))
    if after.batched_tokens != before.batched_tokens:
        reason = f"lowered from {before.batched_tokens}: smaller steps leave more memory for the KV cache"
        found.append(Choice("maxNumBatchedTokens", after.batched_tokens, reason, RULE))
    if after.sequences != before.sequences:
        reason = f"lowered from {before.sequences}: the KV cache would not hold more at once"
        found.append(Choice("maxNumSeqs", after.sequences, reason, RULE))
    return found


def _longest(q: SizingInput, layout: Layout, settings: EngineSettings) -> int | None:
    """Return the context to offer if not all requirements can be met; None if the shortest does not fit.

    The context is as long as the concurrency allows. Fewer requests at once are preferred to a context that
    is shorter than the typical request, and to none.
    """
    r = q.required

    def one_fits(length: int) -> bool:
        return q.memory(layout, replace(settings, max_len=length)).fits(length)

    def all_fit(length: int) -> bool:
        memory = q.memory(layout, replace(settings, max_len=length))
        return memory.fits(length) and memory.fits(min(length, r.typical), r.concurrency)

    kept = _search(all_fit, r.floor, r.context)
    if kept is not None and (kept >= r.typical or r.typical == r.context):
        return kept
    if r.typical < r.context:
        return _search(one_fits, r.floor, r.context)
    return r.floor if one_fits(r.floor) else None


def _search(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest multiple of 1,024 within the bounds that fits, else the lower bound if it fits."""
    if not fits(low):
        return None
    best, left, right = low, low // STEP, high // STEP
    while left <= right:
        middle = (left + right) // 2
        length = max(low, middle * STEP)
        if fits(length):
            best, left = length, middle + 1
        else:
            right = middle - 1
    return best


def _describe_shorter(q: SizingInput, length: int, memory: Memory) -> list[Choice]:
    found, r = [], q.required
    if length < r.context:
        left = f"{memory.kv / GIB:.2f} GiB are left for the KV cache of each, {memory.kv_tokens} tokens"
        found.append(Choice("maxModelLen", length, f"lowered from {r.context}: {left}", RULE))
    typical = min(length, r.typical)
    at_once = int(memory.concurrency(typical))
    if at_once < r.concurrency:
        reason = f"lowered from {r.concurrency}: the KV cache holds {at_once} requests of {typical} tokens"
        found.append(Choice("concurrency", at_once, reason, RULE))
    return found


def _over_nodes(q: SizingInput, layouts: list[Layout]) -> SizedLayout | None:
    for layout in layouts:
        found = _smallest(q, [layout]) or _tightened(q, layout)
        if found and (q.engine.tensor or q.hardware.count):
            return found
        if found:
            problem = f"one node is too small for the weights and {q.required.floor} tokens"
            return replace(found, reason=f"all {q.hardware.per_node} of a node: {problem}")
    return None
