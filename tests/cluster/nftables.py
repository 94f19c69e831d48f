"""The ``nft`` command, which kube-proxy needs: the machine's, else Debian's package in the cache."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from tests.golang import GoError, cache

SECONDS = 300
REMEDY = "install the package nftables (apt-get update && apt-get install nftables)"


def folder_of_nft() -> Path:
    """A folder with ``nft`` in it, for PATH. Raises GoError, saying how to get it."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    found = shutil.which("nft", path=search)
    if found:
        return Path(found).parent
    home = cache() / "nftables"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "bin" / "nft").exists():
            _fetch(home)
    return home / "bin"


def _fetch(home: Path) -> None:
    """The package and what it needs that is not there yet; nothing is installed."""
    if not shutil.which("apt-get"):
        raise GoError(f"no nft here: {REMEDY}")
    archives, root = home / "archives", home / "root"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    _run(
        "apt-get",
        "-y",
        "-qq",
        "--download-only",
        "-o",
        f"Dir::Cache::archives={archives}",
        "install",
        "nftables",
    )
    for package in archives.glob("*.deb"):
        _run("dpkg-deb", "--extract", str(package), str(root))
    libraries = ":".join(sorted({str(path.parent) for path in root.rglob("*.so.*")}))
    (home / "bin").mkdir(exist_ok=True)
    command = home / "bin" / "nft"
    command.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {root}/usr/sbin/nft "$@"\n')
    command.chmod(0o755)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        raise GoError(f"no nft here, and `{' '.join(command)}` failed: {REMEDY}\n{done.stderr[-1000:]}")
