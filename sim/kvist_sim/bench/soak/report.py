"""Results of ``kvist bench soak`` as a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist_sim.bench.soak.judge import GROWTH_BOUND, PARTS, SoakFigures

MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class SoakReport:
    """Results of both parts."""

    figures: Sequence[SoakFigures]
    setting: Mapping[str, Any]

    def broken(self) -> list[str]:
        """Every bound that does not hold."""
        return [f"{one.part}, {one.picker}: {why}" for one in self.figures for why in one.broken()]


def table(report: SoakReport) -> RenderableType:
    """Return one line per picker and part, and its memory over time."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("part", "picker"):
        shown.add_column(head, no_wrap=True)
    for head in ("requests", "failed", "p50 ms", "p99 ms", "CPU", "MB 2nd", "MB last", "growth", "left", ""):
        shown.add_column(head, justify="right", no_wrap=True)
    for one in report.figures:
        shown.add_row(*_row(one))
    return Group(Text(_heading(report)), shown, Text(_course(report)))


def _row(one: SoakFigures) -> list[str]:
    memory = one.memory
    return [
        one.part,
        one.picker,
        f"{one.requests:,}",
        f"{one.failed:,}",
        f"{one.p50 * 1e3:.1f}",
        f"{one.p99 * 1e3:.1f}",
        f"{one.cpu_per_second:.0%}",
        f"{memory.mean(1) / MB:.1f}",
        f"{memory.mean(PARTS - 1) / MB:.1f}",
        f"{memory.growth:+.1%}",
        str(len(one.left)) if one.left else "nothing",
        "BROKEN" if one.broken() else "ok",
    ]


def _heading(report: SoakReport) -> str:
    setting = report.setting
    proof = "" if setting["full"] else "\nShorter than the full run: no proof."
    return (
        f"{setting['seconds']:g} s each, one after the other. direct: {setting['picks']:g} picks/s over "
        f"ext_proc by a client of its own, {setting['blocks']:,} KV blocks/s stored and as many evicted "
        f"meanwhile; milliseconds to the pick. stack: {setting['rate']:g} requests/s through Envoy to "
        f"{setting['engines']} simulated engines; milliseconds to the first token. Memory: resident, mean of "
        f"the second and of the last of {PARTS} parts of the run; bound {GROWTH_BOUND:.0%}.{proof}"
    )


def _course(report: SoakReport) -> str:
    lines = [f"memory in MB, {PARTS} parts of the run:"]
    for one in report.figures:
        course = " ".join(f"{one.memory.mean(part) / MB:>6.1f}" for part in range(PARTS))
        lines.append(f"  {one.part + ' ' + one.picker:<18}{course}")
    return "\n".join(lines)


def document(report: SoakReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in seconds, memory in bytes."""
    return {
        "setting": dict(report.setting),
        "parts": [_record(one) for one in report.figures],
    }


def _record(one: SoakFigures) -> dict[str, Any]:
    return {
        "part": one.part,
        "picker": one.picker,
        "seconds": one.seconds,
        "requests": one.requests,
        "failed": one.failed,
        "why": list(one.why),
        "p50": round(one.p50, 6),
        "p99": round(one.p99, 6),
        "cpu_per_second": round(one.cpu_per_second, 4),
        "memory": [round(one.memory.mean(part)) for part in range(PARTS)],
        "growth": round(one.memory.growth, 5) if one.memory.growth != float("inf") else None,
        "left": list(one.left),
        "broken": one.broken(),
    }
