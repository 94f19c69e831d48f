"""What is missing when nothing fits, and the nearest thing that would. Pure."""

from dataclasses import replace

from kvist_operator.hardware import ROWS, Accelerator
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory

from .fallbacks import squeezed
from .plan import Hardware
from .size import Question, Sized, size


def closest(question: Question, layouts: list[Layout]) -> tuple[Layout, EngineSettings, Memory]:
    """The candidate that lacks least on its fullest GPU, squeezed as far as it goes."""
    runs = [question.settings, *squeezed(question.engine, question.wish, question.settings)]
    settings = replace(runs[-1], max_len=question.wish.floor)
    measured = [(layout, question.at(layout, settings)) for layout in layouts or [Layout()]]
    layout, memory = min(measured, key=lambda pair: pair[1].missing(question.wish.floor, 1))
    return layout, settings, memory


def nearest(question: Question) -> str:
    """In words: more of the same, another dtype, another accelerator; empty when nothing known would do."""
    return (
        _quantised(question)
        or _freed(question)
        or _elsewhere(question)
        or "nothing that is known here would fit it"
    )


def _freed(q: Question) -> str:
    """Without the bounds the user set on size."""
    bound = q.hardware.count or q.engine.tensor or q.engine.pipeline
    if not bound:
        return ""
    engine = replace(q.engine, tensor=None, pipeline=None)
    found = _try(replace(q, engine=engine, hardware=replace(q.hardware, count=None)))
    return (
        f"{_words(found, q.hardware)} would fit: leave count and parallel sizes to the plan" if found else ""
    )


def _quantised(q: Question) -> str:
    if q.model.shape.quantization.method or q.settings.online_fp8 or not q.hardware.accelerator.fp8:
        return ""
    found = _try(replace(q, settings=replace(q.settings, online_fp8=True)))
    return f"spec.engine.quantization: FP8 on {_words(found, q.hardware)} would fit" if found else ""


def _elsewhere(q: Question) -> str:
    """The fewest nodes, and of those the least memory in all."""
    engine = replace(q.engine, tensor=None, pipeline=None)
    options = [
        (-(-found.layout.gpus // row.per_node), found.layout.gpus * row.memory_gib, _words(found, hardware))
        for row in ROWS
        if row.verified and row.vendor in ("nvidia", "amd") and row != q.hardware.accelerator
        for hardware in [Hardware(accelerator=row, per_node=row.per_node)]
        if (found := _try(replace(q, engine=engine, hardware=hardware)))
    ]
    return f"{min(options)[-1]} would fit" if options else ""


def _try(question: Question) -> Sized | None:
    return size(question)[0]


def _words(found: Sized, hardware: Hardware) -> str:
    layout, row = found.layout, hardware.accelerator
    nodes = -(-layout.gpus // hardware.per_node)
    over = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{layout.gpus} × {row.name}{over}"


def shortfall(memory: Memory, length: int) -> float:
    """Bytes that the fullest GPU lacks for one sequence of the shortest context."""
    return memory.missing(length, 1)


def sentence(question: Question, layout: Layout, lacking: float, hint: str) -> str:
    """The refusal in one sentence."""
    row: Accelerator = question.hardware.accelerator
    lacks = f"lack {lacking / GIB:.1f} GiB on each of {layout.gpus} × {row.name}"
    return f"{question.wish.floor} tokens of context {lacks}; {hint}"
