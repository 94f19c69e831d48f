"""Counts the test files that were run again after a failure.

``python -m tests.reruns TIER`` notes the files in which a test of the last run failed; without an argument
the notes are printed, and appended to the summary of a GitHub job (``$GITHUB_STEP_SUMMARY``).
"""

import json
import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
NOTES: Final = ROOT / "build" / "reruns.txt"
LAST_FAILED: Final = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"


def note(tier: str, failed: Path = LAST_FAILED, notes: Path = NOTES) -> None:
    """Append one line for each file with a failed test."""
    names = json.loads(failed.read_text()) if failed.exists() else {}
    files = sorted({name.partition("::")[0] for name in names})
    notes.parent.mkdir(parents=True, exist_ok=True)
    with notes.open("a") as file:
        file.writelines(f"{tier}: {name}\n" for name in files)


def summary(notes: Path = NOTES) -> str:
    """Return the number of files that were run again, and their names."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    head = f"{len(lines)} test files were run again after a failure"
    return "\n".join([head, *(f"- {line}" for line in lines)]) + "\n"


def main() -> None:
    """Note files, or show the notes."""
    if len(sys.argv) > 1:
        note(sys.argv[1])
        return
    sys.stdout.write(summary())
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a") as file:
            file.write(summary())


if __name__ == "__main__":
    main()
