"""Run ``kvist bench route``: cells from options, progress on stderr, the table on stdout."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvist_sim.bench.route.disaggregation import write as write_disaggregation
from kvist_sim.bench.route.page import stamped, write, write_tiers
from kvist_sim.virtual.ideal import GOOD, TooFewRequestsError
from kvist_sim.virtual.kept import Kept
from kvist_sim.virtual.report import OURS, best_ratios, contenders, document, sentences, table
from kvist_sim.virtual.runner import (
    DISAGGREGATING,
    IDEAL,
    NO_TIERS,
    SPECS,
    Cell,
    Job,
    Result,
    cells,
    run_all,
)
from kvist_sim.virtual.workloads.cases import CASES, DISAGGREGATION_CASES
from kvist_sim.virtual.workloads.mooncake import trace
from kvist_sim.virtual.world import Setting


def main(options: argparse.Namespace) -> int:
    """Run the cells. Return exit code 2 for an unknown name, or a trace that cannot be read."""
    if problem := _problem(options):
        return _refused(problem)
    try:
        kept = None if options.keep is None else Kept(options.keep, _job(options))
    except (OSError, ValueError) as error:
        return _refused(f"--keep: {error}")
    try:
        results = _results(options, kept)
    except TooFewRequestsError as error:
        return _refused(f"--requests: {error}; ask for more")
    if options.json != "-":
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(table(results))
        console.print("\n".join(sentences(results)), highlight=False)
    if options.json or options.write_docs:
        _write(options, results)
    return 0


def _refused(problem: str) -> int:
    print(f"kvist bench route: {problem}", file=sys.stderr)
    return 2


def _results(options: argparse.Namespace, kept: Kept | None) -> list[Result]:
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    job = _job(options)
    every = cells(_workloads(options), options.load, options.policy or _policies(options), seeds)
    asked = [cell for cell in every if cell.policy != NO_TIERS or job.has_tiers(cell.case)]
    screened = options.first_seed + options.screen if options.screen else seeds.stop
    results = _run(options, job, [cell for cell in asked if cell.seed < screened], kept)
    still = best_ratios(results) if options.disaggregation else contenders(results)
    there = {result.cell for result in kept.of(asked)} if kept else set()
    later = [c for c in asked if c.seed >= screened and (c in there or (c.case, c.load, c.policy) in still)]
    results += _run(options, job, later, kept)
    order = {cell: number for number, cell in enumerate(asked)}
    return sorted(results, key=lambda result: order[result.cell])


def _run(options: argparse.Namespace, job: Job, asked: Sequence[Cell], kept: Kept | None) -> list[Result]:
    results = kept.of(asked) if kept else []
    there = {result.cell for result in results}
    left = [cell for cell in asked if cell not in there]
    if there:
        _say(f"{len(there)} of {len(asked)} runs are in {options.keep}")
    for result in run_all(job, left, jobs=min(options.jobs, os.cpu_count() or 1), done=_say):
        results.append(result)
        if kept:
            kept.add(result)
    return results


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _job(options: argparse.Namespace) -> Job:
    setting = Setting(
        replicas=options.pickers,
        gossip=options.gossip_delay,
        events=options.event_delay,
        rate_factor=options.prefill_rate_factor,
    )
    first = options.first_seed
    return Job(
        engines=options.engines,
        requests=options.requests,
        setting=setting,
        trace=options.trace,
        pictured=first,
    )


def _offered(options: argparse.Namespace, name: str, results: Sequence[Result]) -> dict[str, object]:
    case = _job(options).case(name)
    shape = case.shape(options.engines)
    return {
        "name": name,
        "summary": shape.summary,
        "ttft": shape.ttft,
        "tpot": shape.tpot,
        "held_out": case.held_out,
        "capacity": next(r.rate / r.cell.load for r in results if r.cell.case == name),
    }


def _policies(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the policies of the table."""
    shared = [spec.name for spec in DISAGGREGATING]
    if options.disaggregation:
        return (OURS, *shared, IDEAL)
    return (*[name for name in SPECS if name not in shared], NO_TIERS, IDEAL)


def _workloads(options: argparse.Namespace) -> Sequence[str]:
    if options.trace is not None:
        return (trace(options.trace).name,)
    cases = DISAGGREGATION_CASES if options.disaggregation else CASES
    return options.workload or tuple(case.name for case in cases)


def _problem(options: argparse.Namespace) -> str:
    """Return the first invalid option in words; empty if all are valid."""
    known = {
        "--workload": {case.name for case in (*CASES, *DISAGGREGATION_CASES)},
        "--policy": {*SPECS, NO_TIERS, IDEAL},
    }
    for flag, given in (("--workload", options.workload), ("--policy", options.policy)):
        for name in given:
            if name not in known[flag]:
                return f"{flag}: {name} is none of {', '.join(sorted(known[flag]))}"
    if options.trace is not None:
        try:
            trace(options.trace)
        except (OSError, ValueError) as error:
            return f"--trace: {error}"
    if options.screen and not 0 < options.screen <= options.seeds:
        return f"--screen: {options.screen} is not between 1 and --seeds {options.seeds}"
    return ""


def _write(options: argparse.Namespace, results: Sequence[Result]) -> None:
    about = {name: str(value) for name, value in vars(options).items() if not callable(value)}
    about["capacity"] = f"highest rate at which the ideal pool serves {GOOD:.0%} within the SLO"
    offered = [_offered(options, name, results) for name in dict.fromkeys(r.cell.case for r in results)]
    found = stamped({**document(results, about), "workloads": offered})
    text = json.dumps(found, indent=1)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text)
    if options.write_docs:
        tiered = all(_job(options).has_tiers(str(one["name"])) for one in offered)
        plain = write_tiers if tiered else write
        write_page = write_disaggregation if options.disaggregation else plain
        write_page(Path(options.write_docs), found)
