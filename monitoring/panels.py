"""The words of a dashboard, and Grafana's JSON made of them by Grafana's own library for its schema.

The JSON is that of Grafana 10; later versions read it. In an expression ``@`` stands for the labels of the
pool that the reader has chosen: ``kvist_epp_requests_total{@,outcome="picked"}``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

CHOSEN: Final = 'namespace="$namespace",pool="$pool"'
MATCHED: Final = 'namespace=~"$namespace",pool=~"$pool"'
"""For a dashboard on which all pools may be chosen."""
SOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG: Final = "kvist"
HEIGHT: Final = 8
FULL_WIDTH: Final = 24
_COLOURS: Final = ("green", "orange", "red")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel."""

    expr: str
    legend: str = ""
    """Name of each series, with labels in double braces."""
    exemplar: bool = False
    """Show requests that are exemplars of the histogram."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``about`` says what to do with what it shows."""

    title: str
    about: str
    unit: str
    """Identifier of Grafana, such as ``s``, ``percentunit``, ``reqps``; ``short`` = a plain number."""
    queries: Sequence[Query]
    kind: str = "lines"
    """``lines``, ``stacked``, ``number``, ``states`` or ``table``."""
    width: int = 8
    limits: Sequence[float] = ()
    """Values from which it is orange, and red; falling limits mean that less is worse."""
    least: float | None = 0
    """Begin of the axis; None: as the values ask for."""
    most: float | None = None
    """End of the axis."""
    texts: Sequence[tuple[str, str, str]] = ()
    """Value, text and colour, for states."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Panels in rows, with variables for data source, namespace and pool."""

    name: str
    """File name and last part of the identifier."""
    title: str
    about: str
    rows: Sequence[Row]
    series: str = "kvist_epp_endpoints"
    """Metric from which namespaces and pools are listed."""
    all_pools: bool = False
    """Whether all pools may be chosen at once."""

    @property
    def panels(self) -> list[Panel]:
        """Return all panels, in order."""
        return [panel for row in self.rows for panel in row.panels]

    def expressions(self) -> list[tuple[Panel, str]]:
        """Return each expression with its panel."""
        return [(panel, self.chosen(query.expr)) for panel in self.panels for query in panel.queries]

    def chosen(self, expr: str) -> str:
        """Return an expression with the labels of the chosen pool."""
        return " ".join(expr.split()).replace("@", MATCHED if self.all_pools else CHOSEN)

    def text(self) -> str:
        """Return the dashboard as Grafana imports it."""
        made = (
            build.Dashboard(f"kvist / {self.title}")
            .uid(f"kvist-{self.name}")
            .description(self.about)
            .tags([TAG])
            .timezone("browser")
            .time("now-3h", "now")
            .refresh("30s")
            .tooltip(model.DashboardCursorSync.CROSSHAIR)
            .variables([_source(), *self._variables()])
            .link(_others())
        )
        number = count(1)
        for row in self.rows:
            made = made.with_row(build.Row(row.title).id(next(number)))
            for panel in row.panels:
                made = made.with_panel(self._panel(panel).id(next(number)))
        return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"

    def _variables(self) -> list[build.QueryVariable]:
        equal = "=~" if self.all_pools else "="
        return [
            _labels("namespace", f"label_values({self.series}, namespace)", everything=self.all_pools),
            _labels(
                "pool",
                f'label_values({self.series}{{namespace{equal}"$namespace"}}, pool)',
                everything=self.all_pools,
            ),
        ]

    def _panel(self, panel: Panel) -> Any:
        made: Any = _KINDS[panel.kind]()
        made = (
            made.title(panel.title)
            .description(panel.about)
            .datasource(SOURCE)
            .unit(panel.unit)
            .height(HEIGHT if panel.kind != "number" else HEIGHT // 2)
            .span(panel.width)
        )
        if panel.least is not None and panel.kind != "table":
            made = made.min(panel.least)
        if panel.most is not None:
            made = made.max(panel.most)
        if panel.limits:
            made = made.thresholds(_limits(panel.limits))
        if panel.texts:
            made = made.mappings([_mapping(panel.texts)])
        now = panel.kind in ("number", "table")
        for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
            asked = (
                Dataquery()
                .datasource(SOURCE)
                .ref_id(letter)
                .expr(self.chosen(query.expr))
                .legend_format(query.legend)
            )
            asked = asked.instant() if now else asked.range()
            if query.exemplar:
                asked = asked.exemplar(True)
            if panel.kind == "table":
                asked = asked.format(PromQueryFormat.TABLE)
            made = made.with_target(asked)
        return made


def _lines() -> timeseries.Panel:
    legend = (
        VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull", "max"])
    )
    tooltip = VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    return timeseries.Panel().legend(legend).tooltip(tooltip).fill_opacity(8).line_width(1)


def _stacked() -> timeseries.Panel:
    return _lines().fill_opacity(40).stacking(StackingConfig().mode(common.StackingMode.NORMAL).group("A"))


def _number() -> stat.Panel:
    latest = ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    return (
        stat.Panel()
        .reduce_options(latest)
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
    )


def _states() -> statetimeline.Panel:
    return statetimeline.Panel().merge_values(True).show_value(common.VisibilityMode.NEVER)


_KINDS: Final = {
    "lines": _lines,
    "stacked": _stacked,
    "number": _number,
    "states": _states,
    "table": table.Panel,
}


def _limits(limits: Sequence[float]) -> build.ThresholdsConfig:
    """Return the colours from each limit on: green before the first one, or after the last if they fall."""
    falling = len(limits) > 1 and limits[0] > limits[-1]
    bounds = [None, *sorted(limits)]
    colours = _COLOURS[: len(bounds)][::-1] if falling else _COLOURS[: len(bounds)]
    steps = [model.Threshold(value, colour) for value, colour in zip(bounds, colours, strict=True)]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _mapping(texts: Sequence[tuple[str, str, str]]) -> model.ValueMap:
    return model.ValueMap(
        options={value: model.ValueMappingResult(text=text, color=colour) for value, text, colour in texts}
    )


def _source() -> build.DatasourceVariable:
    return build.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _labels(name: str, query: str, *, everything: bool) -> build.QueryVariable:
    made = (
        build.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .include_all(everything)
    )
    return made.all_value(".*") if everything else made


def _others() -> build.DashboardLink:
    return (
        build.DashboardLink("kvist")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
