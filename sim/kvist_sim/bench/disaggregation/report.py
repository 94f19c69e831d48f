"""Figures of ``kvist bench disaggregation``: the cost of each kind of request, bursts, tables and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvist_sim.bench.epp.prompts import Kind
from kvist_sim.bench.epp.report import EppFigures
from kvist_sim.envoy_settings import Mode

CONCURRENCY: Final = 16
"""Connections of the client while CPU time is measured; latencies are measured with one."""
WHOLE, SPLIT = "whole", "split"
"""The two pickers: without disaggregation, and with all requests in two legs."""


@dataclass(frozen=True, slots=True)
class LegCell:
    """One configuration of one kind of request."""

    picker: str
    """``WHOLE`` or ``SPLIT``."""
    mode: Mode
    kind: Kind
    concurrency: int


@dataclass(frozen=True, slots=True)
class BurstFigures:
    """Requests that came at once, to a picker that has answered as many before."""

    name: str
    requests: int
    answered: int
    """With status 200."""
    split: int
    """Of all requests of this picker, those before included, whose leg 1 was sent."""
    sent: int
    """All requests of this picker."""
    fallbacks: int
    seconds: float
    """From the first request to the last answer."""
    p50: float
    """Seconds of an answer, median."""
    most_queued: int
    """Most requests that flow control held back at one look; one every 0.1 s."""
    resident_before: int
    """Bytes of the picker before any request."""
    resident_most: int
    """Largest resident bytes, by the kernel."""
    connections: int
    """Most connections to all engines of leg 1 at one look."""

    def broken(self) -> list[str]:
        """Return what must not be, in words."""
        found = []
        if self.answered < self.requests:
            found.append(f"{self.answered} of {self.requests} requests were answered with 200")
        if self.split < self.sent:
            found.append(f"{self.split} of {self.sent} requests were split")
        if self.fallbacks:
            found.append(f"{self.fallbacks} requests fell back to one endpoint")
        return [f"burst, {self.name}: {text}" for text in found]


@dataclass(frozen=True, slots=True)
class LegsReport:
    """All figures of one run."""

    cells: Mapping[LegCell, EppFigures]
    not_split: Mapping[LegCell, int]
    """Requests that were not split, and those that fell back, by cell, where there are any."""
    bursts: Sequence[BurstFigures]
    setting: Mapping[str, Any]
    kinds: Sequence[Kind] = field(default=())
    modes: Sequence[Mode] = field(default=())

    def broken(self) -> list[str]:
        """Return what makes the figures worthless, in words."""
        found = []
        for cell, figures in self.cells.items():
            name = f"{cell.kind.name}, {cell.mode}, {cell.picker}"
            if figures.errors:
                found.append(f"{name}: {figures.errors} requests were not answered with 200")
            if missing := self.not_split.get(cell):
                found.append(f"{name}: {missing} requests were not split, or fell back")
        return found + [text for burst in self.bursts for text in burst.broken()]

    def pair(self, mode: Mode, kind: Kind, concurrency: int) -> tuple[EppFigures, EppFigures]:
        """Return the figures without disaggregation and with it."""
        one, other = (self.cells[LegCell(way, mode, kind, concurrency)] for way in (WHOLE, SPLIT))
        return one, other


def tables(report: LegsReport) -> Group:
    """Return all tables, for 110 columns."""
    parts: list[Any] = []
    if report.kinds:
        parts += [_cpu(report), "", _latency(report), ""]
    if report.bursts:
        parts.append(_bursts(report))
    return Group(Text(_heading(report)), "", *parts)


def _heading(report: LegsReport) -> str:
    setting = report.setting
    return (
        f"{setting['prefill']} prefill and {setting['decode']} decode endpoints that answer at once; "
        f"{setting['index_blocks']:,} blocks in the index,\nhalf of the prompts share a cached prefix.\n"
        "All requests are split by a policy without a margin and without a least length: by default\n"
        "1 KB, some 250 tokens, is not (least_tokens is 512)."
    )


def _cpu(report: LegsReport) -> Table:
    found = _table(f"the picker's CPU per request in us, {CONCURRENCY} connections", "prompt")
    for mode in report.modes:
        for column in ("one leg", "two legs", "", "more"):
            found.add_column(f"{mode}\n{column}", justify="right")
    for kind in report.kinds:
        row = []
        for mode in report.modes:
            whole, split = (one.cpu_per_request or 0.0 for one in report.pair(mode, kind, CONCURRENCY))
            ratio = f"x {split / whole:.2f}" if whole else ""
            row += [f"{whole * 1e6:,.0f}", f"{split * 1e6:,.0f}", ratio, f"{(split - whole) * 1e6:,.0f}"]
        found.add_row(kind.name, *row)
    return found


def _latency(report: LegsReport) -> Table:
    found = _table(
        "latency of one connection in ms, and what the first leg adds (it takes 0 s itself)", "prompt"
    )
    for mode in report.modes:
        for column in ("p50", "p99", "+p50", "+p99"):
            found.add_column(f"{mode}\n{column}", justify="right")
    for kind in report.kinds:
        row = []
        for mode in report.modes:
            whole, split = report.pair(mode, kind, 1)
            times = (whole.p50, whole.p99, split.p50 - whole.p50, split.p99 - whole.p99)
            row += [f"{seconds * 1e3:.2f}" for seconds in times]
        found.add_row(kind.name, *row)
    return found


def _bursts(report: LegsReport) -> Table:
    setting = report.setting
    found = _table(
        f"requests at once, the second time; leg 1 takes {setting['leg_seconds']:g} s "
        f"at each of {setting['burst_prefill']} prefill endpoints",
        "requests",
    )
    for column in ("answered", "split", "fallbacks", "s", "p50 s", "queued", "MB before", "MB most", "conn."):
        found.add_column(column, justify="right")
    for one in report.bursts:
        found.add_row(
            one.name,
            f"{one.answered} of {one.requests}",
            f"{one.split} of {one.sent}",
            str(one.fallbacks),
            f"{one.seconds:.1f}",
            f"{one.p50:.1f}",
            str(one.most_queued),
            f"{one.resident_before / 1e6:,.0f}",
            f"{one.resident_most / 1e6:,.0f}",
            str(one.connections),
        )
    return found


def _table(title: str, first: str) -> Table:
    found = Table(box=None, title=title, title_justify="left", padding=(0, 1, 0, 0))
    found.add_column(first, no_wrap=True)
    return found


def document(report: LegsReport) -> dict[str, Any]:
    """Return the figures for JSON; times in seconds."""
    cells = [
        {
            "picker": cell.picker,
            "mode": cell.mode,
            "prompt": cell.kind.name,
            "concurrency": cell.concurrency,
            **asdict(figures),
        }
        for cell, figures in report.cells.items()
    ]
    return {"setting": dict(report.setting), "cells": cells, "bursts": [asdict(one) for one in report.bursts]}
