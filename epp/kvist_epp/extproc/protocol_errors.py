"""Counts what goes wrong on the gateways' calls, and says in the log where it came from."""

import logging
import time
from collections.abc import Callable, MutableMapping
from typing import Final

WARN_SECONDS: Final = 60.0
"""Time between two warnings of the same kind: a gateway repeats its errors for every request."""

_log = logging.getLogger(__name__)

ErrorCounter = Callable[[str, int, str], None]
"""Counts errors of a gateway or of the picker: one of ``KINDS``, how many, and peer and reason for the log;
an empty text where the log has them already."""

KINDS: Final = ("ext-proc-message", "access-log-message", "access-log-entry", "pick-failed")


class ProtocolErrors:
    """An `ErrorCounter` that adds to ``counts`` and makes one warning a minute of each kind."""

    def __init__(self, counts: MutableMapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` in seconds."""
        self._counts = counts
        self._clock = clock
        self._warned_at: dict[str, float] = {}
        self._muted: dict[str, int] = {}

    def __call__(self, kind: str, count: int, problem: str) -> None:
        """Count, and warn unless a warning of this kind was made less than a minute ago."""
        self._counts[kind] = self._counts.get(kind, 0) + count
        if not problem:
            return
        now = self._clock()
        if now - self._warned_at.get(kind, -WARN_SECONDS) < WARN_SECONDS:
            self._muted[kind] = self._muted.get(kind, 0) + count
            return
        self._warned_at[kind] = now
        muted = self._muted.pop(kind, 0)
        _log.warning("%s%s (%s)", problem, f"; {muted} others since the last warning" if muted else "", kind)
