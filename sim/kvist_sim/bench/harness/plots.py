"""Pictures for the documentation, by matplotlib: curves side by side, in a light and a dark drawing.

Each picture is two SVG files; a page shows the one that suits its reader. Text is drawn as outlines, so that
it fits wherever it is shown, and nothing in a file changes unless the figures do.
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

COLUMNS: Final = 3
PANEL_INCHES: Final = (3.1, 2.25)
LEGEND_COLUMNS: Final = (2, 4, 7)
"""Entries in a row above one, two and three panels."""
OTHERS: Final = "others"
BAND: Final = 0.16
"""Opacity of an interval."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a page."""

    name: str
    text: str
    faint: str
    """Grid, frames, curves without a colour of their own."""
    colours: tuple[str, ...]
    """The first is ours. Told apart by the colour-blind too (Okabe and Ito, brightened for dark pages)."""


LIGHT: Final = Theme(
    "light", "#1f2328", "#b7bdc5", ("#d1242f", "#0072b2", "#e69f00", "#009e73", "#8250df", "#59636e")
)
DARK: Final = Theme(
    "dark", "#e6edf3", "#4a525c", ("#ff7b72", "#56b4e9", "#f0b93a", "#3fc29b", "#c297ff", "#9ea7b3")
)
THEMES: Final = (LIGHT, DARK)
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
    """One small drawing."""

    title: str
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Panels that share their axes' meaning and their legend."""

    name: str
    """Of its files."""
    caption: str
    """For those who do not see it, too."""
    panels: Sequence[Panel]
    x_label: str
    y_label: str
    named: Sequence[str]
    """Curves with a colour and a place in the legend, ours first; the others are faint."""
    log: bool = False
    percent: bool = False
    """The y axis is a share, 0 to 1."""
    percent_x: bool = False
    shared: bool = False
    """One y scale for all panels."""
    legend: bool = True


def write(picture: Picture, folder: Path) -> str:
    """Draw both; returns the Markdown that shows the right one, paths relative to ``folder``'s parent."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        (folder / f"{picture.name}-{theme.name}.svg").write_bytes(drawn(picture, theme, "svg"))
    path = f"{folder.name}/{picture.name}"
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">\n'
        f'  <img alt="{picture.caption}" src="{path}-light.svg">\n</picture>\n'
    )


def drawn(picture: Picture, theme: Theme, kind: str) -> bytes:
    """One drawing as a file's content: ``svg`` or ``png``."""
    with mpl.rc_context({"svg.hashsalt": picture.name, "font.size": 8, "axes.titlesize": 9}):
        figure = _figure(picture, theme)
        out = io.BytesIO()
        when = {"Date": None} if kind == "svg" else None
        figure.savefig(out, format=kind, transparent=True, metadata=when, dpi=150)
    return out.getvalue()


def _figure(picture: Picture, theme: Theme) -> Figure:
    columns = min(COLUMNS, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    size = PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.55
    figure = Figure(figsize=size, layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False, sharey=picture.percent or picture.shared).ravel()
    for axes, panel in zip(every, picture.panels, strict=False):
        _panel(axes, panel, picture, theme)
    for axes in every[len(picture.panels) :]:
        axes.set_axis_off()
    figure.supxlabel(picture.x_label, color=theme.text, fontsize=8)
    figure.supylabel(picture.y_label, color=theme.text, fontsize=8)
    if picture.legend:
        _legend(figure, picture, theme)
    return figure


def _panel(axes: Axes, panel: Panel, picture: Picture, theme: Theme) -> None:
    axes.set_title(panel.title, color=theme.text)
    for curve in sorted(panel.curves, key=lambda curve: curve.name in picture.named):
        _curve(axes, curve, picture, theme)
    _axes(axes, picture, theme)


def _curve(axes: Axes, curve: Curve, picture: Picture, theme: Theme) -> None:
    look = _look(curve.name, picture.named, theme)
    axes.plot(curve.x, curve.y, **look)
    if curve.half and curve.name in picture.named[:1]:
        low = [y - half for y, half in zip(curve.y, curve.half, strict=True)]
        high = [y + half for y, half in zip(curve.y, curve.half, strict=True)]
        axes.fill_between(curve.x, low, high, color=look["color"], alpha=BAND, linewidth=0)


def _look(name: str, named: Sequence[str], theme: Theme) -> dict[str, Any]:
    """Ours is thick and above all; the named have a colour and a stroke; the others are faint, but where none
    is named."""
    if name not in named:
        colour = theme.faint if named else theme.colours[1]
        return {"color": colour, "linewidth": 0.9, "zorder": 1}
    at = named.index(name)
    width = 2.2 if at == 0 else 1.3
    return {"color": theme.colours[at], "linestyle": _STYLES[at], "linewidth": width, "zorder": 10 - at}


def _axes(axes: Axes, picture: Picture, theme: Theme) -> None:
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
    axes.grid(visible=True, color=theme.faint, alpha=0.35, linewidth=0.5)
    axes.tick_params(colors=theme.text, length=2)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(theme.faint)


def _percent(value: float, _: Any) -> str:
    return f"{value:.0%}"


def _plain(value: float, _: Any) -> str:
    return f"{value:g}"


def _legend(figure: Figure, picture: Picture, theme: Theme) -> None:
    shown = {curve.name for panel in picture.panels for curve in panel.curves}
    names = [name for name in picture.named if name in shown]
    if shown - set(names):
        names.append(OTHERS)
    handles = [Line2D([], [], label=name, **_look(name, picture.named, theme)) for name in names]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=LEGEND_COLUMNS[min(COLUMNS, len(picture.panels)) - 1],
        frameon=False,
        labelcolor=theme.text,
    )
