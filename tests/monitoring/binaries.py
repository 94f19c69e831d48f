"""Prometheus and promtool: the machine's, else those of Debian's package, in the cache.

``python -m tests.monitoring.binaries`` gets them.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.golang import GoError, cache

PACKAGE: Final = "prometheus"
PROGRAMS: Final = ("prometheus", "promtool")
SECONDS: Final = 300
REMEDY: Final = "install the package prometheus (apt-get update && apt-get install prometheus)"


def prometheus() -> Path:
    """Return the server. Raises GoError, saying how to get it."""
    return _folder() / "prometheus"


def promtool() -> Path:
    """Return the command that checks and tests rules. Raises GoError, saying how to get it."""
    return _folder() / "promtool"


def _folder() -> Path:
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/bin"))
    found = [shutil.which(name, path=search) for name in PROGRAMS]
    if found[0] and found[1]:
        return Path(found[0]).parent
    home = cache() / "prometheus"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            home.mkdir(exist_ok=True)
            _fetch(home)
            (home / "complete").touch()
    return home / "root" / "usr" / "bin"


def _fetch(home: Path) -> None:
    """Unpack the package without what it depends on, which is for its web pages; nothing is installed."""
    if not shutil.which("apt-get"):
        raise GoError(f"no prometheus here: {REMEDY}")
    if _run(home, "apt-get", "download", "-qq", PACKAGE):
        _run(home, "apt-get", "update", "-qq")
        problem = _run(home, "apt-get", "download", "-qq", PACKAGE)
        if problem:
            raise GoError(f"no prometheus here, and it cannot be downloaded: {REMEDY}\n{problem}")
    [package] = home.glob("*.deb")
    problem = _run(home, "dpkg-deb", "--extract", str(package), str(home / "root"))
    package.unlink()
    if problem:
        raise GoError(f"{package.name} cannot be unpacked: {REMEDY}\n{problem}")


def _run(folder: Path, *command: str) -> str:
    """Return the error text of a command that failed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS)
    return done.stderr[-1000:] or f"exit code {done.returncode}" if done.returncode else ""


if __name__ == "__main__":
    try:
        for one in (prometheus(), promtool()):
            sys.stdout.write(f"{one}\n")
    except GoError as error:
        sys.exit(f"binaries: {error}")
