"""Tables of ``kvist bench epp`` for a terminal of 100 columns."""

import dataclasses
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvist_sim.bench.epp.report import (
    AIM_CONCURRENCY,
    AIMS,
    DUPLEX_BOUND,
    ECHO_WAY,
    RISE_BOUND,
    Cell,
    Change,
    EppReport,
    Way,
    aims,
    changes,
    duplex_share,
    rise,
)
from kvist_sim.bench.harness.machine import machine_facts


def tables(report: EppReport) -> RenderableType:
    """Return all tables, for a console of 100 columns."""
    parts: list[RenderableType] = [Text(_heading(report))]
    for concurrency in report.concurrencies:
        parts += [_work(report, concurrency), _latency(report, concurrency)]
    parts += [_tls(report, way) for way in report.ways if way.tls]
    if report.unit:
        parts.append(multiples_table(report))
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
    return [way for way in report.ways if not way.tls and way != ECHO_WAY]


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


def multiples_table(report: EppReport) -> RenderableType:
    """Return the CPU time of all ways in multiples of the echo's, with the bounds."""
    unit = report.unit
    assert unit is not None
    ways = [way for way in report.ways if way.transport and way != ECHO_WAY]
    table = _table([*(way.name.replace(" ", "\n") for way in ways), "bound", ""])
    bounds = dict(AIMS)
    judged = aims(report)
    for kind in report.kinds:
        found = [report.cpu(way, kind) for way in ways]
        verdict = "held" if all(aim.met for aim in judged if aim.kind == kind) else "missed"
        table.add_row(
            kind.name,
            *("" if cpu is None else f"{cpu / unit:.1f}" for cpu in found),
            *((f"{bounds[kind]:g}", verdict) if kind in bounds else ("", "")),
        )
    title = (
        f"CPU per request in multiples of a bare echo's ({unit * 1e6:,.0f} us for 1 KB, duplex), "
        f"concurrency {AIM_CONCURRENCY}"
    )
    share = duplex_share(report)
    if share is not None:
        verdict = "held" if share <= DUPLEX_BOUND else "missed"
        title += (
            f"\nduplex beside buffered: {share:+.0%} (geometric mean; bound {DUPLEX_BOUND:+.0%}: {verdict})"
        )
    return _titled(title, table)


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
