"""``python -m tests.reference.generate`` writes docs/reference from the code; a test checks the pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.reference import conditions, crds, flags, http_pages, metrics
from tests.shapes import ROOT

FOLDER: Final = ROOT / "docs" / "reference"
MADE: Final[dict[str, Callable[[], str]]] = {
    "picker-flags.md": flags.picker_flags,
    "operator-flags.md": flags.operator_flags,
    "kvist.md": flags.command_line,
    "metrics.md": metrics.metrics,
    "inferencepool.md": crds.pools,
    "inferencepoolpreset.md": crds.presets,
    "conditions.md": conditions.conditions,
    "http-pages.md": http_pages.http_pages,
}


def write(folder: Path = FOLDER) -> None:
    """Write every page of the reference."""
    folder.mkdir(exist_ok=True)
    for name, made in MADE.items():
        (folder / name).write_text(made())


if __name__ == "__main__":
    write()
