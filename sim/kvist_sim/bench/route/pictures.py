"""Pictures of the results of ``kvist bench route``.

Goodput, TTFT and cache hits against load, and the requests on each pod while one prefix is hot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvist_sim.bench.route.plots import Curve, Panel, Picture

OURS: Final = "kvist"
NAMED: Final = (OURS, "llm-d-weighted", "llm-d-affinity", "dynamo", "lmetric", "round-robin")
"""Policies with a colour of their own; the others are faint."""
LOAD: Final = "offered load, by the capacity of an ideal pool with one shared cache"

Row = Mapping[str, Any]
"""A row of the document: one policy in one case at one load."""
Value = Callable[[Row], tuple[float, float]]
"""Returns a figure of a row and the half width of its interval."""
Loads = Mapping[str, Sequence[tuple[float, Sequence[int]]]]
"""By policy: pairs of seconds and requests on each pod."""


def pictures(rows: Sequence[Row]) -> list[Picture]:
    """Return the pictures that the rows can fill; a curve needs two loads."""
    first = "seconds to the first token"
    found = [
        _picture("goodput", rows, _goodput, "goodput", percent=True),
        _picture("ttft-p50", rows, _value("ttft_p50"), f"{first}, median", log=True),
        _picture("ttft-p90", rows, _value("ttft_p90"), f"{first}, 90th percentile", log=True),
        _picture("hits", rows, _value("hit_ratio"), "prompt tokens from a cache", percent=True),
    ]
    return [picture for picture in found if picture.panels]


def pod_loads(loads: Loads) -> Picture:
    """Return a picture with a panel for each policy and a curve for each pod."""
    return Picture(
        name="route-pods",
        caption="Requests on each pod over time, by routing policy; 70 % of the requests share a prefix",
        panels=[Panel(policy, _pods(samples)) for policy, samples in loads.items()],
        x_label="seconds",
        y_label="requests on each pod",
        named=(),
        legend=False,
        shared=True,
    )


def _picture(
    name: str, rows: Sequence[Row], value: Value, label: str, *, log: bool = False, percent: bool = False
) -> Picture:
    cases = dict.fromkeys(row["case"] for row in rows)
    panels = [Panel(case, _curves([row for row in rows if row["case"] == case], value)) for case in cases]
    return Picture(
        name=f"route-{name}",
        caption=f"{label.capitalize()}, against offered load, by workload and routing policy",
        panels=[panel for panel in panels if panel.curves],
        x_label=LOAD,
        y_label=label,
        named=NAMED,
        log=log,
        percent=percent,
        percent_x=True,
    )


def _curves(rows: Sequence[Row], value: Value) -> list[Curve]:
    curves = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((row["load"], *value(row)) for row in rows if row["policy"] == policy)
        if len(points) > 1:
            loads, values, halves = zip(*points, strict=True)
            curves.append(Curve(policy, loads, values, halves))
    return curves


def _goodput(row: Row) -> tuple[float, float]:
    half = row["goodput"]["half"]
    return row["goodput"]["mean"], half if half is not None and half < 1 else 0.0


def _value(name: str) -> Value:
    return lambda row: (row[name], 0.0)


def _pods(samples: Sequence[tuple[float, Sequence[int]]]) -> list[Curve]:
    times = [at for at, _ in samples]
    pods = zip(*(loads for _, loads in samples), strict=True)
    return [Curve(f"pod {number}", times, pod) for number, pod in enumerate(pods)]
