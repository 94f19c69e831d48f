"""The table of ``kvist pools``: one row for each InferencePool, as wide as the terminal. Pure."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .pool_why import explanation

GAP: Final = 2
"""Spaces between columns."""
NONE: Final = "-"
THOUSANDS, MILLIONS = 10_000, 1_000_000
"""Tokens from which on they are shown in thousands and in millions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """Values of one pool's row."""

    namespace: str
    name: str
    model: str
    accelerator: str
    """Accelerators of a replica, such as ``2 × L4``; empty while there is no plan."""
    replicas_ready: int
    replicas_desired: int
    state: str
    """``Ready``, or the reason why the pool is not."""
    verdict: str
    planned_tokens: int | None
    """Tokens of a replica's KV cache by the plan; None while there is no plan or for a model without one."""
    reported_tokens: int | None
    """The same as engines report it; None while none does."""
    hit_rate: float | None
    """Prompt tokens found in the engines' caches, by those looked up, in the last ten minutes; None if
    that is not known."""
    hit_rate_problem: str
    """Why the hit rate is not known; empty if it is."""
    advice: tuple[str, ...]
    url: str


def row(resource: Mapping[str, Any], hit_rate: float | None, problem: str) -> PoolRow:
    """Return the row of a pool: its object, and its hit rate or why that is not known."""
    found = explanation(resource)
    ready = next((each for each in found["conditions"] if each["type"] == "Ready"), None)
    state = "NoStatus" if ready is None else "Ready" if ready["status"] == "True" else ready["reason"]
    return PoolRow(
        namespace=found["namespace"],
        name=found["name"],
        model=found["model"],
        accelerator=(found["plan"].get("accelerator") or {}).get("summary", ""),
        replicas_ready=found["replicas"]["ready"],
        replicas_desired=found["replicas"]["desired"],
        state=state,
        verdict=found["plan"].get("verdict", ""),
        planned_tokens=found["cache"]["planned_tokens"] or None,
        reported_tokens=found["cache"]["reported_tokens"],
        hit_rate=hit_rate,
        hit_rate_problem=problem,
        advice=tuple(found["advice"]),
        url=found["url"],
    )


