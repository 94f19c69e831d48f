"""Results of ``kvist bench epp``: figures of all cells, their bounds, and JSON."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_sim.bench.epp.client import Sample
from kvist_sim.bench.epp.prompts import Kind, PromptShape
from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.load import percentile

BASELINE: Final = "no filter"
AIM_CONCURRENCY: Final = 16
AIM_TRANSPORT: Final = "fast"
ECHO: Final = "echo"
"""Name of the server, in place of a transport, whose CPU time is the unit of the bounds."""
ECHO_KIND: Final = Kind(1, PromptShape.COMPLETION)
AIMS: Final = (
    (Kind(1, PromptShape.COMPLETION), 4.5),
    (Kind(1, PromptShape.CHAT_2), 6.0),
    (Kind(450, PromptShape.CHAT_2), 30.0),
)
"""The picker's CPU time per request, all work included, divided by the echo's of a 1 KB completion."""
DUPLEX_BOUND: Final = 0.15
"""Largest acceptable share by which duplex bodies cost more than buffered ones, over all kinds."""
RISE_BOUND: Final = 0.05
"""Largest acceptable rise over an older revision, without TLS; two runs of one revision differ by 2 %."""


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

    @property
    def judged(self) -> bool:
        """True for the picker of the working tree on its own transport, without TLS: the one with bounds."""
        return self.picker == AIM_TRANSPORT


ECHO_WAY: Final = Way(ECHO, "duplex")


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

    def cpu(self, way: Way, kind: Kind) -> float | None:
        """Return CPU seconds per request at the concurrency of the bounds, or None if not measured."""
        found = self.cells.get(Cell(way, kind, AIM_CONCURRENCY))
        return None if found is None else found.cpu_per_request

    @property
    def unit(self) -> float | None:
        """CPU seconds that the echo needs for a completion of 1 KB, or None if not measured."""
        return self.cpu(ECHO_WAY, ECHO_KIND)

    def broken(self) -> list[str]:
        """Return every bound that does not hold, in words."""
        found = [
            f"{aim.kind.name}, {aim.way.name}: {aim.multiple:.1f} times the echo, bound {aim.bound:g}"
            for aim in aims(self)
            if not aim.met
        ]
        share = duplex_share(self)
        if share is not None and share > DUPLEX_BOUND:
            found.append(f"duplex bodies cost {share:+.0%} beside buffered ones, bound {DUPLEX_BOUND:+.0%}")
        risen = rise(changes(self)) if changes(self) else 0.0
        if risen > RISE_BOUND:
            found.append(f"{risen:+.1%} beside the older revision, bound {RISE_BOUND:+.0%}")
        return found


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


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound of one kind of request, beside what was measured: multiples of the echo's CPU time."""

    kind: Kind
    way: Way
    bound: float
    multiple: float

    @property
    def met(self) -> bool:
        """True if the bound holds."""
        return self.multiple <= self.bound


def aims(report: EppReport) -> list[Aim]:
    """Return the bounds of all kinds and ways that this run measured."""
    unit = report.unit
    return [
        Aim(kind, way, bound, cpu / unit)
        for kind, bound in AIMS
        for way in report.ways
        if unit and way.judged and (cpu := report.cpu(way, kind)) is not None
    ]


def duplex_share(report: EppReport) -> float | None:
    """Return by which share duplex bodies cost more than buffered ones: geometric mean over all kinds.

    None if the run did not measure both.
    """
    ratios = []
    for kind in report.kinds:
        buffered, duplex = (report.cpu(Way(AIM_TRANSPORT, mode), kind) for mode in ("buffered", "duplex"))
        if buffered and duplex:
            ratios.append(duplex / buffered)
    return statistics.geometric_mean(ratios) - 1 if ratios else None


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
    now = dataclasses.replace(older, revision="")
    secured = report.cpu(dataclasses.replace(now, tls=True), kind)
    return Change(kind, report.cpu(older, kind) or 0.0, report.cpu(now, kind) or 0.0, secured)


def rise(found: Sequence[Change]) -> float:
    """Return the relative rise over all kinds: geometric mean of the ratios, minus one."""
    return statistics.geometric_mean(change.ratio for change in found) - 1


def document(report: EppReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in microseconds."""
    return {
        **measured_on(),
        "setting": dict(report.setting),
        "cells": [_record(report, cell, found) for cell, found in report.cells.items()],
        "echo_us": round(report.unit * 1e6, 1) if report.unit else None,
        "aims": [
            {
                "prompt": aim.kind.name,
                "way": aim.way.name,
                "bound": aim.bound,
                "multiple": round(aim.multiple, 2),
                "met": aim.met,
            }
            for aim in aims(report)
        ],
        "duplex_beside_buffered": duplex_share(report),
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
    if found.cpu_per_request is not None and cell.way != ECHO_WAY:
        record["added_p50_us"] = round(report.added(cell, "p50") * 1e6, 1)
        record["added_p99_us"] = round(report.added(cell, "p99") * 1e6, 1)
    return record
