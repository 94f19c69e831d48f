"""Chromium and w3m from Debian's packages, and axe-core from its npm package in the cache of test tools.

``python -m tests.browser.binaries`` gets them.
"""

import fcntl
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.golang import cache

CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome")
"""Names of the program in distributions."""
AXE: Final = "axe-core@4.14.1"
SECONDS: Final = 300


class BrowserError(RuntimeError):
    """A tool cannot be had on this machine; the message says how to get it."""


def chromium() -> Path:
    """Return the browser, installed if apt-get is there and may do so. Raises BrowserError."""
    return _program(CHROMIUM, ("chromium", "fonts-dejavu-core"))


def w3m() -> Path:
    """Return the terminal browser, installed like the other one. Raises BrowserError."""
    return _program(("w3m",), ("w3m",))


def _program(names: Sequence[str], packages: Sequence[str]) -> Path:
    if (found := _installed(names)) is not None:
        return found
    if shutil.which("apt-get") is None:
        raise BrowserError(f"no {names[0]} here: install your distribution's package {packages[0]}")
    for command in (
        ["apt-get", "update"],
        ["apt-get", "install", "--yes", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            what = " ".join(command)
            raise BrowserError(
                f"no {names[0]} here, and `{what}` failed (needs root):\n{done.stderr[-2000:]}"
            )
    if (found := _installed(names)) is None:
        raise BrowserError(f"the package {packages[0]} has no program {names[0]}; install it by hand")
    return found


def _installed(names: Sequence[str]) -> Path | None:
    return next((Path(path) for name in names if (path := shutil.which(name))), None)


def axe() -> Path:
    """Return the script that judges a page's accessibility. Raises BrowserError."""
    home = cache() / AXE.replace("@", "-")
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "axe.min.js").exists():
            _fetch_axe(home)
    return home / "axe.min.js"


def _fetch_axe(home: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise BrowserError(f"no npm here, which fetches {AXE}: install your distribution's package npm")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", AXE, "--pack-destination", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            raise BrowserError(f"`npm pack {AXE}` failed:\n{done.stderr[-2000:]}")
        [archive] = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            script = tar.extractfile("package/axe.min.js")
            assert script is not None, "the package has its script"
            home.mkdir(exist_ok=True)
            (home / "axe.min.js").write_bytes(script.read())


if __name__ == "__main__":
    try:
        for one in (chromium(), w3m(), axe()):
            sys.stdout.write(f"{one}\n")
    except BrowserError as error:
        sys.exit(f"binaries: {error}")
