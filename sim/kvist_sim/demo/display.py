"""Progress of a demo: live lines on a terminal, elsewhere one plain line for each step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from kvist_sim import load

REFRESH_SECONDS: Final = 0.25
RECENT: Final = 100
"""Number of requests in the live figures."""
_NAME_WIDTH: Final = 12


class Display:
    """Progress on one console, which must not be stdout when that carries JSON."""

    def __init__(self, console: Console) -> None:
        """``console`` usually is stderr."""
        self._console = console
        self._progress = Progress(
            TextColumn(f"  {{task.fields[policy]:<{_NAME_WIDTH}}}", style="bold"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f} s"),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, highlight=False)

    @contextmanager
    def start(self, policy: str, what: str) -> Iterator[None]:
        """Show that a component starts, and how long it took."""
        began = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(f"{policy}: starting {what} …"):
                yield
        else:
            yield
        self.say(f"  {policy:<{_NAME_WIDTH}} started {what} [dim]({time.monotonic() - began:.1f} s)[/dim]")

    @contextmanager
    def load(self, policy: str, seconds: float) -> Iterator["LoadDisplay"]:
        """A bar for one run of the load."""
        with self._progress:
            task = self._progress.add_task("", total=seconds, policy=policy, figures="")
            shown = LoadDisplay(self._progress, task)
            yield shown
            self._progress.remove_task(task)
        self.say(f"  {policy:<{_NAME_WIDTH}} load done: {shown.latest}")


class LoadDisplay:
    """Bar of one run."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Made by ``Display.load``."""
        self._progress, self._task = progress, task
        self.latest = ""
        """Figures shown last."""

    def update(self, elapsed: float, state: load.Progress, phase: str) -> None:
        """Show the state of the load; ``phase`` names the part."""
        self.latest = figures(state)
        self._progress.update(self._task, completed=elapsed, figures=f"{self.latest} · {phase}")


def figures(state: load.Progress) -> str:
    """Return the live figures: of the latest answers, without requests that were cancelled.

    Cancelled requests have no usage, so that at the end of the drain time they would show as ``cached 0%``.
    """
    answers = [outcome for outcome in state.outcomes if outcome.finished]
    recent = answers[-RECENT:]
    waits = [o.ttft for o in recent if o.ttft is not None]
    prompt = sum(o.prompt_tokens for o in recent)
    shown = f"{sum(o.cached_tokens for o in recent) / prompt:>3.0%}" if prompt else "  –"
    errors = sum(o.finished and not o.good for o in state.outcomes)
    return (
        f"{len(answers):>4} answers · TTFT {load.percentile(waits, 0.5):.2f} s · "
        f"cached {shown} · {errors} errors"
    )
