"""Texts of the code as Markdown: cells of tables, names as code, and the head of a generated page."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

_NAMES: Final = re.compile(
    r"(?<![\w/`.-])(--[a-z][a-z0-9-]+(?:=[\w.-]+)?|(?:spec|status|metadata)\.[A-Za-z][\w.\[\]]*\w"
    r"|kvist_\w+_\w+|[a-z]+(?:\.kvist\.dev|\.k8s\.io)/[\w-]+|kvist\.dev/[\w-]+)"
)
_SPECIAL: Final = str.maketrans({"|": "\\|", "<": "&lt;", ">": "&gt;", "*": "\\*"})
_CODE: Final = re.compile(r"(`[^`]*`)")


def prose(text: str) -> str:
    """Return a text of the code on one line: names of flags, fields and metrics become code, and characters
    that have a meaning in Markdown are escaped."""
    parts = _CODE.split(" ".join(text.replace("``", "`").split()))
    return "".join(part.replace("|", "\\|") if part.startswith("`") else _marked(part) for part in parts)


def _marked(text: str) -> str:
    pieces = _NAMES.split(text)
    return "".join(code(piece) if at % 2 else piece.translate(_SPECIAL) for at, piece in enumerate(pieces))


def code(text: object) -> str:
    """Return a value or name as code; nothing for an empty text."""
    shown = str(text).replace("|", "\\|")
    return f"`{shown}`" if shown else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; every cell is Markdown already. The site's style sheet knows its ``kind``."""
    lines = [head, ["---"] * len(head), *rows]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f'<div class="{f"reference {kind}".strip()}" markdown>\n\n{text}\n</div>\n'


def page(title: str, source: str, *parts: str) -> str:
    """Return a page: title, where it comes from, and its parts with a blank line between them."""
    head = f"<!-- Written by `make docs` from {source}. -->\n# {title}\n"
    return "\n".join([head, *(part if part.endswith("\n") else f"{part}\n" for part in parts)])
