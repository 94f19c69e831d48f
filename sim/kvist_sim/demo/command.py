"""Run ``kvist demo`` with its options, show the result, and return the exit code."""

import argparse
import json
import sys
from typing import Final

from rich.console import Console

from kvist_sim.envoy import EnvoyMissingError
from kvist_sim.processes import ChildFailedError, Stopped, run

from .plan import RATE_PER_ENGINE, DemoPlan
from .report import DemoReport, Display, document, table
from .run import demo

WIDTH: Final = 100
FAILED: Final = 1


def main(options: argparse.Namespace) -> int:
    """Run both policies and print the comparison. Return 0 only when both runs are valid."""
    progress = _console(stderr=True)
    try:
        report = run(demo(_plan(options), Display(progress)))
    except Stopped as stopped:
        progress.print("stopped")
        return stopped.exit_code
    except (ChildFailedError, EnvoyMissingError) as failure:
        progress.print(f"demo failed: {failure}", style="red", markup=False, highlight=False)
        return FAILED
    _print(report, as_json=options.json)
    if why := report.failure():
        progress.print(f"demo failed: {why}", style="red", markup=False, highlight=False)
        return FAILED
    return 0


def _plan(options: argparse.Namespace) -> DemoPlan:
    return DemoPlan(
        seconds=options.seconds,
        engines=options.engines,
        rate=options.rate or options.engines * RATE_PER_ENGINE,
        seed=options.seed,
    )


def _print(report: DemoReport, *, as_json: bool) -> None:
    if as_json:
        json.dump(document(report), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _console(stderr=False).print(table(report))


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console
