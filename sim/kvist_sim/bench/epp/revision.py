"""Run the picker of an older git revision beside today's: the speed of a shared machine changes by the hour.

The code comes from the repository's history. Third-party packages are those that are installed.
"""

import dataclasses
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import kvist_epp
from kvist_epp.settings.settings import Settings

PACKAGES: Final = ("epp", "common", "operator")
"""Folders that a picker may import from. A revision before ``common`` or ``operator`` is run without."""
BEST_REVISION: Final = "93d577c"
"""Revision with the lowest CPU time per request so far, which ``make bench-guard`` compares with.

Change it only to a revision that a run of ``kvist bench epp --baseline`` has shown to be better."""
REPOSITORY = Path(kvist_epp.__file__).parents[2]
HELP_SECONDS: Final = 30.0


class RevisionError(Exception):
    """The revision is not in the repository's history, or its picker cannot be run."""

    def __init__(self, revision: str, why: str) -> None:
        super().__init__(f"--baseline {revision}: {why}")


def picker_of_revision(revision: str, folder: Path, repository: Path = REPOSITORY) -> list[str]:
    """Extract a revision below ``folder`` and return the command that runs its picker, without arguments.

    Raises RevisionError.
    """
    path = python_path_of_revision(revision, folder, PACKAGES, repository)
    return ["env", f"PYTHONPATH={path}", sys.executable, "-m", "kvist_epp"]


def python_path_of_revision(
    revision: str, folder: Path, packages: Sequence[str], repository: Path = REPOSITORY
) -> str:
    """Extract those of ``packages`` that a revision has below ``folder``; return the PYTHONPATH of them.

    Raises RevisionError.
    """
    place = folder / f"revision-{revision.replace('/', '-')}"
    listing = _git(revision, repository, "ls-tree", "--name-only", f"{revision}^{{commit}}")
    found = [name for name in packages if name in listing.decode().split()]
    archive = _git(revision, repository, "archive", "--format=tar", revision, *found)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(place, filter="data")
    # PYTHONPATH comes before the installed packages, which are found through a .pth file
    return ":".join(str(place / name) for name in found)


def accepted_arguments(revision: str, command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return ``--flag=value`` arguments with the flags' names in that revision's picker.

    Raises RevisionError for a flag that it has under neither its present nor its old name.
    """
    shown = subprocess.run([*command, "--help"], capture_output=True, check=False, timeout=HELP_SECONDS)
    known = set(re.findall(r"--[a-z][a-z-]*", shown.stdout.decode()))
    other_names: dict[str, str] = {}
    for field in dataclasses.fields(Settings):
        names = field.metadata["flag"], field.metadata["old_flag"]
        if all(names):
            other_names |= {names[0]: names[1], names[1]: names[0]}
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag if flag in known else other_names.get(flag, flag)
        if name not in known:
            why = shown.stderr.decode(errors="replace").strip() or f"its picker has no flag {flag}"
            raise RevisionError(revision, why)
        found.append(f"{name}{equals}{value}")
    return found


def _git(revision: str, repository: Path, *words: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, check=True).stdout
    except OSError as error:
        raise RevisionError(revision, f"git cannot be run: {error}") from error
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        raise RevisionError(
            revision,
            f"{why}\nIf this clone lacks the revision, get it: git fetch --unshallow (a shallow clone), or "
            f"git fetch origin {revision}",
        ) from error
