"""``kvist top``: a live table of a pool in the terminal, from a picker's ``/live/state``."""

import argparse
import asyncio
import json
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvist_epp.admin.live import units

from .errors import PickerClientError
from .picker_client import PickerClient, run_with_picker

STATE_PATH: Final = "/live/state"
_WIDE: Final = 120
"""Columns from which a table has all figures."""
_OTHER_LINES: Final = 8
"""Lines of a screen that are not rows of the table."""
_STYLES: Final = ("green", "blue", "yellow", "magenta", "red")
"""Colour of an endpoint's state by its severity."""

Document = Mapping[str, Any]


def top_main(options: argparse.Namespace) -> int:
    """Show the pool until q or Ctrl-C, or once; return the exit code."""
    try:
        return run_with_picker(options, _top)
    except KeyboardInterrupt:
        return 0


async def _top(picker: PickerClient, options: argparse.Namespace) -> int:
    console = Console()
    if options.output == "json":
        print(json.dumps(await state(picker), indent=2))
        return 0
    if options.once or not console.is_terminal:
        console.print(screen(await state(picker), console.width))
        return 0
    await _follow(picker, console, options.interval)
    return 0


async def state(picker: PickerClient) -> Document:
    """Return the picker's document. Raises PickerClientError."""
    found: Document = await picker.get(STATE_PATH)
    return found


async def _follow(picker: PickerClient, console: Console, interval: float) -> None:
    """Update the screen until q is pressed. Raises PickerClientError: the first answer did not come."""
    document = await state(picker)
    stop = asyncio.Event()
    with _keys(stop.set), Live(console=console, screen=True, auto_refresh=False) as live:
        problem = ""
        while not stop.is_set():
            live.update(screen(document, console.width, console.height, problem), refresh=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):  # wait_for of 3.11 may swallow Ctrl-C at its end
                    await stop.wait()
            try:
                document, problem = await state(picker), ""
            except PickerClientError as error:
                problem = str(error)


@contextmanager
def _keys(on_quit: Callable[[], None]) -> Iterator[None]:
    """Call ``on_quit`` when q or Ctrl-D is pressed; keys are not shown."""
    if not sys.stdin.isatty():
        yield
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> None:
        keys = os.read(descriptor, 64)
        if not keys or keys[:1] in b"qQ\x04":
            on_quit()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def screen(document: Document, width: int, height: int = 0, problem: str = "") -> RenderableType:
    """Return the whole screen; ``height``: lines to fit in, 0 for any number."""
    rows, replicas = document["endpoints"], document["replicas"]
    others = _OTHER_LINES + (len(replicas) if len(replicas) > 1 else 0)
    shown = rows[: max(1, height - others)] if height else rows
    parts: list[RenderableType] = [_head(document), *_figures(document), Text("")]
    parts.append(_table(shown, wide=width >= _WIDE))
    if len(shown) < len(rows):
        parts.append(Text(f"{len(rows) - len(shown)} more endpoints, none worse than these", style="dim"))
    if len(replicas) > 1:
        parts += [_replica(one) for one in replicas]
    if problem:
        parts.append(Text(problem, style="red", overflow="ellipsis", no_wrap=True))
    elif height:
        parts.append(Text("q ends", style="dim"))
    return Group(*parts)


def _head(document: Document) -> Text:
    pool, health = document["pool"], document["health"]
    bad = sum(one["severity"] >= 2 for one in document["endpoints"])
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append(_printable(pool["name"]), style="bold")
    text.append(f"  {_printable(pool['model'])}  ", style="dim")
    if not health["ready"]:
        text.append(f"not ready: {_printable(health['reason'])}", style="bold red")
    elif bad:
        text.append(f"{bad} of {len(document['endpoints'])} endpoints need attention", style="bold yellow")
    else:
        text.append("healthy", style="bold green")
    for warning in health["warnings"]:
        text.append(f"  {_printable(warning)}", style="yellow")
    return text


