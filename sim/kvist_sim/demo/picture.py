"""One picture of a demo: the first token's wait over time, the share of cached tokens, and the prefill saved.

It is drawn with matplotlib (extra ``plots``) at 1600 × 900 pixels, on a light ground, from the demo's own
measurements.
"""

import io
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

from .plan import DemoPlan
from .report import KVIST, ROUND_ROBIN, DemoReport, seconds_text
from .series import PREFILL_RATE, RunSeries, run_series

SUFFIXES: Final = (".png", ".svg")
PALETTE: Final = 128
"""Colours of a PNG: enough for flat areas and smooth text, in a third of the bytes."""
INCHES: Final = (16.0, 9.0)
DPI: Final = 100
COLOURS: Final[Mapping[str, str]] = {KVIST: "#00785a", ROUND_ROBIN: "#c25a00"}
"""Distinct for colour-blind readers too, each with a contrast of at least 4.5 to the ground."""
TEXT: Final = "#1f2328"
FAINT: Final = "#59636e"
GRID: Final = "#d5dae0"
GROUND: Final = "#ffffff"
WARM_UP: Final = "#f3f5f7"
LABELS: Final[Mapping[str, str]] = {
    KVIST: "kvist: the engine that caches the prompt's prefix, unless another is faster",
    ROUND_ROBIN: "round robin: the engines take turns",
}
NOTICEABLE: Final = 1.1
"""Ratio below which the headline does not call one policy faster."""


def write_picture(report: DemoReport, file: Path) -> None:
    """Write the picture as PNG or SVG, by the file's suffix. Raises OSError."""
    with mpl.rc_context({"svg.hashsalt": "kvist-demo", "svg.fonttype": "none", "font.size": 12.5}):
        made, drawn = figure(report), io.BytesIO()
        if file.suffix == ".svg":
            made.savefig(drawn, format="svg", facecolor=GROUND, metadata={"Date": None})
            file.write_bytes(drawn.getvalue())
        else:
            made.savefig(drawn, format="png", dpi=DPI, facecolor=GROUND)
            Image.open(drawn).convert("RGB").quantize(PALETTE).save(file, format="PNG", optimize=True)


def figure(report: DemoReport) -> Figure:
    """Return the figure."""
    plan = report.plan
    runs = {name: run_series(report.outcomes[name], plan) for name in (KVIST, ROUND_ROBIN)}
    made = Figure(figsize=INCHES)
    grid = made.add_gridspec(
        2,
        2,
        left=0.06,
        right=0.95,
        top=0.755,
        bottom=0.175,
        width_ratios=(1.45, 1),
        hspace=0.42,
        wspace=0.24,
    )
    _texts(made, report)
    _waits(made.add_subplot(grid[:, 0]), runs, report)
    _shares(made.add_subplot(grid[0, 1]), runs, report)
    _saved(made.add_subplot(grid[1, 1]), runs, plan)
    return made


def headline(report: DemoReport) -> str:
    """Return the result in one line."""
    ours, theirs = report.kvist.ttft_p50, report.round_robin.ttft_p50
    if ours <= 0 or theirs / ours < NOTICEABLE:
        return f"First token after {seconds_text(ours)} with kvist, {seconds_text(theirs)} with round robin"
    return f"First token after {seconds_text(ours)} instead of {seconds_text(theirs)}"


def small_print(plan: DemoPlan) -> str:
    """Return the setting and the formula, in lines for the foot of the picture."""
    return (
        f"{plan.rate:g} requests/s, {plan.shape.groups} shared system prompts of about 6,000 tokens, "
        f"{plan.engines} engines whose caches hold every prompt together, but not one alone. Envoy and "
        "picker are real; the engines are simulated,\n"
        f"timed as Qwen3-32B on one H100. Figures at the right: the {plan.seconds:g} s that are measured; "
        "shaded: warm-up. GPU-seconds saved = prompt tokens read from a cache / "
        f"{PREFILL_RATE:,.0f} tokens/s (prefill of one engine).\n"
        f"kvist {metadata.version('kvist')} · kvist demo · seed {plan.seed}"
    )


