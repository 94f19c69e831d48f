"""Draw pictures for the documentation with matplotlib: curves side by side.

A picture is one SVG file for light and dark pages, see ``svg``. Nothing in it changes unless the figures do.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from kvist_sim.bench.route.svg import compact

COLUMNS: Final = 3
PANEL_INCHES: Final = (3.1, 2.25)
LEGEND_COLUMNS: Final = (2, 4, 7)
"""Entries in a row above one, two and three panels."""
OTHERS: Final = "others"
BAND: Final = 0.16
"""Opacity of an interval."""
COLOURS: Final = ("#d1242f", "#0072b2", "#e69f00", "#009e73", "#8250df", "#59636e")
"""The first is ours. Distinct for colour-blind readers too (Okabe and Ito)."""
TEXT: Final = "#1f2328"
FAINT: Final = "#b7bdc5"
"""Grid, frames, and curves without a colour of their own."""
DARK: Final = {
    **dict(zip(COLOURS, ("#ff7b72", "#56b4e9", "#f0b93a", "#3fc29b", "#c297ff", "#9ea7b3"), strict=True)),
    TEXT: "#e6edf3",
    FAINT: "#4a525c",
}
"""Colours of a dark page by those of a light one."""
_STYLES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    half: Sequence[float] = ()
    """Half width of each point's interval."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One small drawing with its title."""

    title: str
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Panels with the same axes and one legend."""

    name: str
    """Name of the file, without its ending."""
    caption: str
    """Text for readers who do not see the picture."""
    panels: Sequence[Panel]
    x_label: str
    y_label: str
    named: Sequence[str]
    """Curves with a colour and a place in the legend, ours first; the others are faint."""
    log: bool = False
    percent: bool = False
    """True if the y axis is a share, 0 to 1."""
    percent_x: bool = False
    shared: bool = False
    """True for one y scale for all panels."""
    legend: bool = True


def write(picture: Picture, folder: Path) -> str:
    """Write a picture's file; return the Markdown that shows it, its path relative to ``folder``'s parent."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{picture.name}.svg").write_text(draw(picture), encoding="utf-8")
    return f"![{picture.caption}]({folder.name}/{picture.name}.svg)\n"


def draw(picture: Picture) -> str:
    """Return the SVG of a picture."""
    with mpl.rc_context(
        {"svg.hashsalt": picture.name, "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9}
    ):
        out = io.BytesIO()
        _figure(picture).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return compact(out.getvalue(), DARK)


def _figure(picture: Picture) -> Figure:
    columns = min(COLUMNS, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    size = PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.55
    figure = Figure(figsize=size, layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False, sharey=picture.percent or picture.shared).ravel()
    for axes, panel in zip(every, picture.panels, strict=False):
        _panel(axes, panel, picture)
    for axes in every[len(picture.panels) :]:
        axes.set_axis_off()
    figure.supxlabel(picture.x_label, color=TEXT, fontsize=8)
    figure.supylabel(picture.y_label, color=TEXT, fontsize=8)
    if picture.legend:
        _legend(figure, picture)
    return figure


def _panel(axes: Axes, panel: Panel, picture: Picture) -> None:
    axes.set_title(panel.title, color=TEXT)
    for curve in sorted(panel.curves, key=lambda curve: curve.name in picture.named):
        _curve(axes, curve, picture)
    _axes(axes, picture)


def _curve(axes: Axes, curve: Curve, picture: Picture) -> None:
    look = _look(curve.name, picture.named)
    axes.plot(curve.x, curve.y, **look)
    if curve.half and curve.name in picture.named[:1]:
        low = [y - half for y, half in zip(curve.y, curve.half, strict=True)]
        high = [y + half for y, half in zip(curve.y, curve.half, strict=True)]
        axes.fill_between(curve.x, low, high, color=look["color"], alpha=BAND, linewidth=0)


def _look(name: str, named: Sequence[str]) -> dict[str, Any]:
    """Return the look of a curve: ours is thick and on top, other named curves have a colour and a stroke.

    The rest is faint. If no curve is named, all have one colour.
    """
    if name not in named:
        colour = FAINT if named else COLOURS[1]
        return {"color": colour, "linewidth": 0.9, "zorder": 1}
    at = named.index(name)
    width = 2.2 if at == 0 else 1.3
    return {"color": COLOURS[at], "linestyle": _STYLES[at], "linewidth": width, "zorder": 10 - at}


def _axes(axes: Axes, picture: Picture) -> None:
    if picture.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if picture.percent:
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(_percent)
    else:
        axes.yaxis.set_major_formatter(_plain)
    if picture.percent_x:
        axes.xaxis.set_major_formatter(_percent)
    axes.grid(visible=True, color=FAINT, alpha=0.35, linewidth=0.5)
    axes.tick_params(which="both", color=TEXT, labelcolor=TEXT)
    axes.tick_params(length=2)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(FAINT)


def _percent(value: float, _: Any) -> str:
    return f"{value:.0%}"


def _plain(value: float, _: Any) -> str:
    return f"{value:g}"


def _legend(figure: Figure, picture: Picture) -> None:
    shown = {curve.name for panel in picture.panels for curve in panel.curves}
    names = [name for name in picture.named if name in shown]
    if shown - set(names):
        names.append(OTHERS)
    handles = [Line2D([], [], label=name, **_look(name, picture.named)) for name in names]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=LEGEND_COLUMNS[min(COLUMNS, len(picture.panels)) - 1],
        frameon=False,
        labelcolor=TEXT,
    )
