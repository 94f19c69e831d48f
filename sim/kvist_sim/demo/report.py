"""Progress of a demo on a terminal or in a log, and its results as a table and as JSON."""

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from kvist_sim import load
from kvist_sim.demo.plan import DemoPlan
from kvist_sim.load import Summary

from .series import PREFILL_RATE, gpu_seconds_saved

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
        """Show a bar for one run of the load."""
        with self._progress:
            task = self._progress.add_task("", total=seconds, policy=policy, figures="")
            shown = LoadDisplay(self._progress, task)
            yield shown
            self._progress.remove_task(task)
        self.say(f"  {policy:<{_NAME_WIDTH}} load done: {shown.latest}")


class LoadDisplay:
    """Bar of one run."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        """Use ``Display.load`` to make one."""
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


KVIST: Final = "kvist"
ROUND_ROBIN: Final = "round robin"
TENFOLD: Final = 10
"""Ratio from which on no decimals are shown; seconds have one less."""
TOLERATED_ERROR_SHARE: Final = 0.01
"""Largest share of failed requests in a valid run, however fast the rest was."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Both runs of a demo."""

    plan: DemoPlan
    kvist: Summary
    round_robin: Summary
    outcomes: Mapping[str, Sequence[load.Outcome]] = field(default_factory=dict)
    """Every request of each run, warm-up included, by name of the policy; for the picture."""

    def failure(self) -> str | None:
        """Return the reason why the result does not count; None if it does."""
        for name, summary in ((KVIST, self.kvist), (ROUND_ROBIN, self.round_robin)):
            if summary.requests == summary.unfinished:
                return f"{name}: none of {summary.requests} requests was answered"
            if summary.errors > TOLERATED_ERROR_SHARE * summary.requests:
                return f"{name}: {summary.errors} of {summary.requests} requests failed"
        return None


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    value: Callable[[Summary], float]
    shown: Callable[[float], str]
    verdict: str
    """Words for a ratio in kvist's favour."""
    opposite: str = ""
    less_is_better: bool = False


def seconds_text(value: float) -> str:
    """Return a time in milliseconds or seconds with its unit."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < TENFOLD else f"{value:.1f} s"


def _count(value: float) -> str:
    return f"{value:,.0f}"


ROWS: Final = (
    _Row("output tokens/s", lambda s: s.output_tokens_per_second, _count, "more", "less"),
    _Row("answers/s", lambda s: s.requests_per_second, lambda v: f"{v:.1f}", "more", "less"),
    _Row(
        "time to first token, p50",
        lambda s: s.ttft_p50,
        seconds_text,
        "faster",
        "slower",
        less_is_better=True,
    ),
    _Row(
        "time to first token, p90",
        lambda s: s.ttft_p90,
        seconds_text,
        "faster",
        "slower",
        less_is_better=True,
    ),
    _Row("prompt tokens from cache", lambda s: s.cached_share, lambda v: f"{v:.1%}", "more", "less"),
    _Row("prefill saved, GPU-seconds", lambda s: gpu_seconds_saved(s.cached_tokens), _count, "more", "less"),
    _Row("errors", lambda s: s.errors, _count, ""),
    _Row("still waiting at the end", lambda s: s.unfinished, _count, ""),
)


def explanation(plan: DemoPlan) -> str:
    """Return one sentence that says which systems are compared."""
    shape = plan.shape
    return (
        f"The same {plan.seconds:g} s of chat traffic through the same Envoy, twice: once kvist picked the "
        f"engine,\nonce Envoy took turns (round robin).\n"
        f"{plan.rate:g} requests/s, {shape.groups} shared system prompts, {plan.engines} simulated engines "
        f"(timed as Qwen3-32B on one H100).\n"
        f"All caches together hold every prompt, one alone does not: that is where routing matters.\n"
        f"Prefill saved: prompt tokens from cache / {PREFILL_RATE:,.0f} tokens/s, the rate of one engine."
    )


def table(report: DemoReport) -> RenderableType:
    """Return the explanation and the figures side by side."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    shown.add_column(KVIST, justify="right", style="bold green")
    shown.add_column(ROUND_ROBIN, justify="right")
    shown.add_column("kvist is", justify="right", style="dim")
    for row in ROWS:
        kvist, robin = row.value(report.kvist), row.value(report.round_robin)
        shown.add_row(row.name, row.shown(kvist), row.shown(robin), _verdict(row, kvist, robin))
    return Group(Text(explanation(report.plan)), shown)


def _verdict(row: _Row, kvist: float, robin: float) -> str:
    better, worse = (robin, kvist) if row.less_is_better else (kvist, robin)
    if not row.verdict or not worse or not better:
        return ""
    ratio = better / worse
    times, word = (ratio, row.verdict) if ratio >= 1 else (1 / ratio, row.opposite)
    return f"{times:.{1 if times < TENFOLD else 0}f} x {word}"


def document(report: DemoReport) -> dict[str, Any]:
    """Return the report as plain JSON values; times in seconds."""
    runs = {"kvist": report.kvist, "round_robin": report.round_robin}
    return {
        "plan": {**dataclasses.asdict(report.plan), "shape": dataclasses.asdict(report.plan.shape)},
        **{name: _summary(summary) for name, summary in runs.items()},
        "prefill_tokens_per_second": PREFILL_RATE,
        "versions": {"kvist": metadata.version("kvist"), "python": platform.python_version()},
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        **dataclasses.asdict(summary),
        "cached_share": summary.cached_share,
        "prefill_gpu_seconds_saved": gpu_seconds_saved(summary.cached_tokens),
    }