def _texts(made: Figure, report: DemoReport) -> None:
    made.text(0.025, 0.93, headline(report), fontsize=31, fontweight="bold", color=TEXT, va="center")
    subtitle = (
        "Median wait of a chat request. The same traffic through the same Envoy to the same "
        f"{report.plan.engines} engines, twice: only the choice of the engine differs."
    )
    made.text(0.025, 0.873, subtitle, fontsize=15, color=FAINT, va="center")
    handles = [Line2D([], [], color=COLOURS[name], linewidth=4, label=LABELS[name]) for name in LABELS]
    made.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0.018, 0.825),
        ncols=2,
        frameon=False,
        fontsize=14,
        labelcolor=TEXT,
    )
    made.text(
        0.025, 0.012, small_print(report.plan), fontsize=10.5, color=FAINT, va="bottom", linespacing=1.45
    )


def _waits(axes: Axes, runs: Mapping[str, RunSeries], report: DemoReport) -> None:
    axes.set_yscale("log")
    for name, run in runs.items():
        answered = [wait for wait in run.waits if wait.answered]
        axes.scatter(
            [wait.sent for wait in answered],
            [wait.seconds for wait in answered],
            s=9,
            alpha=0.28,
            color=COLOURS[name],
            linewidths=0,
        )
        axes.plot(*_curve([(w.at, w.wait) for w in run.windows]), color=COLOURS[name], linewidth=3)
        if run.unanswered and run.windows:
            _waiting(axes, name, run)
        summary = report.kvist if name == KVIST else report.round_robin
        _value(axes, name, summary.ttft_p50, seconds_text(summary.ttft_p50))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g} s" if value >= 1 else seconds_text(value))
    )
    _dress(
        axes, report.plan, "Time to first token (log scale): a dot for each request, a line for the median"
    )
    axes.set_xlim(right=report.plan.run_seconds)
    axes.set_xlabel("seconds after the traffic began", color=TEXT)


def _waiting(axes: Axes, name: str, run: RunSeries) -> None:
    """Write at the end of a curve why it ends: most of the requests after it got no answer."""
    axes.annotate(
        f"{run.unanswered} requests still\nwait at the end",
        xy=(run.windows[-1].at, run.windows[-1].wait),
        xytext=(12, -16),
        textcoords="offset points",
        va="top",
        fontsize=12.5,
        color=COLOURS[name],
    )


def _shares(axes: Axes, runs: Mapping[str, RunSeries], report: DemoReport) -> None:
    for name, run in runs.items():
        points = [(w.at, 100 * w.cached_share) for w in run.windows]
        axes.plot(*_curve(points), color=COLOURS[name], linewidth=3)
        share = report.kvist.cached_share if name == KVIST else report.round_robin.cached_share
        _value(axes, name, 100 * share, f"{100 * share:.0f} %")
    axes.set_ylim(0, 103)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    _dress(axes, report.plan, "Prompt tokens read from a cache")
    axes.set_xlim(right=report.plan.run_seconds)


def _saved(axes: Axes, runs: Mapping[str, RunSeries], plan: DemoPlan) -> None:
    end = max(plan.run_seconds, *(run.saved[-1][0] for run in runs.values()))
    for name, run in runs.items():
        points = [*run.saved, (end, run.total_saved)]
        axes.plot(*_curve(points), color=COLOURS[name], linewidth=3, drawstyle="steps-post")
        _value(axes, name, run.total_saved, f"{run.total_saved:.0f}")
    axes.set_ylim(bottom=0)
    _dress(axes, plan, "Prefill saved, GPU-seconds (sum)")
    axes.set_xlabel("seconds after the traffic began", color=TEXT)


def _curve(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _value(axes: Axes, name: str, y: float, text: str) -> None:
    """Write a run's figure at the right end of its curve."""
    axes.annotate(
        text,
        xy=(1.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=15,
        fontweight="bold",
        color=COLOURS[name],
        annotation_clip=False,
    )


def _dress(axes: Axes, plan: DemoPlan, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=14, color=TEXT, pad=9)
    axes.margins(x=0)
    axes.set_xlim(left=0)
    axes.axvspan(0, plan.warm_up_seconds + plan.lead_in_seconds, color=WARM_UP, zorder=0, linewidth=0)
    axes.grid(visible=True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelcolor=TEXT)
    for spine in axes.spines.values():
        spine.set_visible(False)
