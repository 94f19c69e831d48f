"""The script that draws the pictures of the documents, from its npm package: one file, once, into the cache.

The site serves it itself, so pictures appear without a network. ``VERSION`` is of the line that the theme is
made for; the digest is that of the registry, and a file with another one is refused.
"""

import base64
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from tests.golang import cache

VERSION: Final = "11.17.2"
SHA512: Final = "V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg=="
MEMBER: Final = "package/dist/mermaid.min.js"
SECONDS: Final = 300


class NoMermaidError(RuntimeError):
    """The script cannot be had; the message says how to get it."""


def script() -> Path:
    """Return the script, fetched if the cache does not have it yet. Raises NoMermaidError."""
    found = cache() / f"mermaid-{VERSION}.min.js"
    found.parent.mkdir(parents=True, exist_ok=True)
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _fetch(found)
    return found


def _fetch(target: Path) -> None:
    if shutil.which("npm") is None:
        raise NoMermaidError(
            "the site's pictures need npm, which comes with Node.js: install it (apt-get install npm)"
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        done = subprocess.run(
            ["npm", "pack", "--silent", f"mermaid@{VERSION}"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        archives = list(folder.glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            raise NoMermaidError(f"npm pack mermaid@{VERSION} failed:\n{done.stderr[-2000:]}")
        digest = base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode()
        if digest != SHA512:
            raise NoMermaidError(f"mermaid {VERSION} has the digest {digest} instead of {SHA512}")
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(MEMBER)
            assert member is not None
            (folder / "script").write_bytes(member.read())
        os.replace(folder / "script", target)  # noqa: PTH105 - atomic, within one file system


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{script()}\n")
    except NoMermaidError as error:
        sys.exit(f"make site: {error}")
