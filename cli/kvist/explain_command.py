"""``kvist explain``: where a request would go, or why one went where it did.

Both read a page of a running picker (``picker_client``) and print the endpoints best first, with the terms of
the cost in milliseconds, and in words what decided between the first two.
"""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from .errors import CommandUsageError, PickerClientError
from .input_files import content_of
from .picker_client import PickerClient, run_with_picker

MOST_BYTES: Final = 256 << 20
PATH_HEADER: Final = "x-kvist-path"
BAD_REQUEST: Final = 400
NOT_FOUND: Final = 404
WIDTHS: Final = (72, 160)
"""Narrowest and widest table."""
SHORTEST_NAME: Final = 8
MOST_TERMS: Final = 3
"""Terms that are named as the ones that decided."""
TIE_SECONDS: Final = 0.0005
"""Costs this close are shown as equal."""

Row = Mapping[str, Any]


def main(options: argparse.Namespace) -> int:
    """Explain a request. Return 0, 1 if it or the picker is not found, 2 for options or a file that cannot be
    used."""
    if (options.request_id is None) == (options.file is None):
        problem = "name a request by its id, or a file with one by -f, but not both"
        print(f"kvist explain: {problem}; kvist explain --help has examples", file=sys.stderr)
        return CommandUsageError.exit_code
    if options.request_id is None:
        return run_with_picker(options, _would_go)
    options.is_file = Path(options.request_id).is_file()
    return run_with_picker(options, _went)


async def _would_go(picker: PickerClient, options: argparse.Namespace) -> int:
    body = _body(options.file)
    headers = {PATH_HEADER: options.path, **dict(options.headers)}
    try:
        page = await picker.post("/debug/pick", body, headers)
    except PickerClientError as error:
        if error.status == BAD_REQUEST:
            raise CommandUsageError(
                f"-f {options.file}: {str(error).removeprefix(picker.where + ': ')}"
            ) from error
        raise
    _show(page, would_go, options)
    return 0


async def _went(picker: PickerClient, options: argparse.Namespace) -> int:
    name = options.request_id
    try:
        page = await picker.get(f"/debug/decisions/{quote(name, safe='')}")
    except PickerClientError as error:
        if error.status == NOT_FOUND and options.is_file:
            raise PickerClientError(f"{error}; there is a file {name}: kvist explain -f {name}") from error
        raise
    _show(page, went, options)
    return 0


def _body(file: str) -> bytes:
    try:
        found = content_of(file, MOST_BYTES)
    except OSError as error:
        raise CommandUsageError(f"-f {file}: {error.strerror}") from error
    if len(found) > MOST_BYTES:
        raise CommandUsageError(f"-f {file}: is larger than 256 MiB, more than any picker takes")
    return found


def _show(
    page: Mapping[str, Any],
    as_text: Callable[[Mapping[str, Any], int], list[str]],
    options: argparse.Namespace,
) -> None:
    """Print a page. A reader that stops early (``| head``) is not an error."""
    lines = as_text(page, _width()) if options.output == "text" else [json.dumps(page, indent=2)]
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _width() -> int:
    narrowest, widest = WIDTHS
    return max(narrowest, min(widest, shutil.get_terminal_size((100, 24)).columns))


# Pages as text


def would_go(page: Mapping[str, Any], width: int) -> list[str]:
    """Return the lines for a page of ``/debug/pick``."""
    rows, picked = page["endpoints"], page["picked"]
    if not picked:
        return ["would be rejected, or wait for an endpoint: none can be picked", "", *table(rows, [], width)]
    best = rows[0]
    lines = [_sent("would go to", rows, picked)]
    lines.append(
        f"{page['mode']}: {best['matched_tokens']:,} of {_prompt(best):,} prompt tokens cached there; "
        f"first token after {_seconds(best['predicted_ttft_seconds'])}"
    )
    if page["full"]:
        lines.append("every endpoint is full: the request would wait for capacity")
    return [*_wrapped(lines, width), "", *table(rows, picked, width), "", *_wrapped(verdict(rows), width)]