def _figures(document: Document) -> Iterator[Text]:
    traffic, hits, ttft, queue = (document[name] for name in ("traffic", "hit_rate", "ttft", "queue"))
    shown = ttft[f"{ttft['shown']}_seconds"]
    first = [
        f"{units.rate(traffic['requests_per_second'])} requests",
        f"from cache {units.share(hits['true'])} (predicted {units.share(hits['predicted'])})",
        f"queued {queue.get('requests', 0)}",
    ]
    price = "" if traffic["saved_money"] is None else f", price {units.money(traffic['saved_money'])}"
    saved = f"{units.count(traffic['saved_tokens'])} tokens, {units.gpu_time(traffic['saved_gpu_seconds'])}"
    yield _line(" · ".join(first))
    spread = f"{units.seconds(shown['p50'])}, p90 {units.seconds(shown['p90'])}"
    yield _line(f"first token {spread} ({ttft['shown_by']})")
    yield _line(f"saved {saved}{price} in {units.seconds(document['window_seconds'])}")


def _line(text: str) -> Text:
    return Text(text, overflow="ellipsis", no_wrap=True)


def _table(rows: list[Document], *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    table.add_column("ENDPOINT", no_wrap=True, overflow="ellipsis", ratio=3, min_width=12)
    table.add_column("STATE", no_wrap=True, overflow="ellipsis", ratio=6 if wide else 3, min_width=11)
    tiered = any(one.get("tiers") for one in rows)
    for name in ("LOAD", "BACKLOG", "KV", *(("TIERS",) if tiered else ()), "CACHE", "REQ/S"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        for name in ("RUNNING", "WAITING", "TOKENS", "PREFILL/S"):
            table.add_column(name, justify="right", no_wrap=True)
    for one in rows:
        table.add_row(*_cells(one, wide=wide, tiered=tiered))
    return table


def _cells(one: Document, *, wide: bool, tiered: bool) -> Iterator[RenderableType]:
    style = _STYLES[min(one["severity"], len(_STYLES) - 1)]
    state = Text(one["state"], style=style)
    if one["reason"]:
        state.append(f" {_printable(one['reason'])}", style="dim")
    hits = one["hit_rate"]
    yield _printable(one["name"])
    yield state
    yield f"{one['requests']}" + (f"/{one['slots']}" if one["slots"] else "")
    yield units.seconds(one["backlog_seconds"])
    yield units.share(one["kv_usage"])
    if tiered:
        yield _tiers(one.get("tiers", {}), wide=wide)
    yield units.share(hits["predicted"] if hits["true"] is None else hits["true"])
    yield units.rate(one["requests_per_second"]).removesuffix("/s")
    if wide:
        yield units.UNKNOWN if one["running"] is None else str(one["running"])
        yield units.UNKNOWN if one["waiting"] is None else str(one["waiting"])
        yield units.count(one["backlog_tokens"])
        yield units.count(one["prefill_tokens_per_second"])


def _tiers(tiers: Mapping[str, int], *, wide: bool) -> str:
    """Return the tokens on slower tiers: each tier's where there is room, else all together."""
    if not tiers:
        return units.UNKNOWN
    if not wide:
        return units.count(sum(tiers.values()))
    return ", ".join(f"{units.tier(medium)} {units.count(tokens)}" for medium, tokens in tiers.items())


def _replica(one: Document) -> Text:
    text = Text(f"replica {_printable(one['replica'])}: ", overflow="ellipsis", no_wrap=True)
    if not one["answers"]:
        return text.append("does not answer", style="red")
    return text.append(
        f"{units.rate(one['requests_per_second'])}, from cache {units.share(one['true'])}, "
        f"queued {one['queued']}" + ("" if one["health"]["ready"] else f", {one['health']['reason']}")
    )


def _printable(text: str) -> str:
    """Return a text without characters that a terminal would obey; clients and engines choose names."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
