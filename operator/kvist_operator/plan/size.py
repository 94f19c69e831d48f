"""The sizing rule: the layout that holds the wish with the fewest accelerators, and what gives way. Pure.

The wish is the required concurrency times the typical length of a request, with the required context.

1. Layouts in a node are tried from the smallest. Memory share and step size give way first, then the number
   of sequences in a step: a smaller layout with tighter settings comes before a larger one.
2. A larger layout is taken only if it holds at least 5 % of the wish more than every smaller one.
3. What the best layout in a node does not hold is taken from the concurrency, and only when a single
   sequence of the required context does not fit from the context (never under 8k).
4. Pipeline stages over nodes come last.

Values that the user sets never change, and every reduction is a choice with its reason.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory, budget
from kvist_operator.models.shape import Facts
from kvist_operator.spec.disaggregation import Role
from kvist_operator.spec.pool import EngineSpec, Pool

from .layouts import layouts_over_nodes, layouts_within_node
from .plan import Choice, Hardware
from .requirements import RULE, STEP, Requirements

T = TypeVar("T")

DEFAULT_SHARE: Final = 92
SHARES: Final = (95, 97)
BATCHES: Final = (4096, 2048)
SEQUENCES: Final = (64, 32)
SMALL_DEFAULT: Final = 256
MAX_SEQUENCES: Final = 1024
"""Sequences per step by vLLM's default, on small and on large GPUs."""
PREFILL_SEQUENCES: Final = 16
"""Fewest sequences of an engine that only prefills."""
SHORT_PROMPT: Final = 1024
"""Tokens of its prompts, where the workload does not say; an assumption."""
GB10: Final = 121
"""Capability of the GPU in DGX Spark: much memory, little compute."""
WORTH: Final = 0.05
"""Part of the wish that a larger layout, or a dearer kind of node, must hold beyond every cheaper one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedLayout:
    """A layout and settings that fit, and the choices that differ from the first settings."""

    layout: Layout
    settings: EngineSettings
    memory: Memory
    reason: str
    choices: tuple[Choice, ...] = ()
    others: tuple["SizedLayout", ...] = ()
    """Other layouts of the same accelerators that fit, the smallest first."""


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

    def held(self, memory: Memory) -> float:
        """Return the part of the wish that is held, at most 1."""
        r = self.required
        length = min(memory.max_len, r.typical)
        tokens = memory.concurrency(length) * length
        return min(1.0, tokens / (r.concurrency * r.typical), memory.max_len / r.context)

    @property
    def load(self) -> str:
        """The wish in words."""
        if self.settings.pooling:
            return f"steps of {self.settings.batched_tokens} tokens"
        return f"{self.required.concurrency} requests of {self.required.typical} tokens"


def first_settings(
    pool: Pool, gpu: Accelerator, required: Requirements, base: EngineSettings
) -> tuple[EngineSettings, list[Choice]]:
    """Return the settings to try first: vLLM's defaults unless the user differs."""
    engine = pool.engine
    share, batched, sequences = engine.memory_percent, engine.max_num_batched_tokens, engine.max_num_seqs
    source = "vLLM: config/cache.py"
    shared = Choice(
        "gpuMemoryUtilizationPercent",
        share or DEFAULT_SHARE,
        "as requested" if share else "vLLM's default; the rest is for memory that vLLM does not manage",
        "spec.engine.gpuMemoryUtilizationPercent" if share else source,
    )
    reason, source = "as requested", "spec.engine.maxNumBatchedTokens"
    prefills = pool.role is Role.PREFILL
    if not batched and prefills:
        batched = 2 * default_batch(gpu)
        reason, source = "prefill is bound by compute, and no sequence that decodes waits for a step", RULE
    elif not batched:
        batched = default_batch(gpu)
        reason, source = "vLLM's default for this GPU memory", "vLLM: engine/arg_utils.py"
    step = Choice("maxNumBatchedTokens", batched, reason, source)
    reason, source = "as requested", "spec.engine.maxNumSeqs"
    if not sequences and prefills:
        sequences = _prompts_of_a_step(batched, pool.workload.prompt_tokens)
        reason, source = f"twice the prompts of a step of {batched:,} tokens; more take memory", RULE
    elif not sequences:
        sequences = min(max(SMALL_DEFAULT, _power_of_two(required.concurrency)), MAX_SEQUENCES, batched)
        reason, source = "enough for most loads; more take memory from the KV cache", RULE
        if sequences > SMALL_DEFAULT:
            reason, source = f"{required.concurrency} requests run at once", "spec.workload.concurrency"
    settings = replace(
        base,
        share=share or DEFAULT_SHARE,
        batched_tokens=max(batched, sequences),
        sequences=sequences,
        max_len=required.context,
    )
    return settings, [shared, step, Choice("maxNumSeqs", sequences, reason, source)]


