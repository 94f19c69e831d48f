"""Reads a file that an option names, or stdin."""

import errno
import os
import sys
from pathlib import Path


def content_of(file: str, most: int) -> bytes:
    """Return the content of a file, or of stdin for ``-``: at most one byte more than ``most``.

    Raises OSError.
    """
    if not file:
        raise FileNotFoundError(errno.ENOENT, "no file is named: write its path, or - for stdin")
    if file != "-":
        with Path(file).open("rb") as opened:
            return opened.read(most + 1)
    if sys.stdin is None:  # it was closed before the command began, as some service managers do
        raise OSError(errno.EBADF, f"stdin: {os.strerror(errno.EBADF)}")
    return sys.stdin.buffer.read(most + 1)
