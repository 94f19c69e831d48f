"""Bounds, tables and JSON of ``kvist bench rest`` and ``kvist bench scale``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.console import Group
from rich.table import Table

from kvist_sim.bench.rest.few import ENGINES, RATE, Few
from kvist_sim.bench.rest.idle import NOW, Idle
from kvist_sim.bench.rest.pages import ENDPOINTS as PAGE_ENDPOINTS
from kvist_sim.bench.rest.pages import READS, PageRead
from kvist_sim.bench.rest.scale import BLOCKS, BLOCKS_PART, ENDPOINTS, REQUESTS, REQUESTS_PART, Scale

IDLE_BOUNDS: Final[Mapping[int, float]] = {4: 0.01, 100: 0.03, 1_000: 0.15}
"""Largest share of a core without requests, by the number of endpoints."""
REQUEST_AIM: Final = 0.001
"""CPU seconds per request at the low rate: an aim, since it is mostly the machine's caches that decide."""


@dataclass(frozen=True, slots=True)
class RestReport:
    """Figures at rest, at a low rate, and of pages that are read."""

    idle: list[Idle]
    few: list[Few]
    pages: list[PageRead] = field(default_factory=list)

    def broken(self) -> list[str]:
        """Return the bounds that do not hold, in words; an older revision has none."""
        found = [
            f"{one.endpoints} endpoints ({one.engines}): {one.share:.1%} of a core at rest, "
            f"more than {bound:.0%}"
            for one in self.idle
            if one.picker == NOW and one.share > (bound := IDLE_BOUNDS.get(one.endpoints, 1.0))
        ]
        return found + [f"{one.picker}: {one.failed} requests failed" for one in self.few if one.failed]


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """Figures of one, two and more replicas."""

    scale: list[Scale]

    def broken(self) -> list[str]:
        """Return what makes the figures worthless: requests that were not answered."""
        return [f"{one.replicas} replicas: {one.refused} refused" for one in self.scale if one.refused]

    @property
    def most_blocks(self) -> float:
        """Blocks that one replica took in for each second of CPU at the goal's rate; 0: not measured."""
        return next((one.most_blocks for one in self.scale if one.most_blocks), 0.0)

    def goal_events(self, one: Scale) -> float:
        """Return the share of a core that events need at the goal: the same in each replica, since each takes
        in all. Where the goal's rate was not offered, that of the blocks that were."""
        return BLOCKS / self.most_blocks if self.most_blocks else one.per_block * BLOCKS

    def goal(self, one: Scale) -> float:
        """Return the share of a core that each replica needs at the goal."""
        return one.rest + self.goal_events(one) + one.goal_requests


def rest_document(report: RestReport) -> dict[str, Any]:
    """Return the figures for JSON."""
    return {
        "idle": [asdict(one) for one in report.idle],
        "few": [asdict(one) for one in report.few],
        "pages": [asdict(one) for one in report.pages],
    }


def scale_document(report: ScaleReport) -> dict[str, Any]:
    """Return the figures for JSON."""
    derived = ("per_block", "per_request", "goal_requests")
    return {
        "scale": [
            asdict(one)
            | {name: getattr(one, name) for name in derived}
            | {"goal_events": report.goal_events(one), "goal": report.goal(one)}
            for one in report.scale
        ]
    }


def rest_table(report: RestReport) -> Group:
    """Return the tables of what was measured."""
    tables = [_idle_table(report), _few_table(report), _pages_table(report)]
    return Group(*(part for one in tables if one.row_count for part in (one, "")))


def _idle_table(report: RestReport) -> Table:
    idle = _table("no requests: share of a core", ("picker", "engines", "endpoints", "CPU", "bound"))
    for one in report.idle:
        bound = IDLE_BOUNDS.get(one.endpoints)
        shown = "" if bound is None else f"{bound:.0%}"
        idle.add_row(one.picker, one.engines, f"{one.endpoints:,}", f"{one.share:.2%}", shown)
    return idle


def _few_table(report: RestReport) -> Table:
    few = _table(
        f"{RATE:g} requests/s of chats of about 6,000 tokens to {ENGINES} simulated engines, through Envoy",
        ("picker", "requests", "failed", "picker us/request", "at rest, of these", "Envoy us/request"),
    )
    for part in report.few:
        at_rest = part.idle_share / RATE * 1e6
        figures = (part.picker_cpu * 1e6, at_rest, part.proxy_cpu * 1e6)
        few.add_row(
            part.picker, f"{part.requests:,}", str(part.failed), *(f"{figure:,.0f}" for figure in figures)
        )
    return few


def _pages_table(report: RestReport) -> Table:
    pages = _table(
        f"{PAGE_ENDPOINTS:,} endpoints: longest wait of a health check\n"
        f"while a page is read (median of {READS})",
        ("picker", "page", "KB", "page ms", "wait ms"),
    )
    for one in report.pages:
        figures = (f"{one.size / 1000:,.0f}", f"{one.seconds * 1000:.0f}", f"{one.delay * 1000:.1f}")
        pages.add_row(one.picker, one.page or "none", *figures)
    return pages


def scale_table(report: ScaleReport) -> Group:
    """Return the measured figures, and what follows from them."""
    measured = _table(
        f"{ENDPOINTS:,} endpoints, {REQUESTS_PART * REQUESTS:,.0f} requests/s over all replicas, "
        f"{BLOCKS_PART * BLOCKS:,.0f} blocks/s stored\n"
        "and as many evicted: CPU of each replica, shares of a core",
        ("replicas", "at rest", "+ events", "+ requests", "+ both", "us/block", "us/request", "p99 ms"),
    )
    goal = _table(
        f"so at {REQUESTS:,.0f} requests/s and {BLOCKS:,.0f} blocks/s each replica needs, cores",
        ("replicas", "at rest", "events", "requests", "in all"),
    )
    for one in report.scale:
        measured.add_row(
            str(one.replicas),
            *(f"{share:.0%}" for share in (one.rest, one.events, one.requests, one.both)),
            f"{one.per_block * 1e6:.1f}",
            f"{one.per_request * 1e6:,.0f}",
            f"{one.p99 * 1000:.0f}",
        )
        shares = (one.rest, report.goal_events(one), one.goal_requests, report.goal(one))
        goal.add_row(str(one.replicas), *(f"{share:.2f}" for share in shares))
    most = report.most_blocks
    words = f"One that is offered {BLOCKS:,.0f} blocks/s, and no requests: {most:,.0f} for a second of CPU."
    return Group(measured, "", goal, *(("", words) if most else ()))


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=None, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("picker", "engines", "page") else "right")
    return table
