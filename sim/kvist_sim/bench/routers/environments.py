"""Install other projects' routers, each in a virtual environment of its own in the cache folder.

``$KVIST_CACHE`` or ``~/.cache/kvist``, as the tools of the tests. Seconds and some ten megabytes each, once.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

VERSIONS: Final = {
    "vllm-router": "0.1.17",
    "sglang-router": "0.3.2",
    "ai-dynamo-runtime": "1.6.1",
}
"""By name of the package."""
PYTHON: Final = "3.11"


class RouterMissingError(Exception):
    """A router cannot be installed on this machine; the text has the reason."""


def python(package: str) -> Path:
    """Return the interpreter of an environment with this package, made if needed.

    Raises RouterMissingError.
    """
    home = _cache() / "routers" / f"{package}-{VERSIONS[package]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            _build(home, f"{package}=={VERSIONS[package]}")
    return home / "bin" / "python"


def _cache() -> Path:
    return Path(os.environ.get("KVIST_CACHE") or Path.home() / ".cache" / "kvist")


def _build(home: Path, requirement: str) -> None:
    shutil.rmtree(home, ignore_errors=True)
    _uv("venv", "--quiet", "--python", PYTHON, str(home))
    _uv("pip", "install", "--quiet", "--python", str(home / "bin" / "python"), requirement)
    (home / "complete").touch()


def _uv(*arguments: str) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise RouterMissingError("uv is missing: `pip install uv` into the environment that runs this")
    done = subprocess.run([uv, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RouterMissingError(f"`uv {' '.join(arguments[:2])} … {arguments[-1]}`: {_last(done.stderr)}")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no word"
