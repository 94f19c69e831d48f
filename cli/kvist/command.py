"""The record of one command of ``kvist``."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of ``kvist``: its words, help, options and function."""

    words: tuple[str, ...]
    """As typed: ``("bench", "epp")``."""
    summary: str
    """One line, for the list."""
    examples: str
    function: str
    """``module:name``; called with the parsed options, or with the remaining words when ``options`` is None.
    Returns the exit code."""
    options: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds the options; None = the words after the command go on unread, ``--help`` too."""
    extra: str = "demo"
    """The extra of the distribution that it needs."""
    hidden: bool = False
    """Accepted, but left out of the lists of ``--help``: an older name."""
