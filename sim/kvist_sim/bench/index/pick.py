"""``python -m kvist_sim.bench.index.pick``: CPU of a pick among many endpoints.

Every endpoint has 30 requests under way. One prompt of 32,768 tokens (131 KB) is held whole by all
endpoints, by a storage that all share, by ten, or by none. CPU of the look-up in index and history, and of
the pick, apart: the pick is the product's ``CandidateTable``, with the accounting of the request it sends and
of one that ends, which change the columns. Times are the best of several rounds, which alternate between the
cases.
"""

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import process_time
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from kvist_epp.app.process import freeze_startup_objects
from kvist_epp.disaggregation.partners import wanted_pairs
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Found, Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.load.tracker import LoadTracker
from kvist_epp.scheduling.candidate_table import CandidateTable, PickedEndpoints
from kvist_epp.scheduling.leg_table import WarmPairs
from kvist_epp.scheduling.pick import Candidate, Demand
from kvist_epp.scheduling.split_decision import weigh
from kvist_sim.bench.harness.proof import FAILED, WIDTH, console, publish, stamped
from kvist_sim.bench.index.data import BLOCK_SIZE, ROOT, Chain, chain

TOKENS: Final = 32_768
ENDPOINTS: Final = (20, 100, 1000)
RUNNING: Final = 30
"""Requests on each endpoint, every other one with half of its prompt to prefill."""
TEN: Final = 10
STORAGE: Final = "storage"
CASES: Final = ("all", STORAGE, "ten", "none")
"""Endpoints that hold the prompt, or the storage that all share."""
USES: Final = 7.0
"""Requests that recently had the prompt's prefix: a popular one, of which a copy may pay."""
ROUNDS: Final = 25
CALLS: Final = 100
PICK_SECONDS: Final = 0.001
"""Time between two picks, in which backlogs drain."""
BOUND: Final = 2.0
"""Of the time of a pick among the most endpoints to that among the fewest, when ten hold the prompt."""


class BusyPool:
    """Endpoints that are all busy, the first of which hold the prompt."""

    def __init__(
        self, count: int, case: str, prompt: Chain, tpot_seconds: float, *, splits: bool = False
    ) -> None:
        self._index, self._tracker = Index(), LoadTracker(tpot_seconds=tpot_seconds)
        self._lookup = Lookup(self._index, RoutingHistory())
        self._prompt = prompt.prompt
        candidates = [self._member(number) for number in range(count)]
        if case == STORAGE:
            shared = self._index.publisher(STORAGE)
            prompt.store(self._index, shared)
            self._lookup.storages = {STORAGE: shared}
            for candidate in candidates:
                self._lookup.join_storage(candidate.endpoint.key, STORAGE)
        for number in range({"all": count, "ten": min(TEN, count)}.get(case, 0)):
            prompt.store(self._index, self._index.publisher(f"{candidates[number].endpoint.key}/0"))
        self._requests: deque[InFlightRequest] = deque()
        for at in range(RUNNING):
            for candidate in candidates:
                self._send(candidate.endpoint.key, at % 2 * 500, 0.0)
        self._table = CandidateTable(candidates, self._tracker.changed)
        self._warm = _warm(candidates) if splits else None
        self._turn = 0

    def _member(self, number: int) -> Candidate:
        address = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
        endpoint = Endpoint(f"engine-{number}", "pool", address, 8000, {})
        publisher = self._index.publisher(f"{endpoint.key}/0")
        self._lookup.join(endpoint.key, Member((publisher,), block_size=BLOCK_SIZE))
        load = self._tracker.load(endpoint.key)
        load.slots = 256
        return Candidate(endpoint, load)

    def _send(self, endpoint: str, uncached: int, now: float) -> None:
        request = InFlightRequest("session", 1000)
        self._tracker.add(request, endpoint, uncached, now)
        self._requests.append(request)

    def look(self) -> Found:
        """Return the blocks that each endpoint holds."""
        return self._lookup.look(ROOT, [self._prompt])

    def pick(self, found: Found) -> PickedEndpoints:
        """Pick the best endpoints, send a request to the first, and end the oldest request."""
        self._turn += 1
        now = self._turn * PICK_SECONDS
        demand = Demand(found.tokens, found.hits, USES)
        picked = self._table.choose(demand, now=now, turn=self._turn)
        if self._warm is not None:
            weigh(self._table.legs(), demand, picked.best, now=now, warm=self._warm)
        self._send(picked.best.endpoint.key, picked.best.uncached_tokens, now)
        self._tracker.end_reports.on_report()
        self._tracker.end(self._requests.popleft(), now)
        return picked


def _warm(candidates: Sequence[Candidate]) -> WarmPairs:
    """Return all pairs that a pool connects."""
    pairs = WarmPairs()
    for prefill, decode in wanted_pairs([one.endpoint for one in candidates]):
        pairs.add(prefill, decode)
    return pairs


