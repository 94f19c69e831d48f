"""Run a benchmark with bounds, from its start to its exit code: chaos, soak, queue and prewarm."""

import argparse
import datetime as dt
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import uvloop
from rich.console import Console, RenderableType

from kvist_sim.bench.epp.report import machine_facts, versions
from kvist_sim.bench.harness.publish import publish
from kvist_sim.envoy import EnvoyMissingError
from kvist_sim.processes import ChildFailedError, Stopped, run

FAILED: Final = 1
WIDTH: Final = 110


class Report(Protocol):
    """Result of a benchmark that has bounds."""

    def broken(self) -> list[str]:
        """Return every broken bound in words."""
        ...


_R = TypeVar("_R", bound=Report)


def console() -> Console:
    """Return the console for progress messages."""
    return Console(stderr=True, width=WIDTH, highlight=False)


def prove(
    name: str,
    work: Coroutine[Any, Any, _R],
    say: Console,
    options: argparse.Namespace,
    *,
    table: Callable[[_R], RenderableType],
    document: Callable[[_R], dict[str, Any]],
) -> int:
    """Run, print the table, write the results.

    Return a non-zero code when a bound is broken or a component failed.
    """
    try:
        report = run(work, loop_factory=uvloop.new_event_loop)
    except Stopped as stopped:
        say.print("stopped")
        return stopped.exit_code
    except (ChildFailedError, EnvoyMissingError, TimeoutError) as failure:
        why = str(failure) or "an answer did not come in time"
        say.print(f"{name} failed: {why}", style="red", markup=False)
        return FAILED
    publish(name, stamped(document(report), report), table(report), options, width=WIDTH)
    for broken in report.broken():
        say.print(f"bound broken: {broken}", style="red", markup=False)
    return FAILED if report.broken() else 0


def stamped(found: dict[str, Any], report: Report) -> dict[str, Any]:
    """Return a document with date, machine, versions and the broken bounds."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": versions(),
        **found,
        "broken": report.broken(),
    }
