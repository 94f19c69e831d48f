"""A picker of an older revision beside today's, in one run: a shared machine's speed changes by the hour.

Its code comes from the repository's history, its packages are today's.
"""

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import kvist_epp

PACKAGES: Final = ("epp", "common")
"""Folders that a picker is made of; older revisions have no ``common``."""
REPOSITORY = Path(kvist_epp.__file__).parents[2]


class RevisionError(Exception):
    """There is no such revision, or no repository."""

    def __init__(self, revision: str, why: str) -> None:
        super().__init__(f"--baseline {revision}: {why}")


def older(revision: str, folder: Path, repository: Path = REPOSITORY) -> list[str]:
    """The command that runs the picker of a revision, up to its arguments. Raises RevisionError."""
    place = folder / f"revision-{revision.replace('/', '-')}"
    git = ["git", "-C", str(repository)]
    try:
        listing = subprocess.run([*git, "ls-tree", "--name-only", revision], capture_output=True, check=True)
        packages = [name for name in PACKAGES if name in listing.stdout.decode().split()]
        command = [*git, "archive", "--format=tar", revision, *packages]
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except OSError as error:
        raise RevisionError(revision, f"git cannot be run: {error}") from error
    except subprocess.CalledProcessError as error:
        raise RevisionError(revision, error.stderr.decode(errors="replace").strip()) from error
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(place, filter="data")
    # before the installed package, which is found through a .pth file
    path = ":".join(str(place / name) for name in packages)
    return ["env", f"PYTHONPATH={path}", sys.executable, "-m", "kvist_epp"]