@dataclass(frozen=True, slots=True)
class PickFigures:
    """Microseconds of CPU of one case."""

    held_by: str
    endpoints: int
    lookup_us: float
    pick_us: float


@dataclass(frozen=True, slots=True)
class PickReport:
    """Figures of all cases."""

    rows: Sequence[PickFigures]
    tpot_seconds: float
    splits: bool = False
    """A pick also decides whether another endpoint computes the prompt."""

    def growth(self) -> float:
        """Return the time of a pick among the most endpoints over that among the fewest; ten hold it."""
        ten = sorted((row for row in self.rows if row.held_by == "ten"), key=lambda row: row.endpoints)
        return ten[-1].pick_us / ten[0].pick_us

    def broken(self) -> list[str]:
        """Return the broken bound, in words."""
        growth = self.growth()
        if growth <= BOUND:
            return []
        return [f"the most endpoints cost {growth:.1f} times as much as the fewest when ten hold the prompt"]


def measure(
    endpoints: Sequence[int], prompt: Chain, tpot_seconds: float, *, splits: bool = False
) -> PickReport:
    """Measure every case with every number of endpoints."""
    cells = [(case, count) for case in CASES for count in endpoints]
    pools = [BusyPool(count, case, prompt, tpot_seconds, splits=splits) for case, count in cells]
    found = [pool.look() for pool in pools]
    held = {"all": max(endpoints), STORAGE: max(endpoints), "ten": TEN, "none": 0}
    assert [len(one.hits) for one in found] == [min(held[case], count) for case, count in cells]
    times: list[list[tuple[float, float]]] = [[] for _ in cells]
    for _ in range(ROUNDS):
        for pool, known, rounds in zip(pools, found, times, strict=True):
            rounds.append((_seconds(pool.look), _seconds(partial(pool.pick, known))))
    rows = []
    for (case, count), rounds in zip(cells, times, strict=True):
        look, pick = (min(both) * 1e6 for both in zip(*rounds, strict=True))
        rows.append(PickFigures(case, count, look, pick))
    return PickReport(rows, tpot_seconds, splits)


def _seconds(call: Callable[[], object]) -> float:
    began = process_time()
    for _ in range(CALLS):
        call()
    return (process_time() - began) / CALLS


def table(report: PickReport) -> RenderableType:
    """Return the figures, the bound above them."""
    fewest, most = _span(report)
    verdict = "missed" if report.broken() else "held"
    target = f" under a TPOT target of {report.tpot_seconds:g} s" if report.tpot_seconds else ""
    target += ", with the decision where to compute the prompt" if report.splits else ""
    shown = Table(box=None)
    for title in ("prompt held by", "endpoints", "look-up", "pick", "both"):
        shown.add_column(title, justify="left" if title.startswith("prompt") else "right")
    for row in report.rows:
        times = (row.lookup_us, row.pick_us, row.lookup_us + row.pick_us)
        shown.add_row(row.held_by, f"{row.endpoints:,}", *(f"{time:,.0f}" for time in times))
    return Group(
        "us of CPU; a pick includes the accounting of a request that is sent and of one that ends",
        f"pick among {most:,} endpoints{target}: {report.growth():.1f} times that among {fewest:,}",
        f"when ten hold the prompt (bound {BOUND:g}: {verdict})",
        "",
        shown,
    )


def _span(report: PickReport) -> tuple[int, int]:
    counts = [row.endpoints for row in report.rows]
    return min(counts), max(counts)


def document(report: PickReport) -> dict[str, Any]:
    """Return the figures for JSON."""
    rows = [asdict(row) for row in report.rows]
    settings = {"tpot_seconds": report.tpot_seconds, "splits": report.splits}
    return {**settings, "growth": report.growth(), "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what is asked for; non-zero when the bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m kvist_sim.bench.index.pick", description=__doc__)
    parser.add_argument("--endpoints", type=int, nargs="+", default=ENDPOINTS, metavar="N")
    parser.add_argument(
        "--tpot-target", type=float, default=0.0, metavar="SECONDS", help="as kvist-epp's (default: none)"
    )
    parser.add_argument(
        "--disaggregation",
        action="store_true",
        help="also decide whether another endpoint computes the prompt",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; -: to stdout")
    parser.add_argument("--write-docs", metavar="FILE", help="write the table into docs/benchmarks.md")
    options = parser.parse_args(argv)
    prompt = chain("warm", TOKENS // BLOCK_SIZE)
    report = measure(options.endpoints, prompt, options.tpot_target, splits=options.disaggregation)
    name = "pick" + "-tpot" * bool(options.tpot_target) + "-split" * options.disaggregation
    publish(name, stamped(document(report), report), table(report), options, width=WIDTH)
    for broken in report.broken():
        console().print(f"bound broken: {broken}", style="red", markup=False)
    return FAILED if report.broken() else 0


if __name__ == "__main__":
    freeze_startup_objects()  # the collector as in the picker's own process
    sys.exit(main())
