"""The kind of accelerator of a plan, among those that a cluster has; and its cheaper neighbours. Pure.

Kinds are compared by the price of a replica if prices are given, else by its size: total memory, then number
of accelerators. The cheapest that holds the wish is taken. A dearer kind is taken only if it holds at least
5 % of the wish more (``size.most_worth``). Several nodes come after one node, and GPUs that other pods share
come last. A pool stays on the kind for which it was planned as long as it fits there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.memory.layout import EngineSettings, Layout
from kvist_operator.node_labels import NodeFacts

from .kv import KvChoice
from .plan import Choice, Hardware, Neighbour
from .resources import HardwareOption
from .size import SizedLayout, SizingInput, most_worth, tighter_settings

VENDORS: Final = {"rocm": "amd", "tpu": "google", "gaudi": "intel", "hpu": "intel", "cpu": "cpu"}
"""Vendor of an image by a part of its name; NVIDIA without one of them."""
NAMED: Final = 4
"""Kinds of nodes that a reason lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSizing:
    """The sizing of a pool on one kind of accelerator."""

    candidate: HardwareOption
    q: SizingInput
    kv: KvChoice
    settings: tuple[Choice, ...]
    """Choices of the settings that were tried first."""
    sized: SizedLayout | None
    """None if nothing fits."""
    layouts: tuple[Layout, ...]
    spread: tuple[Choice, ...] = ()
    others: tuple[SizedLayout, ...] = ()
    """Other sizes of the same kind that fit."""

    @property
    def held(self) -> float:
        """Part of the wish that is held."""
        return self.q.held(self.sized.memory) if self.sized else 0.0


def for_image(nodes: Sequence[NodeFacts], image: str) -> list[NodeFacts]:
    """Return the kinds of accelerators that an engine's image is for; all of them if it is for none."""
    name = image.lower()
    vendor = next((found for part, found in VENDORS.items() if part in name), "nvidia")
    return [facts for facts in nodes if facts.accelerator.vendor == vendor] or list(nodes)


def choose(attempts: Sequence[HardwareSizing]) -> HardwareSizing:
    """Return the attempt to use; without one that fits, the one that lacks least."""
    fitting = [each for each in attempts if each.sized]
    if not fitting:
        return min(attempts, key=lambda each: lacking(each)[1])
    for each in fitting:
        if each.candidate.planned:
            return each
    first = min(map(_rank, fitting))
    cheapest_first = sorted((each for each in fitting if _rank(each) == first), key=_attempt_cost)
    found = most_worth(cheapest_first, lambda each: each.held)
    assert found is not None
    return found


def lacking(attempt: HardwareSizing) -> tuple[Layout, float]:
    """Return the layout that lacks least on its fullest GPU for one sequence of the shortest context, with
    the tightest settings, and the bytes that it lacks."""
    q, floor = attempt.q, attempt.q.required.floor
    settings = replace(tightest(q), max_len=floor)
    missing = [(layout, q.memory(layout, settings).missing(floor, 1)) for layout in attempt.layouts]
    return min(missing, key=lambda pair: pair[1])


def tightest(q: SizingInput) -> EngineSettings:
    """Return the settings that leave most memory for the KV cache."""
    return [q.settings, *tighter_settings(q.engine, q.required, q.settings)][-1]


def described(chosen: HardwareSizing, attempts: Sequence[HardwareSizing]) -> list[Choice]:
    """Return the choices of the accelerator, with the kinds that it was compared with; without them if the
    pool was planned before, so that a status does not change as nodes come and go."""
    accelerator, *more = chosen.candidate.choices
    names = list(dict.fromkeys(each.q.hardware.accelerator.name for each in attempts))
    if len(names) > 1 and not chosen.candidate.planned:
        some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        order = "cheapest" if chosen.q.hardware.price is not None else "smallest"
        why = f"the {order} that holds the wish or most of it" if chosen.sized else "lacks least"
        accelerator = replace(accelerator, reason=f"{accelerator.reason}; {why}, of {some}")
    return [accelerator, *more]


def neighbours(chosen: HardwareSizing, attempts: Sequence[HardwareSizing]) -> tuple[Neighbour, ...]:
    """Return the cheaper size that holds most, and, if the plan holds less than the wish, the cheapest dearer
    one that holds most."""
    if chosen.sized is None:
        return ()
    own = cost(chosen.q.hardware, chosen.sized.layout)
    found = [
        (cost(each.q.hardware, sized.layout), each.q.held(sized.memory), each.q, sized)
        for each in attempts
        for sized in _sizes(each)
        if not each.q.hardware.accelerator.shared and sized is not chosen.sized
    ]
    cheaper = [entry for entry in found if entry[0] < own]
    dearer = [entry for entry in found if entry[0] > own and entry[1] > chosen.held]
    best = [max(cheaper, key=lambda entry: entry[1])] if cheaper else []
    if dearer:
        best.append(min(dearer, key=lambda entry: (-entry[1], entry[0])))
    return tuple(_neighbour(q, sized, price < own) for price, _, q, sized in best)


def cost(hardware: Hardware, layout: Layout) -> tuple[bool, float, int, int, str]:
    """Return what orders sizes: the price of a replica, or after all prices its memory in GiB."""
    price, row = hardware.cost(layout), hardware.accelerator
    size = layout.gpus * row.memory_gib if price is None else price
    return price is None, size, layout.gpus, hardware.per_node, row.name


def _rank(attempt: HardwareSizing) -> tuple[bool, bool]:
    hardware, sized = attempt.q.hardware, attempt.sized
    return hardware.accelerator.shared, bool(sized and hardware.nodes(sized.layout) > 1)


def _attempt_cost(attempt: HardwareSizing) -> tuple[bool, float, int, int, str]:
    assert attempt.sized is not None
    return cost(attempt.q.hardware, attempt.sized.layout)


def _sizes(attempt: HardwareSizing) -> Iterator[SizedLayout]:
    if attempt.sized:
        yield attempt.sized
    yield from attempt.others


def _neighbour(q: SizingInput, sized: SizedLayout, cheaper: bool) -> Neighbour:
    tokens = min(sized.memory.max_len, q.required.typical)
    return Neighbour(
        accelerator=q.hardware.accelerator.name,
        gpus=sized.layout.gpus,
        nodes=q.hardware.nodes(sized.layout),
        sequences=sized.memory.concurrency(tokens),
        wished=q.required.concurrency,
        tokens=tokens,
        cheaper=cheaper,
        price=q.hardware.cost(sized.layout),
    )
