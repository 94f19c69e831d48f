"""The table: a row for each case, load and policy; beside ours what the pairs of runs say. Pure."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

import msgspec
from rich.table import Table

from kvist_sim.virtual.judge import Interval, Verdict, interval
from kvist_sim.virtual.runner import Result

OURS: Final = "kvist"
Key = tuple[str, float]
"""Workload and load."""

WITHIN: Final = 0.02
"""Goodput this close to the best is as good."""
CONTENDS: Final = 0.10
"""Goodput within which of the best other a policy stays in the race after the first seeds …"""
CONTENDS_SHARE: Final = 0.25
"""… and no more than this share of the best's, since beyond capacity all are close to nothing."""
CONTENDERS: Final = 2
"""Others that stay in it at most: far below capacity nearly all are as good."""
BLIND: Final = ("round-robin", "least-requests")
"""Policies than which ours may never be worse."""


class Row(msgspec.Struct, frozen=True):
    """One policy in one case at one load, over all seeds."""

    case: str
    load: float
    policy: str
    rate: float
    seeds: int
    goodput: Interval
    ahead: Interval
    """Our goodput less its, by pairs of seeds."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p90: float
    hit_ratio: float
    tokens_per_second: float
    spread: float


class Judgement(msgspec.Struct, frozen=True):
    """Comparison of our policy with the others in one workload at one load."""

    case: str
    load: float
    best: str
    """The best of the others."""
    behind: Interval
    """Goodput of the best of the others less ours."""
    lost: bool
    """Further behind than 2 %, and the interval does not reach there."""
    harmed: str
    """Round robin or least requests, when it is ahead by more than 2 %; empty: neither is."""


def rows(results: Sequence[Result]) -> list[Row]:
    """In the order of the results' cases and loads, best goodput first."""
    grouped = _grouped(results)
    made = []
    for (case, load), policies in grouped.items():
        ours = policies.get(OURS, {})
        some = [_row(case, load, name, runs, ours) for name, runs in policies.items()]
        made += sorted(some, key=lambda row: (-row.goodput.mean, row.ttft_p90))
    return made


def judgements(results: Sequence[Result]) -> list[Judgement]:
    """Return the comparison for every workload and load in which our policy and another one ran."""
    made = []
    for (case, load), policies in _grouped(results).items():
        others = {name: runs for name, runs in policies.items() if name not in {OURS, "ideal"}}
        if OURS in policies and others:
            made.append(_judgement(case, load, policies[OURS], others))
    return made


def contenders(results: Sequence[Result]) -> set[tuple[str, float, str]]:
    """Return (workload, load, policy) of the policies that may still turn out best, and of those that
    ours may not be worse than."""
    found = set()
    for (case, load), policies in _grouped(results).items():
        means = {name: fmean(r.verdict.goodput for r in runs.values()) for name, runs in policies.items()}
        others = {name: mean for name, mean in means.items() if name not in {OURS, "ideal"}}
        best = max(others.values(), default=0.0)
        least = best - min(CONTENDS, CONTENDS_SHARE * best)
        near = sorted((name for name in others if others[name] > least), key=lambda name: -others[name])
        behind = means.get(OURS, 0.0) - CONTENDS
        kept = {OURS, "ideal", *near[:CONTENDERS], *(name for name in BLIND if means.get(name, 0.0) > behind)}
        found |= {(case, load, name) for name in kept & policies.keys()}
    return found


def best_ratios(results: Sequence[Result]) -> set[tuple[str, float, str]]:
    """Return (workload, load, policy) of those that go on where roles are fixed: of the ratios of one rule
    (``llm-d-pd-1:3``) that with the best goodput so far, and every policy without a ratio."""
    found = set()
    for (case, load), policies in _grouped(results).items():
        best: dict[str, tuple[float, str]] = {}
        for name, runs in policies.items():
            rule = name.rsplit("-", 1)[0] if ":" in name else name
            best[rule] = max(
                best.get(rule, (-1.0, "")), (fmean(r.verdict.goodput for r in runs.values()), name)
            )
        found |= {(case, load, name) for _, name in best.values()}
    return found


