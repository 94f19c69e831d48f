"""The rule of size. Pure.

1. The smallest tensor parallelism in a node that leaves the wanted context for the wanted concurrency.
2. Rather more accelerators of the same node than less context.
3. Rather a tighter engine, then less context (never under 8k, always said), than a second node.
4. Then pipeline stages over nodes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory, budget
from kvist_operator.models.shape import SizedModel
from kvist_operator.spec.pool import EngineSpec

from .fallbacks import say, squeezed
from .layouts import more_nodes, one_node
from .plan import Choice, Hardware
from .requirements import STEP, Wish

SOURCE: Final = "rule of size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A layout and a settings that fit, and what it took."""

    layout: Layout
    settings: EngineSettings
    memory: Memory
    reason: str
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Input of the rule of size."""

    model: SizedModel
    hardware: Hardware
    engine: EngineSpec
    wish: Wish
    settings: EngineSettings
    """The settings to try first."""

    def at(self, layout: Layout, settings: EngineSettings) -> Memory:
        """The memory of one candidate."""
        return budget(self.model, self.hardware.accelerator, layout, settings)

    def meets(self, memory: Memory) -> bool:
        """Whether the whole wish is met."""
        return memory.fits(self.wish.context) and memory.fits(self.wish.typical, self.wish.concurrency)


def size(question: Question) -> tuple[Sized | None, list[Layout]]:
    """The layout to take, None if none fits; and all layouts that were possible. Raises SpecError."""
    q = question
    near = one_node(q.engine, q.model.shape, q.hardware)
    far = more_nodes(q.engine, q.model.shape, q.hardware)
    found = _smallest(q, near) or _tight(q, near[-1:]) or _over_nodes(q, far)
    return found, [*near, *far]


def _smallest(q: Question, layouts: Iterable[Layout]) -> Sized | None:
    tried: list[Layout] = []
    for layout in layouts:
        memory = q.at(layout, q.settings)
        if q.meets(memory):
            return Sized(layout=layout, settings=q.settings, memory=memory, reason=_why(q, layout, tried))
        tried.append(layout)
    return None


def _why(q: Question, layout: Layout, tried: list[Layout]) -> str:
    if q.engine.tensor:
        return "as asked"
    if q.hardware.count:
        return f"spec.accelerator.count is {q.hardware.count}"
    want = f"{q.wish.concurrency} requests of {q.wish.typical} tokens"
    if not tried:
        return (
            f"one is enough for the weights and {want}"
            if layout.gpus == 1
            else f"the smallest that leaves room for {want}"
        )
    memory = q.at(tried[-1], q.settings)
    lacks = memory.missing(q.wish.typical, q.wish.concurrency)
    short = f"{tried[-1].tensor} would lack {lacks / GIB:.1f} GiB on each"
    return f"the smallest that leaves room for {want}; {short}"


def _tight(q: Question, layouts: Iterable[Layout]) -> Sized | None:
    """The given layout with ever less comfort, then with less context."""
    for layout in layouts:
        tightest = q.settings
        for settings in squeezed(q.engine, q.wish, q.settings):
            tightest = settings
            memory = q.at(layout, settings)
            if q.meets(memory):
                return _squeezed(q, layout, settings, memory, [])
        found = _shorter(q, layout, tightest)
        if found:
            return found
    return None


def _squeezed(
    q: Question, layout: Layout, settings: EngineSettings, memory: Memory, more: list[Choice]
) -> Sized:
    asked = q.engine.tensor is not None or q.hardware.count is not None
    reason = "as asked" if asked else "all accelerators of a node, before a second node is taken"
    return Sized(
        layout=layout,
        settings=settings,
        memory=memory,
        reason=reason,
        choices=(*say(q.settings, settings, q.hardware), *more),
    )


def _shorter(q: Question, layout: Layout, settings: EngineSettings) -> Sized | None:
    """Less context at the wanted concurrency, then fewer requests at the shortest context."""
    length = _longest(q, layout, settings)
    if length is None:
        return None
    tight = replace(settings, max_len=length)
    memory = q.at(layout, tight)
    return _squeezed(q, layout, tight, memory, _said(q, length, memory))


def _longest(q: Question, layout: Layout, settings: EngineSettings) -> int | None:
    """The context to offer where the whole wish is too much; None if not even the shortest fits.

    As long as the concurrency is kept; but rather fewer requests than a context shorter than those that are
    expected, and rather fewer than none.
    """
    wish = q.wish

    def alone(length: int) -> bool:
        return q.at(layout, replace(settings, max_len=length)).fits(length)

    def together(length: int) -> bool:
        memory = q.at(layout, replace(settings, max_len=length))
        return memory.fits(length) and memory.fits(min(length, wish.typical), wish.concurrency)

    kept = _search(together, wish.floor, wish.context)
    if kept is not None and (kept >= wish.typical or wish.typical == wish.context):
        return kept
    if wish.typical < wish.context:
        return _search(alone, wish.floor, wish.context)
    return wish.floor if alone(wish.floor) else None


def _search(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest multiple of 1,024 between the two that fits, the lower bound included."""
    if not fits(low):
        return None
    steps = range(low // STEP, high // STEP + 1)
    best, left, right = low, 0, len(steps) - 1
    while left <= right:
        middle = (left + right) // 2
        length = max(low, steps[middle] * STEP)
        if fits(length):
            best, left = length, middle + 1
        else:
            right = middle - 1
    return best


def _said(q: Question, length: int, memory: Memory) -> list[Choice]:
    found = []
    if length < q.wish.context:
        left = f"{memory.kv / GIB:.2f} GiB are left for the cache of each, {memory.kv_tokens} tokens"
        reason = f"lowered from {q.wish.context}: {left}"
        found.append(Choice("maxModelLen", length, reason, SOURCE))
    at_once = int(memory.concurrency(min(length, q.wish.typical)))
    if at_once < q.wish.concurrency:
        holds = f"the cache holds {at_once} of {min(length, q.wish.typical)} tokens"
        reason = f"{q.wish.concurrency} were wanted; {holds}"
        found.append(Choice("concurrency", at_once, reason, SOURCE))
    return found


def _over_nodes(q: Question, layouts: list[Layout]) -> Sized | None:
    for layout in layouts:
        found = _smallest(q, [layout]) or _tight(q, [layout])
        if found:
            return _reasoned(found, q)
    return None


def _reasoned(found: Sized, q: Question) -> Sized:
    if q.engine.tensor or q.hardware.count:
        return found
    problem = f"one node is too small for the weights and {q.wish.floor} tokens"
    reason = f"all {q.hardware.per_node} of a node: {problem}"
    return replace(found, reason=reason)
