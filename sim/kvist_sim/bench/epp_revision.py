"""A picker of an older revision beside today's, in one run: a shared machine's speed changes by the hour.

Its code comes from the repository's history, its packages are today's.
"""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import kvist_epp

REPOSITORY = Path(kvist_epp.__file__).parents[2]


class RevisionError(Exception):
    """There is no such revision, or no repository."""

    def __init__(self, revision: str, why: str) -> None:
        super().__init__(f"--baseline {revision}: {why}")


def older(revision: str, folder: Path, repository: Path = REPOSITORY) -> list[str]:
    """The command that runs the picker of a revision, up to its arguments. Raises RevisionError."""
    place = folder / f"revision-{revision.replace('/', '-')}"
    command = ["git", "-C", str(repository), "archive", "--format=tar", revision, "epp"]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except OSError as error:
        raise RevisionError(revision, f"git cannot be run: {error}") from error
    except subprocess.CalledProcessError as error:
        raise RevisionError(revision, error.stderr.decode(errors="replace").strip()) from error
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(place, filter="data")
    # before the installed package, which is found through a .pth file
    return ["env", f"PYTHONPATH={place / 'epp'}", sys.executable, "-m", "kvist_epp"]