def _judgement(
    case: str, load: float, ours: Mapping[int, Result], others: Mapping[str, Mapping[int, Result]]
) -> Judgement:
    ahead = {name: _ahead(runs, ours) for name, runs in others.items()}
    best = max(ahead, key=lambda name: (len(others[name]), ahead[name].mean))  # few seeds tell little
    harmed = [name for name in BLIND if name in ahead and ahead[name].mean > WITHIN]
    lost = ahead[best].mean > WITHIN and ahead[best].mean - ahead[best].half > 0
    return Judgement(case, load, best, ahead[best], lost, " ".join(harmed))


def _ahead(one: Mapping[int, Result], other: Mapping[int, Result]) -> Interval:
    pairs = [seed for seed in one if seed in other]
    return interval([one[seed].verdict.goodput - other[seed].verdict.goodput for seed in pairs])


def _grouped(results: Sequence[Result]) -> dict[Key, dict[str, dict[int, Result]]]:
    grouped: dict[Key, dict[str, dict[int, Result]]] = {}
    for result in results:
        cell = result.cell
        grouped.setdefault((cell.case, cell.load), {}).setdefault(cell.policy, {})[cell.seed] = result
    return grouped


def _row(case: str, load: float, policy: str, runs: Mapping[int, Result], ours: Mapping[int, Result]) -> Row:
    verdicts = [result.verdict for result in runs.values()]

    def mean(name: str) -> float:
        return fmean(getattr(verdict, name) for verdict in verdicts)

    return Row(
        case=case,
        load=load,
        policy=policy,
        rate=fmean(result.rate for result in runs.values()),
        seeds=len(runs),
        goodput=interval([verdict.goodput for verdict in verdicts]),
        ahead=_ahead(ours, runs),
        **{
            name: mean(name)
            for name in Row.__struct_fields__
            if name in Verdict.__struct_fields__ and name != "goodput"
        },
    )


def table(results: Sequence[Result]) -> Table:
    """For a terminal."""
    made = Table(title="policies in virtual time", title_justify="left")
    for name in ("case", "load", "policy"):
        made.add_column(name)
    for name in ("goodput", "ours ahead", "TTFT p50", "p90", "p99", "TPOT p90", "hits", "tok/s", "spread"):
        made.add_column(name, justify="right")
    last: Key | None = None
    for row in rows(results):
        if last not in {None, (row.case, row.load)}:
            made.add_section()
        first = last != (row.case, row.load)
        last = row.case, row.load
        made.add_row(*_texts(row, first=first), style="bold" if row.policy == OURS else None)
    return made


def _texts(row: Row, *, first: bool) -> list[str]:
    return [
        row.case if first else "",
        f"{row.load:.0%}" if first else "",
        row.policy,
        _share(row.goodput),
        "" if row.policy == OURS else _share(row.ahead),
        *(f"{seconds:.3f}" for seconds in (row.ttft_p50, row.ttft_p90, row.ttft_p99)),
        f"{1000 * row.tpot_p90:.0f} ms",
        f"{row.hit_ratio:.0%}",
        f"{row.tokens_per_second:.0f}",
        f"{row.spread:.2f}",
    ]


def _share(found: Interval) -> str:
    half = "" if found.half == float("inf") else f" ±{100 * found.half:.1f}"
    return f"{100 * found.mean:.1f}{half} %"


def sentences(results: Sequence[Result]) -> list[str]:
    """Return sentences that name the rows in which our policy is not the best; one sentence if there
    are none."""
    made = []
    for one in judgements(results):
        where = f"{one.case} at {one.load:.0%}"
        if one.lost:
            made.append(f"lost: {where}: {one.best} is ahead by {_share(one.behind)} goodput")
        if one.harmed:
            made.append(f"harm: {where}: worse than {one.harmed} by more than 2 % goodput")
    return made or ["best, or within 2 % goodput of the best, everywhere"]


def document(results: Sequence[Result], about: Mapping[str, Any]) -> dict[str, Any]:
    """For a file: what was asked, every run, every row, how we stand."""
    return {
        "about": dict(about),
        "runs": msgspec.to_builtins(list(results)),
        "rows": msgspec.to_builtins(rows(results)),
        "standing": msgspec.to_builtins(judgements(results)),
    }