def documents(rows: Sequence[PoolRow]) -> list[dict[str, Any]]:
    """Return the rows as plain JSON values."""
    return [{**asdict(each), "advice": list(each.advice)} for each in rows]


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cells: Sequence[str]
    least: int = 0
    """Fewest characters to which the column may be shortened; 0: never."""
    left_out: int = 0
    """Order in which columns are left out where even that is too wide, 1 first; 0: never."""
    right: bool = False
    weight: float = 1.0
    """Weight of its spare characters when one has to be shortened; low for what commands need whole."""

    @property
    def natural(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def table(rows: Sequence[PoolRow], width: int | None, *, wide: bool = False, namespaces: bool = False) -> str:
    """Return the table and its footnotes. ``width``: characters of the longest line, None = any; ``wide``:
    more columns, exact figures and all advice; ``namespaces``: with the column of namespaces."""
    notes = _notes(rows)
    numbers = {key: number for number, (_, keys) in enumerate(notes, 1) for key in keys}
    hits = [_hits(each, numbers.get((each.namespace, each.name))) for each in rows]
    columns = _wide_columns(rows, hits) if wide else _columns(rows, hits)
    if namespaces or wide:
        columns.insert(0, _Column("NAMESPACE", [each.namespace for each in rows], least=9, weight=0.6))
    columns, left_out = _chosen(columns, width)
    lines = _lines(columns, None if wide else width)
    footnotes = [f"[{number}] {reason}" for number, (reason, _) in enumerate(notes, 1)]
    if left_out:
        footnotes.append(f"too narrow for {', '.join(left_out)}: -o wide has every column")
    footnotes = [line for note in footnotes for line in _wrapped(note, width)]
    return "\n".join([*lines, *([""] if footnotes else []), *footnotes])


def _wrapped(note: str, width: int | None) -> list[str]:
    indent = "    " if note.startswith("[") else ""
    return textwrap.wrap(note, width, subsequent_indent=indent, break_on_hyphens=False) if width else [note]


def _columns(rows: Sequence[PoolRow], hits: Sequence[str]) -> list[_Column]:
    return [
        _Column("NAME", [each.name for each in rows], least=8, weight=0.4),
        _Column("MODEL", [each.model.removeprefix("hf://") or NONE for each in rows], least=12),
        _Column("ACCELERATOR", [each.accelerator or NONE for each in rows], least=9, left_out=2),
        _Column("READY", [f"{each.replicas_ready}/{each.replicas_desired}" for each in rows], right=True),
        _Column("STATE", [each.state for each in rows], least=7, weight=0.6),
        _Column("CACHE", [_short(each.planned_tokens) for each in rows], right=True),
        _Column("REPORTED", [_short(each.reported_tokens) for each in rows], right=True, left_out=1),
        _Column("HITS", hits, right=True),
        _Column("ADVICE", [_advice(each) for each in rows], least=6),
    ]


def _wide_columns(rows: Sequence[PoolRow], hits: Sequence[str]) -> list[_Column]:
    return [
        _Column("NAME", [each.name for each in rows]),
        _Column("MODEL", [each.model or NONE for each in rows]),
        _Column("ACCELERATOR", [each.accelerator or NONE for each in rows]),
        _Column("READY", [f"{each.replicas_ready}/{each.replicas_desired}" for each in rows], right=True),
        _Column("STATE", [each.state for each in rows]),
        _Column("PLAN", [each.verdict or NONE for each in rows]),
        _Column("CACHE", [_exact(each.planned_tokens) for each in rows], right=True),
        _Column("REPORTED", [_exact(each.reported_tokens) for each in rows], right=True),
        _Column("SHARE", [_share(each) for each in rows], right=True),
        _Column("HITS", hits, right=True),
        _Column("URL", [each.url or NONE for each in rows]),
        _Column("ADVICE", [" | ".join(each.advice) or NONE for each in rows]),
    ]


def _notes(rows: Sequence[PoolRow]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each reason why hit rates are not known, with its pools; those of one reason share a note."""
    found: dict[str, list[tuple[str, str]]] = {}
    for each in rows:
        if each.hit_rate is None and each.hit_rate_problem:
            found.setdefault(each.hit_rate_problem, []).append((each.namespace, each.name))
    return list(found.items())


def _hits(found: PoolRow, note: int | None) -> str:
    if found.hit_rate is not None:
        return f"{100 * found.hit_rate:.0f} %"
    return NONE if note is None else f"{NONE} [{note}]"


def _advice(found: PoolRow) -> str:
    return f"{len(found.advice)}: {found.advice[0]}" if found.advice else NONE


def _share(found: PoolRow) -> str:
    if not found.planned_tokens or found.reported_tokens is None:
        return NONE
    return f"{100 * found.reported_tokens / found.planned_tokens:.0f} %"


def _exact(tokens: int | None) -> str:
    return NONE if tokens is None else f"{tokens:,}"


def _short(tokens: int | None) -> str:
    """Return a number of tokens in five characters at most, such as ``288k`` and ``1.25M``."""
    if tokens is None or tokens < THOUSANDS:
        return NONE if tokens is None else str(tokens)
    if tokens < MILLIONS - MILLIONS // 2000:
        return f"{tokens / 1_000:.0f}k"
    millions = tokens / MILLIONS
    return f"{millions:.2f}M" if millions < 9.995 else f"{millions:.0f}M"


def _chosen(columns: Sequence[_Column], width: int | None) -> tuple[list[_Column], list[str]]:
    """Return the columns that fit at their least width, and the titles of those that are left out."""
    kept, left_out = list(columns), []
    for gone in sorted((each for each in columns if each.left_out), key=lambda each: each.left_out):
        if width is None or _least(kept) <= width:
            break
        kept.remove(gone)
        left_out.append(gone.title)
    return kept, left_out


def _least(columns: Sequence[_Column]) -> int:
    widths = (min(each.natural, each.least or each.natural) for each in columns)
    return sum(widths) + GAP * (len(columns) - 1)


def _lines(columns: Sequence[_Column], width: int | None) -> list[str]:
    sizes = [each.natural for each in columns]
    while width is not None and sum(sizes) + GAP * (len(sizes) - 1) > width:
        spare = [size - (each.least or size) for size, each in zip(sizes, columns, strict=True)]
        if max(spare) <= 0:
            break
        sizes[max(range(len(sizes)), key=lambda i: (spare[i] * columns[i].weight, i))] -= 1
    rows = zip(*((each.title, *each.cells) for each in columns), strict=True)
    return [
        (" " * GAP)
        .join(
            f"{_cut(cell, size):{'>' if each.right else '<'}{size}}"
            for cell, size, each in zip(cells, sizes, columns, strict=True)
        )
        .rstrip()
        for cells in rows
    ]


def _cut(cell: str, size: int) -> str:
    return cell if len(cell) <= size else f"{cell[: size - 1].rstrip()}…"
