"""Layouts that hold more tokens of models whose KV cache tensor parallelism repeats on every rank. Pure.

MLA keeps one row per token for all heads, so each tensor-parallel rank holds the whole cache. Two layouts of
the same GPUs avoid that: *data-parallel attention* gives each rank its own requests (and whole attention
weights, beside experts that stay divided among all ranks); *decode context parallelism* gives each rank a
part of the tokens of every request, at the price of communication in each decode step.

Example: DeepSeek-R1 on 8 × H200 with a 16-bit cache holds 0.6 million tokens with TP 8, 2.4 million with 8
data-parallel ranks, although their attention weights are whole, and 4.9 million with context parallelism over
8 ranks. Data parallelism needs a request for every rank at each moment; context parallelism does not.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kvist_operator.memory.layout import Layout
from kvist_operator.models.shape import ModelShape

from .layouts import context_obstacle
from .plan import Choice
from .requirements import RULE
from .size import SizedLayout, SizingInput, size

WIDE: Final = 4
"""Concurrent requests for each data-parallel rank from which ranks are seldom idle."""
MORE: Final = 1.25
"""Times as many tokens that another layout must hold to be taken or suggested."""


def share_cache(q: SizingInput, sized: SizedLayout) -> tuple[SizedLayout, list[Choice]]:
    """Return the layout to use instead of ``sized``, on as many GPUs, and the reason or a suggestion.

    Data-parallel attention is chosen where it holds more and the workload is wide; decode context parallelism
    where the requested context or concurrency would not fit otherwise. Sizes that the user sets stay.
    """
    engine, shape, layout = q.engine, q.facts.shape, sized.layout
    if engine.tensor or engine.data or engine.context or not shape.latent or layout.tensor == 1:
        return sized, []
    data = _best(q, sized, _data_parallel(shape, layout))
    if data and q.required.concurrency >= WIDE * data.layout.data:
        ranks = f"{data.layout.data} ranks with requests of their own hold {data.memory.kv_tokens:,} tokens"
        return data, [
            Choice("tensorParallelSize", data.layout.tensor, "attention is data-parallel", RULE),
            Choice("dataParallelSize", data.layout.data, f"{ranks} {_instead(sized)}", RULE),
        ]
    if not q.satisfied_by(sized.memory):
        context = _best(q, sized, _context_parallel(shape, layout))
        if context:
            ranks = f"{context.layout.context} ranks that divide the tokens hold"
            reason = (
                f"{ranks} {context.memory.kv_tokens:,} {_instead(sized)}; a decode step waits for all of them"
            )
            return context, [
                Choice("tensorParallelSize", layout.tensor, sized.reason, RULE),
                Choice("decodeContextParallelSize", context.layout.context, reason, RULE),
            ]
    if data:
        needed = WIDE * data.layout.data
        reason = (
            f"{data.layout.data} ranks would hold {data.memory.kv_tokens:,} tokens {_instead(sized)}, but "
            f"need {needed} requests at once: set spec.workload.concurrency to {needed} if you expect them"
        )
        return sized, [Choice("dataParallelSize", 1, reason, RULE)]
    return sized, []


def _data_parallel(shape: ModelShape, layout: Layout) -> Iterator[Layout]:
    experts = shape.experts
    data = 2
    while layout.pipeline == 1 and experts and not experts.count % layout.tensor and data <= layout.tensor:
        yield replace(layout, tensor=layout.tensor // data, data=data)
        data *= 2


def _context_parallel(shape: ModelShape, layout: Layout) -> Iterator[Layout]:
    context = 2
    while context <= layout.tensor:
        if not context_obstacle(shape, layout.tensor, context):
            yield replace(layout, context=context)
        context *= 2


def _best(q: SizingInput, sized: SizedLayout, layouts: Iterator[Layout]) -> SizedLayout | None:
    """Return the first layout that is enough, else the one that holds most; None if none holds more."""
    found = []
    for layout in layouts:
        pipeline = layout.pipeline if layout.pipeline > 1 else q.engine.pipeline
        engine = replace(
            q.engine, tensor=layout.tensor, data=layout.data, context=layout.context, pipeline=pipeline
        )
        each, _ = size(replace(q, engine=engine))
        if each and each.memory.kv_tokens >= MORE * sized.memory.kv_tokens:
            if layout.context > 1 and q.satisfied_by(each.memory):
                return each
            found.append(each)
    return max(found, key=lambda each: each.memory.kv_tokens, default=None)


def _instead(sized: SizedLayout) -> str:
    return (
        f"instead of {sized.memory.kv_tokens:,} with tensor parallelism, which repeats the cache on each GPU"
    )
