"""The commands of the documents: fenced blocks, and the tag that says which tier runs each, or why none does.

A tag is a comment on the line before the fence::

    <!-- run: data-plane -->                   the data-plane tier runs it; e2e: on a cluster;
                                               make test-all: its targets are a part of that
    <!-- run by: test_something -->            this test runs it, with other addresses
    <!-- not run: needs a GPU -->              no test runs it, for one of the reasons in ``REASONS``

Without a tag the unit tier runs the block. ``console``: a command after ``$``, then its output, with ``…``
for any lines; without output only the exit code counts. ``bash``: a script.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.shapes import ROOT

COMMANDS: Final = ("bash", "console")
LANGUAGES: Final = (*COMMANDS, "json", "text", "yaml")
"""Every fence names one; ``text`` is for content that is none of the others."""
TIERS: Final = ("unit", "data-plane", "e2e", "make test-all")
REASONS: Final = ("needs a GPU", "needs a cloud", "needs a published release", "needs a container builder")
_FENCE: Final = re.compile(r"^ *```(.*)$")
_TAG: Final = re.compile(r"^<!-- (run|run by|not run): (.+) -->$")
_COMMENT: Final = re.compile(r"^<!--.*-->$")
_ANYTHING: Final = "…"


@dataclass(frozen=True)
class Step:
    """A command and the lines that it prints."""

    command: str
    printed: tuple[str, ...] = ()

    def agrees(self, output: str) -> bool:
        """Return whether the output is the one in the document."""
        if not self.printed:
            return True
        any_lines = r"(?:.*\n)*?"
        lines = (any_lines if line == _ANYTHING else re.escape(line) + "\n" for line in self.printed)
        ended = output if output.endswith("\n") or not output else f"{output}\n"
        return re.fullmatch("".join(lines), ended) is not None


@dataclass(frozen=True)
class Block:
    """One fenced block of a document."""

    file: Path
    line: int
    """Line number of the fence."""
    language: str
    text: str
    tag: str = ""
    """The whole comment before the fence."""

    @property
    def name(self) -> str:
        """Return file and line, for messages and test ids."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    @property
    def where(self) -> tuple[str, str]:
        """Return ("run", tier), ("run by", test) or ("not run", reason)."""
        found = _TAG.match(self.tag)
        return (found[1], found[2]) if found else ("run", "unit")

    def steps(self) -> list[Step]:
        """Return the commands of the block; a script is one command."""
        return [Step(self.text)] if self.language == "bash" else list(_steps(self.text))

    def faults(self) -> Iterator[str]:
        """Yield the errors in the language and the tag."""
        if self.language not in LANGUAGES:
            yield f"{self.name}: ```{self.language} is none of {', '.join(LANGUAGES)}"
        if self.tag and self.language in COMMANDS and not _TAG.match(self.tag):
            yield f"{self.name}: {self.tag} is no tag"
        kind, what = self.where
        known = {"run": TIERS, "not run": REASONS}.get(kind, (what,))
        if what not in known:
            yield f"{self.name}: {what!r} is none of {', '.join(known)}"
        if self.language == "console" and not self.text.startswith("$ "):
            yield f"{self.name}: begins with no command"


def _steps(text: str) -> Iterator[Step]:
    command, goes_on = "", False
    printed: list[str] = []
    for line in text.splitlines():
        if goes_on:
            command += f"\n{line}"
        elif line.startswith("$ "):
            if command:
                yield Step(command, tuple(printed))
            command, printed = line[2:], []
        else:
            printed.append(line)
        goes_on = (goes_on or line.startswith("$ ")) and line.endswith("\\")
    if command:
        yield Step(command, tuple(printed))


def documents() -> list[Path]:
    """Return the documents from which people copy commands."""
    return [
        ROOT / "README.md",
        ROOT / "charts" / "kvist" / "README.md",
        ROOT / "docs" / "index.md",
        *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
        *sorted((ROOT / "docs" / "guides").glob("*.md")),
        *sorted((ROOT / "examples").rglob("README.md")),
    ]


def blocks(file: Path) -> Iterator[Block]:
    """Yield every fenced block of a document."""
    opened: tuple[int, str, str] | None = None
    before = ""
    body: list[str] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened:
            yield Block(file, opened[0], opened[1], "\n".join(body) + "\n", opened[2])
            opened = None
        elif fence:
            opened, body = (number, fence[1].strip(), before if _COMMENT.match(before) else ""), []
        elif opened:
            body.append(line)
        before = line


def all_blocks() -> list[Block]:
    """Return the blocks of all documents."""
    return [block for file in documents() for block in blocks(file)]


def commands(tier: str) -> list[Block]:
    """Return the blocks that a tier runs."""
    return [b for b in all_blocks() if b.language in COMMANDS and b.where == ("run", tier)]