def _prompts_of_a_step(batched: int, prompt: int | None) -> int:
    """Return twice the prompts that a step computes, as a power of two within bounds."""
    return min(SMALL_DEFAULT, max(PREFILL_SEQUENCES, _power_of_two(2 * batched // (prompt or SHORT_PROMPT))))


def default_batch(gpu: Accelerator) -> int:
    """Return the default of ``vllm serve`` for tokens per step, which depends on device memory."""
    if gpu.vendor != "cpu" and gpu.memory_gib >= 160:
        return 16_384
    return 8192 if _is_large(gpu) else 2048


def default_sequences(gpu: Accelerator) -> int:
    """Return the default of ``vllm serve`` for sequences per step, which depends on device memory."""
    return MAX_SEQUENCES if _is_large(gpu) else SMALL_DEFAULT


def _is_large(gpu: Accelerator) -> bool:
    """Return whether vLLM takes its larger defaults (``engine/arg_utils.py``: ``get_batch_defaults``)."""
    slow = gpu.name.startswith("A100") or gpu.capability == GB10
    return gpu.vendor != "cpu" and gpu.memory_gib >= 70 and not slow


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def tighter_settings(
    engine: EngineSpec, required: Requirements, settings: EngineSettings
) -> Iterator[EngineSettings]:
    """Yield ever tighter settings: share and step size, then sequences; values of the user do not change."""
    least = min(SMALL_DEFAULT, max(_power_of_two(required.concurrency), SEQUENCES[-1]))
    share = [] if engine.memory_percent else [("share", s) for s in SHARES]
    batch = [] if engine.max_num_batched_tokens else [("batched_tokens", b) for b in BATCHES]
    few = [] if engine.max_num_seqs else [("sequences", max(s, least)) for s in SEQUENCES]
    for field, value in [*share[:1], *batch[:1], *share[1:], *batch[1:], *few]:
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
    if q.hardware.accelerator.isolated:
        near, far = [layout for layout in near if layout.gpus == 1], []
    return _within_node(q, near) or _over_nodes(q, far), [*near, *far]


def _within_node(q: SizingInput, layouts: list[Layout]) -> SizedLayout | None:
    """Return the smallest layout to which no larger one adds enough of the wish; None if none fits."""
    found: list[SizedLayout] = []
    for layout in layouts:
        sized = _settle(q, layout)
        if sized:
            found.append(sized)
        if sized and q.held(sized.memory) == 1:
            break
    best = most_worth(found, lambda sized: q.held(sized.memory))
    if best is None:
        return None
    smaller = next((layout for layout in reversed(layouts) if layout.gpus < best.layout.gpus), None)
    others = tuple(each for each in found if each is not best)
    return replace(best, reason=_why(q, best, smaller, layouts[-1]), others=others)


def most_worth(cheapest_first: Iterable[T], held: Callable[[T], float]) -> T | None:
    """Return the last element that holds 5 % of the wish more than every cheaper one; None of an empty
    list."""
    best, most = None, 0.0
    for each in cheapest_first:
        if best is None or held(each) >= most + WORTH:
            best = each
        most = max(most, held(each))
    return best


def _settle(q: SizingInput, layout: Layout) -> SizedLayout | None:
    """Return a layout with the settings that it needs: tighter ones, then fewer requests at once, then less
    context; None if even that does not fit."""
    steps = [q.settings, *tighter_settings(q.engine, q.required, q.settings)]
    for settings in steps:
        memory = q.memory(layout, settings)
        if q.satisfied_by(memory):
            return _sized(q, layout, settings, memory)
    # fewer sequences in a step cost throughput: only if the cache holds 5 % more with them
    many = [each for each in steps if each.sequences == q.settings.sequences][-1]
    milder, tightest = (_reduced(q, layout, settings) for settings in (many, steps[-1]))
    if tightest and milder and q.held(milder.memory) >= (1 - WORTH) * q.held(tightest.memory):
        return milder
    return tightest


def _reduced(q: SizingInput, layout: Layout, settings: EngineSettings) -> SizedLayout | None:
    length = _longest(q, layout, settings)
    if length is None:
        return None
    settings = replace(settings, max_len=length)
    return _sized(q, layout, settings, q.memory(layout, settings))


def _sized(q: SizingInput, layout: Layout, settings: EngineSettings, memory: Memory) -> SizedLayout:
    found = [
        *_describe_tighter(q.settings, settings, q.hardware.accelerator),
        *_describe_reduced(q, settings.max_len, memory),
    ]
    return SizedLayout(layout=layout, settings=settings, memory=memory, reason="", choices=tuple(found))


def _why(q: SizingInput, best: SizedLayout, smaller: Layout | None, largest: Layout) -> str:
    if q.engine.tensor:
        return "as requested"
    if q.hardware.count:
        return f"spec.accelerator.count is {q.hardware.count}"
    if best.settings.pooling:
        q = replace(q, settings=best.settings)
    holds = f"is enough for {q.load}" if q.settings.pooling else f"holds {shown(q, best.memory)} of {q.load}"
    if q.satisfied_by(best.memory):
        if best.layout.gpus == 1:
            return f"one is enough for the weights and {q.load}"
        if smaller is None:
            return f"the smallest with enough KV cache for {q.load}"
        settings = [q.settings, *tighter_settings(q.engine, q.required, q.settings)][-1]
        memory = q.memory(smaller, settings)
        lacks = memory.missing(q.required.typical, q.required.concurrency) / GIB
        few = f"; {smaller.gpus} would lack {lacks:.1f} GiB on each"
        return f"the smallest with enough KV cache for {q.load}{few if lacks >= 0.05 else ''}"
    if best.layout.gpus < largest.gpus:
        return f"{holds}; more of a node would hold less than {WORTH:.0%} more"
    return f"{holds}; all that a node can share, which comes before a second node"


def shown(q: SizingInput, memory: Memory) -> str:
    """Return how many typical requests fit at once, with one decimal, rounded down."""
    return f"{math.floor(10 * memory.concurrency(min(memory.max_len, q.required.typical))) / 10:g}"


def _describe_tighter(before: EngineSettings, after: EngineSettings, gpu: Accelerator) -> list[Choice]:
    found = []
    if after.share != before.share:
        what = "a step" if after.pooling else "the KV cache"
        reason = f"raised from {before.share} for {what}; no other process may use the {gpu.name}"
        found.append(Choice("gpuMemoryUtilizationPercent", after.share, reason, RULE))
    if after.batched_tokens != before.batched_tokens:
        why = "need less memory" if after.pooling else "leave more memory for the KV cache"
        reason = f"lowered from {before.batched_tokens}: smaller steps {why}"
        found.append(Choice("maxNumBatchedTokens", after.batched_tokens, reason, RULE))
    if after.sequences != before.sequences:
        reason = f"lowered from {before.sequences}: fewer leave more memory for the KV cache"
        found.append(Choice("maxNumSeqs", after.sequences, reason, RULE))
    return found


def _longest(q: SizingInput, layout: Layout, settings: EngineSettings) -> int | None:
    """Return the longest context of which one sequence fits; None if the shortest does not."""

    def one_fits(length: int) -> bool:
        return q.memory(layout, replace(settings, max_len=length)).fits(length)

    r = q.required
    return r.context if one_fits(r.context) else _search(one_fits, r.floor, r.context)


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


def _describe_reduced(q: SizingInput, length: int, memory: Memory) -> list[Choice]:
    found, r = [], q.required
    if length < r.context:
        left = f"{memory.kv / GIB:.2f} GiB are left for the KV cache of each, {memory.kv_tokens} tokens"
        if q.settings.pooling:
            left = f"{memory.kv / GIB:.2f} GiB of each are left beside weights and steps"
        found.append(Choice("maxModelLen", length, f"lowered from {r.context}: {left}", RULE))
    if q.settings.pooling:
        return found
    typical = min(length, r.typical)
    at_once = int(memory.concurrency(typical))
    if at_once < r.concurrency:
        holds = f"the KV cache holds {shown(q, memory)} requests of {typical} tokens"
        reason = f"lowered from {r.concurrency}: {holds}"
        found.append(Choice("concurrency", at_once, reason, RULE))
    return found


def _over_nodes(q: SizingInput, layouts: list[Layout]) -> SizedLayout | None:
    for layout in layouts:
        found = _settle(q, layout)
        if found and (q.engine.tensor or q.hardware.count):
            return replace(found, reason=_why(q, found, None, layout))
        if found:
            problem = f"one node is too small for the weights and {q.required.floor} tokens"
            return replace(found, reason=f"all {q.hardware.per_node} of a node: {problem}")
    return None