def went(page: Mapping[str, Any], width: int) -> list[str]:
    """Return the lines for a page of ``/debug/decisions/ID``."""
    rows, picked, actual = page["endpoints"], page["picked"], page["actual"]
    at = datetime.fromtimestamp(page["at"], UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    model = f", model {page['model']}" if page["model"] else ""
    prompt = f"{page['prompt_tokens']:,} prompt tokens ({page['prompt_bytes']:,} bytes)"
    lines = [
        f"request {page['id']}" + (f", session {page['session']}" if page["session"] != page["id"] else ""),
        f"{at} UTC, replica {page['replica']}",
        f"{page['kind']}{model}, priority {page['priority']}: {prompt}, {page['mode']}",
        f"waited {_seconds(page['waited_seconds'])}",
    ]
    if not picked:
        lines.append(f"rejected ({page['outcome']}): {page['message']}")
        return [*_wrapped(lines, width), *_earlier(page)]
    lines += [
        _sent("went to", rows, picked),
        f"cached tokens: {page['predicted_cached_tokens']:,} predicted, {_known(actual['cached_tokens'])}",
        f"first token:   {_seconds(page['predicted_ttft_seconds'])} predicted, {_observed(actual)}",
        _ending(actual, rows, picked),
    ]
    shown = [*table(rows, picked, width), *_left_out(page)]
    return [*_wrapped(lines, width), "", *shown, "", *_wrapped(verdict(rows), width), *_earlier(page)]


def _wrap(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    return [part for line in lines for part in _wrap(line, width)]


def _sent(verb: str, rows: Sequence[Row], picked: Sequence[str]) -> str:
    names = _names(rows)
    others = ", ".join(names.get(one, one) for one in picked[1:])
    best = names.get(picked[0])
    named = f"{best} ({picked[0]})" if best else picked[0]
    return f"{verb} {named}" + (f"; if it fails, to {others}" if others else "")


def _names(rows: Sequence[Row]) -> dict[str, str]:
    """Return the short name of each endpoint by ``ip:port``."""
    names = short_names([row["name"] for row in rows])
    return dict(zip((row["endpoint"] for row in rows), names, strict=True))


def _prompt(row: Row) -> int:
    """Return the tokens of the prompt; of one that is wholly cached the last one is computed again."""
    matched, uncached = int(row["matched_tokens"]), int(row["uncached_tokens"])
    return matched if matched and uncached == 1 else matched + uncached


def _known(cached: int | None) -> str:
    return "true figure not known" if cached is None else f"{cached:,} true"


def _observed(actual: Mapping[str, Any]) -> str:
    seconds = actual["ttft_seconds"]
    return "not observed" if seconds is None else f"{_seconds(seconds)} observed (wait included)"


def _ending(actual: Mapping[str, Any], rows: Sequence[Row], picked: Sequence[str]) -> str:
    served = actual["endpoint"]
    where = "not served yet, as far as known" if served is None else f"served by {served}"
    if served is not None and served != picked[0]:
        where = f"served by {_names(rows).get(served, 'another')} ({served}) instead"
    if actual["ended"] is None:
        return f"{where}; has not ended"
    status = f", status {actual['status']}" if actual["status"] else ""
    return f"{where}; ended{status} ({actual['ended']})"


def _left_out(page: Mapping[str, Any]) -> list[str]:
    lines = []
    if page["not_shown"]:
        lines.append(
            f"{page['not_shown']:,} more of {page['candidates']:,} that were considered are not shown"
        )
    listed = sum(not row["eligible"] for row in page["endpoints"])
    if page["ineligible"] > listed:
        lines.append(f"{page['ineligible'] - listed:,} more could not be picked")
    return lines


def _earlier(page: Mapping[str, Any]) -> list[str]:
    earlier = page.get("earlier") or ()
    if not earlier:
        return []
    return ["", f"this id was used {len(earlier) + 1} times; this is the last one (-o json has the others)"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


# The table


def table(rows: Sequence[Row], picked: Sequence[str], width: int) -> list[str]:
    """Return the endpoints as a table of at most ``width`` characters, if it can be made so narrow.

    Columns and words that matter less are left out for it, and names lose their beginnings.
    """
    able = [row for row in rows if row["eligible"]]
    names = short_names([row["name"] for row in rows])
    columns = _columns(able, [name for name, row in zip(names, rows, strict=True) if row["eligible"]])
    columns[NOTE] = [_note(row, n, picked) for n, row in enumerate(able)]
    states = [_state(row) for row in able]
    for left_out in ("", "address", "backlog", NOTE, "uncached"):
        if left_out == NOTE:
            columns[NOTE] = states
        else:
            columns.pop(left_out, None)
        excess = sum(_wide(name, cells) + 2 for name, cells in columns.items()) - 2 - width
        if excess <= 0:
            break
    longest = _wide(NAME, columns[NAME])
    shortest = min(longest, max(SHORTEST_NAME, longest - max(0, excess)))
    columns[NAME] = [_fitted(name, shortest) for name in columns[NAME]]
    lines = ["cost of each endpoint by its terms, in milliseconds:"] if able else []
    lines.append("  ".join(_cell(name, name, cells) for name, cells in columns.items()).rstrip())
    lines += [
        "  ".join(_cell(cells[n], name, cells) for name, cells in columns.items()).rstrip()
        for n in range(len(able))
    ]
    rank = _wide(RANK, columns[RANK])
    return lines + [
        f"{'-':>{rank}}  {_fitted(name, shortest):<{shortest}}  {row['reason']}"
        for name, row in zip(names, rows, strict=True)
        if not row["eligible"]
    ]


RANK: Final = "#"
NAME: Final = "endpoint"
NOTE: Final = " "


def _columns(able: Sequence[Row], names: list[str]) -> dict[str, list[str]]:
    """Return the cells of each column but the last; terms that are 0 everywhere have none."""
    columns = {RANK: [str(n) for n in range(1, len(able) + 1)], NAME: names}
    columns["address"] = [row["endpoint"] for row in able]
    for name, field in (("cached", "matched"), ("uncached", "uncached"), ("backlog", "backlog")):
        columns[name] = [f"{row[f'{field}_tokens']:,}" for row in able]
    for term in able[0]["terms"] if able else ():
        seconds = [row["terms"][term] for row in able]
        if any(seconds):
            columns[term] = _milliseconds(seconds)
    columns["cost"] = _milliseconds([row["cost_seconds"] for row in able])
    return columns


def _milliseconds(seconds: Sequence[float]) -> list[str]:
    """Return a column of milliseconds; tenths of them only where they matter."""
    digits = 0 if max(seconds, default=0.0) >= 1.0 else 1
    return [f"{value * 1000:,.{digits}f}" for value in seconds]


def _wide(name: str, cells: Sequence[str]) -> int:
    return max([len(name), *map(len, cells)])


def _cell(text: str, column: str, cells: Sequence[str]) -> str:
    side = "<" if column in (NAME, "address", NOTE) else ">"
    return f"{text:{side}{_wide(column, cells)}}"


def _note(row: Row, number: int, picked: Sequence[str]) -> str:
    place = "picked" if picked and row["endpoint"] == picked[0] else "runner-up" if number == 1 else ""
    return ", ".join(filter(None, (place, _state(row))))


def _state(row: Row) -> str:
    reason = str(row["reason"])
    return "full" if reason.startswith("full") else "deferred" if "deferred" in reason else ""


def short_names(names: Sequence[str]) -> list[str]:
    """Return ``namespace/name`` of each endpoint without the namespace, if all have the same."""
    spaces = {name.partition("/")[0] for name in names}
    return [name.partition("/")[2] if len(spaces) == 1 and "/" in name else name for name in names]


def _fitted(name: str, width: int) -> str:
    """Return the end of a name that is too long: pods of one Deployment begin alike."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


# What decided


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return in words what decided between the picked endpoint and the next one, and why the request does not
    go where most of its prompt is cached."""
    able = [row for row in rows if row["eligible"]]
    if len(able) < 2:
        return ["no other endpoint could be picked"]
    names = short_names([row["name"] for row in able])
    lines = [f"the runner-up, {names[1]}, {_compared(able[0], able[1])}"]
    most = max(range(len(able)), key=lambda n: able[n]["matched_tokens"])
    if most > 1 and able[most]["matched_tokens"] > max(able[0]["matched_tokens"], able[1]["matched_tokens"]):
        cached = f"{able[most]['matched_tokens']:,} tokens cached"
        lines.append(f"{names[most]}, which has {cached}, {_compared(able[0], able[most])}")
    return lines


def _compared(best: Row, other: Row) -> str:
    """Return how the cost of an endpoint compares with that of the picked one, and which terms make it so."""
    more = other["cost_seconds"] - best["cost_seconds"]
    if more < -TIE_SECONDS:
        why = "it is full" if _state(other) == "full" else "more requests run there"
        return f"would have cost {_seconds(-more)} less, but {why}"
    if more < TIE_SECONDS:
        return "would have cost the same: ties go to the fewest running requests, then in turn"
    parts = {term: other["terms"][term] - best["terms"][term] for term in best["terms"]}
    order = sorted(parts, key=lambda term: -parts[term])
    deciding = [term for term in order if parts[term] >= max(TIE_SECONDS, parts[order[0]] / 4)][:MOST_TERMS]
    saved = -sum(value for value in parts.values() if value < -TIE_SECONDS)
    listed = ", ".join(f"{term} {_seconds(parts[term])}" for term in deciding)
    against = f"; the other terms speak for it by {_seconds(saved)}" if saved > 0 else ""
    return f"would have cost {_seconds(more)} more: {listed}{against}"
