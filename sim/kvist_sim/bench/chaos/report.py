"""Results of ``kvist bench chaos`` as a table and as JSON."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist_sim.bench.chaos.judge import ERROR_BOUND, WINDOW, ChaosFigures, Error


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """Figures of all phases."""

    phases: Sequence[ChaosFigures]
    setting: Mapping[str, Any]
    elsewhere: Mapping[str, str]
    """Faults that this command cannot make, with the command that does."""

    def broken(self) -> list[str]:
        """Every bound that does not hold, with its phase."""
        return [f"{figures.phase.name}: {why}" for figures in self.phases for why in figures.broken()]


def table(report: ChaosReport) -> RenderableType:
    """Return one line per phase, and the steps of each."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("phase", no_wrap=True)
    for head in (
        "\nsent",
        "\nlost",
        "cut by\npicker",
        "cut by\nengine",
        "\nretried",
        "no\npick",
        "TTFT ms\np50",
        "\np90",
        "error\nbefore",
        "error\nafter",
        "healed\nin",
        "",
    ):
        shown.add_column(head, justify="right", no_wrap=True)
    for figures in report.phases:
        shown.add_row(*_row(figures))
    return Group(Text(_heading(report)), shown, Text(_steps(report)))


def _row(figures: ChaosFigures) -> list[str]:
    return [
        figures.phase.name,
        *(f"{n:,}" for n in (figures.sent, figures.lost, figures.cut_by_picker, figures.cut_by_engine)),
        *(f"{n:,}" for n in (figures.retried, figures.unpicked)),
        *(f"{1e3 * seconds:.0f}" for seconds in (figures.ttft_p50, figures.ttft_p90)),
        _percent(figures.before),
        _percent(figures.after),
        f"{figures.healed:.1f} s",
        "BROKEN" if figures.broken() else "ok",
    ]


def _percent(error: Error) -> str:
    return "?" if math.isinf(error.share) else f"{error.share:.2%}"


def _heading(report: ChaosReport) -> str:
    setting, total = report.setting, sum(figures.sent for figures in report.phases)
    pickers = f"{setting['pickers']} pickers{' that gossip' if setting['peers'] else ''}"
    proof = "" if setting["full"] else "\nNot the full run: no proof."
    return (
        f"{total:,} requests, {setting['rate']:g} a second, streamed; "
        f"{setting['engines']} simulated engines, "
        f"{pickers},\none Envoy{', TLS between them' if setting['tls'] else ''}. "
        f"Phases of {setting['phase_seconds']:g} s with one fault each, 5 s after they begin.\n"
        f"Error: predicted against reported cached tokens of {WINDOW} requests, those before the fault and\n"
        f"those that begin {setting['settle_seconds']:g} s after it; healed: from then on no {WINDOW} "
        f"were off by {ERROR_BOUND:.0%}.{proof}"
    )


def _steps(report: ChaosReport) -> str:
    lines = ["what was done, in seconds after each fault began:"]
    for figures in report.phases:
        name = figures.phase.name
        for at, what in figures.phase.steps:
            lines.append(f"  {name:<16}{at:>6.1f}  {what}")
            name = ""
    lines += [f"  {name:<16}     -  {where}" for name, where in report.elsewhere.items()]
    return "\n".join(lines)


def document(report: ChaosReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in seconds."""
    return {
        "setting": dict(report.setting),
        "phases": [_record(figures) for figures in report.phases],
        "elsewhere": dict(report.elsewhere),
    }


def _record(figures: ChaosFigures) -> dict[str, Any]:
    record = dataclasses.asdict(figures)
    for name in ("before", "after"):
        share = getattr(figures, name).share
        record[name]["share"] = None if math.isinf(share) else round(share, 6)
    return record | {"broken": figures.broken()}
