"""The report: what was done, and how long each step took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print the wall time of a step to the test's output, also if it fails."""
    began = time.monotonic()
    try:
        yield
    finally:
        say(name, f"{time.monotonic() - began:.1f} s")


def say(name: str, text: str) -> None:
    """A line of the report."""
    sys.stdout.write(f"  {name:<58} {text}\n")
