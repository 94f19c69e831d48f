"""Plans of every model of the catalogue on many accelerators and in three clusters, and the page with their
figures; ``python -m tests.operator.sizing_sweep`` writes docs/planning-sweep.md again."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.operator.pools import known, pool

from kvist_operator.errors import SpecError
from kvist_operator.models.catalogue import catalogue
from kvist_operator.node_labels import NodeFacts, node_kinds
from kvist_operator.plan import Plan, make_plan
from kvist_operator.plan.requirements import DEFAULT_CONCURRENCY, DEFAULT_CONTEXT

PAGE: Final = Path(__file__).parents[2] / "docs" / "planning-sweep.md"
GPUS: Final = (
    "T4",
    "L4",
    "A100-40GB",
    "L40S",
    "A100-80GB",
    "H100-80GB",
    "H200-141GB",
    "B200-180GB",
    "MI300X-192GB",
)
PRODUCT: Final = "nvidia.com/gpu.product"
COUNT: Final = "nvidia.com/gpu.count"
CLUSTERS: Final[Mapping[str, list[dict[str, str]]]] = {
    "20 × T4; 4 × (8 × H100)": [
        {PRODUCT: "Tesla-T4", COUNT: "1"},
        {PRODUCT: "NVIDIA-H100-80GB-HBM3", COUNT: "8"},
    ],
    "1 × L4; 4 × L4; 4 × A10; 8 × H200": [
        {PRODUCT: "NVIDIA-L4", COUNT: "1"},
        {PRODUCT: "NVIDIA-L4", COUNT: "4"},
        {PRODUCT: "NVIDIA-A10G", COUNT: "4"},
        {PRODUCT: "NVIDIA-H200", COUNT: "8"},
    ],
    "MIG slices of 9.5 GiB; shared L4; 8 × A100-40GB": [
        {PRODUCT: "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "nvidia.com/gpu.memory": "9728", COUNT: "7"},
        {PRODUCT: "NVIDIA-L4-SHARED", "nvidia.com/gpu.replicas": "4", COUNT: "1"},
        {PRODUCT: "NVIDIA-A100-SXM4-40GB", COUNT: "8"},
    ],
}
"""Clusters by their nodes, several of which have GPUs too small for most models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A model on a kind of accelerator."""

    model: str
    gpu: str
    plan: Plan | None
    """None if the accelerator is older than the kernels for the checkpoint."""
    held: float
    """Part of the wish that the plan holds."""
    half: float
    """Part that the best plan with at most half as many GPUs holds; 0 without one."""

    @property
    def gpus(self) -> int:
        """GPUs of the plan; 0 if there is none."""
        return self.plan.layout.gpus if self.plan and self.plan.argv else 0


def part_held(plan: Plan | None) -> float:
    """Return the part of the default wish that a plan holds: eight sequences of 32k, or the native length."""
    if plan is None or not plan.argv:
        return 0.0
    context = min(DEFAULT_CONTEXT, known(plan.argv[1]).shape.max_len)
    tokens = plan.memory.concurrency(plan.settings.max_len) * plan.settings.max_len
    return min(1.0, tokens / (DEFAULT_CONCURRENCY * context))


@cache
def models() -> list[str]:
    """Return the models of the catalogue that generate text: of others no cache is promised."""
    found = ((name, known(name)) for name in sorted(catalogue()))
    return [name for name, facts in found if facts.shape.pooling is None and facts.task is None]


@cache
def pairs() -> tuple[Pair, ...]:
    """Return all pairs of a model and a kind of accelerator."""
    found = {(model, gpu): _pair(model, gpu) for gpu in GPUS for model in set(twins().values())}
    return tuple(replace(found[twins()[name], gpu], model=name) for gpu in GPUS for name in models())


@cache
def twins() -> Mapping[str, str]:
    """Return for each model one with the same shape and size, whose plans are the same: itself or another."""
    first: dict[str, str] = {}
    facts = {name: known(name) for name in models()}
    return {n: first.setdefault(repr((f.shape, f.checkpoint_bytes)), n) for n, f in facts.items()}


def _pair(model: str, gpu: str) -> Pair:
    plan = _plan(model, gpu=gpu)
    gpus = plan.layout.gpus if plan and plan.argv else 0
    halves = [_plan(model, gpu=gpu, count=n) for n in (1, 2, 4, 8, 16) if 2 * n <= gpus]
    return Pair(
        model=model, gpu=gpu, plan=plan, held=part_held(plan), half=max(map(part_held, halves), default=0)
    )


def _plan(model: str, *, count: int = 0, **where: Any) -> Plan | None:
    """Return a plan; None if the model cannot be divided like this, or runs on a newer accelerator only."""
    spec = {"accelerator": {"count": count}} if count else {}
    try:
        return make_plan(pool(f"hf://{model}", **spec), known(model), **where)
    except SpecError:
        return None


def kinds(cluster: str) -> list[NodeFacts]:
    """Return the kinds of accelerators of a cluster."""
    return node_kinds(CLUSTERS[cluster])


@cache
def in_cluster(cluster: str) -> Mapping[str, Plan | None]:
    """Return the plan of each model in a cluster."""
    found = {name: _plan(name, nodes=kinds(cluster)) for name in set(twins().values())}
    return {name: found[twins()[name]] for name in models()}


def wrongly_refused(cluster: str) -> list[str]:
    """Return the models that are refused in a cluster although one of its kinds of nodes holds them."""
    refused = [name for name, plan in in_cluster(cluster).items() if plan is None or not plan.argv]
    alone = {name: [_plan(name, nodes=[kind]) for kind in kinds(cluster)] for name in refused}
    return [name for name, plans in alone.items() if any(plan and plan.argv for plan in plans)]


def page() -> str:
    """Return the page with the figures of the sweep."""
    rows = [_gpu_row(gpu) for gpu in GPUS]
    return HEAD + "\n".join(rows) + MIDDLE + "\n".join(map(_cluster_row, CLUSTERS)) + "\n"


def _gpu_row(gpu: str) -> str:
    own = [pair for pair in pairs() if pair.gpu == gpu]
    fit = [(pair, pair.plan) for pair in own if pair.plan and pair.plan.argv]
    whole = sum(pair.held == 1 for pair, _ in fit)
    native = {pair.model: known(pair.model).shape.max_len for pair in own}
    context = sum(plan.settings.max_len < min(DEFAULT_CONTEXT, native[pair.model]) for pair, plan in fit)
    larger = [pair.held - pair.half for pair in own if pair.gpus > 1]
    gain = f"{100 * min(larger):.0f} %" if larger else "–"
    gpus = sum(pair.gpus for pair in own)
    cells = (gpu, len(fit), len(own) - len(fit), gpus, whole, len(fit) - whole - context, context, gain)
    return f"| {' | '.join(map(str, cells))} |"


def _cluster_row(cluster: str) -> str:
    plans = in_cluster(cluster)
    taken = Counter(plan.hardware.accelerator.name for plan in plans.values() if plan and plan.argv)
    listed = ", ".join(f"{name} {number}" for name, number in sorted(taken.items()))
    return f"| {cluster} | {listed} | {len(plans) - taken.total()} | {len(wrongly_refused(cluster))} |"


HEAD: Final = f"""# Plans of the catalogue

Written by `make golden` from the planner; a test compares the page with it. Each model of the catalogue is
planned on nodes of each accelerator ([planning](guides/planning.md) has the rule), for the default wish:
{DEFAULT_CONCURRENCY} sequences of 32,768 tokens, or of the native length if that is shorter.

*Gain* is the smallest part of the wish that any plan with several GPUs holds beyond the best plan with at
most half of them; below 5 % the larger one would not be taken. Models whose kernels need a newer GPU count as
refused.

| accelerator | planned | refused | GPUs in all | whole wish | fewer sequences | shorter context | gain |
|---|---|---|---|---|---|---|---|
"""
MIDDLE: Final = """

In these clusters every kind of node is tried. A refusal is wrong if one kind of node alone would have held
the model.

| nodes | models by accelerator taken | refused | wrongly |
|---|---|---|---|
"""


if __name__ == "__main__":
    PAGE.write_text(page())
