"""Lint of prose: documents, docstrings and the strings that users read (``python -m tests.prose [--full]``).

Rules of house style that no other linter has: a list of words, the first words of a docstring, and its
length. Text between backquotes, in fenced blocks and in the targets of links is exempt, because it holds
names of flags, metrics, JSON keys, fields and files.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
WORDS: Final = re.compile(
    r"\b(nobody|somebody|whoever|anybody|told|tells? of|owes?|owed|newcomers?|the late|twins?"
    r"|sees? to|seen to|heed(?:ed)?|in vain|be rid of|goes by|worth(?!while| a| the| an))\b",
    re.IGNORECASE,
)
OPENERS: Final = re.compile(
    r"(It|Its|Who|What|Where|When|Of|Nobody|Somebody|From now on|The same|They|Them|Those|As|How|So"
    r"|And|But|Only|Not|No more)\b"
)
FEWEST_WORDS: Final = 3
DOCUMENTS: Final = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/guides/*.md",
    "docs/reference/*.md",
    "docs/tutorials/*.md",
    "examples/*.md",
    "charts/*.md",
    "charts/*.txt",
    "charts/kvist/values.yaml",
    "crds/*.yaml",
)
ALLOWED: Final = {"documents": 0, "sources": 0, "tests": 0}
"""Findings that are left in each part. Lower these numbers as they fall; never raise them."""
_CODE: Final = re.compile(r"``.*?``|`[^`]*`|\]\([^)]*\)")


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository that match, without generated code."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    skipped = ("tests/prose.py", "tests/test_prose.py")
    return [ROOT / name for name in listed if "/pb/" not in name and not name.startswith(skipped)]


def document(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, finding) of a document."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and (found := WORDS.search(_CODE.sub("", line))):
            yield number, f"{found[0]!r}: {line.strip()[:100]}"


def module(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, finding) of a module: its docstrings and its string literals with spaces."""
    tree = ast.parse(text)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        if (doc := ast.get_docstring(node)) is None:
            continue
        constant = node.body[0].value  # type: ignore[attr-defined]  # a docstring is an expression
        docstrings.add(id(constant))
        first = doc.strip().splitlines()[0]
        if OPENERS.match(first):
            yield constant.lineno, f"no subject: {first[:100]}"
        elif len(first.split()) < FEWEST_WORDS and not isinstance(node, ast.Module):
            yield constant.lineno, f"fewer than {FEWEST_WORDS} words: {first}"
        elif found := WORDS.search(_CODE.sub("", doc)):
            yield constant.lineno, f"{found[0]!r}: {first[:100]}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if " " in node.value and (found := WORDS.search(_CODE.sub("", node.value))):
            yield node.lineno, f"{found[0]!r} in a string: {node.value.strip()[:100]!r}"


def findings() -> dict[str, list[str]]:
    """Return what the rules find, for each part of ``ALLOWED``."""
    found: dict[str, list[str]] = {part: [] for part in ALLOWED}
    for file in tracked(*DOCUMENTS):
        found["documents"] += _lines(file, document(file.read_text()))
    for file in tracked("*.py"):
        name = file.relative_to(ROOT)
        found["tests" if name.parts[0] == "tests" else "sources"] += _lines(file, module(file.read_text()))
    return found


def _lines(file: Path, rows: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{file.relative_to(ROOT)}:{number}: {text}" for number, text in rows]


def main() -> int:
    """Print the counts, and the findings of parts that have more than allowed (``--full``: of all parts)."""
    status = 0
    for part, lines in findings().items():
        risen = len(lines) > ALLOWED[part]
        if risen or "--full" in sys.argv:
            sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.write(f"prose: {len(lines)} findings in {part}, {ALLOWED[part]} allowed\n")
        status |= risen
    return status


if __name__ == "__main__":
    sys.exit(main())
