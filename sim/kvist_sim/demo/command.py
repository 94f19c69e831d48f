"""Run ``kvist demo`` with its options, show the result, and return the exit code."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Final

from rich.console import Console

from kvist_sim.envoy import EnvoyMissingError
from kvist_sim.processes import ChildFailedError, Stopped, run

from .live_page import LivePage, wait_for_enter
from .plan import RATE_PER_ENGINE, DemoPlan
from .report import DemoReport, Display, document, table
from .run import demo

WIDTH: Final = 100
FAILED: Final = 1
USAGE: Final = 2
PICTURE: Final = Path("kvist-demo.png")
"""Picture of ``--watch`` without ``--picture``, in the working folder."""


def main(options: argparse.Namespace) -> int:
    """Run both policies and print the comparison. Return 0 only when both runs are valid and the picture, if
    one was requested, is written; 2 when it cannot be."""
    progress = _console(stderr=True)
    if problem := _picture_problem(options.picture):
        print(f"kvist: {problem}", file=sys.stderr)
        return USAGE
    picture = options.picture
    if options.watch and picture is None:
        picture = PICTURE
        if problem := _picture_problem(picture):
            progress.print(f"no picture: {problem}", markup=False, highlight=False)
            picture = None
    shown = _Result(progress, as_json=options.json, picture=picture)
    page = LivePage() if options.watch else None
    if page is not None and sys.stdin.isatty():
        shown.stays = page
    try:
        run(demo(_plan(options), Display(progress), shown.finish, page))
    except Stopped as stopped:
        if shown.report is None:
            progress.print("stopped")
            return stopped.exit_code
    except (ChildFailedError, EnvoyMissingError) as failure:
        progress.print(f"demo failed: {failure}", style="red", markup=False, highlight=False)
        return FAILED
    return shown.exit_code()


class _Result:
    """Shows the report when both runs are over."""

    def __init__(self, progress: Console, *, as_json: bool, picture: Path | None) -> None:
        self._progress, self._as_json, self._picture = progress, as_json, picture
        self._failure = ""
        self.report: DemoReport | None = None
        self.stays: LivePage | None = None
        """The page that stays until Enter is pressed; None if the demo ends at once."""

    async def finish(self, report: DemoReport) -> None:
        """Print the report, write the picture, and wait until the user has seen the page."""
        _print(report, as_json=self._as_json)
        self._failure = report.failure() or self._draw(report)
        self.report = report
        if self.stays is not None and not self._failure:
            self._say(f"live page: {self.stays.url} (paste a request there to see where it would go)")
            self._say("Enter ends the demo")
            await wait_for_enter(sys.stdin)

    def exit_code(self) -> int:
        """Return the exit code, and print why the demo failed if it did."""
        if not self._failure:
            return 0
        self._progress.print(f"demo failed: {self._failure}", style="red", markup=False, highlight=False)
        return FAILED

    def _draw(self, report: DemoReport) -> str:
        """Write the picture; return why it cannot be written."""
        if self._picture is None:
            return ""
        from .picture import write_picture

        try:
            write_picture(report, self._picture)
        except OSError as error:
            return f"--picture {self._picture}: cannot be written: {error}"
        self._say(f"picture: {self._picture}")
        return ""

    def _say(self, text: str) -> None:
        self._progress.print(text, markup=False, highlight=False, soft_wrap=True)


def _picture_problem(file: Path | None) -> str:
    """Return why the picture cannot be drawn or written, with the remedy; empty if it can."""
    if file is None:
        return ""
    if importlib.util.find_spec("matplotlib") is None:
        return "kvist demo --picture needs matplotlib: pip install 'kvist[plots]'"
    if not os.access(file.parent, os.W_OK) or file.is_dir():
        return f"--picture {file}: cannot be written: name a file in a folder that exists and is yours"
    return ""


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
        sys.stdout.flush()
    else:
        _console(stderr=False).print(table(report))


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console
