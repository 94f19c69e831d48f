"""Results of ``kvist bench prewarm`` as tables and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist_sim.bench.prewarm.sockets import CAPACITY, RATE, Run
from kvist_sim.bench.prewarm.virtual import ENGINES, KINDS, PREWARMED, ROLLOUT, STEADY, Cell, Workload
from kvist_sim.virtual.judge import interval

AVOIDED_BOUND: Final = 0.5
"""Smallest acceptable share of the TTFT p90 added by a rollout that prewarming avoids."""


@dataclass(frozen=True, slots=True)
class PrewarmReport:
    """Results of both parts."""

    workloads: Sequence[Workload]
    runs: Sequence[Run]
    setting: Mapping[str, Any]

    def broken(self) -> list[str]:
        """Every bound that does not hold."""
        found = [
            f"virtual, {one.name}: {avoided(one):.0%} of what a rollout adds is avoided, less than half"
            for one in self.workloads
            if avoided(one) < AVOIDED_BOUND
        ]
        if self.runs and (share := avoided_over_sockets(self.runs)) < AVOIDED_BOUND:
            found.append(f"sockets: {share:.0%} of what a rollout adds is avoided, less than half")
        return found + [
            f"sockets, {run.kind}: {run.failed} requests failed" for run in self.runs if run.failed
        ]


def avoided(workload: Workload) -> float:
    """Return the share of the TTFT p90 added by rollouts that prewarming avoids, over all seeds."""
    plain, prewarmed = fmean(workload.added(ROLLOUT)), fmean(workload.added(PREWARMED))
    return 1 - prewarmed / plain if plain > 0 else 1.0


def avoided_over_sockets(runs: Sequence[Run]) -> float:
    """Return the avoided share for the runs over sockets."""
    by_kind = {run.kind: run.p90 for run in runs}
    added = by_kind[ROLLOUT] - by_kind[STEADY]
    return 1 - (by_kind[PREWARMED] - by_kind[STEADY]) / added if added > 0 else 1.0


def table(report: PrewarmReport) -> RenderableType:
    """Return the tables of both parts."""
    setting = report.setting
    proof = "" if setting["full"] else "\nNot the full run: no proof."
    parts: list[RenderableType] = []
    if report.workloads:
        parts += [Text(_virtual_heading(report)), _virtual(report.workloads), Text(_paired(report.workloads))]
    if report.runs:
        parts += [Text(_sockets_heading(report)), _sockets(report.runs), Text(_told(report.runs))]
    return Group(*parts, Text(proof))


def _virtual_heading(report: PrewarmReport) -> str:
    setting, seeds = report.setting, report.setting["seeds"]
    rates = ", ".join(f"{one.name} {one.rate:.1f}" for one in report.workloads)
    return (
        f"Virtual time: {ENGINES} engines at {setting['load']:.0%} load (requests/s: {rates}), seeds "
        f"{seeds[0]} to {seeds[-1]}, {setting['seconds']:g} s each, slots of "
        f"{setting['seconds'] * 0.075:g} s; means over seeds, seconds."
    )


def _virtual(workloads: Sequence[Workload]) -> Table:
    shown = _heads(("workload", ""), ("TTFT p50", "p90", "p99", "hits", "goodput", "tokens prewarmed"))
    for one in workloads:
        for kind in KINDS:
            shown.add_row(one.name if kind == STEADY else "", kind, *_means(one.of(kind)))
    return shown


def _means(cells: Sequence[Cell]) -> list[str]:
    every = [cell.verdict for cell in cells]
    times = (
        [v.ttft_p50 for v in every],
        [v.ttft_p90 for v in every],
        [v.ttft_p99 for v in every],
    )
    return [
        *(f"{fmean(values):.3f}" for values in times),
        f"{fmean(v.hit_ratio for v in every):.1%}",
        f"{fmean(v.goodput for v in every):.2%}",
        f"{fmean(cell.prewarmed_tokens for cell in cells):,.0f}",
    ]


def _paired(workloads: Sequence[Workload]) -> str:
    lines = []
    for one in workloads:
        plain, prewarmed = one.added(ROLLOUT), one.added(PREWARMED)
        lines.append(
            f"{one.name}: a rollout adds {interval(plain)} s to the p90, with prewarming "
            f"{interval(prewarmed)} s:\n"
            f"  {avoided(one):.0%} of it is avoided (by seed: {', '.join(_shares(plain, prewarmed))})"
        )
    return "\n".join(lines) + "\n"


def _shares(plain: Sequence[float], prewarmed: Sequence[float]) -> list[str]:
    return [
        f"{1 - after / before:.0%}" if before > 0 else "-"
        for before, after in zip(plain, prewarmed, strict=True)
    ]


def _sockets_heading(report: PrewarmReport) -> str:
    return (
        f"Over sockets: {RATE:g} requests/s ({report.setting['load']:.0%} of {CAPACITY:g}), Envoy, one "
        f"picker, {ENGINES} simulated engines, slots of {report.setting['slot_seconds']:g} s; seconds. "
        f"Load average before: {report.setting['busy_before']:g}."
    )


def _sockets(runs: Sequence[Run]) -> Table:
    shown = _heads(("",), ("requests", "failed", "TTFT p50", "p90", "p99", "cached", "tokens prewarmed"))
    for run in runs:
        shown.add_row(
            run.kind,
            f"{run.requests:,}",
            f"{run.failed:,}",
            *(f"{seconds:.3f}" for seconds in (run.p50, run.p90, run.p99)),
            f"{run.cached / max(1, run.prompt):.1%}",
            f"{run.prewarmed_tokens:,.0f}",
        )
    return shown


def _told(runs: Sequence[Run]) -> str:
    return f"{avoided_over_sockets(runs):.0%} of what the rollout adds to the p90 is avoided."


def _heads(words: Sequence[str], figures: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in words:
        shown.add_column(head, no_wrap=True)
    for head in figures:
        shown.add_column(head, justify="right", no_wrap=True)
    return shown


def document(report: PrewarmReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in seconds."""
    return {
        "setting": dict(report.setting),
        "virtual": [_record(one) for one in report.workloads],
        "sockets": [asdict(run) for run in report.runs],
        "sockets_gone": avoided_over_sockets(report.runs) if report.runs else None,
    }


def _record(workload: Workload) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "rate": workload.rate,
        "gone": avoided(workload),
        "runs": [
            {
                "kind": cell.kind,
                "seed": cell.seed,
                "given": cell.prewarmed_tokens,
                **{
                    name: getattr(cell.verdict, name)
                    for name in ("ttft_p50", "ttft_p90", "ttft_p99", "hit_ratio", "goodput", "lost")
                },
            }
            for cell in workload.cells
        ],
    }
