"""Results of ``kvist bench routers`` as a table and as JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist_sim.demo.plan import DemoPlan
from kvist_sim.load import Summary

KVIST: Final = "kvist"
TOLERATED: Final = 0.01
"""Share of our own requests that may fail before the run is no result."""


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """Figures of one router."""

    name: str
    version: str
    how: str
    summary: Summary
    cpu: Mapping[str, float]
    """Seconds a request of each of its processes, the response passing through included where it does."""
    added: float
    """Seconds to the first byte of a short request, above the engine's own."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """Reason why a router could not be run."""

    name: str
    version: str
    why: str


@dataclass(frozen=True, slots=True)
class RouterReport:
    """Results of all routers."""

    plan: DemoPlan
    routers: Sequence[RouterFigures | Absent]

    def broken(self) -> list[str]:
        """Return the reasons why our result does not count; other routers are shown, not judged."""
        return [why for router in self.routers if router.name == KVIST for why in _broken(router)]


def _broken(router: RouterFigures | Absent) -> list[str]:
    if isinstance(router, Absent):
        return [router.why]
    failed = router.summary.errors
    return [f"{failed} requests failed"] if failed > TOLERATED * router.summary.requests else []


def table(report: RouterReport) -> RenderableType:
    """Return a row for each router; below, the routers that could not be run, and why."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("router", no_wrap=True)
    for head in (
        "TTFT p50\nms",
        "TTFT p90\nms",
        "from\ncache",
        "answers\n/s",
        "failed",
        "unfi-\nnished",
        "adds\nms",
        "CPU us\na request",
    ):
        shown.add_column(head, justify="right", no_wrap=True)
    for router in report.routers:
        if isinstance(router, RouterFigures):
            shown.add_row(*_row(router))
    return Group(
        Text(_heading(report.plan)), shown, *(Text(line) for line in map(_said, report.routers) if line)
    )


def _said(router: RouterFigures | Absent) -> str:
    if isinstance(router, Absent):
        return f"{router.name} {router.version} did not run: {router.why}"
    return router.note


def _heading(plan: DemoPlan) -> str:
    return (
        f"{plan.rate:g} requests/s of chats for {plan.seconds:g} s to {plan.engines} simulated engines "
        f"(timed as Qwen3-32B\non one H100); {plan.shape.groups} shared system prompts of about 6,000 "
        "tokens: all caches together hold them, one\ndoes not. CPU: of what picks + of what passes bytes on; "
        "one figure where one process does both."
    )


def _row(router: RouterFigures) -> list[str]:
    summary = router.summary
    return [
        f"{router.name} {router.version}".strip(),
        f"{summary.ttft_p50 * 1e3:,.0f}",
        f"{summary.ttft_p90 * 1e3:,.0f}",
        f"{summary.cached_share:.1%}",
        f"{summary.requests_per_second:.1f}",
        str(summary.errors),
        str(summary.unfinished),
        f"{router.added * 1e3:.1f}",
        " + ".join(f"{seconds * 1e6:,.0f}" for seconds in router.cpu.values()),
    ]


def document(report: RouterReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in seconds."""
    plan = dataclasses.asdict(report.plan) | {"shape": dataclasses.asdict(report.plan.shape)}
    return {"setting": plan, "routers": [dataclasses.asdict(router) for router in report.routers]}
