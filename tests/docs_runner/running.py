"""Runs the commands of a document as a reader would, in a checkout with the programs on the path."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.docs_runner.blocks import Block, Step
from tests.shapes import ROOT

SECONDS: Final = 100
SEEN: Final = ("charts", "crds", "docs", "examples")
"""Folders of the repository that commands name."""
POOL: Final = ROOT / "examples" / "02-tuned" / "pool.yaml"
"""The file that guides call pool.yaml."""


class WrongError(AssertionError):
    """A command fails, or its output differs from the document."""


def run(block: Block, folder: Path, path: str = "") -> None:
    """Run every command of a block in this empty folder. Raises WrongError.

    ``path``: additional folders with programs, before those of the system.
    """
    for name in SEEN:
        (folder / name).symlink_to(ROOT / name)
    (folder / "pool.yaml").write_text(POOL.read_text())
    for step in block.steps():
        _run(block, step, folder, path)


def _run(block: Block, step: Step, folder: Path, path: str) -> None:
    programs = [str(Path(sys.executable).parent), *filter(None, [path]), os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step.command],
        cwd=folder,
        env={
            "PATH": os.pathsep.join(programs),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    if done.returncode or not step.agrees(done.stdout):
        said = f"exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        raise WrongError(f"{block.name}: {step.command}\n{said}")
